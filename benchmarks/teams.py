"""Plans of one model, made in a clean process and run by turns in others: what planned benchmarks have in common.

::

    planner = Worker("planner", plans, model, …)             # ready: what the model costs; asks: a plan each
    with Team(model, rows, ranks) as team:                   # processes that meet over gloo
        team.build(name, plan), team.step(name)
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.workers import TIMEOUT, WayFailed, Worker, rotated
from parallax.errors import ConfigError, InfeasiblePlan
from parallax.machine.local import ClusterConfig, choose_devices
from parallax.model.describe import Chain
from parallax.model.precision import PrecisionConfig
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Plan
from parallax.plan.search.search import describe as as_line
from parallax.run.planning import measure_model, plan_model, settle
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig

WARM_UP = 2  # steps that do not count
STARTS = 300  # seconds for processes to meet


class Model(Protocol):
    """What is trained; it travels to processes, so it is plain data."""

    @property
    def precision(self) -> PrecisionConfig:
        """Of weights and products."""

    def chain(self) -> Chain:
        """Its blocks."""

    def batch(self, rows: int) -> TensorRows:
        """Random rows, the same in every process."""

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """A mean over the rows."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where ranks compute. ``memory`` is the budget of a device. Tensors smaller than ``minimum_bytes`` are not
    swapped."""

    kind: str = "cpu"
    memory: int | str = "auto"
    minimum_bytes: int = 65536

    def cluster(self, devices: int, memory: int | None = None) -> ClusterConfig:
        """Return a cluster of ``devices`` devices, each one thread."""
        return ClusterConfig(
            kind=self.kind, devices=devices, threads=1, device_memory=memory or self.memory
        )

    @property
    def swap(self) -> SwapConfig:
        """What may be moved."""
        return SwapConfig(minimum_bytes=self.minimum_bytes)

    @property
    def device(self) -> torch.device:
        """The one that all ranks share."""
        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request to the planner."""

    devices: int
    config: PlanConfig
    microbatch: int | str = "auto"
    memory: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, or why there is none. ``summary``: the plan as a line of text."""

    plan: Plan | None = None
    reason: str | None = None
    summary: str = ""

    @property
    def seconds(self) -> float:
        """The predicted step."""
        assert self.plan is not None
        return self.plan.prediction.step_seconds


@contextlib.contextmanager
def plans(
    model: Model, rows: int, place: Place, cache: str
) -> Iterator[tuple[list[float], Callable[[Ask], Answer]]]:
    """A worker's way (benchmarks/workers.py): measures ``model`` and the machine, as a rank computes, and plans. Ready:
    seconds of forward and backward of each block for the rows of a batch. Messages: :class:`Ask`. ``cache`` is a folder
    of this run, so that the machine is measured in it, and only once."""
    with tempfile.TemporaryDirectory(prefix="parallax-benchmark-") as folder:
        os.environ["XDG_CACHE_HOME"] = cache
        see_one_device(place)
        chain, batch = model.chain(), model.batch(rows)
        choice = choose_devices(place.cluster(1))
        settle(choice)
        profile = measure_model(
            chain, model.loss, batch, choice, precision=model.precision, swap=place.swap
        )

        def plan(ask: Ask) -> Answer:
            try:
                found = plan_model(
                    chain,
                    model.loss,
                    batch,
                    cluster=place.cluster(ask.devices, ask.memory),
                    plan=ask.config,
                    precision=model.precision,
                    swap=place.swap,
                    microbatch=ask.microbatch,
                    profile=profile,
                    scratch=Path(folder),
                ).plan
            except (ConfigError, InfeasiblePlan) as error:
                return Answer(reason=str(error))
            return Answer(plan=found, summary=as_line(found))

        yield (
            [
                block.forward_seconds.at(rows) + block.backward_seconds.at(rows)
                for block in profile.blocks
            ],
            plan,
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of all ranks: from a barrier to the end of the slowest; the most that any of them held so far."""

    seconds: float
    loss: float
    peak_bytes: int


