"""Polynomial decay."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.errors import check_positive
from parallax.runtime.optim.schedule import ScheduleConfig, check_share


@dataclass(frozen=True, kw_only=True)
class PolynomialSchedule(ScheduleConfig):
    """Polynomial decay over the run. ``power``: the exponent to which the remaining part of the run is raised.
    ``final``: the factor at the end of the run."""

    name: str = "polynomial"
    power: float = 2.0
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("schedule.power", self.power)
        check_share("final", self.final)

    def after_warmup(self, position: int, length: int) -> float:
        left = 1 - min(1.0, position / length)
        return float(self.final + (1 - self.final) * left**self.power)
