"""Schedules: the order in which each pipeline rank computes.

- ``action.py``: the actions, the entries of a rank's list
- ``order.py``: the forwards and backwards of a pipeline rank as columns
- ``placement.py``: the pipeline rank of each stage
- ``schedule.py``: a schedule as one object, found by its name
- ``gpipe.py``, ``one_forward.py``, ``double_buffered.py``, ``zero_bubble.py``, ``breadth_first.py``: the built-in
  schedules, with timelines
- ``own.py``: schedules that users write

A new built-in schedule must be added to the list in this file.
"""

from parallax.plan.schedule.action import Action, Kind
from parallax.plan.schedule.breadth_first import BREADTH_FIRST
from parallax.plan.schedule.double_buffered import DOUBLE_BUFFERED
from parallax.plan.schedule.gpipe import GPIPE
from parallax.plan.schedule.one_forward import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD
from parallax.plan.schedule.own import Listing, register_schedule
from parallax.plan.schedule.schedule import SCHEDULES, Schedule, named
from parallax.plan.schedule.zero_bubble import ZERO_BUBBLE_H1, ZERO_BUBBLE_H2, ZERO_BUBBLE_V

__all__ = [
    "BUILT_IN",
    "SCHEDULES",
    "Action",
    "Kind",
    "Listing",
    "Schedule",
    "named",
    "register_schedule",
]

BUILT_IN = (  # in the order in which they are listed and tried
    GPIPE,
    ONE_FORWARD_ONE_BACKWARD,
    DOUBLE_BUFFERED,
    INTERLEAVED,
    ZERO_BUBBLE_H1,
    ZERO_BUBBLE_H2,
    ZERO_BUBBLE_V,
    BREADTH_FIRST,
)
SCHEDULES.update({schedule.name: schedule for schedule in BUILT_IN})
