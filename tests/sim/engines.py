"""Whole engines on the simulated accelerator, of one rank and of several that share it or have one each.

A rank is a process, and each has a simulated device of its own. ``direct``: its identity says so, and tensors travel
between devices by the group of :mod:`tests.sim.group`; otherwise all say the same, and everything is staged.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from parallax.errors import SwapError
from parallax.machine.accelerators import register_accelerator
from parallax.model.describe import Chain
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.precision import PrecisionConfig
from parallax.plan.plan import Plan
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.test_streaming import recurrent as recurrent_model
from tests.plans import described, make_plan
from tests.sim import group
from tests.sim.device import SIM, C, Sim
from tests.sim.midway import full_disk
from tests.sim.races import Verdict, host_waits, judge, note_waits

MIB = 2**20
SEQUENCE = 32
STEPS = 3


class Ran(NamedTuple):
    """``losses`` of the steps, what was noticed in all of them, the host's ``waits`` of the last by place, and after
    each the bytes on the device, and of pinned memory. ``left``: the sum of each parameter's absolute values after
    the second step and at the end, and before that the loss of what comes next. ``contexts``: numbers of devices that
    would have one, of those on which some thread requested an event."""

    losses: list[float]
    verdict: Verdict
    waits: dict[str, int]
    allocated_bytes: list[int]
    pinned_bytes: list[int]
    left: list[float]
    contexts: set[int]


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
    """Return ``plan`` with tier bytes for all weights and gradients of fp32 and once more for the largest block's, as
    the planner gives."""
    sizes = [sum(p.nbytes for p in block.module.parameters()) for block in chain.blocks]
    needed = 2 * (sum(sizes) + max(sizes))
    return replace(plan, stages=tuple(replace(s, streamed_bytes=needed) for s in plan.stages))


class Broken(TensorRows):
    """Rows of which the third micro-batch cannot be had."""

    def targets(self, start: int, stop: int) -> Any:
        if start >= 4:
            raise ArithmeticError("broken rows")
        return super().targets(start, stop)


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
    fails: str = "",
    number: str = "fp32",
    stream: bool = False,
) -> Ran:
    """Some steps of a small decoder on ``device`` ("sim:1": the second one) under the plan of ``options``; called by
    every rank. ``exact``: offloaded parameters have no more bytes in the tier than they need. ``verify``: transfers are
    delayed at random. ``resumed``: the second step is taken twice, again from a checkpoint of the first. ``fails``:
    after the first step one fails, by its "rows", or by a full "disk", which may be reported in the "gradients" that
    follow; or it ends with its "gradients". ``number``: the type of weights and of computing. ``stream``: everything
    runs on a stream of its own."""
    register_accelerator(Apart() if direct else Shared("sim", "", group.NAME))
    config = GPTConfig(layers=layers, hidden=64, heads=4, sequence=SEQUENCE, tied=tied)
    precision = PrecisionConfig(parameters=number, compute=number)
    chain = described(config.build, dtype=precision.parameter_dtype)
    # What is pinned is allocated page by page, for every engine.
    usual = {"tier": "host", "tier_bytes": 64 * MIB, "swap_limit": 2 * MIB}
    plan = make_plan(chain, replicas=replicas, **{**usual, **options})
    if exact:
        plan = without_slack(plan, chain)
    found = Ran([], Verdict("", [], {}), {}, [], [], [], set())

    here = SIM if device == "sim" else torch.device(device)

    def run() -> None:
        own = torch.Stream(SIM) if stream else contextlib.nullcontext()
        with tempfile.TemporaryDirectory() as folder, own:
            engine = Engine.build(
                chain,
                plan,
                loss=GPT.loss,
                device=here,
                swap=SwapConfig(minimum_bytes=1024, verify=verify),
                scratch=Path(folder),
                precision=precision,
            )
            assert bool(engine.mesh.routes) == (direct and len(replicas) > 1)
            _steps(engine, found, steps, Path(folder), resumed=resumed, fails=fails)
            engine.close()
            found.contexts.update(C.contexts())

    torch.accelerator.set_device_index(here.index or 0)  # as select_device does
    try:
        verdict = judge(run, lateness=lateness)
    finally:
        torch.accelerator.set_device_index(0)
    return found._replace(verdict=verdict)


def _steps(
    engine: Engine, found: Ran, steps: int, folder: Path, *, resumed: bool, fails: str
) -> None:
    """The steps, and what they leave."""
    while len(found.losses) < steps:
        step = len(found.losses)
        if step == steps - 1:
            note_waits()
        found.losses.append(engine.step(batch()).loss)
        found.allocated_bytes.append(torch.accelerator.memory_allocated(SIM))
        found.pinned_bytes.append(C.pinned_bytes())
        if step == 1 and not resumed:
            found.left.extend(float(p.detach().abs().sum()) for p in engine.parameters.values())
        if not step and fails == "gradients":
            engine.gradients(batch())
        elif not step and (resumed or fails):
            saved = engine.save(folder / "checkpoints", {})
        if not step and fails == "rows":
            _fail_by_rows(engine)
        if not step and fails.startswith("disk"):
            _fail_on_disk(engine, engine.gradients if "gradients" in fails else engine.step)
            engine.load(saved)
        if step == 1 and resumed:
            engine.load(saved)
            found.losses.pop()
            resumed = False
    found.waits.update(host_waits())
    if engine.mesh.device == SIM:
        note_waits()
        engine.predict(batch())
        assert host_waits() or engine.mesh.pipeline_rank, "rows may still be read"
    found.left.append(engine.gradients(batch()))
    found.left.extend(float(p.detach().abs().sum()) for p in engine.parameters.values())


def _fail_by_rows(engine: Engine) -> None:
    """In the middle of a step, whose micro-batches are under way."""
    tokens = batch()
    try:
        engine.step(Broken(tokens.inputs(0, 8), tokens.targets(0, 8)))
    except ArithmeticError:
        return
    raise AssertionError("broken rows were not requested")


def _fail_on_disk(engine: Engine, following: Callable[[TensorRows], object]) -> None:
    """In a step, or beside what follows it: then that says so, and changes nothing."""
    first = next(iter(engine.parameters.values()))
    before = first.clone()
    with full_disk():
        try:
            engine.step(batch())
            before = first.clone()
            following(batch())
        except SwapError:
            assert torch.equal(before, first), "a step that failed has changed weights"
            return
    raise AssertionError("a full disk was not reported")


class OneBuffer(Shared):
    """Keeps recurrent weights as CUDA does, except that they are no buffer."""

    @property
    def flattens_recurrent_weights(self) -> bool:
        return True


def recurrent(options: dict[str, Any]) -> tuple[list[float], set[str]]:
    """The losses of an RNN whose weights stay on the device, and the names of the resident parameters. (An LSTM needs a
    kernel that the simulator lacks.)"""
    register_accelerator(OneBuffer("sim", "", group.NAME))
    chain = described(partial(recurrent_model, nn.RNN))
    plan = make_plan(chain, tier="host", tier_bytes=64 * MIB, **options)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.build(chain, plan, loss=GPT.loss, device=SIM, scratch=Path(folder))
        losses = [engine.step(batch()).loss for _ in range(STEPS)]
        named = engine._stage.named_tensors().items()
        resident = {name for name, tensor in named if not engine._stage.is_offloaded(tensor)}
        engine.close()
    return losses, resident
