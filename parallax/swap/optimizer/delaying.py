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

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallax.model.private import copy_to_each, lerp_each_in_place, same_versions
from parallax.swap.optimizer.averaging import SHARE, exchange

VERSION = "weight_version"
"""Key of a state: the newest weights. In a checkpoint, whose model weights are the newest ones, it is the version
before them."""
PREVIOUS = "previous_weights"  # key of a state, with the correction
NEXT = "next_weights"
"""Key of a state, with the correction: the weights of the next training step. If steps overlap (:func:`swap_buffers`),
this state replaces that of the previous weights."""
EXCHANGES = "exchanges_versions"
"""Key of a parameter group: whether ``step`` only exchanges the model's weights with the newest weights."""
SWAPS = "swaps_buffers"
"""Key of a parameter group: whether passes of the next training step may run before a step (:func:`swap_buffers`)."""


def delaying(optimizer: Optimizer, *, corrects: bool = False) -> Optimizer:
    """Delay each step of ``optimizer``, and of its clones, by one version of the weights. Return ``optimizer``.

    The class of ``optimizer`` is replaced by a subclass. Its steps take no closure. If ``corrects`` is True, the model
    computes with predicted weights.
    """
    kind: Any = type(optimizer)
    optimizer.__class__ = _delaying(kind, corrects)
    set_exchanges(optimizer, False)
    for group in optimizer.param_groups:
        group[SWAPS] = False
    return optimizer


def set_exchanges(optimizer: Optimizer, exchanges: bool) -> None:
    """Set whether the next calls of ``step`` exchange the model's weights with the newest weights, instead of updating
    them."""
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
            if any(group[SWAPS] for group in self.param_groups):
                _step_between_passes(self, step, corrects)
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
            # Added after the step: an optimizer creates its states only for a parameter without any.
            for parameter, states in versions.items():
                self.state[parameter].update(states)

    Delaying.__name__, Delaying.__qualname__ = kind.__name__, kind.__qualname__
    return Delaying


def swap_buffers(optimizer: Optimizer) -> None:
    """Let ``optimizer``, which delays its steps, support passes of the next training step before each of its steps.

    These passes run between two calls of :func:`exchange_buffers`, with the weights of the next training step. The
    optimizer step then does not write to the memory of these weights. Instead, this memory becomes that of the model's
    parameters, and the memory that they had is overwritten (the two buffers of PipeDream-2BW).

    Without the correction (``corrects`` of :func:`delaying`), the weights of the next training step are the newest
    weights. With the correction, they are a prediction, which is one more optimizer state.
    """
    for group in optimizer.param_groups:
        group[SWAPS] = True


def exchange_buffers(optimizer: Optimizer) -> None:
    """Exchange the model's weights with the weights of the next training step, without a copy. A second call undoes
    the exchange."""
    for parameter, states in optimizer.state.items():
        key = NEXT if NEXT in states else VERSION
        if key in states:
            parameter.data, states[key] = states[key], parameter.data


def mirrored(parameter: Tensor, states: dict[str, Any], *, overlaps: bool) -> dict[str, Any]:
    """Return the optimizer ``states`` of ``parameter`` in the form that its next steps need. ``overlaps``: whether
    training steps overlap.

    If they overlap, the states include the weights of the next training step, otherwise the previous weights. The
    newest weights, which ``parameter`` holds, are the mean of the two, so each can be computed from the other. States
    that already have the form are returned unchanged.
    """
    old, new = (PREVIOUS, NEXT) if overlaps else (NEXT, PREVIOUS)
    if old not in states:
        return states
    rest = {key: value for key, value in states.items() if key != old}
    return {**rest, new: torch.lerp(states[old], parameter.detach().to(states[old]), 2.0)}


def weights_after(states: Mapping[str, Tensor]) -> Tensor | None:
    """Return the weights with which the next step computes, in full precision; None if they are those of this step, as
    before a parameter's first step."""
    newest = states.get(VERSION)
    if newest is None or PREVIOUS not in states:
        return newest
    return torch.lerp(newest, states[PREVIOUS], -1.0)


def _step_between_passes(optimizer: Any, step: Callable[[Any], None], corrects: bool) -> None:
    """Update the newest weights by ``step``, without a write to the memory of the weights of the next training step.

    These weights then become the model's. If ``corrects``, the model computes with predicted weights.
    """
    buffers, following = dict[Tensor, Tensor](), dict[Tensor, Tensor]()
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        states = optimizer.state.get(parameter, {})
        if VERSION in states:
            newest, oldest = states.pop(VERSION), parameter.data
            following[parameter] = states.pop(NEXT, newest)
            oldest.copy_(newest)
        elif parameter.grad is not None:  # the first step: all versions are the model's weights
            following[parameter], oldest = parameter.data, parameter.detach().clone()
            newest = oldest.clone() if corrects else oldest
        else:
            continue
        # Without the correction, the new weights are written into the memory of the oldest.
        buffers[parameter], parameter.data = oldest, newest if corrects else oldest
    try:
        with same_versions(following):
            step(optimizer)
        if corrects:
            lerp_each_in_place([*buffers.values()], [p.detach() for p in buffers], 2.0)
    finally:
        for parameter, weights in following.items():
            states = {VERSION: parameter.data, **({NEXT: buffers[parameter]} if corrects else {})}
            optimizer.state[parameter].update(states)
            parameter.data = weights


def _take_versions(optimizer: Optimizer, corrects: bool) -> dict[Tensor, dict[str, Tensor]]:
    """Remove the saved versions of the weights from the optimizer states, and return them by parameter: the newest
    version and, if ``corrects`` (the model computes with predicted weights), the previous one.

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
    """Set ``weights`` to the newest version. If ``versions`` include previous weights, ``weights`` are set instead to
    the prediction of the version after the newest one. The previous weights are then replaced by the newest."""
    if not weights:
        return
    newest = [states[VERSION] for states in versions]
    previous = [states[PREVIOUS] for states in versions if PREVIOUS in states]
    copy_to_each(weights, newest)
    if previous:
        lerp_each_in_place(weights, previous, -1.0)
        copy_to_each(previous, newest)
