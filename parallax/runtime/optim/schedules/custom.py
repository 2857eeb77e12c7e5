"""The user's own schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parallax.common.targets import call_target
from parallax.errors import ConfigError
from parallax.runtime.optim.schedule import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class CustomSchedule(ScheduleConfig):
    """The user's own schedule. ``target``: the function as ``package.module:function``. ``kwargs``: keyword arguments
    of the function. Parallax calls ``function(position, length, **kwargs)``, with the position from 0 and the length
    after the warm-up, both in steps or epochs, and uses the result as the factor of the learning rate. The result must
    depend on these arguments alone."""

    name: str = "custom"
    target: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)

    def after_warmup(self, position: int, length: int) -> float:
        found = call_target("schedule", self.target, self.kwargs, position, length)
        if isinstance(found, bool) or not isinstance(found, int | float) or not found >= 0:
            raise ConfigError(
                f"schedule.target={self.target}: it returned {found!r:.60} at {position} of {length}; accepted is the "
                "factor of the learning rate, a number from 0"
            )
        return float(found)
