"""Saved-tensor hooks that pass autograd's saved tensors to the swap manager, inside the context :func:`offloading`.

With hooks, autograd no longer checks that a saved tensor was not changed in place. So these hooks make the check, with
torch's own message, for all saved tensors.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from parallax.machine.host import LOOK_BYTES, relieve_memory
from parallax.model.private import operation_number, uncompiled
from parallax.model.saved import ELSEWHERE, NOT_PLAIN, Selector
from parallax.swap.activations.manager import SwapManager
from parallax.swap.activations.records import Entry, empty, layout_of

_FEW = 2048  # number of living saved tensors above which their histories are not searched


class _KeptTensor:
    """A saved tensor that stays on the device.

    A tensor with autograd history is detached. Otherwise there would be a reference cycle that no garbage collector
    finds: the history of a saved output references this object, and this object would reference the history. A leaf has
    no history and is not detached, so that a later assignment to its ``.data`` takes effect, as it does without hooks.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        relieve_memory(LOOK_BYTES)  # a guess: the bytes that the operator needs are unknown
        if self.tensor._version != self.version:
            raise changed_in_place(self.tensor, self.version, self.tensor)
        return self.tensor


class _MovedTensor:
    """A saved tensor whose storage may be offloaded.

    ``_counter`` is a detached tensor that shares the version counter of the saved tensor. So a change in place is
    detected even if the bytes are offloaded or if another view was changed. If the storage was saved for the first
    time, ``_counter`` is the detached tensor in the :class:`Record` (``Record.alias``). Otherwise it is a separate
    tensor without bytes.
    """

    __slots__ = ("_counter", "_entry", "_layout", "_leaf", "_manager", "_version")

    def __init__(
        self, tensor: Tensor, entry: Entry, alias: Tensor | None, manager: SwapManager
    ) -> None:
        self._entry, self._manager = entry, manager
        self._version = tensor._version
        self._layout = layout_of(tensor) if alias is None else None
        self._counter = tensor.detach() if alias is None else alias
        if alias is None:
            empty(self._counter)
        self._leaf = weakref.ref(tensor) if tensor.is_leaf else None

    def unpack(self) -> Tensor:
        counter, record = self._counter, self._entry.record
        if counter._version != self._version:
            size = (self._layout or record.layout or (0, counter.size()))[1]
            saved = torch.empty(size, dtype=counter.dtype, device="meta")
            raise changed_in_place(counter, self._version, saved)
        storage = self._manager.load(self._entry)
        if self._leaf is not None:
            leaf = self._leaf()
            saved_as = self._layout or record.layout or layout_of(counter)
            if leaf is not None and (
                leaf.untyped_storage() is not record.origin() or layout_of(leaf) != saved_as
            ):
                return leaf  # its ``.data`` was replaced, and autograd would use the new data
        # A change in place must be visible to all records of this storage.
        if counter.untyped_storage() is storage:
            return counter
        layout, found = self._layout or record.layout, counter.detach()
        assert layout is not None
        with torch.inference_mode(False):  # inference tensors share no version counter
            found.data = counter.new_empty(0).set_(storage, *layout)
        return found


class _Offloading(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self, manager: SwapManager, selector: Selector, micro: int) -> None:
        def pack(tensor: Tensor) -> _KeptTensor | _MovedTensor:
            # An interrupt has left these hooks active after the manager was closed.
            if manager.closed:
                return _KeptTensor(tensor)
            reason = (
                selector.why_kept if manager.record_count < _FEW else selector.why_kept_itself
            )(tensor)
            if (
                reason is None
                and not tensor.is_cpu
                and manager.swap_stream.is_other(tensor, graphs_ended=manager.empty)
            ):
                reason = ELSEWHERE
            if reason is not None:
                manager.count_kept(reason, 0 if reason is NOT_PLAIN else tensor.nbytes)
                return _KeptTensor(tensor)
            entry, alias = manager.save(tensor, micro, operation_number())
            return _MovedTensor(tensor, entry, alias, manager)

        # Compiled blocks reach these hooks where they call code that is not compiled.
        super().__init__(uncompiled(pack), uncompiled(_unpack))
        self._manager = manager

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._manager.settle()


def offloading(
    manager: SwapManager, selector: Selector, micro: int
) -> torch.autograd.graph.saved_tensors_hooks:
    """Return the saved-tensor hooks for a block's forward, under which its activations may be offloaded.

    The activations belong to micro-batch ``micro``; ``selector`` chooses the tensors that may be offloaded.
    """
    return _Offloading(manager, selector, micro)


def _unpack(packed: _KeptTensor | _MovedTensor) -> Tensor:
    return packed.unpack()


def changed_in_place(counter: Tensor, expected: int, saved: Tensor) -> RuntimeError:
    """Return the error that torch raises, without hooks, for a saved tensor that was changed in place.

    ``counter`` is a tensor with the version counter of the saved tensor, and ``expected`` is the version at the time of
    saving. The message has the type and shape of ``saved``.
    """
    shape = "" if saved.is_nested else f" {list(saved.shape)}"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{saved.type().replace('.meta', '')}{shape}] is at version {counter._version}; expected version "
        f"{expected} instead. Hint: enable anomaly detection to find the operation that failed to "
        "compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )
