"""The operations that the profiler times: the passes of one block, and an optimizer step."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parallax.model.profiling.clock import Clock
from parallax.model.profiling.offloads import Saving
from parallax.model.saved import without_history
from parallax.model.split_backward import WeightGradStore

Tensors = tuple[Tensor, ...]

_STEPS = 3
_OPTIMIZED = 32  # tensors of the optimizer step, together larger than caches


class Bench(Protocol):
    """The interface to an object that runs a block in the configured precision, and the loss after the last block."""

    def forward(self, block: nn.Module, entering: Tensors, targets: Any) -> Tensors:
        """Return the block's outputs or, if ``targets`` are given, the loss of these outputs."""

    def add_loss(self, outputs: Tensors, targets: Any) -> Tensors:
        """Return the loss of the last block's outputs."""


class BlockPasses:
    """The passes of one block: the forward, and the backward as a whole, split, or with offloaded saved tensors.

    ``leaves``: tensors from which the inputs are made. As in a stage, an input that needs a gradient is not a leaf, but
    the result of a graph node with two parents. ``targets``: the targets if the passes include the loss, otherwise
    None.
    """

    def __init__(
        self,
        bench: Bench,
        device: torch.device,
        block: nn.Module,
        leaves: Tensors,
        targets: Any,
    ) -> None:
        self._bench, self._block, self._targets = bench, block, targets
        self.leaves = leaves
        self._device = device
        self._anchor = torch.zeros((), device=self._device, requires_grad=True)

    def enter(self, _: object = None) -> Tensors:
        """Return new inputs for a forward, which the forward may change in place."""
        return tuple(
            leaf + self._anchor.to(leaf.dtype) if leaf.requires_grad else leaf
            for leaf in self.leaves
        )

    def forward(self, entering: Tensors) -> Tensors:
        return self._bench.forward(self._block, entering, self._targets)

    def backward(self, results: Tensors) -> None:
        """Compute the gradients of inputs and parameters, from ``results``, which :meth:`forward` returned."""
        roots = [tensor for tensor in results if tensor.requires_grad]
        if roots:
            ones = [torch.ones_like(root) for root in roots]
            torch.autograd.backward(roots, ones if self._targets is None else None)
        for leaf in (*self.leaves, self._anchor):
            leaf.grad = None

    def offloaded(self, saving: Saving) -> Tensors:
        """Run a forward under the hooks ``saving``, which offload saved tensors.

        The loss then runs without the hooks.
        """
        entering = self.enter()
        with saving:
            results = self._bench.forward(self._block, entering, None)
        if self._targets is None:
            return results
        return self._bench.add_loss(results, self._targets)

    def after_the_last_saved(self, clock: Clock) -> float:
        """Run a forward, and return the seconds from the moment when the block saves its last tensor to the end of the
        forward.

        The forward includes the loss if there are targets.
        """
        marks = [clock.mark()]

        def pack(tensor: Tensor) -> Tensor:
            marks[0] = clock.mark()
            return without_history(tensor)

        entering = self.enter()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            results = self._bench.forward(self._block, entering, None)
        if self._targets is not None:
            results = self._bench.add_loss(results, self._targets)
        return clock.seconds_since(marks[0])

    def split(self, entering: Tensors) -> tuple[Tensors, WeightGradStore]:
        """Run a forward whose backward defers weight gradients. Return the forward's results, and the store of these
        gradients.
        """
        store = WeightGradStore(self._device)
        with store.splitting():
            return self._bench.forward(self._block, entering, self._targets), store

    def enter_and_split(self, _: object) -> tuple[Tensors, WeightGradStore]:
        """Create new inputs and run :meth:`split` on them."""
        return self.split(self.enter())

    def input_gradient_pass(self, found: tuple[Tensors, WeightGradStore]) -> WeightGradStore:
        """Run the backward of a split forward without the weight gradients, and return the store of these gradients.

        ``found``: what :meth:`split` returned.
        """
        self.backward(found[0])
        return found[1]

    def weight_gradient_pass(self, store: WeightGradStore) -> None:
        store.finish()


def optimizer_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds of an optimizer step per byte of parameters.

    The step clears gradients, computes their norm, clips them, and runs fused AdamW.
    """
    parameters = [
        nn.Parameter(torch.zeros(2**18, device=device, dtype=dtype)) for _ in range(_OPTIMIZED)
    ]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    one = torch.ones((), device=device, dtype=dtype)
    clock, seconds = Clock(device), []
    for _ in range(1 + _STEPS):
        start = clock.now()
        optimizer.zero_grad(set_to_none=False)
        torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in parameters if parameter.grad is not None]
        )
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, one)
        optimizer.step()
        seconds.append(clock.now() - start)
    return min(seconds[1:]) / sum(parameter.nbytes for parameter in parameters)
