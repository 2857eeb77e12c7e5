"""Which of the tensors that autograd saves are activations that may leave the device.

The profiler counts with this rule and the swap manager moves by it, so what was predicted is what is moved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHAIN_LENGTH = 4  # cast, transpose, view, expand: the longest way from a parameter to its saved copy seen so far


class Selector:
    """Decides by storage. Stay: parameters and buffers, copies made from a parameter alone (autocast's casts),
    small tensors, and anything that is not plain strided memory."""

    def __init__(self, held: Iterable[Tensor], minimum_bytes: int) -> None:
        self._held = {tensor.untyped_storage().data_ptr() for tensor in held}
        self._minimum = max(1, minimum_bytes)

    def moves(self, tensor: Tensor) -> bool:
        """Whether the storage of a saved ``tensor`` may be moved."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._minimum or storage.data_ptr() in self._held:
            return False
        return not self._from_parameter(tensor)

    def _from_parameter(self, tensor: Tensor) -> bool:
        node = tensor.grad_fn
        for _ in range(_CHAIN_LENGTH):
            if node is None:
                return False
            variable = getattr(node, "variable", None)
            if variable is not None:
                return variable.untyped_storage().data_ptr() in self._held
            parents = node.next_functions
            if len(parents) != 1:
                return False
            node = parents[0][0]
        return False
