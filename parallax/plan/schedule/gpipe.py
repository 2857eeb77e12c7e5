"""The GPipe schedule: all forwards, then all backwards."""

from __future__ import annotations

import numpy as np

from parallax.plan.schedule.action import BACKWARD, FORWARD
from parallax.plan.schedule.order import Order
from parallax.plan.schedule.schedule import Ramp, Schedule


def gpipe(pipeline_ranks: int, pipeline_rank: int, micro_batches: int, interleave: int) -> Order:
    """Return the GPipe order of one pipeline rank: all forwards, then all backwards in reverse.

    ``interleave`` is ignored: a pipeline rank has one stage. Source: Huang et al. 2019, section 2.3.

    ::

        stage 0 | F0 F1 F2 F3 .. .. B3 B2 B1 B0
        stage 1 | .. F0 F1 F2 F3 B3 B2 B1 B0 ..
    """
    del pipeline_ranks, interleave
    micros = np.arange(micro_batches)
    kinds = np.repeat([FORWARD, BACKWARD], micro_batches)
    return Order(
        kinds, np.full(2 * micro_batches, pipeline_rank), np.concatenate([micros, micros[::-1]])
    )


GPIPE = Schedule(
    name="gpipe",
    ordering=gpipe,
    ramp=Ramp(ahead=0),
    holds_all=True,
    steady=True,
    searched=True,
)
