"""What happens in a worker of the GPU benchmark: one way of training a task on one device, within a cap.

``plain``           everything stays on the device
``offload``         ``parallax.swap`` around a plain loop; with fp32 states they are on the host for good, where the
                    weights are stepped beside the next forward (``HostOptimizer``); with bf16 states
                    ``parallax.swap(optimizer=...)`` moves them, and the device steps
``save_on_cpu``     ``torch.autograd.graph.save_on_cpu(pin_memory=True)``
``checkpoint``      ``torch.utils.checkpoint`` around each block
``fsdp``            FSDP2 ``fully_shard`` on one rank with ``CPUOffloadPolicy``

The same code runs on a CPU, where the device's bytes are those of the tensors that are alive, counted.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import parallax
from benchmarks.gpu.meters import CountedMeter, CudaMeter, Meter
from benchmarks.gpu.updates import (
    SETTINGS,
    Update,
    full_precision,
    on_host,
    pageable_bytes,
    sharded,
    stepper,
)
from benchmarks.models import Task
from benchmarks.workers import reason
from parallax.errors import BudgetExceeded, SwapError
from parallax.swap.lms.scope import Swapping

AMPLE = 2**50  # bytes: no limit
REFUSED = (torch.OutOfMemoryError, BudgetExceeded, SwapError)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One way. ``limit_bytes``: what saved activations, and states that move, may hold on the device; ``tier_bytes``:
    and on the host. ``cap_bytes``: what everything may hold on the device. ``states``: AdamW on fp32 copies of the
    weights, or on bf16 weights; none is SGD without states. ``warm_seconds``: the device is busy for so long before
    anything is timed, or its clock would still be rising."""

    way: str
    device: str
    rows: int
    limit_bytes: int | None = None
    tier_bytes: int | str = "auto"
    cap_bytes: int | None = None
    states: str = "none"
    eager: bool = False
    minimum_bytes: int = 65536
    warm_seconds: float = 0.0


@dataclass
class Turn:
    """Some steps: ``losses`` by the number of the step."""

    seconds: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    peak_bytes: int = 0


