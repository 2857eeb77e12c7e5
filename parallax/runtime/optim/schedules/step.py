"""Decay in steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallax.errors import check_positive
from parallax.runtime.optim.schedule import ScheduleConfig, check_share


@dataclass(frozen=True, kw_only=True)
class StepSchedule(ScheduleConfig):
    """Decay in steps.

    ``gamma``: the factor by which each decay multiplies the rate.
    ``every``: steps or epochs from one decay to the next, counted from the start of the run; 0 without milestones is a
        third of the run.
    ``milestones``: decay at each of these steps or epochs.
    """

    name: str = "step"
    gamma: float = 0.1
    every: int = 0
    milestones: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("gamma", self.gamma)
        check_positive("schedule.every", self.every, zero=True)

    def after_warmup(self, position: int, length: int) -> float:
        place, every = position + self.warmup, self.every
        if not every and not self.milestones:
            every = max(1, -(-(length + self.warmup) // 3))
        decays = place // every if every else 0
        return float(self.gamma ** (decays + sum(place >= each for each in self.milestones)))
