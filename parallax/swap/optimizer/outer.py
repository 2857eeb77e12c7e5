"""Local steps: replicas step alone, and once in a round they all take the mean of their weights.

At the end of a round, the mean change of the weights over the replicas is the gradient of an outer optimizer, SGD with
Nesterov momentum, which steps the weights with which the round began::

    Δ = weights at the begin of the round − mean over the replicas of the weights now
    m = momentum · m + Δ
    weights of all replicas = weights at the begin of the round − lr · (Δ + momentum · m)

With a learning rate of 1 and without momentum, these are the mean weights themselves (local SGD, Stich 2019, "Local SGD
Converges Fast and Communicates Little", algorithm 1). Source: Douillard et al. 2023, "DiLoCo: Distributed
Low-Communication Training of Language Models", algorithm 1.

The weights at the begin of the round and the momentum are two more optimizer states of each parameter. So they are
offloaded, saved and counted like all other states, in the precision of the master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

ROUND_START, OUTER_MOMENTUM = "outer_weights", "outer_momentum"  # keys of states
OUTER_STATES = ROUND_START, OUTER_MOMENTUM
ENDS_ROUND = "ends_round"
"""Key of a parameter group: whether the step only ends a round."""
_RUN_BYTES = (
    4 * 2**20
)  # weights that are averaged at one time; the plan's reserve of a device is larger

Mean = Callable[[Tensor], None]
"""A function that replaces a tensor of one dimension by its mean over the replicas. All replicas call it, in the same
order."""


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
    set_ends_round(optimizer, False)
    return optimizer


def set_ends_round(optimizer: Optimizer, ends: bool) -> None:
    """Set what the next steps of ``optimizer`` do. If ``ends`` is True, a step only ends the round, by a step of the
    outer optimizer. If it is False, a step is an ordinary local step."""
    for group in optimizer.param_groups:
        group[ENDS_ROUND] = ends


def _local(kind: Any, rule: OuterRule, mean: Mean | None) -> type[Optimizer]:
    step = kind.step

    class Local(kind):
        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            if any(group[ENDS_ROUND] for group in self.param_groups):
                _end_round(self, parameters, rule, mean)
                return None
            # Not in the state during the step: optimizers take a parameter without states for one that is new.
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


def _end_round(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], rule: OuterRule, mean: Mean | None
) -> None:
    known = [optimizer.state.get(parameter, {}) for parameter in parameters]
    if any(key not in state for state in known for key in rule.states):
        return  # every step since the start of the run was skipped, so all weights are equal
    columns = [[p.detach() for p in parameters]]
    columns += [[state[key] for state in known] for key in rule.states]
    for run in _runs(columns):
        weights, *outer = run
        flat = _joined(weights if not outer else [a - w for a, w in zip(outer[0], weights)])
        if mean is not None:
            mean(flat)
        for piece, values, *states in zip(
            flat.split([w.numel() for w in weights]), weights, *outer
        ):
            values.copy_(_stepped(piece.view(values.shape), states, rule))


def _stepped(found: Tensor, states: Sequence[Tensor], rule: OuterRule) -> Tensor:
    """Return the weights with which the next round begins.

    ``found``: the mean weights if the rule keeps no ``states``; otherwise the mean change of the weights. ``states``
    are the weights at the begin of the round and, if there is one, the momentum. Both are updated in place.
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
