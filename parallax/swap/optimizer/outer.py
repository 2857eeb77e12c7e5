"""Local steps: replicas step alone, and once in a round they all take the mean of their weights.

At the end of a round, the mean change of the weights over the replicas is the gradient of an outer optimizer, SGD with
Nesterov momentum, which steps the weights with which the round began::

    Δ = weights at the start of the round − mean over the replicas of the weights now
    m = momentum · m + Δ
    weights of all replicas = weights at the start of the round − lr · (Δ + momentum · m)

With a learning rate of 1 and without momentum, these are the mean weights themselves (local SGD, Stich 2019, "Local SGD
Converges Fast and Communicates Little", algorithm 1). Source: Douillard et al. 2023, "DiLoCo: Distributed
Low-Communication Training of Language Models", algorithm 1.

The weights at the start of the round and the momentum are two more optimizer states of each parameter. So they are
offloaded, saved and counted like all other states, in the precision of the master weights.

The parameters may be divided into fragments, whose rounds end at different steps (Douillard et al. 2025, "Streaming
DiLoCo with overlapping communication: Towards a Distributed Free Lunch"). And local steps may go on while a fragment is
exchanged. When the exchange ends, the replica keeps the progress that it has made since the start of the exchange::

    weights = weights that the rule gives + (weights now − weights at the start of the exchange)

For mean weights, this is the rule of Shen et al. 2019, "Faster Distributed Deep Net Training: Computation and
Communication Decoupled Stochastic Gradient Descent". Streaming DiLoCo interpolates between the two weights instead.

Averages of the weights (EMA, :mod:`parallax.swap.optimizer.averaging`) are those of the mean weights of the replicas
after each step, with the exchanges after it::

    average = average + share · (mean over the replicas of the weights − average)

This is linear, so each replica averages its own weights, and the mean of these averages is formed when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallax.swap.optimizer.averaging import AVERAGE

ROUND_START, OUTER_MOMENTUM = "outer_weights", "outer_momentum"  # keys of states
OUTER_STATES = ROUND_START, OUTER_MOMENTUM
EXCHANGED = "exchanged_fragments"
"""Key of a parameter group: None, or the :class:`FragmentExchanges` that the step makes instead of a local step."""
FRAGMENT = (
    "fragment"  # key of a parameter group: the index of its parameters' fragment, 0 if it has none
)
_UNDER_WAY = "exchanges_under_way"
"""Key in the state of an optimizer: the :class:`_Averaged` runs of each fragment whose exchange has begun."""
_RUN_BYTES = (
    4 * 2**20
)  # weights that are averaged at one time; the plan's reserve of a device is larger

Mean = Callable[[Tensor], Callable[[], None]]
"""A function that begins to replace a tensor of one dimension by its mean over the replicas, and returns a function
that waits for the mean. All replicas call both, in the same order."""


class FragmentExchanges(NamedTuple):
    """Fragments whose exchange between the replicas begins after a step, and fragments whose exchange ends after it. A
    fragment may be in both; then its whole exchange happens after that step.

    ``share`` is the share of the new weights in the averaged weights after the local step before. If ``averages`` is
    True, replicas take the mean of their averaged weights instead.
    """

    begun: Collection[int] = ()
    ended: Collection[int] = ()
    share: float = 0.0
    averages: bool = False


class _Averaged(NamedTuple):
    """Weights, or changes of weights, that are being averaged in ``flat``. ``wait()`` waits for the mean.

    ``weights``: a copy of the weights at the start of the exchange; None if the exchange ends after the same step.
    """

    flat: Tensor
    wait: Callable[[], None]
    weights: Tensor | None


class Means(NamedTuple):
    """The functions that average weights over the replicas.

    ``resident``  for weights on the device that every replica steps
    ``shards``    for weights on the device of which each replica steps a shard
    ``host``      for weights that a thread steps on the host
    """

    resident: Mean
    shards: Mean
    host: Mean


@dataclass(frozen=True, slots=True)
class OuterRule:
    """The settings of the outer optimizer, SGD with Nesterov momentum. ``compressed``: replicas exchange rounded
    changes of the weights, not the weights."""

    lr: float = 1.0
    momentum: float = 0.0
    compressed: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the states that this rule keeps for each parameter."""
        if self.momentum:
            return OUTER_STATES
        return (ROUND_START,) if self.lr != 1.0 or self.compressed else ()


