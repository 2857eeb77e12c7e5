"""Zero-bubble schedules with one stage per pipeline rank: weight-gradient passes (W) fill the bubble."""

from __future__ import annotations

import numpy as np

from parallax.plan.schedule.order import Numbers, Order, by_rounds
from parallax.plan.schedule.schedule import Ramp, Schedule


def zero_bubble_h1(
    pipeline_ranks: int, pipeline_rank: int, micro_batches: int, interleave: int
) -> Order:
    """ZB-H1: 1F1B with each stage's weight-gradient passes delayed until they fill the bubble. A stage delays them by
    as many micro-batches as there are stages before it, so all have as many in flight as 1F1B's first stage.

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
    """ZB-H2: forwards fill the warm-up and weight-gradient passes the tail, so that no stage waits where a forward and
    both passes of a backward take equally long. It holds about twice the activations of 1F1B on every stage.

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
    """Return forward, input-gradient (B) and weight-gradient (W) passes in turn: forwards are ``warm_up`` ahead of B, W
    is ``delay`` behind. At most ``warm_up`` + ``delay`` + 1 micro-batches are in flight."""
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
