"""Whole engines on the simulated accelerator, of one rank and of several that share it or have one each.

A rank is a process, and each has a simulated device of its own. ``direct``: its identity says so, and tensors travel
between devices by the group of :mod:`tests.sim.group`; otherwise all say the same, and everything is staged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parallax.machine.accelerators import register_accelerator
from parallax.model.describe import Chain, describe
from parallax.model.gpt import GPT, GPTConfig
from parallax.model.precision import PrecisionConfig
from parallax.plan.plan import Plan
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.plans import make_plan
from tests.sim import group
from tests.sim.device import SIM, Sim
from tests.sim.races import Verdict, host_waits, judge, note_waits

MIB = 2**20
SEQUENCE = 32
STEPS = 3


class Ran(NamedTuple):
    """``losses`` of the steps, what was noticed in all of them, the host's ``waits`` of the last by place, and the
    bytes on the device after each."""

    losses: list[float]
    verdict: Verdict
    waits: dict[str, int]
    allocated_bytes: list[int]


class Shared(Sim):
    """One device for all ranks."""

    def identity(self, index: int) -> str:
        return "the only one"


class Apart(Sim):
    """A device of its own for each."""

    def __init__(self) -> None:
        super().__init__("sim", group.NAME)


def batch() -> TensorRows:
    tokens = torch.randint(0, 256, (8, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    return TensorRows(tokens[:, :-1], tokens[:, 1:])


def without_slack(plan: Plan, chain: Chain) -> Plan:
    """Room below for all weights and gradients of fp32, and once more for the largest block's, as the planner gives."""
    sizes = [sum(p.nbytes for p in block.module.parameters()) for block in chain.blocks]
    needed = 2 * (sum(sizes) + max(sizes))
    return replace(plan, stages=tuple(replace(s, streamed_bytes=needed) for s in plan.stages))


def train(
    device: str,
    replicas: Sequence[int],
    options: dict[str, Any],
    *,
    direct: bool = False,
    steps: int = STEPS,
    layers: int = 4,
    lateness: int = 2,
    tied: bool = False,
    exact: bool = False,
    verify: bool = False,
    resumed: bool = False,
    number: str = "fp32",
) -> Ran:
    """Some steps of a small decoder under the plan of ``options``; called by every rank. ``exact``: streamed parameters
    have no more room below than they need. ``verify``: transfers are held up at random. ``resumed``: from a checkpoint,
    after the first step. ``number``: the type of weights and of computing."""
    register_accelerator(Apart() if direct else Shared("sim", "", group.NAME))
    config = GPTConfig(layers=layers, hidden=64, heads=4, sequence=SEQUENCE, tied=tied)
    precision = PrecisionConfig(parameters=number, compute=number)
    chain = describe(config.build, dtype=precision.parameter_dtype)
    # What is pinned is allocated page by page, for every engine.
    usual = {"tier": "host", "tier_bytes": 64 * MIB, "swap_limit": 2 * MIB}
    plan = make_plan(chain, replicas=replicas, **{**usual, **options})
    if exact:
        plan = without_slack(plan, chain)
    losses: list[float] = []
    waits: dict[str, int] = {}
    allocated: list[int] = []

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine.build(
                chain,
                plan,
                loss=GPT.loss,
                device=SIM if device == "sim" else torch.device("cpu"),
                swap=SwapConfig(minimum_bytes=1024, verify=verify),
                scratch=Path(folder),
                precision=precision,
            )
            assert engine.mesh.direct == (direct and len(replicas) > 1)
            for step in range(steps):
                if step == steps - 1:
                    note_waits()
                losses.append(engine.step(batch()).loss)
                if resumed and not step:
                    engine.load(engine.save(Path(folder) / "checkpoints", {}))
                allocated.append(torch.accelerator.memory_allocated(SIM))
            waits.update(host_waits())
            engine.close()

    verdict = judge(run, lateness=lateness)
    return Ran(losses, verdict, waits, allocated)