def in_rounds(optimizer: Optimizer, rule: OuterRule, mean: Mean | None = None) -> Optimizer:
    """Turn the steps of ``optimizer``, and of its clones, into local steps, whose rounds end with a step of the outer
    optimizer ``rule``. Return ``optimizer``.

    The class of ``optimizer`` is replaced by a subclass. ``mean`` averages a tensor over the replicas in place; None if
    there is a single replica.
    """
    kind: Any = type(optimizer)
    optimizer.__class__ = _local(kind, rule, mean)
    set_exchanged(optimizer, None)
    return optimizer


def set_exchanged(optimizer: Optimizer, exchanges: FragmentExchanges | None) -> None:
    """Make the next calls of ``optimizer.step`` only make ``exchanges``. With None, they take local steps again."""
    for group in optimizer.param_groups:
        group[EXCHANGED] = exchanges


def _local(kind: Any, rule: OuterRule, mean: Mean | None) -> type[Optimizer]:
    step = kind.step

    class Local(kind):
        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            exchanges: FragmentExchanges | None = self.param_groups[0][EXCHANGED]
            if exchanges is not None:
                if exchanges.averages:
                    _average_averages(self, mean)
                for fragment in dict.fromkeys((*exchanges.ended, *exchanges.begun)):
                    _exchange(self, fragment, exchanges, rule, mean)
                return None
            parameters = [p for group in self.param_groups for p in group["params"]]
            # Removed from the state during the step: an optimizer creates its states only for a parameter without any.
            kept = [_taken(self.state.get(p, {}), p, rule) for p in parameters]
            loss: float | None = step(self) if closure is None else step(self, closure)
            for parameter, states in zip(parameters, kept):
                if states:
                    self.state[parameter].update(states)
            return loss

    Local.__name__, Local.__qualname__ = kind.__name__, kind.__qualname__
    return Local


def _taken(state: dict[str, Any], parameter: Tensor, rule: OuterRule) -> dict[str, Tensor]:
    """Remove the states of ``rule`` from ``state``, the optimizer state of ``parameter``, and return them. Before the
    first step, return their initial values."""
    found = {key: state.pop(key, None) for key in rule.states}
    if found and found[ROUND_START] is None:
        found[ROUND_START] = parameter.detach().clone()
    if OUTER_MOMENTUM in found and found[OUTER_MOMENTUM] is None:
        found[OUTER_MOMENTUM] = torch.zeros_like(parameter)
    return found


def _exchange(
    optimizer: Optimizer,
    fragment: int,
    exchanges: FragmentExchanges,
    rule: OuterRule,
    mean: Mean | None,
) -> None:
    """Begin the exchange of the parameters of ``optimizer`` in ``fragment``, or end it, or both."""
    groups = [group for group in optimizer.param_groups if group.get(FRAGMENT, 0) == fragment]
    parameters = [parameter for group in groups for parameter in group["params"]]
    known = [optimizer.state.get(parameter, {}) for parameter in parameters]
    if any(key not in state for state in known for key in rule.states):
        return  # every step since the start of the run was skipped, so all weights are equal
    averaged = all(AVERAGE in state for state in known)
    keys = (*rule.states, *([AVERAGE] if averaged else []))
    columns = [[p.detach() for p in parameters], *([s[key] for s in known] for key in keys)]
    stepped = 1 + len(rule.states)
    state: dict[Any, Any] = optimizer.state
    begins, ends = fragment in exchanges.begun, fragment in exchanges.ended
    begun: Iterable[_Averaged] = (
        _begun(run[:stepped], mean, keeps=not ends) for run in _runs(columns)
    )
    if not ends:
        state.setdefault(_UNDER_WAY, {})[fragment] = [*begun]
        return
    if not begins:
        begun = state.get(_UNDER_WAY, {}).pop(fragment, ())
    for each, run in zip(begun, _runs(columns)):
        before = [values.clone() for values in run[0]] if averaged and exchanges.share else []
        _end(each, run[:stepped], rule)
        for average, old, new in zip(*run[stepped:], before, run[0]):
            average.add_(new - old, alpha=exchanges.share)


