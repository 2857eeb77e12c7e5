"""Build the action lists that the ranks of a pipeline execute."""

from __future__ import annotations

from dataclasses import replace

from parallax.plan.plan import Pipeline
from parallax.plan.schedule import Action, Kind


def actions(
    pipeline: Pipeline,
    pipeline_rank: int,
    micro_batches: int,
    *,
    begun: bool = False,
    continues: bool = False,
) -> list[Action]:
    """Return all actions of one training step for the ranks of ``pipeline_rank``.

    If ``continues`` is True, the list also has the first actions of the next step, with ``step`` 1. If ``begun`` is
    True, the first actions of this step are left out, because they are in the list of the previous step. Both need a
    schedule that continues over steps.

    One reduce follows the last backward of the step, and one update for all stages of the pipeline rank ends the list.
    If a stage offloads activations, each backward is prepared by a FETCH, which starts to read the offloaded
    activations. The FETCH comes right after the preceding forward or backward and its send. So the read overlaps with
    the send and with the wait for the gradient.

    An example is the last stage but one under 1F1B, with offloading. The letters mean forward (F), backward (B), send
    (S), receive (R) and fetch (L), and the numbers are micro-batches::

        R0 F0 S0 | R1 F1 S1 L0 | R0 B0 S0 | R2 F2 S2 L1 | R1 B1 S1 | ...
    """
    if begun or continues:
        return _overlapping(pipeline, pipeline_rank, micro_batches, begun, continues)
    offload = any(pipeline.stages[stage].offloads for stage in pipeline.stages_of(pipeline_rank))
    listed = _compute_order(pipeline, pipeline_rank, micro_batches)
    following: list[Action | None] = [*listed[1:], None]
    result: list[Action] = []
    for action, after in zip(listed, following):
        result += _with_messages(pipeline, action)
        if offload and after is not None and after.kind is Kind.BACKWARD:
            result.append(replace(after, kind=Kind.FETCH))
    return [*result, Action(Kind.REDUCE, pipeline_rank), Action(Kind.UPDATE, pipeline_rank)]


def _overlapping(
    pipeline: Pipeline, pipeline_rank: int, micro_batches: int, begun: bool, continues: bool
) -> list[Action]:
    """Return the actions of a step that overlaps with the step before it or after it.

    The forwards and backwards of consecutive steps are one sequence, and the list of a step is a part of it. Pipeline
    rank ``i`` updates after ``i`` backwards of the next step. Pipeline rank 0 is the last one to complete the backwards
    of this step. It has completed them by that time, because each rank sends a gradient on before it computes its next
    forward and backward.
    """
    order = _compute_order(pipeline, pipeline_rank, 2 * micro_batches)
    # actions of a step that are in the list of the previous step
    first = pipeline.pipeline_ranks - 1 + pipeline_rank
    result: list[Action] = []
    for each in order[first if begun else 0 : first + 2 * micro_batches]:
        later, micro = divmod(each.micro, micro_batches)
        if later and not continues:
            continue
        result += _with_messages(pipeline, replace(each, micro=micro, step=later))
        if each.kind is Kind.BACKWARD and each.micro == micro_batches - 1:
            result.append(Action(Kind.REDUCE, pipeline_rank))
    return [*result, Action(Kind.UPDATE, pipeline_rank)]


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


def task_actions(
    pipeline: Pipeline, pipeline_rank: int, micro_batches: int, steps: int = 1
) -> list[Action]:
    """Return all actions of ``steps`` steps of the pipeline's task, for the ranks of ``pipeline_rank``. If the schedule
    continues over steps, the list also begins one more step."""
    if not pipeline.task.trains:
        return evaluation_actions(pipeline, pipeline_rank, micro_batches)
    continues = pipeline.overlaps(micro_batches)
    return [
        replace(each, step=step + each.step)
        for step in range(steps)
        for each in actions(
            pipeline,
            pipeline_rank,
            micro_batches,
            begun=continues and step > 0,
            continues=continues,
        )
    ]


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
