"""Copies of buffers, made before each step and restored if the step is skipped.

A forward changes buffers, such as the running statistics of BatchNorm, before the ranks know whether the step will be
skipped. Without the copies, a NaN would stay in the buffers forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallax.model.private import copy_to_each

# Larger buffers, such as tables, are copied when their version changes. Smaller ones are always copied: BatchNorm's
# kernels write running statistics without a new version.
_ALWAYS_BYTES = 2**20


class _Kept(NamedTuple):
    """One buffer of a module, and a copy of its values.

    ``owner``    the module's dict of buffers
    ``name``     the buffer's name in this dict
    ``tensor``   the buffer
    ``values``   the copy
    ``version``  the buffer's version counter at the time of the copy
    ``counted``  whether the buffer is copied only if its version counter has changed; False for small buffers, which
                 are copied in every step
    """

    owner: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    values: Tensor
    version: int
    counted: bool


class KeptBuffers:
    """Copies of the buffers of ``modules``. They take as much memory as the buffers, so a memory profile counts the
    bytes of buffers twice."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._kept: dict[tuple[int, str], _Kept] = {}
        self._none: list[tuple[dict[str, Tensor | None], str]] = []

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the buffers. Only buffers that may have changed since the last call are copied, with one kernel per
        type."""
        self._none.clear()
        changed: dict[torch.dtype, list[_Kept]] = {}
        for place, module in enumerate(self._modules):
            for name, tensor in module._buffers.items():
                if tensor is None:
                    self._none.append((module._buffers, name))
                    continue
                key = place, name
                kept = self._kept.get(key)
                if kept is None or kept.tensor is not tensor:
                    counted = tensor.nbytes > _ALWAYS_BYTES
                    values = tensor.clone()
                    self._kept[key] = _Kept(
                        module._buffers, name, tensor, values, tensor._version, counted
                    )
                elif not kept.counted or kept.version != tensor._version:
                    self._kept[key] = kept = kept._replace(version=tensor._version)
                    changed.setdefault(tensor.dtype, []).append(kept)
        for each in changed.values():
            copy_to_each([kept.values for kept in each], [kept.tensor for kept in each])

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers to the values of the last :meth:`remember`."""
        for owner, name in self._none:
            owner[name] = None
        for kept in self._kept.values():
            kept.owner[kept.name] = kept.tensor
            # An expanded buffer cannot be written, and is always equal.
            if not torch.equal(kept.tensor, kept.values):
                kept.tensor.copy_(kept.values)
