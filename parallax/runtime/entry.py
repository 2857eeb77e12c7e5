"""Where tensors enter a graph, and their gradients leave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallax.model.block import can_require_grad
from parallax.runtime.channels.message import Gradients, Tensors


class _Entrance(torch.autograd.Function):
    """The inputs themselves, from now on in the graph; the backward drops their gradients into a list, None for one
    that nothing depends on."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, arrived: list[Tensor | None], *tensors: Tensor
    ) -> Tensors:
        del anchor  # requires a gradient, and so the result does
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors)  # no views: a block may change its input in place
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.arrived.extend(gradients)
        return (None,) * (2 + len(gradients))


class GraphEntry:
    """Where a micro-batch's inputs enter the graph, and their gradients leave it. Autograd must not keep the inputs for
    that: they live only as long as a block has saved them.

    What a channel lends has to be copied anyway. The copy is in the graph, and what it was made of is a leaf without
    memory, for the gradient: no Python runs in the backward. What has memory of its own takes :class:`_Entrance`.
    """

    __slots__ = ("_anchor", "_arrived", "_count", "_leaves")

    def __init__(self, anchor: Tensor) -> None:
        self._anchor = anchor
        self._leaves: list[Tensor] = []
        self._arrived: list[Tensor | None] = []
        self._count = 0

    def copy(self, lent: Tensor) -> Tensor:
        """The caller's own tensor; in the graph, where it can be."""
        if not can_require_grad(lent):
            return lent.clone()
        leaf = lent.detach().requires_grad_()
        copied = leaf.clone()
        leaf.data = lent.new_empty(()).expand(lent.shape)
        self._leaves.append(leaf)
        return copied

    def enter(self, inputs: Tensors, floating: Sequence[Tensor]) -> Tensors:
        """The ``inputs``, those that are ``floating`` in the graph."""
        if self._leaves or not floating:
            return inputs
        self._count = len(floating)
        entered: Tensors = _Entrance.apply(self._anchor, self._arrived, *floating)
        if len(floating) == len(inputs):
            return entered
        entering = iter(entered)
        return tuple(next(entering) if can_require_grad(tensor) else tensor for tensor in inputs)

    def take_gradients(self) -> Gradients:
        """Of the floating inputs, once; None where nothing depends on them."""
        leaves, arrived, self._leaves, self._arrived = self._leaves, self._arrived, [], []
        if leaves:
            return tuple([leaf.grad for leaf in leaves])
        return tuple(arrived) or (None,) * self._count
