"""Actions: the entries of the list that a rank executes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kind of an action.

    ``fetch`` starts to prefetch the offloaded activations of a micro-batch. ``reduce`` completes the gradient
    synchronisation of the replicas. In a split backward, ``backward`` computes the gradient of the input (B) and
    ``backward_weight`` the gradients of the parameters (W). Otherwise ``backward`` computes both.
    """

    # StrEnum's own hash is written in Python, and actions are often looked up by kind.
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
    """One entry of a rank's list.

    ``micro`` is −1 for an action without a micro-batch. ``step`` is the training step of the action in a list of
    several steps; the first step is 0.
    """

    kind: Kind
    stage: int
    micro: int = -1
    step: int = 0

    def __str__(self) -> str:
        later = f" of step +{self.step}" if self.step else ""
        return f"{self.kind}({self.stage}{'' if self.micro < 0 else f', {self.micro}'}){later}"


def is_split(listed: Sequence[Action]) -> bool:
    """Return whether the list of actions ``listed`` has separate weight-gradient passes."""
    return any(action.kind is Kind.BACKWARD_WEIGHT for action in listed)
