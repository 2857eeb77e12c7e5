"""The flat list of actions that every rank of a pipeline rank executes.

A schedule only decides the order of forwards and backwards; sends, receives and fetches are put around them
here, the same way for every schedule. The simulator runs the list on predicted costs, the executor on tensors.
"""

from __future__ import annotations

from parallax.plan.schedule.action import Action, Kind
from parallax.plan.schedule.schedule import Schedule


def actions(
    schedule: Schedule,
    pipeline_ranks: int,
    pipeline_rank: int,
    micro_batches: int,
    *,
    interleave: int = 1,
    offload: bool = False,
) -> list[Action]:
    """The whole list of one training step for the ranks of ``pipeline_rank``; its reduce and update are those of all
    its stages.

    With ``offload`` each backward is preceded by a FETCH that stands right after the compute action before it, so that
    reading overlaps with sending and with the wait for the gradient::

        1f1b, last but one of several stages, offloading
        F0 S0 | R1 F1 S1 L0 | R B0 S | F2 S2 L1 | R B1 S | ...
    """
    listed = schedule.compute_order(
        pipeline_ranks, pipeline_rank, micro_batches, interleave=interleave
    )
    following: list[Action | None] = [*listed[1:], None]
    cuts = _Cuts(schedule, pipeline_ranks, interleave)
    result: list[Action] = []
    for action, after in zip(listed, following):
        result += cuts.around(action)
        if offload and after is not None and after.kind is Kind.BACKWARD:
            result.append(Action(Kind.FETCH, after.stage, after.micro))
    return [*result, Action(Kind.REDUCE, pipeline_rank), Action(Kind.UPDATE, pipeline_rank)]


def evaluation_actions(
    schedule: Schedule,
    pipeline_ranks: int,
    pipeline_rank: int,
    micro_batches: int,
    *,
    interleave: int = 1,
) -> list[Action]:
    """The whole list of one forward pass, for evaluation and inference, for the ranks of ``pipeline_rank``: the
    schedule's forwards, in its order. Micro-batches stream through, nothing is saved.

    ::

        stage 0 | F0 F1 F2 ..
        stage 1 | .. F0 F1 F2
    """
    listed = schedule.compute_order(
        pipeline_ranks, pipeline_rank, micro_batches, interleave=interleave
    )
    cuts = _Cuts(schedule, pipeline_ranks, interleave)
    forwards = [action for action in listed if action.kind is Kind.FORWARD]
    return [step for action in forwards for step in cuts.around(action)]


class _Cuts:
    """The cuts between stages that messages cross: stages on one pipeline rank hand over what they have."""

    def __init__(self, schedule: Schedule, pipeline_ranks: int, interleave: int) -> None:
        last = pipeline_ranks * interleave - 1
        self._crossed = {cut for cut in range(last) if not schedule.hands_over(cut, pipeline_ranks)}

    def around(self, action: Action) -> list[Action]:
        """An action between what it receives and what it sends."""
        stage, micro = action.stage, action.micro
        from_below, from_above = stage - 1 in self._crossed, stage in self._crossed
        if action.kind is Kind.FORWARD:
            before = [Action(Kind.RECEIVE_ACTIVATION, stage, micro)] if from_below else []
            after = [Action(Kind.SEND_ACTIVATION, stage, micro)] if from_above else []
            return [*before, action, *after]
        if action.kind is Kind.BACKWARD_WEIGHT:
            return [action]
        before = [Action(Kind.RECEIVE_GRADIENT, stage, micro)] if from_above else []
        after = [Action(Kind.SEND_GRADIENT, stage, micro)] if from_below else []
        return [*before, action, *after]
