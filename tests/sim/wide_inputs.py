"""A model whose inputs take a third of a step to come, in virtual time: at once, and a micro-batch ahead."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallax.machine.accelerators import limit_device_memory
from parallax.model.describe import describe
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Plan
from parallax.plan.search.search import search
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.sim.device import SIM, TOTAL_BYTES, C
from tests.sim.timed import SPEEDS, cache_in, cluster_of, measured_quickly, sample_of

WIDTH, ROWS, MICRO = 2**16, 32, 4


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4))


def _batch() -> TensorRows:
    made = torch.Generator().manual_seed(0)
    return TensorRows(
        torch.randn(ROWS, WIDTH, generator=made), torch.randn(ROWS, 4, generator=made)
    )


def figures() -> dict[str, Any]:
    """Virtual seconds of a step, the peak and what was planned, by whether the inputs came ahead; and what the planner
    chooses, for a device with enough memory and for one with 64 KiB too little."""
    chain, rows = describe(_model), _batch()
    with tempfile.TemporaryDirectory() as folder, cache_in(folder):
        C.speeds(**SPEEDS)
        profile = measured_quickly(chain, _loss, sample_of(rows))
        C.speeds()

    def planned(memory: int) -> Plan:
        plan, _ = search(
            profile, cluster_of(1, memory), PlanConfig(), global_batch=ROWS, microbatch=MICRO
        )
        return plan

    plan = planned(2**32)
    peak = plan.prediction.ranks[0].peak_bytes
    less = planned(peak - 2**16)
    return {
        "ahead": _train(chain, plan),
        "at once": _train(chain, less),
        "chosen": (plan.stages[0].inputs_ahead, less.stages[0].inputs_ahead),
        "inputs": MICRO * WIDTH * 4,
    }


def _train(chain: Any, plan: Plan) -> tuple[float, int, int]:
    planned = plan.prediction.ranks[0].peak_bytes
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        held.callback(limit_device_memory, SIM, TOTAL_BYTES)
        limit_device_memory(SIM, planned)
        C.speeds(**SPEEDS)
        held.callback(C.speeds)
        engine = Engine.build(
            chain, plan, loss=_loss, device=SIM, swap=SwapConfig(), scratch=Path(folder)
        )
        held.callback(engine.close)
        for _ in range(3):
            torch.accelerator.synchronize()
            begun = C.host_seconds()
            result = engine.step(_batch())
        torch.accelerator.synchronize()
        return C.host_seconds() - begun, result.peak_bytes, planned


if __name__ == "__main__":
    for name, found in figures().items():
        print(name, found)
