"""(to be written)"""

from __future__ import annotations

from dataclasses import dataclass

from parallax.errors import ConfigError, check_choice, check_positive
from parallax.plan.schedule import ORDERS

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What the planner is told; ``auto`` leaves the choice to it.

    ``stages``: pipeline stages. ``replicas``: a number for every stage, or one per stage such as ``[1, 2]``.
    ``schedule``: gpipe or 1f1b. ``activations``: force keep, offload or recompute on every block.
    """

    stages: int | str = AUTO
    replicas: int | str | list[int] = AUTO
    schedule: str = AUTO
    activations: str = AUTO

    def __post_init__(self) -> None:
        check_choice("plan.schedule", self.schedule, [AUTO, *ORDERS])
        check_choice("plan.activations", self.activations, [AUTO, "keep", "offload", "recompute"])
        if self.stages != AUTO:
            check_positive("plan.stages", whole("plan.stages", self.stages))
        counts = self.replicas if isinstance(self.replicas, list | tuple) else [self.replicas]
        for count in counts:
            if count != AUTO:
                check_positive("plan.replicas", whole("plan.replicas", count))


def whole(key: str, value: int | str) -> int:
    """``value`` as a whole number, or :class:`ConfigError` that says what ``key`` accepts."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}={value}: accepted are auto or a whole number")
    return value
