"""One cycle: the rate rises, and then falls below its start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parallax.errors import check_positive
from parallax.runtime.optim.schedule import ScheduleConfig, check_share


@dataclass(frozen=True, kw_only=True)
class OneCycleSchedule(ScheduleConfig):
    """One cycle (Smith and Topin 2019), as torch's ``OneCycleLR`` without cycling momentum: up to the full rate and
    down again, both along a cosine.

    ``rise``: the part of the run in which the rate rises.
    ``div``: the full rate divided by the first rate.
    ``final_div``: the first rate divided by the last rate.
    """

    name: str = "one_cycle"
    rise: float = 0.3
    div: float = 25.0
    final_div: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("rise", self.rise)
        check_positive("schedule.div", self.div)
        check_positive("schedule.final_div", self.final_div)

    def after_warmup(self, position: int, length: int) -> float:
        first, peak = 1 / self.div, self.rise * length - 1
        position = min(position, length - 1)
        if position <= peak:
            return _between(first, 1.0, position / peak if peak else 1.0)
        return _between(1.0, first / self.final_div, (position - peak) / (length - 1 - peak))


def _between(start: float, end: float, done: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * done))
