"""Divide a limit of device memory into fixed and movable bytes, and measure the memory of the process."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.common.units import format_bytes
from parallax.machine.host import MemoryBound, available_memory
from parallax.model.saved import address
from parallax.swap.lms.offloaded_tensors import OffloadedWeight
from parallax.swap.lms.weights import OffloadedModel
from parallax.swap.lms.wrapped import local_bytes, parts

# bytes beyond a limit that cause no warning: libraries (4 MiB measured), Python objects
_TOLERATED = 16 * 2**20


@dataclass
class Share:
    """The division of the limit of device memory, in bytes. It is valid until layers are frozen, unfrozen or added.

    ``limit``      the limit
    ``weights``    parameters and buffers that stay on the device
    ``gradients``  gradients that stay on the device
    ``visiting``   offloaded parameters and their gradients while they are on the device
    """

    limit: int
    weights: int
    gradients: int
    visiting: int  # offloaded parameters and their gradients while they are on the device

    @property
    def movable_bytes(self) -> int:
        """Bytes that are left for activations and optimizer states."""
        return self.limit - self.weights - self.gradients - self.visiting

    def __str__(self) -> str:
        parts = f"parameters and buffers {format_bytes(self.weights)}, gradients {format_bytes(self.gradients)}"
        if self.visiting:
            parts += f", offloaded parameters and gradients while on the device {format_bytes(self.visiting)}"
        return f"limit {format_bytes(self.limit)} = {parts}, activations and states {format_bytes(self.movable_bytes)}"


def limit_or_auto(
    model: nn.Module, optimizers: Sequence[Optimizer], limit: int | None, device: torch.device
) -> int:
    """Return ``limit``. If it is None, return the bytes that the model holds on ``device`` plus the free bytes."""
    if limit is not None:
        return limit
    return _made_bytes(held_tensors(model, optimizers), optimizers) + _free_bytes(device)


def divide(
    model: nn.Module, optimizers: Sequence[Optimizer], limit: int, offloaded: OffloadedModel | None
) -> Share:
    """Return the division of ``limit`` into bytes for parameters, for gradients, and for data that can be offloaded.

    ``offloaded`` has the offloaded parameters, if there are any. Only a part of their bytes is on the device at one
    time.
    """
    tensors = held_tensors(model, optimizers)
    trained = [t for t in tensors if t.requires_grad]
    weights, gradients = _storage_bytes(tensors), sum(local_bytes(t) for t in trained)
    return Share(limit, weights, gradients, 0 if offloaded is None else offloaded.limit_bytes)


class ProcessMemory:
    """Bounds and measures the memory of the process, which on a CPU is the device's memory.

    ``made``: the bytes of the existing model and optimizers, which count towards the limit. All other memory that the
    process already holds does not count.
    """

    def __init__(self, limit: int, made: int) -> None:
        self._limit = limit
        self._bound = MemoryBound(limit - made)
        self._beside = max(0, self._bound.before_bytes - made)

    def peak_bytes(self) -> int:
        """Return the peak of the process's memory that counts towards the limit."""
        return self._bound.peak_bytes() - self._beside

    def report(self) -> str:
        taken, beside, limit = map(format_bytes, (self.peak_bytes(), self._beside, self._limit))
        return (
            f"process: {taken} at its measured peak, limit {limit}, beyond the {beside} before; "
            f"freed memory was returned {self._bound.trims} times"
        )

    def close(self) -> None:
        """Remove the bound on the process's memory, and warn if the process has clearly exceeded the limit."""
        self._bound.close()
        over = self.peak_bytes() - self._limit
        if over > max(_TOLERATED, self._limit // 8):
            warnings.warn(
                f"the process took {format_bytes(self.peak_bytes())} where the limit is {format_bytes(self._limit)}: "
                f"{format_bytes(over)} are what operators need while they run, what Python variables hold, or what "
                "malloc keeps: lower the limit by as much, or use smaller batches",
                RuntimeWarning,
                stacklevel=2,
            )


def observe_process(
    model: nn.Module, optimizers: Sequence[Optimizer], limit: int, device: torch.device
) -> ProcessMemory | None:
    """Bound the memory of this process from now on, and return an object that measures it. ``limit``: the limit in
    bytes for ``model`` and ``optimizers``.

    On an accelerator the result is None, because the allocator measures its memory.
    """
    if device.type != "cpu":
        return None
    return ProcessMemory(limit, _made_bytes(held_tensors(model, optimizers), optimizers))


def held_tensors(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters and buffers of the model and all other tensors that the optimizers train, without
    duplicates.

    Offloaded parameters are left out.
    """
    found = [*model.parameters(), *model.buffers()]
    found += [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]
    return list({id(t): t for t in found if type(t) is not OffloadedWeight}.values())


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of the model's parameters."""
    return sum(local_bytes(p) for p in model.parameters())


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return [v for state in states for v in state.values() if isinstance(v, Tensor)]


def is_plain(value: Any) -> bool:
    """Whether ``value`` is a tensor, not of a subclass, with strided memory."""
    return type(value) is Tensor and value.layout is torch.strided


def _made_bytes(held: Sequence[Tensor], optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of existing parameters, buffers, gradients and optimizer states."""
    made = _storage_bytes(held) + _storage_bytes(
        t.grad for t in held if t.requires_grad and t.grad is not None
    )
    return made + _storage_bytes(value for each in optimizers for value in _state_tensors(each))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``, each storage counted once."""
    plain = [part for tensor in tensors for part in parts(tensor)]
    storages = [part.untyped_storage() for part in plain if part.layout is torch.strided]
    return sum({address(storage): storage.nbytes() for storage in storages}.values())


def _free_bytes(device: torch.device) -> int:
    """Return the bytes available for new tensors.

    A margin is left: a tenth of a GPU's memory, or a fifth of the free RAM.
    """
    if device.type == "cpu":
        return available_memory() * 8 // 10
    free, total = torch.accelerator.get_memory_info(device)
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return max(0, free + cached - total // 10)
