"""A limit of device memory, divided into what stays and the room for what can move."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.host import available_memory
from parallax.model.saved import address
from parallax.swap.wrapped import local_bytes, parts
from parallax.units import format_bytes


@dataclass(frozen=True)
class Share:
    """How the limit is divided; bytes."""

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


def divide(model: nn.Module, optimizers: Sequence[Optimizer], limit: int | None, device: torch.device) -> Share:
    """The division of ``limit`` bytes of ``device``; None: of what the model has there and what is free."""
    tensors = held_tensors(model, optimizers)
    trained = [t for t in tensors if t.requires_grad]
    weights, gradients = _storage_bytes(tensors), sum(local_bytes(t) for t in trained)
    if limit is None:
        made = _storage_bytes(t.grad for t in trained if t.grad is not None)
        made += _storage_bytes(value for each in optimizers for value in _state_tensors(each))
        limit = weights + made + _free_bytes(device)
    return Share(limit, weights, gradients)


def held_tensors(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Parameters and buffers, and what else the optimizers train; each once."""
    found = [*model.parameters(), *model.buffers()]
    found += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return list({id(tensor): tensor for tensor in found}.values())


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return [v for state in states for v in state.values() if isinstance(v, Tensor)]


def is_plain(value: Any) -> bool:
    """Whether it is a tensor of ordinary strided memory."""
    return type(value) is Tensor and value.layout is torch.strided


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each counted once."""
    plain = [part for tensor in tensors for part in parts(tensor)]
    storages = [part.untyped_storage() for part in plain if part.layout is torch.strided]
    return sum({address(storage): storage.nbytes() for storage in storages}.values())


def _free_bytes(device: torch.device) -> int:
    """What new tensors may take: a tenth of a GPU, a fifth of the RAM stays for what no limit counts."""
    if device.type == "cpu":
        return available_memory() * 8 // 10
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + cached - total // 10)
