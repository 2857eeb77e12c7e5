"""The built-in schedules, in the order in which they are listed and tried."""

from __future__ import annotations

from parallax.plan.schedule.gpipe import GPIPE
from parallax.plan.schedule.one_forward import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD
from parallax.plan.schedule.schedule import SCHEDULES
from parallax.plan.schedule.zero_bubble import ZERO_BUBBLE_H1, ZERO_BUBBLE_H2
from parallax.plan.schedule.zero_bubble_v import ZERO_BUBBLE_V

BUILT_IN = (
    GPIPE,
    ONE_FORWARD_ONE_BACKWARD,
    INTERLEAVED,
    ZERO_BUBBLE_H1,
    ZERO_BUBBLE_H2,
    ZERO_BUBBLE_V,
)
SCHEDULES.update({schedule.name: schedule for schedule in BUILT_IN})