class Trainer:
    """A model, its optimizer and a batch, trained in one way."""

    def __init__(self, task: Task, spec: Spec, meter: Meter, stack: contextlib.ExitStack) -> None:
        self._task, self._spec, self._meter = task, spec, meter
        self._device = torch.device("cuda", 0) if spec.device == "cuda" else torch.device("cpu")
        torch.manual_seed(0)
        self._model = task.build(self._device)
        if spec.way == "checkpoint":
            again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            for block in task.blocks(self._model):
                block.forward = functools.partial(again, block.forward)
        self.pageable_bytes = 0
        if spec.way == "fsdp":
            with meter.elsewhere():
                fp32 = spec.states == "fp32"
                self._model = sharded(self._model, task, self._device, stack, fp32=fp32)
            self.pageable_bytes = pageable_bytes(self._model) if spec.device == "cuda" else 0
        # Wait for updates that run beside the next step.
        self._settle: Callable[[], None] = lambda: None
        self._moved: list[torch.optim.Optimizer] = []
        self._swapping: Swapping | None = None
        self._limit: int | None = None
        self._update = self._updater(stack)
        self._scope = stack.enter_context(contextlib.ExitStack())
        self._around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        if spec.way == "save_on_cpu":
            pinned = self._device.type == "cuda"
            self._around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)
        self._batch = task.batch(spec.rows, self._device)
        self._steps = self._since = 0  # ever; since there is a limit
        if spec.way == "offload" and spec.limit_bytes is not None:
            self.limit(spec.limit_bytes, spec.tier_bytes)
        meter.release()
        self.static_bytes = meter.used_bytes()

    def resize(self, rows: int) -> int:
        """Train so many rows from now on; the bytes that then stay between steps."""
        del self._batch
        self._batch = self._task.batch(rows, self._device)
        self._meter.release()
        self.static_bytes = self._meter.used_bytes()
        return self.static_bytes

    def limit(self, limit_bytes: int, tier_bytes: int | str, *, eager: bool = False) -> bool:
        """Let what moves hold ``limit_bytes`` on the device from now on. The limit of ``parallax.swap`` is of weights
        and gradients as well."""
        if self._limit == limit_bytes:
            return True  # a new scope would pin its host memory again
        self._scope.close()
        gc.collect()
        weights = [*self._model.parameters()]
        fixed = sum(tensor.nbytes for tensor in [*weights, *self._model.buffers(), *weights])
        self._swapping = self._scope.enter_context(
            parallax.swap(
                self._model,
                fixed + limit_bytes,
                optimizer=self._moved,
                tier_bytes=tier_bytes,
                eager=eager,
                minimum_bytes=self._spec.minimum_bytes,
            )
        )
        self._limit, self._since = limit_bytes, self._steps
        return True

    def limit_device_memory(self, budget_bytes: int, tier_bytes: int) -> Turn:
        """Find, within a few turns, a limit whose peak is at most ``budget_bytes`` above what stays between steps.
        What operators need while they run is in the peak and not in the limit; a turn in which nothing has to move
        shows how much that is. Where no limit is small enough for the budget and large enough to run, the smallest
        that ran stays."""
        self.limit(AMPLE, tier_bytes, eager=False)
        peak, saved = self.turn(1).peak_bytes, self._saved()
        limit = max(budget_bytes - max(0, peak - self.static_bytes - saved), budget_bytes // 8)
        refused, works, turn = 0, AMPLE, Turn()
        for _ in range(5):
            try:
                self.limit(limit, tier_bytes, eager=self._spec.eager)
                turn, works = self.turn(1), limit
            except (BudgetExceeded, SwapError):
                refused, limit = limit, (limit + min(works, saved)) // 2
                self._model.zero_grad(set_to_none=True)
                continue
            excess = turn.peak_bytes - self.static_bytes - budget_bytes
            lower = limit - int(1.1 * excess)
            if excess <= 0 or limit - refused <= limit // 16:
                break
            limit = lower if lower > refused else (limit + refused) // 2
        if self._limit != works or not turn.seconds:
            self.limit(works, tier_bytes, eager=self._spec.eager)
            turn = self.turn(1)
        return turn

    def turn(self, steps: int) -> Turn:
        """Some steps for the allocator to grow and the clock to rise, then ``steps`` that are timed, with no
        waiting between them; afterwards the memory is others'."""
        turn, losses, first = Turn(), list[Tensor](), self._steps
        self._meter.release()
        begun = time.perf_counter()
        while not losses or time.perf_counter() - begun < self._spec.warm_seconds:
            losses.append(self._step(*self._batch))
            self._meter.synchronize()
        marks: list[Any] = [self._meter.mark()]
        for _ in range(steps):
            losses.append(self._step(*self._batch))
            marks.append(self._meter.mark())
        turn.seconds = self._meter.seconds(marks)
        self._settle()
        turn.peak_bytes = self._meter.peak_bytes()
        turn.losses = {first + index: loss.item() for index, loss in enumerate(losses)}
        losses.clear()
        self._meter.release()
        return turn

    def fits(self, rows: int, limits: tuple[int, ...]) -> str:
        """Return the reason why a step of ``rows`` is not possible; "" if it is possible. A swap limit is chosen of
        ``limits``: the best one depends on the memory that a block needs while it runs."""
        del self._batch
        why = ""
        for limit in [limit for limit in limits if self._limit is None or limit <= self._limit] or [
            0
        ]:
            try:
                if self._spec.way == "offload":
                    self.limit(limit, self._spec.tier_bytes)
                self._batch = self._task.batch(rows, self._device)
                self._step(*self._batch)
                self._meter.synchronize()
                why = ""
            except REFUSED as error:
                why = reason(error)
            self._meter.release()
            if not why:
                break
            self._batch = (torch.empty(0), torch.empty(0))
            self._model.zero_grad(set_to_none=True)
            self._meter.release()
        return why

    def moved(self) -> dict[str, float]:
        """Of a step: bytes that went down and came up, and seconds that the training thread waited for them."""
        if self._swapping is None or self._steps == self._since:
            return {}
        found, steps = self._swapping.statistics, self._steps - self._since
        return {
            "bytes_out": found.bytes_out / steps,
            "bytes_in": found.bytes_in / steps,
            "stall_seconds": found.stall_seconds / steps,
        }

    def trace(self, path: str) -> dict[str, Any]:
        """Write one step as a Chrome trace, after one that warms up."""
        self._step(*self._batch)
        self._meter.synchronize()
        kinds = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        with profile(activities=kinds) as profiler:
            self._step(*self._batch)
            self._meter.synchronize()
        self._settle()
        self._meter.release()
        profiler.export_chrome_trace(path)
        return {"file": Path(path).name, "bytes": Path(path).stat().st_size}

    def _saved(self) -> int:
        """The most that saved activations have held on the device."""
        return self._swapping.statistics.high_water if self._swapping is not None else 0

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._around():
            loss = self._task.loss(self._model, inputs, targets)
        loss.backward()
        with self._meter.elsewhere() if self._spec.way == "fsdp" else contextlib.nullcontext():
            self._update()
        self._steps += 1  # one that failed has changed nothing
        return loss.detach()

    def _updater(self, stack: contextlib.ExitStack) -> Update:
        parameters = list(self._model.parameters())
        if self._spec.states == "none":
            return stepper(torch.optim.SGD(parameters, lr=1e-3))
        if self._spec.states == "bf16" or self._spec.way == "fsdp":
            optimizer = torch.optim.AdamW(parameters, fused=True, **SETTINGS)
            self._moved = [optimizer] if self._spec.way == "offload" else []
            return stepper(optimizer)
        if self._spec.way == "offload":
            with self._meter.elsewhere():
                update, self._settle = on_host(self._model, self._device, stack)
            return update
        return full_precision(parameters)


@contextlib.contextmanager
def train(task: Task, spec: Spec) -> Iterator[tuple[dict[str, int], Callable[[Any], Any]]]:
    """A worker's way (benchmarks/workers.py). Ready: the bytes that stay between steps, and those that a copy to the
    device would find in pageable memory. Messages: the name of a method of :class:`Trainer`, and its arguments."""
    gc.freeze()  # what libraries have made need not be looked through in every turn
    with contextlib.ExitStack() as stack:
        meter: Meter
        if spec.device == "cuda":
            torch.cuda.init()
            meter = CudaMeter(spec.cap_bytes)
        else:
            torch.set_num_threads(1)
            meter = stack.enter_context(CountedMeter(spec.cap_bytes))
        trainer = Trainer(task, spec, meter, stack)

        def answer(message: tuple[Any, ...]) -> Any:
            name, *arguments = message
            return getattr(trainer, name)(*arguments)

        ready = {"static_bytes": trainer.static_bytes, "pageable_bytes": trainer.pageable_bytes}
        yield ready, answer
