"""Forwards alone on the simulated accelerator."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parallax.machine.accelerators import register_accelerator
from parallax.model.factory.gpt import GPTConfig
from parallax.plan.plan import Plan
from parallax.runtime.forward import ForwardEngine
from parallax.swap.config import SwapConfig
from tests.plans import described
from tests.sim import group
from tests.sim.device import SIM
from tests.sim.engines import Apart, Shared, batch
from tests.sim.races import Verdict, judge


class Predicted(NamedTuple):
    """The outputs of this rank's rows on the host, by first row, and the most bytes that were on its device."""

    verdict: Verdict
    outputs: dict[int, Any]
    peak_bytes: int


def predict(device: str, config: GPTConfig, plan: Plan, *, direct: bool) -> Predicted:
    """Three forwards of a batch under ``plan``; called by every rank."""
    register_accelerator(Apart() if direct else Shared("sim", "", group.NAME))
    outputs, peaks = dict[int, Any](), list[int]()

    def run() -> None:
        # What earlier tests of this process have left on the device.
        held = torch.accelerator.memory_allocated(SIM) if device == "sim" else 0
        with tempfile.TemporaryDirectory() as folder:
            engine = ForwardEngine.build(
                described(config.build),
                plan,
                device=SIM if device == "sim" else torch.device(device),
                swap=SwapConfig(minimum_bytes=1024),
                scratch=Path(folder),
            )
            for _ in range(3):
                found = engine.predict(batch())
                outputs.update((first, part.cpu()) for first, part in found)
                del found
            peaks.append(engine.peak_bytes() - held)
            engine.close()

    verdict = judge(run)
    return Predicted(verdict, outputs, max(peaks, default=0))
