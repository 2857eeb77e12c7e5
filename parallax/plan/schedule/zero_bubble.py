"""Zero-bubble schedules, in which weight-gradient passes (W) fill the bubble.

ZB-H1 and ZB-H2 have one stage per pipeline rank, ZB-V has two.
"""

from __future__ import annotations

import numpy as np

from parallax.plan.schedule.action import BACKWARD, BACKWARD_WEIGHT, FORWARD
from parallax.plan.schedule.order import Numbers, Order, by_rounds
from parallax.plan.schedule.placement import BACK_AND_FORTH
from parallax.plan.schedule.schedule import Ramp, Schedule

Slot = tuple[int, int, int]  # kind, index among the pipeline rank's stages, first micro-batch


def zero_bubble_h1(
    pipeline_ranks: int, pipeline_rank: int, micro_batches: int, interleave: int
) -> Order:
    """Return the ZB-H1 order of one pipeline rank: 1F1B with weight-gradient passes delayed to fill the bubble.

    A stage delays its weight-gradient passes by as many micro-batches as there are stages before it. So every stage has
    as many micro-batches in flight as the first stage of 1F1B. ``interleave`` is ignored: a pipeline rank has one
    stage.

    Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.1.

    ::

        stage 0 | F0 F1 F2 .. .. B0 W0 F3 B1 W1 F4 B2 W2 F5 B3 W3 B4 W4 B5 W5
        stage 1 | .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 F5 B4 W3 B5 W4 W5
        stage 2 | .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 F5 B5 W3 W4 W5
    """
    del interleave
    return zero_bubble(
        pipeline_rank,
        micro_batches,
        warm_up=pipeline_ranks - pipeline_rank - 1,
        delay=pipeline_rank,
    )


def zero_bubble_h2(
    pipeline_ranks: int, pipeline_rank: int, micro_batches: int, interleave: int
) -> Order:
    """Return the ZB-H2 order of one pipeline rank, in which no stage waits under ideal conditions.

    More forwards fill the warm-up, and weight-gradient passes fill the end. No stage waits if a forward and both passes
    of a backward take equally long. Every stage holds about twice the activations of 1F1B. ``interleave`` is ignored: a
    pipeline rank has one stage.

    Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.2.

    ::

        stage 0 | F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 .. ..
        stage 1 | .. F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5 ..
        stage 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5
    """
    del interleave
    return zero_bubble(
        pipeline_rank,
        micro_batches,
        warm_up=2 * (pipeline_ranks - pipeline_rank - 1),
        delay=2 * pipeline_rank,
    )


def zero_bubble(pipeline_rank: int, micro_batches: int, *, warm_up: int, delay: int) -> Order:
    """Return an order in which forward, input-gradient (B) and weight-gradient (W) passes take turns.

    In each turn, the forward is ``warm_up`` micro-batches ahead of the B, and the W is ``delay`` micro-batches behind
    the B. At most ``warm_up`` + ``delay`` + 1 micro-batches are in flight.
    """
    count = np.arange(micro_batches)
    column = np.full(micro_batches, pipeline_rank), count
    return by_rounds([count - warm_up, count, count + delay], [column] * 3)


def _in_flight_h1(pipeline_ranks: int, pipeline_rank: Numbers) -> Numbers:
    return np.full_like(pipeline_rank, pipeline_ranks)


def _in_flight_h2(pipeline_ranks: int, pipeline_rank: Numbers) -> Numbers:
    return np.full_like(pipeline_rank, 2 * pipeline_ranks - 1)


# Qi et al. 2024, table 2: the ramp is T_F + T_B − T_W, and T_F + T_B − 2·T_W, where 1F1B has T_F + T_B + T_W.
ZERO_BUBBLE_H1 = Schedule(
    name="zb-h1",
    ordering=zero_bubble_h1,
    splits=True,
    ramp=Ramp(weight_savings=2),
    in_flight_count=_in_flight_h1,
    steady=True,
    searched=True,
)
ZERO_BUBBLE_H2 = Schedule(
    name="zb-h2",
    ordering=zero_bubble_h2,
    splits=True,
    ramp=Ramp(weight_savings=3, ahead=2),
    in_flight_count=_in_flight_h2,
    steady=True,
    searched=True,
)


