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
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import parallax
from benchmarks.models import Task
from benchmarks.workers import reason
from parallax.errors import BudgetExceeded, SwapError
from parallax.machine.device import copies_for
from parallax.swap.lms.scope import Swapping
from parallax.swap.optimizer.host import HostOptimizer

AMPLE = 2**50  # bytes: no limit
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One way. ``limit_bytes``: what saved activations, and states that move, may hold on the device; ``tier_bytes``:
    and on the host. ``cap_bytes``: what everything may hold on the device. ``states``: AdamW on fp32 copies of the
    weights, or on bf16 weights; none is SGD without states."""

    way: str
    device: str
    rows: int
    limit_bytes: int | None = None
    tier_bytes: int | str = "auto"
    cap_bytes: int | None = None
    states: str = "none"
    eager: bool = False
    minimum_bytes: int = 65536


@dataclass
class Turn:
    """Some steps: ``losses`` by the number of the step."""

    seconds: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    peak_bytes: int = 0


# ---------------------------------------------------------------------------------------------------- device memory


class CudaMemory:
    """torch's own counters; the cap is the allocator's."""

    def __init__(self, cap_bytes: int | None) -> None:
        if cap_bytes is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), 0)

    def used_bytes(self) -> int:
        """In tensors, now."""
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """The most since :meth:`release`."""
        return torch.cuda.max_memory_allocated()

    def release(self) -> None:
        """Give back what is not used, so that others can have it, and count anew."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def elsewhere(self) -> AbstractContextManager[object]:
        """Host memory does not count."""
        return contextlib.nullcontext()


class CountedMemory(TorchDispatchMode):
    """A device that is played by main memory: the storages that this thread has made and that are alive."""

    def __init__(self, cap_bytes: int | None) -> None:
        super().__init__()
        self._cap, self._used, self._peak, self._counts = cap_bytes, 0, 0, True
        self._alive: set[int] = set()  # addresses, also of storages that do not count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the storages of what an operator returns."""
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes() if self._counts else 0
        if key == 0 or key in self._alive:
            return
        if self._cap is not None and self._used + size > self._cap:
            raise torch.OutOfMemoryError(f"{size} bytes more than {self._used} of {self._cap}")
        self._alive.add(key)
        self._used += size
        self._peak = max(self._peak, self._used)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._used -= size

    def used_bytes(self) -> int:
        """In tensors, now."""
        return self._used

    def peak_bytes(self) -> int:
        """The most since :meth:`release`."""
        return self._peak

    def release(self) -> None:
        """Count anew."""
        gc.collect()
        self._peak = self._used

    def synchronize(self) -> None:
        """Nothing runs behind this thread's back."""

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is made here stands for host memory."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before


Memory = CudaMemory | CountedMemory


# ------------------------------------------------------------------------------------------------------------- ways