class Team:
    """Processes that hold the engines of plans for as many ranks. ``cap_bytes``: what each may hold on a CUDA device,
    by its allocator; ``patience``: seconds for all to have met; ``start``: as of :class:`Worker`."""

    def __init__(
        self,
        model: Model,
        rows: int,
        ranks: int,
        place: Place,
        *,
        cap_bytes: int | None = None,
        patience: float = STARTS,
        start: str = "spawn",
    ) -> None:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="parallax-benchmark-"))
            self._pool = stack.enter_context(ThreadPoolExecutor(ranks))
            self._workers = []
            for rank in range(ranks):
                given = model, rows, place, Path(folder), rank, ranks, cap_bytes
                worker = Worker(f"rank {rank}", _rank, *given, start=start)
                stack.callback(worker.close)
                stack.callback(worker.stop)
                self._workers.append(worker)
            self._all(lambda worker: worker.ready(patience))
            self._stack = stack.pop_all()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def build(self, name: str, plan: Plan, timeout: float = TIMEOUT) -> None:
        """Make the engines of ``plan``."""
        self._all(lambda worker: worker.ask(("build", name, plan), timeout))

    def step(self, name: str, timeout: float = TIMEOUT) -> Step:
        """One step of the plan of that name."""
        found: list[Step] = self._all(lambda worker: worker.ask(("step", name), timeout))
        return Step(
            seconds=max(step.seconds for step in found),
            loss=found[0].loss,
            peak_bytes=max(step.peak_bytes for step in found),
        )

    def _all(self, call: Callable[[Worker], Any]) -> list[Any]:
        return list(self._pool.map(call, self._workers))


@contextlib.contextmanager
def _rank(
    model: Model,
    rows: int,
    place: Place,
    folder: Path,
    rank: int,
    ranks: int,
    cap_bytes: int | None,
) -> Iterator[tuple[bool, Callable[[tuple[Any, ...]], Any]]]:
    see_one_device(place)
    settle(choose_devices(place.cluster(ranks)))
    cuda = place.kind == "cuda"
    if cap_bytes is not None and cuda:
        torch.cuda.set_per_process_memory_fraction(
            cap_bytes / torch.cuda.get_device_properties(0).total_memory, 0
        )
    chain, batch, engines = model.chain(), model.batch(rows), dict[str, Engine]()

    def build(name: str, plan: Plan) -> bool:
        engines[name] = Engine.build(
            chain,
            plan,
            loss=model.loss,
            device=place.device,
            precision=model.precision,
            swap=place.swap,
            scratch=folder,
        )
        return True

    def step(name: str) -> Step:
        if ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        result = engines[name].step(batch)
        if cuda:
            torch.cuda.synchronize()
        return Step(
            seconds=time.perf_counter() - start, loss=result.loss, peak_bytes=result.peak_bytes
        )

    def answer(message: tuple[Any, ...]) -> Any:
        what, *arguments = message
        return build(*arguments) if what == "build" else step(*arguments)

    with contextlib.ExitStack() as stack:
        if ranks > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder / 'store'}",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=STARTS),
            )
            stack.callback(dist.destroy_process_group)
        yield True, answer
        for engine in engines.values():
            engine.close()


def see_one_device(place: Place) -> None:
    """Before CUDA starts: with a device for each rank they would not share one, nor talk through the host."""
    if place.kind == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(
            ","
        )[0]


@dataclass
class Run:
    """The measurements of a plan's steps; ``reason``: why there are no more."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    reason: str | None = None


def by_turns(
    steps: Mapping[str, Callable[[], Step]],
    repetitions: int,
    enough: Callable[[float], bool] = lambda longest: False,
) -> dict[str, Run]:
    """Return the measured steps of each: ``repetitions`` rounds, or fewer if ``enough(longest)`` is true, where
    ``longest`` is the seconds of the longest round so far."""
    found = {name: Run() for name in steps}
    longest = 0.0
    for repetition in range(-WARM_UP, repetitions):
        start = time.perf_counter()
        for name in rotated(
            [name for name, run in found.items() if run.reason is None], repetition
        ):
            _take(steps[name], found[name], counts=repetition >= 0)
        longest = max(longest, time.perf_counter() - start)
        if repetition >= 0 and enough(longest):
            break
    return found


def _take(step: Callable[[], Step], run: Run, *, counts: bool) -> None:
    try:
        taken = step()
    except WayFailed as failed:
        run.reason = str(failed)
        return
    run.losses.append(taken.loss)
    run.peak_bytes = max(run.peak_bytes, taken.peak_bytes)
    if counts:
        run.seconds.append(taken.seconds)


def loss_difference(ours: Run, theirs: Run) -> float:
    """The largest, relative: plans of one model, batch and seed lose the same but for the order of sums."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses))


def check_same_losses(runs: Mapping[str, Run]) -> None:
    """Raise an error if losses differ or plans failed, because the plans would not compute the same."""
    first = next(iter(runs.values()))
    for name, run in runs.items():
        if run.reason is not None:
            raise WayFailed(f"{name}: {run.reason}")
        if loss_difference(run, first) > 1e-3:
            raise AssertionError(f"{name} disagrees on the losses: {run.losses} and {first.losses}")
