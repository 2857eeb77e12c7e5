"""Buffers as they were before a step that is not to have happened.

A forward changes buffers, such as the running statistics of BatchNorm, long before anybody knows whether the step
will be taken. Where it is skipped, or was only a trial, they go back to what they were: a NaN would stay for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Larger ones, such as tables, by their version. Kernels of BatchNorm write running statistics without counting one.
_ALWAYS_BYTES = 2**20


class _Kept(NamedTuple):
    """A buffer's place, the tensor that was there, and a copy of its values at ``version``."""

    owner: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    values: Tensor
    version: int
    counted: bool


class KeptBuffers:
    """Copies of the buffers of ``modules``: they take as much memory once more."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._kept: dict[tuple[int, str], _Kept] = {}

    @torch.no_grad()
    def remember(self) -> None:
        """As they are now. Copies only what may have changed since the last time."""
        for place, module in enumerate(self._modules):
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    key = place, name
                    self._kept[key] = _copied(self._kept.get(key), module, name, tensor)

    @torch.no_grad()
    def restore(self) -> None:
        """As they were when :meth:`remember` was called."""
        for kept in self._kept.values():
            kept.owner[kept.name] = kept.tensor
            if not kept.counted or kept.tensor._version != kept.version:
                kept.tensor.copy_(kept.values)


def _copied(before: _Kept | None, module: nn.Module, name: str, tensor: Tensor) -> _Kept:
    counted = tensor.nbytes > _ALWAYS_BYTES
    if before is not None and before.tensor is tensor:
        if counted and before.version == tensor._version:
            return before
        before.values.copy_(tensor)
        return before._replace(version=tensor._version)
    return _Kept(module._buffers, name, tensor, tensor.clone(), tensor._version, counted)


class NothingKept:
    """Every step is taken, or the run ends."""

    def remember(self) -> None:
        """Nothing will go back."""

    def restore(self) -> None:
        """Nobody asks."""
