"""What ranks do: the entries of their lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What an action does; ``fetch`` begins to bring back offloaded activations of a micro-batch, ``reduce`` ends the
    replicas' gradient synchronisation. Where a schedule has ``backward_weight``, that half computes the gradients of
    the parameters and ``backward`` only that of the input; elsewhere ``backward`` is all of it."""

    # An enumeration's own is written in Python, and actions are looked up by kind all the time.
    __hash__ = str.__hash__

    RECEIVE_ACTIVATION = "receive_activation"
    RECEIVE_GRADIENT = "receive_gradient"
    SEND_ACTIVATION = "send_activation"
    SEND_GRADIENT = "send_gradient"
    FETCH = "fetch"
    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_WEIGHT = "backward_weight"
    REDUCE = "reduce"
    UPDATE = "update"


# In an order, a kind is its index here.
COMPUTE = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT
FORWARD, BACKWARD, BACKWARD_WEIGHT = range(3)


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list; ``micro`` is −1 where no micro-batch is meant. ``step`` counts the steps that a list
    holds, from its first."""

    kind: Kind
    stage: int
    micro: int = -1
    step: int = 0

    def __str__(self) -> str:
        later = f" of step +{self.step}" if self.step else ""
        return f"{self.kind}({self.stage}{'' if self.micro < 0 else f', {self.micro}'}){later}"


def is_split(listed: Sequence[Action]) -> bool:
    """Whether weight halves run apart."""
    return any(action.kind is Kind.BACKWARD_WEIGHT for action in listed)
