"""Decay with the inverse square root of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parallax.errors import check_positive
from parallax.runtime.optim.schedule import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class InverseSqrtSchedule(ScheduleConfig):
    """Decay with the inverse square root of the step, from the full rate at the end of the warm-up (Vaswani et al.
    2017, section 5.3). ``timescale``: the steps or epochs after which the rate has fallen to 1/√2 of the full rate; 0
    is the length of the warm-up."""

    name: str = "inverse_sqrt"
    warmup: int = 4000
    timescale: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("schedule.timescale", self.timescale, zero=True)

    def after_warmup(self, position: int, length: int) -> float:
        del length
        scale = self.timescale or max(1, self.warmup)
        return math.sqrt(scale / (scale + position))
