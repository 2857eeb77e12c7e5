"""A constant rate."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.runtime.optim.schedule import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class ConstantSchedule(ScheduleConfig):
    """The full rate after the warm-up."""

    name: str = "constant"

    def after_warmup(self, position: int, length: int) -> float:
        del position, length
        return 1.0
