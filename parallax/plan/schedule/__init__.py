"""Schedules: the order in which each pipeline rank computes.

action.py, order.py    entries of a list; the forwards and backwards of a pipeline rank as columns
placement.py           the pipeline rank of each stage
schedule.py            a schedule as one object, found by its name
gpipe.py, one_forward.py, zero_bubble.py, zero_bubble_v.py    the families, each with its timelines drawn
built_in.py            the list of built-in schedules: register a new one here
own.py                 the user's own schedules
"""

from parallax.plan.schedule.action import Action, Kind
from parallax.plan.schedule.built_in import BUILT_IN
from parallax.plan.schedule.own import Listing, register_schedule
from parallax.plan.schedule.schedule import SCHEDULES, Schedule, named

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