class Trainer:
    """A model, its optimizer and a batch, trained in one way."""

    def __init__(self, task: Task, spec: Spec, memory: Memory, stack: contextlib.ExitStack) -> None:
        self._task, self._spec, self._memory = task, spec, memory
        self._device = torch.device(spec.device, 0 if spec.device == "cuda" else None)
        torch.manual_seed(0)
        self._model = task.build(self._device)
        if spec.way == "checkpoint":
            for block in task.blocks(self._model):
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore
        if spec.way == "fsdp":
            with memory.elsewhere():
                self._model = _sharded(
                    self._model, task, self._device, stack, fp32=spec.states == "fp32"
                )
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
        self._steps = 0
        if spec.way == "offload" and spec.limit_bytes is not None:
            self.limit(spec.limit_bytes, spec.tier_bytes)
        memory.release()
        self.static_bytes = memory.used_bytes()

    def limit(self, limit_bytes: int, tier_bytes: int | str, *, eager: bool = False) -> None:
        """Let what moves hold ``limit_bytes`` on the device from now on. The limit of ``parallax.swap`` is of weights
        and gradients as well."""
        if self._limit == limit_bytes:
            return  # a new scope would pin its host memory anew
        self._scope.close()
        gc.collect()
        fixed = sum(
            t.nbytes
            for t in [*self._model.parameters(), *self._model.buffers(), *self._model.parameters()]
        )
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
        self._limit = limit_bytes

    def keep_to(self, budget_bytes: int, tier_bytes: int) -> Turn:
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
        """One step for the allocator to grow, then ``steps`` that are timed; afterwards the memory is others'."""
        turn = Turn()
        self._memory.release()
        for index in range(1 + steps):
            self._memory.synchronize()
            start = time.perf_counter()
            loss = self._step(*self._batch)
            self._memory.synchronize()
            taken = time.perf_counter() - start
            turn.losses[self._steps] = loss.item()
            self._steps += 1
            if index:
                turn.seconds.append(taken)
        self._settle()
        turn.peak_bytes = self._memory.peak_bytes()
        del loss
        self._memory.release()
        return turn

    def fits(self, rows: int, limits: tuple[int, ...]) -> str | None:
        """Why a step of ``rows`` is not possible; None where it is. A swap limit is chosen of ``limits``: the share
        that suits depends on what a block needs while it runs."""
        del self._batch
        why: str | None = None
        for limit in [limit for limit in limits if self._limit is None or limit <= self._limit] or [
            0
        ]:
            try:
                if self._spec.way == "offload":
                    self.limit(limit, self._spec.tier_bytes)
                self._batch = self._task.batch(rows, self._device)
                self._step(*self._batch)
                self._memory.synchronize()
                why = None
            except (torch.OutOfMemoryError, BudgetExceeded, SwapError) as error:
                why = reason(error)
            self._memory.release()
            if why is None:
                break
            self._batch = (torch.empty(0), torch.empty(0))
            self._model.zero_grad(set_to_none=True)
            self._memory.release()
        return why

    def _saved(self) -> int:
        """The most that saved activations have held on the device."""
        return self._swapping.statistics.high_water if self._swapping is not None else 0

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._around():
            loss = self._task.loss(self._model, inputs, targets)
        loss.backward()
        with self._memory.elsewhere() if self._spec.way == "fsdp" else contextlib.nullcontext():
            self._update()
        return loss.detach()

    def _updater(self, stack: contextlib.ExitStack) -> Callable[[], None]:
        parameters = list(self._model.parameters())
        if self._spec.states == "none":
            return _stepper(torch.optim.SGD(parameters, lr=1e-3))
        if self._spec.states == "bf16" or self._spec.way == "fsdp":
            optimizer = torch.optim.AdamW(parameters, fused=True, **SETTINGS)
            self._moved = [optimizer] if self._spec.way == "offload" else []
            return _stepper(optimizer)
        if self._spec.way == "offload":
            with self._memory.elsewhere():
                return self._host_updater(stack)
        return _full_precision(parameters)

    def _host_updater(self, stack: contextlib.ExitStack) -> Callable[[], None]:
        parameters = list(self._model.parameters())
        meant = torch.optim.AdamW(parameters, fused=True, **SETTINGS)
        host = HostOptimizer(meant, parameters, copies=copies_for(self._device))
        stack.callback(host.close)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(host.reduced)
        for module in self._model.modules():
            own = list(module.parameters(recurse=False))
            if own:
                module.register_forward_pre_hook(lambda module, inputs, own=own: host.ready(own))  # type: ignore[misc]
        self._settle = host.finish
        return host.commit


def _stepper(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def _full_precision(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """AdamW on fp32 copies of bf16 weights, all on the device: 16 bytes of states for each parameter."""
    copies = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = torch.optim.AdamW(copies, fused=True, **SETTINGS)

    @torch.no_grad()
    def update() -> None:
        for parameter, copy in zip(parameters, copies):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for parameter, copy in zip(parameters, copies):
            parameter.copy_(copy)

    return update


def _sharded(
    model: nn.Module, task: Task, device: torch.device, stack: contextlib.ExitStack, *, fp32: bool
) -> nn.Module:
    """FSDP2 on one rank: its parameters, gradients and optimizer are on the host, a block's weights come and go."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="parallax-benchmark-"))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1
    )
    stack.callback(dist.destroy_process_group)
    mesh = init_device_mesh(device.type, (1,))
    kind = next(model.parameters()).dtype
    host = model.cpu().float() if fp32 else model.cpu()
    host = host.to(memory_format=torch.contiguous_format)  # FSDP2 knows no other
    policy = MixedPrecisionPolicy(param_dtype=kind if fp32 else None)
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    )
    for block in task.blocks(host):
        shard(block)
    shard(host)
    for module in host.modules():  # it moves parameters only
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return host


@contextlib.contextmanager
def train(task: Task, spec: Spec) -> Iterator[tuple[int, Callable[[tuple[Any, ...]], Any]]]:
    """A worker's way (benchmarks/workers.py). Ready: the bytes that stay between steps. Messages: the name of a method
    of :class:`Trainer`, and its arguments."""
    with contextlib.ExitStack() as stack:
        memory: Memory
        if spec.device == "cuda":
            torch.cuda.init()
            memory = CudaMemory(spec.cap_bytes)
        else:
            torch.set_num_threads(1)
            memory = stack.enter_context(CountedMemory(spec.cap_bytes))
        trainer = Trainer(task, spec, memory, stack)

        def answer(message: tuple[Any, ...]) -> Any:
            name, *arguments = message
            return getattr(trainer, name)(*arguments)

        yield trainer.static_bytes, answer
