"""The user's own schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parallax.common.targets import call_target
from parallax.errors import ConfigError
from parallax.runtime.optim.schedule import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class CustomSchedule(ScheduleConfig):
    """The user's own schedule. ``target``: ``package.module:function``; ``kwargs``: its arguments besides the position
    from 0 and the length, in steps or epochs after the warm-up: ``function(position, length, **kwargs)`` returns the
    factor of the learning rate, and nothing else may change it."""

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
