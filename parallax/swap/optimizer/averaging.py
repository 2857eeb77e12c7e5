"""Averaged weights (EMA), kept as one more optimizer state of each parameter.

So averages are offloaded, sharded, saved and counted like all other states, in the precision of the master weights. An
average starts as the weights before the first step. The share is the fraction of the new weights in an
updated average. It is a setting of the parameter groups, like the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallax.model.private import lerp_each_in_place

AVERAGE = "weight_average"  # key of a state
SHARE = "average_share"
"""Key of a parameter group: the share of the new weights in the average after a step. 0 leaves the average unchanged.
With None, the step only exchanges weights and averages."""
_TRIED = 0.25  # share in trials of an optimizer; a run sets a share for each step
_EXCHANGED_ELEMENTS = 2**20  # elements that are copied at one time


def averaging(optimizer: Optimizer) -> Optimizer:
    """Make each step of ``optimizer``, and of its clones, also update averaged weights. Return ``optimizer``.

    The class of ``optimizer`` is replaced by a subclass.
    """
    kind: Any = type(optimizer)
    optimizer.__class__ = _averaging(kind)
    set_share(optimizer, _TRIED)
    return optimizer


def set_share(optimizer: Optimizer, share: float | None) -> None:
    """Set the fraction ``share`` that the new weights have in the averages that the next step computes.

    With None, the next step exchanges weights and averages and does nothing else.
    """
    for group in optimizer.param_groups:
        group[SHARE] = share


@cache
def _averaging(kind: Any) -> type[Optimizer]:
    step = kind.step

    class Averaging(kind):
        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            if any(group[SHARE] is None for group in self.param_groups):
                exchange(self, AVERAGE)
                return None
            parameters = [p for group in self.param_groups for p in group["params"]]
            # Not in the state during the step: optimizers take a parameter without states for one that is new.
            kept = [self.state.get(p, {}).pop(AVERAGE, None) for p in parameters]
            begun = [p.detach().clone() if a is None else a for p, a in zip(parameters, kept)]
            loss: float | None = step(self) if closure is None else step(self, closure)
            for parameter, average in zip(parameters, begun):
                self.state[parameter][AVERAGE] = average
            _update(self)
            return loss

    Averaging.__name__, Averaging.__qualname__ = kind.__name__, kind.__qualname__
    return Averaging


def _update(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if group["params"] and group[SHARE]:
            averages = [optimizer.state[p][AVERAGE] for p in group["params"]]
            lerp_each_in_place(averages, [p.detach() for p in group["params"]], group[SHARE])


def exchange(optimizer: Optimizer, key: str) -> None:
    """Exchange the values of each parameter with those of its state ``key``, if it has this state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = optimizer.state.get(parameter, {}).get(key)
            if held is not None:
                _exchange_values(parameter.detach(), held)


def _exchange_values(weights: Tensor, average: Tensor) -> None:
    pairs = [(weights, average)]
    if weights.is_contiguous() and average.is_contiguous():
        parts = (each.view(-1).split(_EXCHANGED_ELEMENTS) for each in (weights, average))
        pairs = list(zip(*parts))
    for one, other in pairs:
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
