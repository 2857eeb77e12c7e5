"""Warm-up, stable rate, decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from parallax.errors import check_choice
from parallax.runtime.optim.schedule import ScheduleConfig, check_share


@dataclass(frozen=True, kw_only=True)
class WSDSchedule(ScheduleConfig):
    """Warm-up, stable rate, decay (Hu et al. 2024, "MiniCPM", section 4).

    ``decay``: the fraction of the run, at its end, in which the rate falls.
    ``final``: the factor at the end of the run.
    ``shape``: the shape of the decay: linear, cosine, or sqrt, which is one minus the square root of the decay's
        progress (Hägele et al. 2024).
    """

    name: str = "wsd"
    decay: float = 0.2
    final: float = 0.0
    shape: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("decay", self.decay)
        check_share("final", self.final)
        check_choice("schedule.shape", self.shape, list(_SHAPES))

    def after_warmup(self, position: int, length: int) -> float:
        decaying = self.decay * (length + self.warmup)
        done = 1 - (length - position) / decaying if decaying else 0.0
        left = _SHAPES[self.shape](min(1.0, max(0.0, done)))
        return self.final + (1 - self.final) * left


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1 - math.sqrt(done),
}
