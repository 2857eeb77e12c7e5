"""The schedule of PipeDream-2BW: 1F1B that does not drain the pipeline between two steps."""

from __future__ import annotations

from parallax.plan.schedule.one_forward import ONE_FORWARD_ONE_BACKWARD
from parallax.plan.schedule.schedule import Ramp, Schedule

DOUBLE_BUFFERED = Schedule(
    name="2bw",
    ordering=ONE_FORWARD_ONE_BACKWARD.ordering,
    in_flight_count=ONE_FORWARD_ONE_BACKWARD.in_flight_count,
    ramp=Ramp(drains=False),
    steady=True,
    continues=True,
)
"""The order within a step is that of 1F1B, and the next step begins where 1F1B would drain the pipeline::

    stage 0 | F0 F1 B0 F2 B1 F3 B2 f0 B3 f1 b0 f2 b1 ..        (two stages, four micro-batches; F, B: a step,
    stage 1 | .. F0 B0 F1 B1 F2 B2 F3 B3 f0 b0 f1 b1 ..         f, b: the next step)

A forward of the next step comes before the update of this step. So the schedule needs updates that are delayed by one
step, with two versions of the weights on every stage, however many stages there are. Stage ``i`` computes ``i``
backwards of the next step before it knows the gradient norm of this step, so every stage but the first one needs a
second set of gradients.

Source: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1.
"""
