"""Delayed updates: gradients of weights that are one version old, as in PipeDream-2BW.

An optimizer step is ``w(t+1) = w(t) − lr · u(g(w(t−1)))`` (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel
DNN Training", section 3.1): the model computes with ``w(t−1)`` while ``w(t)`` is already known. Before the first step,
both versions are the initial weights. The newest version is one more optimizer state of each parameter. So it is
offloaded, sharded, saved and counted like all other states, in the precision of the master weights::

    step t       model: w(t−1) ──▶ gradient ──┐         model := w(t) ──▶ gradient of step t+1
                 state: w(t) ─────────────────┴─ step ──▶ state: w(t+1)

With the correction, the model computes with a prediction of the weights that its gradient will update: the last change
is added once more, ``w(t) + (w(t) − w(t−1))``, in place of ``w(t)``. The prediction of weights is that of SpecTrain
(Chen et al. 2018) and XPipe (Guan et al. 2019), which predict from momentum; the last change exists for every
optimizer. It needs ``w(t−1)`` as one more state.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallax.model.private import copy_to_each, lerp_each_in_place
from parallax.swap.optimizer.averaging import SHARE, exchange

VERSION = "weight_version"
"""Key of a state. It is the newest weights during training. In a checkpoint, which has the newest weights as the
model's, it is the version before them."""
PREVIOUS = "previous_weights"  # key of a state, with the correction
EXCHANGES = "exchanges_versions"
"""Key of a parameter group: whether the step only exchanges the two versions."""


def delaying(optimizer: Optimizer, *, corrects: bool = False) -> Optimizer:
    """Delay each step of ``optimizer``, and of its clones, by one version of the weights. Return ``optimizer``.

    The class of ``optimizer`` is replaced by a subclass. Its steps take no closure. If ``corrects`` is True, the model
    computes with predicted weights.
    """
    kind: Any = type(optimizer)
    optimizer.__class__ = _delaying(kind, corrects)
    set_exchanges(optimizer, False)
    return optimizer


def set_exchanges(optimizer: Optimizer, exchanges: bool) -> None:
    """Set whether the next steps only exchange the model's weights and the newest weights."""
    for group in optimizer.param_groups:
        group[EXCHANGES] = exchanges


@cache
def _delaying(kind: Any, corrects: bool) -> type[Optimizer]:
    step = kind.step

    class Delaying(kind):
        @torch.no_grad()
        def step(self) -> None:
            if any(group[EXCHANGES] for group in self.param_groups):
                exchange(self, VERSION)
                return
            if any(group.get(SHARE, 0.0) is None for group in self.param_groups):
                step(self)  # exchanges weights and averages
                return
            versions = _take_versions(self, corrects)
            weights = {parameter: parameter.detach() for parameter in versions}
            _advance([*weights.values()], [*versions.values()])
            for parameter, states in versions.items():
                parameter.data = states[VERSION]
            try:
                step(self)
            finally:
                for parameter, current in weights.items():
                    parameter.data = current
            # After the step: optimizers take a parameter without states for one that is new.
            for parameter, states in versions.items():
                self.state[parameter].update(states)

    Delaying.__name__, Delaying.__qualname__ = kind.__name__, kind.__qualname__
    return Delaying


def _take_versions(optimizer: Optimizer, corrects: bool) -> dict[Tensor, dict[str, Tensor]]:
    """Remove the saved versions of the weights from the optimizer states, and return them by parameter: the newest one
    and, if ``corrects``, the previous one.

    Before a parameter's first step, all versions are copies of its weights. Parameters without a gradient or a saved
    version are left out.
    """
    found = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        states = optimizer.state.get(parameter, {})
        if VERSION in states or parameter.grad is not None:
            newest = states.pop(VERSION, None)
            newest = parameter.detach().clone() if newest is None else newest
            found[parameter] = {VERSION: newest}
            if corrects:
                previous = states.pop(PREVIOUS, None)
                found[parameter][PREVIOUS] = newest.clone() if previous is None else previous
    return found


def _advance(weights: list[Tensor], versions: list[dict[str, Tensor]]) -> None:
    """Set ``weights`` to the newest version, or to the prediction of the version after it."""
    if not weights:
        return
    newest = [states[VERSION] for states in versions]
    previous = [states[PREVIOUS] for states in versions if PREVIOUS in states]
    copy_to_each(weights, newest)
    if previous:
        lerp_each_in_place(weights, previous, -1.0)
        copy_to_each(previous, newest)