def _begun(run: Sequence[Sequence[Tensor]], mean: Mean | None, *, keeps: bool) -> _Averaged:
    """Begin to average the weights of ``run`` or, if the rule keeps states, the changes of the weights in the round.
    ``keeps``: also copy the weights."""
    weights, *outer = run
    flat = _joined(weights if not outer else [a - w for a, w in zip(outer[0], weights)])
    copies = _joined(weights) if keeps else None
    return _Averaged(flat, _no_wait if mean is None else mean(flat), copies)


def _average_averages(optimizer: Optimizer, mean: Mean | None) -> None:
    """Replace the averaged weights by their mean over the replicas, which have equal weights. Replicas exchange the
    differences from the weights, because rounding in the exchange then costs less."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    averages = [optimizer.state.get(parameter, {}).get(AVERAGE) for parameter in parameters]
    known = [average for average in averages if average is not None]
    if mean is None or len(known) < len(parameters):
        return  # a single replica, or every step since the start of the run was skipped
    for run in _runs([known, [parameter.detach() for parameter in parameters]]):
        flat = _joined([average - weights for average, weights in zip(*run)])
        mean(flat)()
        pieces = flat.split([average.numel() for average in run[0]])
        for average, weights, piece in zip(*run, pieces):
            average.copy_(weights).add_(piece.view(average.shape))


def _no_wait() -> None:
    """No-op: there is a single replica."""


def _end(averaged: _Averaged, run: Sequence[Sequence[Tensor]], rule: OuterRule) -> None:
    averaged.wait()
    weights, *outer = run
    sizes = [each.numel() for each in weights]
    kept = None if averaged.weights is None else averaged.weights.split(sizes)
    for n, (piece, values, *states) in enumerate(zip(averaged.flat.split(sizes), weights, *outer)):
        found = _stepped(piece.view(values.shape), states, rule)
        if kept is None:
            values.copy_(found)
        else:
            values.sub_(kept[n].view(values.shape)).add_(found)


def _stepped(found: Tensor, states: Sequence[Tensor], rule: OuterRule) -> Tensor:
    """Return the weights with which the next round begins.

    ``found``: the mean weights if the rule keeps no ``states``; otherwise the mean change of the weights. ``states``
    are the weights at the start of the round and, if there is one, the momentum. Both are updated in place.
    """
    if not states:
        return found
    start, change = states[0], found
    if len(states) > 1:
        momentum = states[1]
        momentum.mul_(rule.momentum).add_(change)
        change = change.add(momentum, alpha=rule.momentum)
    return start.add_(change, alpha=-rule.lr)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _runs(columns: Sequence[Sequence[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Yield runs of pieces of tensors, for all ``columns`` in parallel.

    ``columns`` are lists of equal length, whose tensors with the same index have equal shapes. A run has, for each
    column, a list of pieces (:func:`_pieces`). The pieces of the first column have one dtype and about ``_RUN_BYTES``
    or less.
    """
    run: list[tuple[Tensor, ...]] = []
    size = 0
    for pieces in (piece for row in zip(*columns) for piece in _pieces(row)):
        first = pieces[0]
        if run and (size + first.nbytes > _RUN_BYTES or first.dtype is not run[0][0].dtype):
            yield [list(column) for column in zip(*run)]
            run, size = [], 0
        run.append(pieces)
        size += first.nbytes
    if run:
        yield [list(column) for column in zip(*run)]


def _pieces(row: Iterable[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in ``row``, which have equal shapes, in pieces of at most ``_RUN_BYTES``, as views. Tensors
    that are not contiguous stay undivided."""
    real = tuple(torch.view_as_real(each) if each.is_complex() else each for each in row)
    if not all(each.is_contiguous() for each in real):
        return iter([real])
    number = max(1, _RUN_BYTES // real[0].element_size())
    return zip(*(each.view(-1).split(number) for each in real))
