"""Cosine decay, once or with restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parallax.errors import check_positive
from parallax.runtime.optim.schedule import ScheduleConfig, check_share


@dataclass(frozen=True, kw_only=True)
class CosineSchedule(ScheduleConfig):
    """Decay along a cosine (Loshchilov and Hutter 2017), after a warm-up of ten steps or epochs.

    ``final``: the factor at the end of the run. ``restarts``: how often the rate returns to its full
    value; each of the equally long cycles decays."""

    name: str = "cosine"
    warmup: int = 10
    final: float = 0.1
    restarts: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("final", self.final)
        check_positive("schedule.restarts", self.restarts, zero=True)

    def after_warmup(self, position: int, length: int) -> float:
        done = min(1.0, position / length)
        if self.restarts and done < 1:
            done = done * (self.restarts + 1) % 1
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))
