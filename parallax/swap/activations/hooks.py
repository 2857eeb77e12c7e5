"""Saved-tensor hooks: what autograd saves inside :func:`offloading` goes through the swap manager.

Hooks switch off autograd's own check that a saved tensor was not changed in place, so it is made here, for
tensors that stay and tensors that leave alike, with torch's own words.
"""

from __future__ import annotations

import weakref
from functools import cache

import torch
from torch import Tensor

from parallax.machine.host import LOOK_BYTES, relieve_memory
from parallax.model.private import operation_number
from parallax.model.saved import NOT_PLAIN, Selector
from parallax.swap.activations.manager import SwapManager
from parallax.swap.activations.records import Entry

_FEW = 2048  # saved tensors alive at one time, up to which the history of each is looked at


@cache
def _nothing(device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor without bytes: torch lets ``.data`` change within a kind of device only."""
    return torch.empty(0, device=device, dtype=dtype)


class _KeptTensor:
    """A saved tensor that stays where it is. Without its history: a saved output whose history holds what was
    packed would be a cycle that no collector sees. A leaf has none, and what is put into it later by ``.data`` counts,
    as it does without hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        relieve_memory(LOOK_BYTES)  # what its operator needs is not known
        if self.tensor._version != self.version:
            raise _changed(self.tensor, self.version, self.tensor)
        return self.tensor


class _MovedTensor:
    """A saved tensor whose storage is an entry.

    ``_counter`` is a tensor without bytes that shares the version counter of what was saved: so a change is seen
    wherever the bytes are, whoever is still alive, and through whichever view it was made.
    """

    __slots__ = ("_counter", "_entry", "_leaf", "_manager", "_shape", "_version")

    def __init__(self, tensor: Tensor, entry: Entry, manager: SwapManager) -> None:
        self._entry, self._manager = entry, manager
        self._shape = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._version = tensor._version
        self._counter = counter = tensor.detach()
        counter.data = _nothing(tensor.device, tensor.dtype)
        self._leaf = weakref.ref(tensor) if tensor.is_leaf else None

    def unpack(self) -> Tensor:
        counter = self._counter
        if counter._version != self._version:
            saved = torch.empty(self._shape[1], dtype=counter.dtype, device="meta")
            raise _changed(counter, self._version, saved)
        storage = self._manager.load(self._entry)
        if self._leaf is not None:
            leaf = self._leaf()
            if leaf is not None and leaf.untyped_storage() is not self._entry.record.origin():
                return (
                    leaf  # its ``.data`` are others now, and it is these that autograd would find
                )
        return counter.new_empty(0).set_(storage, *self._shape)


class _Offloading(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self, manager: SwapManager, selector: Selector, micro: int) -> None:
        def pack(tensor: Tensor) -> _KeptTensor | _MovedTensor:
            # An interrupt has left these hooks in force: nothing can leave any more.
            if manager.closed:
                return _KeptTensor(tensor)
            reason = (selector.why_kept if manager.saved < _FEW else selector.why_kept_itself)(
                tensor
            )
            if reason is not None:
                manager.decide(reason, 0 if reason is NOT_PLAIN else tensor.nbytes)
                return _KeptTensor(tensor)
            return _MovedTensor(
                tensor, manager.add(tensor, micro, operation=operation_number()), manager
            )

        super().__init__(pack, _unpack)
        self._manager = manager

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._manager.settle()


def offloading(
    manager: SwapManager, selector: Selector, micro: int
) -> torch.autograd.graph.saved_tensors_hooks:
    """The context in which a block runs forward so that its saved activations belong to ``micro`` and may
    leave."""
    return _Offloading(manager, selector, micro)


def _unpack(packed: _KeptTensor | _MovedTensor) -> Tensor:
    return packed.unpack()


def _changed(counter: Tensor, expected: int, saved: Tensor) -> RuntimeError:
    """What torch says."""
    shape = "" if saved.is_nested else f" {list(saved.shape)}"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{saved.type().replace('.meta', '')}{shape}] is at version {counter._version}; expected version "
        f"{expected} instead. Hint: enable anomaly detection to find the operation that failed to "
        "compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )
