"""The settings of a learning-rate schedule, with the base class of the options of ``schedule=``."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import ClassVar

from parallax.common.registered import Registered
from parallax.errors import ConfigError, check_choice, check_positive

_HEIGHTS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Registered):
    """A learning-rate schedule, which gives the factor of all learning rates at each step. The factor depends on the
    step alone, so a resumed run continues the schedule. This is the base class of the dataclasses of ``schedule=``.

    ``unit``: what the schedule counts: ``steps``, or ``epochs``, with a constant rate within an epoch.
    ``warmup``: for how many steps or epochs the rate rises linearly from near zero, before the schedule begins.
    ``epoch_steps``: the steps of an epoch; 0 derives them from the number of rows.
    """

    package: ClassVar[str] = "parallax.runtime.optim.schedules"

    unit: str = "steps"
    warmup: int = 0
    epoch_steps: int = 0

    def __post_init__(self) -> None:
        check_choice("schedule.unit", self.unit, ["steps", "epochs"])
        for key in ("warmup", "epoch_steps"):
            check_positive(f"schedule.{key}", getattr(self, key), zero=True)

    @abc.abstractmethod
    def after_warmup(self, position: int, length: int) -> float:
        """Return the factor at ``position`` (from 0) among the ``length`` units after the warm-up. ``length`` is at
        least 1."""

    def factor(self, step: int, steps: int) -> float:
        """Return the factor at ``step`` (from 0) in a run of ``steps`` steps."""
        if self.unit == "epochs":
            self.check(steps)
            step, steps = step // self.epoch_steps, math.ceil(steps / self.epoch_steps)
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        return self.after_warmup(step - self.warmup, max(1, steps - self.warmup))

    def check(self, steps: int) -> None:
        """Raise :class:`ConfigError` if a run of ``steps`` steps cannot have this schedule."""
        if self.unit == "epochs" and not self.epoch_steps:
            raise ConfigError(
                "schedule.unit=epochs: the number of rows is unknown, so epochs have no length; set "
                "schedule.epoch_steps=N, or use schedule.unit=steps"
            )
        if self.unit == "epochs" and self.warmup * self.epoch_steps >= steps:
            raise ConfigError(
                f"schedule.warmup={self.warmup}: the run ends within these epochs, of {self.epoch_steps} steps each; "
                "lower it"
            )


def curve(schedule: ScheduleConfig, steps: int, width: int = 48) -> str:
    """Return the factors of ``schedule`` over a run of ``steps`` steps as one line of ``width`` bars; the highest bar
    is the largest factor."""
    count = min(width, steps)
    places = [round(i * (steps - 1) / max(1, count - 1)) for i in range(count)]
    factors = [schedule.factor(place, steps) for place in places]
    most = max(factors, default=0.0) or 1.0
    return "".join(_HEIGHTS[max(0, min(8, math.ceil(8 * factor / most)))] for factor in factors)


def check_share(key: str, value: float) -> None:
    """Raise :class:`ConfigError` unless ``value``, the value of the setting ``key``, is in [0, 1]."""
    if not 0 <= value <= 1:
        raise ConfigError(f"schedule.{key}={value}: accepted are numbers from 0 to 1")
