"""Add received tensors to the autograd graph, and collect their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallax.model.block import can_require_grad
from parallax.runtime.channels.message import Gradients, Tensors


class _Entrance(torch.autograd.Function):
    """Adds its inputs to the graph without a copy. The backward appends their gradients to a list; the gradient of an
    unused input is None."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, arrived: list[Tensor | None], *tensors: Tensor
    ) -> Tensors:
        del anchor  # it only makes the outputs require gradients
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors)  # outputs are not views: a block may change its input in place
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.arrived.extend(gradients)
        return (None,) * (2 + len(gradients))


class GraphEntry:
    """Adds the inputs of a micro-batch to the autograd graph, and collects their gradients. The graph does not keep the
    inputs alive: an input is freed as soon as no block has saved it.

    A tensor in a channel's memory has to be copied anyway, so the copy is recorded in the graph. The source of the copy
    is a leaf without memory, whose ``.grad`` collects the gradient, so that no Python code runs in the backward. A
    tensor that has its own memory enters the graph through :class:`_Entrance`, without a copy. ``anchor`` is a tensor
    that requires a gradient, so that the graph is recorded.
    """

    __slots__ = ("_anchor", "_arrived", "_count", "_leaves")

    def __init__(self, anchor: Tensor) -> None:
        self._anchor = anchor
        self._leaves: list[Tensor] = []
        self._arrived: list[Tensor | None] = []
        self._count = 0

    def copy(self, borrowed: Tensor) -> Tensor:
        """Return a copy of ``borrowed``, a tensor in a channel's memory. The copy is part of the graph if it can have a
        gradient."""
        if not can_require_grad(borrowed):
            return borrowed.clone()
        leaf = borrowed.detach().requires_grad_()
        copied = leaf.clone()
        leaf.data = borrowed.new_empty(()).expand(borrowed.shape)
        self._leaves.append(leaf)
        return copied

    def enter(self, inputs: Tensors, floating: Sequence[Tensor]) -> Tensors:
        """Return ``inputs``. In the result, the tensors in ``floating`` are part of the graph."""
        if self._leaves or not floating:
            return inputs
        self._count = len(floating)
        entered: Tensors = _Entrance.apply(self._anchor, self._arrived, *floating)
        if len(floating) == len(inputs):
            return entered
        entering = iter(entered)
        return tuple(next(entering) if can_require_grad(tensor) else tensor for tensor in inputs)

    def take_gradients(self) -> Gradients:
        """Return the gradients of the floating-point inputs, and remove them from this object. The gradient of an
        unused input is None."""
        leaves, arrived, self._leaves, self._arrived = self._leaves, self._arrived, [], []
        if leaves:
            return tuple([leaf.grad for leaf in leaves])
        return tuple(arrived) or (None,) * self._count
