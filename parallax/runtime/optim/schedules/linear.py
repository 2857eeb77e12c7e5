"""Linear decay."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.runtime.optim.schedule import ScheduleConfig, check_share


@dataclass(frozen=True, kw_only=True)
class LinearSchedule(ScheduleConfig):
    """Linear decay over the run. ``final``: the factor at the end of the run."""

    name: str = "linear"
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("final", self.final)

    def after_warmup(self, position: int, length: int) -> float:
        return 1 + (self.final - 1) * min(1.0, position / length)
