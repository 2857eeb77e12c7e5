"""The 1F1B schedules, with one or several stages per pipeline rank."""

from __future__ import annotations

import numpy as np

from parallax.plan.schedule.order import Numbers, Order, weave
from parallax.plan.schedule.schedule import Schedule


def one_forward_one_backward(
    pipeline_ranks: int, pipeline_rank: int, micro_batches: int, interleave: int
) -> Order:
    """Return the 1F1B order of one pipeline rank: one forward per later stage, then one forward and one backward in
    turn.

    Source: PipeDream-Flush, Narayanan et al. 2021, section 2.2.

    At most ``pipeline_ranks − pipeline_rank`` micro-batches are in flight, whatever the number of micro-batches.
    ``interleave`` is ignored: a pipeline rank has one stage.

    ::

        stage 0 | F0 F1 .. B0 F2 B1 F3 B2 .. B3
        stage 1 | .. F0 B0 F1 B1 F2 B2 F3 B3 ..
    """
    del interleave
    stages, micros = np.full(micro_batches, pipeline_rank), np.arange(micro_batches)
    return weave(pipeline_ranks - pipeline_rank - 1, (stages, micros), (stages, micros))


def interleaved(
    pipeline_ranks: int, pipeline_rank: int, micro_batches: int, interleave: int
) -> Order:
    """Return the interleaved 1F1B order of one pipeline rank.

    Compared with 1F1B, ``interleave`` virtual stages per pipeline rank divide the bubble by ``interleave`` and multiply
    the number of messages by it. With one stage per pipeline rank the order is plain 1F1B.

    A pipeline rank computes groups of micro-batches stage by stage: all of a group in its first stage, then all in its
    second. A group has as many micro-batches as there are pipeline ranks. Then the first micro-batch of a group returns
    to the first pipeline rank just when the last one has been sent. If the number of pipeline ranks does not divide the
    number of micro-batches, groups are a little larger (a smaller group would stall the pipeline, and can deadlock).

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    section 2.2, and the order of Megatron-LM's ``forward_backward_pipelining_with_interleaving``.

    An example has two pipeline ranks with two virtual stages each. A line is a pipeline rank, named after its first
    stage. F and B are passes of this stage, f and b those of the pipeline rank's second stage::

        stage 0 | F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .. b2 .. b3 B2 B3
        stage 1 | .. F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 ..
    """
    if interleave == 1:
        return one_forward_one_backward(pipeline_ranks, pipeline_rank, micro_batches, interleave)
    groups = np.array_split(np.arange(micro_batches), max(1, micro_batches // pipeline_ranks))
    micros = np.concatenate([np.tile(group, interleave) for group in groups])
    chunks = np.concatenate([np.repeat(np.arange(interleave), len(group)) for group in groups])
    # The first group is never smaller.
    warm_up = 2 * (pipeline_ranks - pipeline_rank - 1) + (interleave - 1) * len(groups[0])
    last = interleave - 1
    return weave(
        warm_up,
        (pipeline_rank + pipeline_ranks * chunks, micros),
        (pipeline_rank + pipeline_ranks * (last - chunks), micros),
    )


def _in_flight(pipeline_ranks: int, pipeline_rank: Numbers) -> Numbers:
    return pipeline_ranks - pipeline_rank


ONE_FORWARD_ONE_BACKWARD = Schedule(
    name="1f1b",
    ordering=one_forward_one_backward,
    in_flight_count=_in_flight,
    steady=True,
    searched=True,
)
INTERLEAVED = Schedule(
    name="interleaved",
    ordering=interleaved,
    interleaves=(2, 4),
    interleaves_freely=True,
    grouped=True,
    in_flight_count=_in_flight,
    steady=True,
    searched=True,
)
