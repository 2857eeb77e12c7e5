"""Exponential decay."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.runtime.optim.schedule import ScheduleConfig, check_share


@dataclass(frozen=True, kw_only=True)
class ExponentialSchedule(ScheduleConfig):
    """Exponential decay. ``gamma``: the factor by which each step or epoch after the warm-up multiplies the rate."""

    name: str = "exponential"
    gamma: float = 0.999

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("gamma", self.gamma)

    def after_warmup(self, position: int, length: int) -> float:
        del length
        return float(self.gamma**position)
