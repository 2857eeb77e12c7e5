"""The breadth-first schedule: each block computes a group of micro-batches before the next block computes."""

from __future__ import annotations

import numpy as np

from parallax.plan.schedule.action import BACKWARD, FORWARD
from parallax.plan.schedule.order import Order
from parallax.plan.schedule.schedule import Schedule


def breadth_first(
    pipeline_ranks: int, pipeline_rank: int, micro_batches: int, interleave: int, group: int
) -> Order:
    """Return the breadth-first order of one pipeline rank.

    A pipeline rank runs the forward of its first virtual stage for all micro-batches of a group, then the forward of
    its second virtual stage for all of them, and so on. Then it runs the backwards, last virtual stage first. After
    that, the next group begins. A group has ``group`` micro-batches; 0 means that all micro-batches are in one group.

    With one block per virtual stage, offloaded weights are read once per group for the forward and once for the
    backward, instead of once per micro-batch. The gradients of a block are complete when its last backward ends. The
    disadvantage is that all micro-batches of a group are in flight at one time.

    Source: Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism". With one pipeline rank this is the order of
    GreedySnake (Yin et al. 2025), where it is called vertical scheduling.

    An example has two pipeline ranks with two virtual stages each, and one group. A line is a pipeline rank, named
    after its first stage. F and B are passes of this stage, f and b those of the pipeline rank's second stage::

        stage 0 | F0 F1 F2 F3 f0 f1 f2 f3 .. .. b0 b1 b2 b3 B0 B1 B2 B3
        stage 1 | .. F0 F1 F2 F3 f0 f1 f2 f3 b0 b1 b2 b3 B0 B1 B2 B3 ..
    """
    size = min(group or micro_batches, micro_batches)
    mine = pipeline_rank + pipeline_ranks * np.arange(interleave)
    kinds, stages, micros = [], [], []
    for first in range(0, micro_batches, size):
        row = np.arange(first, min(first + size, micro_batches))
        kinds.append(np.repeat([FORWARD, BACKWARD], interleave * len(row)))
        stages.append(np.repeat(np.concatenate([mine, mine[::-1]]), len(row)))
        micros.append(np.tile(row, 2 * interleave))
    return Order(np.concatenate(kinds), np.concatenate(stages), np.concatenate(micros))


BREADTH_FIRST = Schedule(
    name="breadth-first",
    grouping=breadth_first,
    interleaves=(2,),
    interleaves_freely=True,
)
