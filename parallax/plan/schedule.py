"""Schedules: for each stage, the flat list of actions that every one of its ranks executes.

A schedule only decides the order of forwards and backwards (``ORDERS``); :func:`actions` puts the sends,
receives, offloads and fetches around them, the same way for every schedule. The simulator runs the list on
predicted costs, the executor on tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from parallax.errors import PlanError, check_choice


class Kind(StrEnum):
    """What an action does; ``offload`` opens a micro-batch whose saved activations may leave the device,
    ``fetch`` begins to bring them back, ``reduce`` ends the replicas' gradient synchronisation."""

    RECEIVE_ACTIVATION = "receive_activation"
    RECEIVE_GRADIENT = "receive_gradient"
    SEND_ACTIVATION = "send_activation"
    SEND_GRADIENT = "send_gradient"
    OFFLOAD = "offload"
    FETCH = "fetch"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list; ``micro`` is −1 where no micro-batch is meant."""

    kind: Kind
    stage: int
    micro: int = -1

    def __str__(self) -> str:
        return f"{self.kind}({self.stage}{'' if self.micro < 0 else f', {self.micro}'})"


def gpipe(stages: int, stage: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards in reverse (GPipe, Huang et al. 2019, section 2.3).

    ::

        stage 0 | F0 F1 F2 F3 .. .. B3 B2 B1 B0
        stage 1 | .. F0 F1 F2 F3 B3 B2 B1 B0 ..
    """
    del stages
    forward = [Action(Kind.FORWARD, stage, m) for m in range(micro_batches)]
    return forward + [Action(Kind.BACKWARD, stage, m) for m in reversed(range(micro_batches))]


def one_forward_one_backward(stages: int, stage: int, micro_batches: int) -> list[Action]:
    """1F1B: warm up with one forward per later stage, then alternate.

    Source: PipeDream-Flush, Narayanan et al. 2021, section 2.2.

    At most ``stages − stage`` micro-batches are in flight, whatever their number.

    ::

        stage 0 | F0 F1 .. B0 F2 B1 F3 B2 .. B3
        stage 1 | .. F0 B0 F1 B1 F2 B2 F3 B3 ..
    """
    warm_up = min(micro_batches, stages - stage - 1)
    order = [Action(Kind.FORWARD, stage, m) for m in range(warm_up)]
    for m in range(warm_up, micro_batches):
        order += [Action(Kind.FORWARD, stage, m), Action(Kind.BACKWARD, stage, m - warm_up)]
    return order + [Action(Kind.BACKWARD, stage, m) for m in range(micro_batches - warm_up, micro_batches)]


def forward_only(stages: int, stage: int, micro_batches: int) -> list[Action]:
    """Evaluation: micro-batches stream through, nothing is saved.

    ::

        stage 0 | F0 F1 F2 ..
        stage 1 | .. F0 F1 F2
    """
    del stages
    return [Action(Kind.FORWARD, stage, m) for m in range(micro_batches)]


Order = Callable[[int, int, int], list[Action]]
ORDERS: dict[str, Order] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def in_flight(schedule: str, stages: int, stage: int, micro_batches: int) -> int:
    """The most micro-batches that have gone forward but not backward at one time."""
    most = now = 0
    for action in compute_order(schedule, stages, stage, micro_batches):
        now += 1 if action.kind is Kind.FORWARD else -1
        most = max(most, now)
    return most


def compute_order(schedule: str, stages: int, stage: int, micro_batches: int) -> list[Action]:
    """The forwards and backwards of one stage."""
    check_choice("plan.schedule", schedule, ORDERS)
    if not 0 <= stage < stages or micro_batches < 1:
        raise PlanError(f"stage {stage} of {stages} with {micro_batches} micro-batches: nothing to schedule")
    return ORDERS[schedule](stages, stage, micro_batches)


def actions(schedule: str, stages: int, stage: int, micro_batches: int, *, offload: bool = False) -> list[Action]:
    """The whole list of one training step for the ranks of ``stage``.

    With ``offload`` each forward is preceded by OFFLOAD, and each backward by a FETCH that stands right after the
    compute action before it, so that reading overlaps with sending and with the wait for the gradient::

        1f1b, last but one of several stages, offloading
        O0 F0 S0 | R1 O1 F1 S1 L0 | R B0 S | O2 F2 S2 L1 | R B1 S | ...
    """
    order = compute_order(schedule, stages, stage, micro_batches)
    result: list[Action] = []
    for position, action in enumerate(order):
        result += _around(action, stages, offload)
        following = order[position + 1] if position + 1 < len(order) else None
        if offload and following is not None and following.kind is Kind.BACKWARD:
            result.append(Action(Kind.FETCH, stage, following.micro))
    return [*result, Action(Kind.REDUCE, stage), Action(Kind.UPDATE, stage)]


def evaluation_actions(stages: int, stage: int, micro_batches: int) -> list[Action]:
    """The whole list of one evaluation pass for the ranks of ``stage``."""
    order = forward_only(stages, stage, micro_batches)
    return [step for action in order for step in _around(action, stages, offload=False)]


def _around(action: Action, stages: int, offload: bool) -> list[Action]:
    stage, micro = action.stage, action.micro
    if action.kind is Kind.FORWARD:
        before = [Action(Kind.RECEIVE_ACTIVATION, stage, micro)] if stage > 0 else []
        opened = [Action(Kind.OFFLOAD, stage, micro)] if offload else []
        after = [Action(Kind.SEND_ACTIVATION, stage, micro)] if stage < stages - 1 else []
        return [*before, *opened, action, *after]
    before = [Action(Kind.RECEIVE_GRADIENT, stage, micro)] if stage < stages - 1 else []
    after = [Action(Kind.SEND_GRADIENT, stage, micro)] if stage > 0 else []
    return [*before, action, *after]
