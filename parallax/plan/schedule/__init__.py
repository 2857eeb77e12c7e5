"""Schedules: for each pipeline rank, in which order it computes.

action.py, order.py    entries of a list; the forwards and backwards of a pipeline rank as columns
placement.py           which stage sits on which pipeline rank
schedule.py            a schedule as one object, and how one is found by its name
gpipe.py, one_forward.py, zero_bubble.py, zero_bubble_v.py    the families, each with its timelines drawn
built_in.py            which of them there are: a new one is registered here
own.py                 schedules of the user's own
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
