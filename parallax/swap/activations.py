"""Saved-tensor hooks: what autograd saves inside :func:`offloading` goes through the swap manager.

Hooks switch off autograd's own check that a saved tensor was not changed in place, so it is made here, for
tensors that stay and tensors that leave alike, with torch's own words.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from parallax.model.saved import NOT_PLAIN, Selector
from parallax.swap.manager import SwapManager
from parallax.swap.records import Entry


class _Kept:
    """A saved tensor that stays where it is. Without its history: a saved output whose history holds what was
    packed would be a cycle that no collector sees."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        _check_version(self.tensor, self.version)
        return self.tensor


class _Moved:
    """A saved tensor whose storage is an entry.

    The entry's alias watches the version while the bytes are still on the device; afterwards a weak reference
    to the tensor does, because an alias would keep the storage alive.
    """

    __slots__ = ("_dtype", "_entry", "_manager", "_original", "_shape", "_version")

    def __init__(self, tensor: Tensor, entry: Entry, manager: SwapManager) -> None:
        self._entry, self._manager = entry, manager
        self._shape = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._dtype, self._version = tensor.dtype, tensor._version
        self._original = weakref.ref(tensor)

    def unpack(self) -> Tensor:
        for watched in (self._entry.record.alias, self._original()):
            if watched is not None:
                _check_version(watched, self._version)
        storage = self._manager.load(self._entry)
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._shape)


def offloading(manager: SwapManager, selector: Selector, micro: int) -> torch.autograd.graph.saved_tensors_hooks:
    """The context in which a block runs forward so that its saved activations belong to ``micro`` and may
    leave."""

    def pack(tensor: Tensor) -> _Kept | _Moved:
        reason = selector.why_kept(tensor)
        if reason is not None:
            manager.decide(reason, 0 if reason is NOT_PLAIN else tensor.nbytes)
            return _Kept(tensor)
        return _Moved(tensor, manager.add(tensor, micro), manager)

    def unpack(packed: _Kept | _Moved) -> Tensor:
        return packed.unpack()

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _check_version(tensor: Tensor, expected: int) -> None:
    if tensor._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
            f"{expected} instead. Hint: enable anomaly detection to find the operation that failed to "
            "compute its gradient, with torch.autograd.set_detect_anomaly(True)."
        )
