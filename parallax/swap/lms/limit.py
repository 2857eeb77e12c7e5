"""A limit of device memory: divided into what stays and the room for what can move, and what came of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.common.units import format_bytes
from parallax.machine.host import MemoryBound, available_memory
from parallax.model.saved import address
from parallax.swap.lms.wrapped import local_bytes, parts

# Bytes beyond a limit that any loop may take: libraries (4 MiB seen), Python's own objects.
_TOLERATED = 16 * 2**20


@dataclass
class Share:
    """How the limit is divided, until layers are frozen, unfrozen or added; bytes."""

    limit: int
    weights: int
    gradients: int

    @property
    def room(self) -> int:
        """What is left for activations and states."""
        return self.limit - self.weights - self.gradients

    def __str__(self) -> str:
        parts = f"parameters and buffers {format_bytes(self.weights)}, gradients {format_bytes(self.gradients)}"
        return f"limit {format_bytes(self.limit)} = {parts}, activations and states {format_bytes(self.room)}"


def divide(
    model: nn.Module, optimizers: Sequence[Optimizer], limit: int | None, device: torch.device
) -> Share:
    """The division of ``limit`` bytes of ``device``; None: of what the model has there and what is free."""
    tensors = held_tensors(model, optimizers)
    trained = [t for t in tensors if t.requires_grad]
    weights, gradients = _storage_bytes(tensors), sum(local_bytes(t) for t in trained)
    if limit is None:
        limit = _made_bytes(tensors, optimizers) + _free_bytes(device)
    return Share(limit, weights, gradients)


class Observed(Protocol):
    """What the process was seen to take under a limit."""

    def report(self) -> list[str]:
        """In lines for people."""

    def close(self) -> None:
        """The limit is over."""


class NotObserved:
    """On a GPU, whose allocator counts for itself."""

    def report(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing was opened."""


class ProcessMemory:
    """On a CPU the process is the device: a limit that its memory does not follow is no limit, so it is bounded, and
    measured against the limit. What of the model was there before counts towards the limit, what else was there
    does not."""

    def __init__(self, limit: int, made: int) -> None:
        self._limit = limit
        self._bound = MemoryBound(limit - made)
        self._beside = max(0, self._bound.before_bytes - made)

    def taken_bytes(self) -> int:
        """The most that the process took so far, to be compared with the limit."""
        return self._bound.peak_bytes() - self._beside

    def report(self) -> list[str]:
        taken, beside, limit = map(format_bytes, (self.taken_bytes(), self._beside, self._limit))
        return [
            f"process: took {taken} at most as measured, where the limit is {limit}, beside {beside} that were there; "
            f"freed memory went back {self._bound.trims} times"
        ]

    def close(self) -> None:
        """Warns where the process took much more than the limit."""
        self._bound.close()
        over = self.taken_bytes() - self._limit
        if over > max(_TOLERATED, self._limit // 8):
            warnings.warn(
                f"the process took {format_bytes(self.taken_bytes())} where the limit is {format_bytes(self._limit)}: "
                f"{format_bytes(over)} are what operators need while they run, what Python variables hold, or what "
                "malloc does not give back here: lower the limit by as much, or use smaller batches",
                RuntimeWarning,
                stacklevel=2,
            )


def observe(
    model: nn.Module, optimizers: Sequence[Optimizer], limit: int, device: torch.device
) -> Observed:
    """Watch ``device`` from now on."""
    if device.type != "cpu":
        return NotObserved()
    return ProcessMemory(limit, _made_bytes(held_tensors(model, optimizers), optimizers))


def held_tensors(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Parameters and buffers, and what else the optimizers train; each once."""
    found = [*model.parameters(), *model.buffers()]
    found += [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]
    return list({id(tensor): tensor for tensor in found}.values())


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return [v for state in states for v in state.values() if isinstance(v, Tensor)]


def is_plain(value: Any) -> bool:
    """Whether it is a tensor of ordinary strided memory."""
    return type(value) is Tensor and value.layout is torch.strided


def _made_bytes(held: Sequence[Tensor], optimizers: Iterable[Optimizer]) -> int:
    """Bytes that are there already of parameters, buffers, gradients and states."""
    made = _storage_bytes(held) + _storage_bytes(
        t.grad for t in held if t.requires_grad and t.grad is not None
    )
    return made + _storage_bytes(value for each in optimizers for value in _state_tensors(each))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each counted once."""
    plain = [part for tensor in tensors for part in parts(tensor)]
    storages = [part.untyped_storage() for part in plain if part.layout is torch.strided]
    return sum({address(storage): storage.nbytes() for storage in storages}.values())


def _free_bytes(device: torch.device) -> int:
    """What new tensors may take: a tenth of a GPU, a fifth of the RAM stays for what no limit counts."""
    if device.type == "cpu":
        return available_memory() * 8 // 10
    free, total = torch.accelerator.get_memory_info(device)
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return max(0, free + cached - total // 10)
