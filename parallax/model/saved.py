"""Which of the tensors that autograd saves are activations that may leave the device.

The profiler counts with this rule and the swap manager moves by it, so what was predicted is what is moved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHAIN_LENGTH = 4  # cast, transpose, view, expand: the longest way from a parameter to its copy seen so far
_SMALL_PART = 8  # moving a storage for less than this share of it costs more than it can free
_LOOKUPS = ("Embedding", "Index", "Gather", "Take")  # read a parameter at places that the data chose


class Selector:
    """Decides by storage. Stay: parameters and buffers, copies made from a parameter alone (autocast's
    casts), what the caller holds anyway (tensors that collect a gradient, small slices of a batch), small
    tensors, and anything that is not plain strided memory."""

    def __init__(self, held: Iterable[Tensor], minimum_bytes: int) -> None:
        self._held = {0, *(tensor.untyped_storage().data_ptr() for tensor in held)}  # 0: no bytes at all
        self._minimum = max(1, minimum_bytes)

    def moves(self, tensor: Tensor) -> bool:
        """Whether the storage of a saved ``tensor`` may be moved."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.is_nested or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._minimum or storage.data_ptr() in self._held:
            return False
        return not self._slice_of_input(tensor) and not self._from_leaf(tensor)

    def _slice_of_input(self, tensor: Tensor) -> bool:
        """Rows of a batch or of a whole data set: the storage belongs to the caller, who still holds it."""
        has_history = tensor.requires_grad or tensor.grad_fn is not None
        return not has_history and tensor.nbytes * _SMALL_PART < tensor.untyped_storage().nbytes()

    def _from_leaf(self, tensor: Tensor) -> bool:
        """A tensor that collects a gradient, a view of one, or a copy made from a parameter alone."""
        if tensor.requires_grad and tensor.is_leaf:
            return True
        node, storage = tensor.grad_fn, tensor.untyped_storage()
        for _ in range(_CHAIN_LENGTH):
            if node is None or node.name().startswith(_LOOKUPS):
                return False
            variable = getattr(node, "variable", None)
            if variable is not None:
                source = variable.untyped_storage().data_ptr()
                small = storage.nbytes() // tensor.element_size() <= variable.numel()
                return source == storage.data_ptr() or (source in self._held and small)
            parents = node.next_functions
            if len(parents) != 1:
                return False
            node = parents[0][0]
        return False
