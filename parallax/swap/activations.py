"""Saved-tensor hooks: what autograd saves inside :func:`offloading` goes through the swap manager.

Hooks switch off autograd's own check that a saved tensor was not changed in place, so it is made here, for tensors
that stay and tensors that leave alike, with torch's own words.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from parallax.model.saved import Selector
from parallax.swap.manager import Entry, SwapManager


class _Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def unpack(self) -> Tensor:
        _check_version(self.tensor, self.version)
        return self.tensor


class _Moved:
    """A saved tensor whose storage is an entry.

    An alias watches the version while the bytes are still on the device; afterwards a weak reference does, because
    an alias would keep the storage alive.
    """

    __slots__ = ("_alias", "_entry", "_manager", "_original", "_shape", "_version", "__weakref__", "dtype")

    def __init__(self, tensor: Tensor, entry: Entry, manager: SwapManager) -> None:
        self._entry, self._manager = entry, manager
        self._shape = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self.dtype, self._version = tensor.dtype, tensor._version
        self._original = weakref.ref(tensor)
        self._alias: Tensor | None = tensor.detach()
        entry.watchers.append(weakref.WeakMethod(self.left))

    def left(self) -> None:
        """The bytes have left the device: remember a change that came too early, let go of the storage."""
        if self._alias is not None and self._alias._version == self._version:
            self._alias = None

    def unpack(self) -> Tensor:
        watched = self._alias if self._alias is not None else self._original()
        if watched is not None:
            _check_version(watched, self._version)
        storage = self._manager.load(self._entry)
        return torch.empty(0, dtype=self.dtype, device=self._entry.device).set_(storage, *self._shape)


def offloading(manager: SwapManager, selector: Selector, micro: int) -> torch.autograd.graph.saved_tensors_hooks:
    """The context in which a block runs forward so that its saved activations belong to ``micro`` and may leave."""

    def pack(tensor: Tensor) -> _Kept | _Moved:
        if not selector.moves(tensor):
            return _Kept(tensor)
        return _Moved(tensor, manager.add(tensor, micro), manager)

    def unpack(packed: _Kept | _Moved) -> Tensor:
        return packed.unpack()

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _check_version(tensor: Tensor, expected: int) -> None:
    if tensor._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {expected} "
            "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
            "with torch.autograd.set_detect_anomaly(True)."
        )
