"""A checkpoint of one kind of device on another: what a rank holds before and after some steps, as bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from parallax.machine.accelerators import register_accelerator
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.precision import PrecisionConfig
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.held import held
from tests.plans import described, make_plan
from tests.sim import group
from tests.sim.device import SIM
from tests.sim.engines import SEQUENCE, Shared, batch
from tests.sim.races import judge


def go_on(
    device: str,
    replicas: tuple[int, ...],
    options: dict[str, Any],
    number: str,
    folder: Path,
    loaded: Path | None,
    steps: int,
) -> tuple[str, bytes, bytes, list[float]]:
    """What went wrong; what is held after loading and after ``steps`` more; their losses. Saved in ``folder``."""
    register_accelerator(Shared("sim", "", group.NAME))
    precision = PrecisionConfig(parameters=number, compute=number)
    config = GPTConfig(layers=2, hidden=32, heads=2, sequence=SEQUENCE, tied=False)
    chain = described(config.build, dtype=precision.parameter_dtype)
    plan = make_plan(chain, replicas=replicas, **{"tier": "host", "swap_limit": 2**21, **options})
    found: list[Any] = []

    def run() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            engine = Engine.build(
                chain,
                plan,
                loss=GPT.loss,
                device=SIM if device == "sim" else torch.device("cpu"),
                swap=SwapConfig(minimum_bytes=1024),
                scratch=Path(scratch),
                precision=precision,
            )
            if loaded is not None:
                engine.load(loaded)
            found.append(save(held(engine)))
            losses = [engine.step(batch()).loss for _ in range(steps)]
            found.append(save(held(engine)))
            found.append(losses)
            engine.save(folder, {})
            engine.close()

    verdict = judge(run)
    output = verdict.error or "; ".join(str(race) for race in verdict.races[:1])
    return output, *found
