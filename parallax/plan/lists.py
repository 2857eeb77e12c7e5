"""Build the action lists that the ranks of a pipeline execute."""

from __future__ import annotations

from dataclasses import replace

from parallax.plan.plan import Pipeline
from parallax.plan.schedule import Action, Kind


def actions(pipeline: Pipeline, pipeline_rank: int, micro_batches: int) -> list[Action]:
    """Return all actions of one training step for the ranks of ``pipeline_rank``.

    The list ends with one reduce and one update for all stages of the pipeline rank. If a stage offloads activations,
    each backward is prepared by a FETCH, which starts to read the offloaded activations. The FETCH comes right after
    the preceding forward or backward and its send. So the reading overlaps with the transfer and with the wait for the
    gradient.

    An example is the last stage but one under 1F1B, with offloading. The letters mean forward (F), backward (B), send
    (S), receive (R) and fetch (L), and the numbers are micro-batches::

        R0 F0 S0 | R1 F1 S1 L0 | R0 B0 S0 | R2 F2 S2 L1 | R1 B1 S1 | ...
    """
    offload = any(pipeline.stages[stage].offloads for stage in pipeline.stages_of(pipeline_rank))
    listed = _compute_order(pipeline, pipeline_rank, micro_batches)
    following: list[Action | None] = [*listed[1:], None]
    result: list[Action] = []
    for action, after in zip(listed, following):
        result += _with_messages(pipeline, action)
        if offload and after is not None and after.kind is Kind.BACKWARD:
            result.append(replace(after, kind=Kind.FETCH))
    return [*result, Action(Kind.REDUCE, pipeline_rank), Action(Kind.UPDATE, pipeline_rank)]


def evaluation_actions(pipeline: Pipeline, pipeline_rank: int, micro_batches: int) -> list[Action]:
    """Return all actions of one evaluation or inference pass for the ranks of ``pipeline_rank``.

    They are the forwards of the schedule, in its order; nothing is saved for a backward.

    ::

        stage 0 | F0 F1 F2 ..
        stage 1 | .. F0 F1 F2
    """
    listed = _compute_order(pipeline, pipeline_rank, micro_batches)
    forwards = [action for action in listed if action.kind is Kind.FORWARD]
    return [each for action in forwards for each in _with_messages(pipeline, action)]


def task_actions(pipeline: Pipeline, pipeline_rank: int, micro_batches: int) -> list[Action]:
    """Return all actions of one step of the pipeline's task, for the ranks of ``pipeline_rank``."""
    listed = actions if pipeline.task.trains else evaluation_actions
    return listed(pipeline, pipeline_rank, micro_batches)


def _compute_order(pipeline: Pipeline, pipeline_rank: int, micro_batches: int) -> list[Action]:
    return pipeline.schedule.compute_order(
        pipeline.pipeline_ranks, pipeline_rank, micro_batches, interleave=pipeline.interleave
    )


def _with_messages(pipeline: Pipeline, action: Action) -> list[Action]:
    """Return a compute action with its receive before it and its send after it.

    Nothing is sent or received between two stages of one pipeline rank.
    """
    entering, leaving = (
        edge is not None and not pipeline.is_local(edge)
        for edge in (pipeline.entering(action.stage), pipeline.leaving(action.stage))
    )
    if action.kind is Kind.FORWARD:
        before = [replace(action, kind=Kind.RECEIVE_ACTIVATION)] if entering else []
        after = [replace(action, kind=Kind.SEND_ACTIVATION)] if leaving else []
        return [*before, action, *after]
    if action.kind is Kind.BACKWARD_WEIGHT:
        return [action]
    before = [replace(action, kind=Kind.RECEIVE_GRADIENT)] if leaving else []
    after = [replace(action, kind=Kind.SEND_GRADIENT)] if entering else []
    return [*before, action, *after]