def zero_bubble_v(
    pipeline_ranks: int, pipeline_rank: int, micro_batches: int, interleave: int
) -> Order:
    """Return the ZB-V order of one pipeline rank, which has two stages.

    Data passes through the first stages of all pipeline ranks in ascending order and then through their second stages
    in descending order. So the first and the last stage are on the same pipeline rank, and the backward begins there
    early. Every pipeline rank holds as many activations as the first pipeline rank of 1F1B. No pipeline rank waits
    between its first and its last action under two conditions: a forward, an input-gradient and a weight-gradient pass
    take equally long, and there are at least 2 · ``pipeline_ranks`` − 1 micro-batches.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", where it is called V-ZB; the order is that
    of torch's ``ScheduleZBVZeroBubble``.

    A line is a pipeline rank, named after its first stage. F, B and W are passes of this stage, f, b and w those of the
    pipeline rank's second stage::

        stage 0 | F0 F1 F2 F3 F4 f0 b0 w0 f1 b1 w1 f2 b2 w2 B0 W0 f3 b3 w3 B1 W1 f4 b4 w4 B2 W2 B3 W3 B4 W4 .. ..
        stage 1 | .. F0 F1 F2 f0 F3 f1 b0 w0 f2 b1 w1 F4 B0 W0 f3 b2 w2 B1 W1 f4 b3 w3 B2 b4 B3 W2 B4 W3 w4 W4 ..
        stage 2 | .. .. F0 f0 F1 f1 F2 f2 b0 w0 F3 B0 W0 f3 b1 w1 F4 B1 W1 f4 b2 w2 B2 b3 B3 b4 B4 W2 w3 w4 W3 W4
    """
    del interleave
    count = max(
        micro_batches, 2 * pipeline_ranks - 1
    )  # with fewer micro-batches the excess is dropped
    after = pipeline_ranks - pipeline_rank
    warm_up = [
        _turns(2 * after - 1, (FORWARD, 0, 0)),
        _turns(pipeline_rank, (FORWARD, 1, 0), (FORWARD, 0, 2 * after - 1)),
        _turns(after, (FORWARD, 1, pipeline_rank), (BACKWARD, 1, 0), (BACKWARD_WEIGHT, 1, 0)),
    ]
    steady = _turns(
        count - pipeline_ranks,
        *((FORWARD, 0, pipeline_ranks + after - 1), (BACKWARD, 0, 0), (BACKWARD_WEIGHT, 0, 0)),
        *((FORWARD, 1, pipeline_ranks), (BACKWARD, 1, after), (BACKWARD_WEIGHT, 1, after)),
    )
    drain = [
        _turns(
            pipeline_rank,
            (BACKWARD, 0, count - pipeline_ranks),
            (BACKWARD, 1, count - pipeline_rank),
        ),
        _turns(after, (BACKWARD, 0, count - after), (BACKWARD_WEIGHT, 0, count - pipeline_ranks)),
        _turns(pipeline_rank, (BACKWARD_WEIGHT, 1, count - pipeline_rank)),
        _turns(pipeline_rank, (BACKWARD_WEIGHT, 0, count - pipeline_rank)),
    ]
    listed = np.concatenate([*warm_up, steady, *drain])
    kinds, turned, micros = listed[listed[:, 2] < micro_batches].T
    return Order(
        kinds, np.where(turned == 1, 2 * pipeline_ranks - 1 - pipeline_rank, pipeline_rank), micros
    )


def _turns(times: int, *slots: Slot) -> Numbers:
    """Return the actions ``slots`` repeated ``times`` times, one row per action.

    The rows have the columns of :data:`Slot`. From one repetition to the next, the micro-batch of each action increases
    by one.
    """
    listed = np.tile(np.array(slots, dtype=np.int64), (times, 1))
    listed[:, 2] += np.repeat(np.arange(times), len(slots))
    return listed


# The ramp is T_B − T_W, which is half of 1 − 3 · T_W / (T_F + T_B + T_W) where T_F = T_B.
ZERO_BUBBLE_V = Schedule(
    name="zb-v",
    ordering=zero_bubble_v,
    splits=True,
    interleaves=(2,),
    placement=BACK_AND_FORTH,
    ramp=Ramp(weight_savings=3),
    steady=True,
)
