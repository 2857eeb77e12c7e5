"""What is known of a step that was taken."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallax.common.events import Span
from parallax.swap.statistics import SwapStatistics


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step. ``loss`` and ``gradient_norm`` are global; the rest is this rank's. ``peak_bytes`` is the device's
    high water since the engine was built (on a CPU: of the process, beyond what it had before). ``loss_scale`` is what
    the loss was multiplied by, ``skipped_steps`` how many so far were not taken because gradients overflowed,
    ``trouble`` why this one was not taken, where that is to be said, ``learning_rate`` that of this step."""

    loss: float
    gradient_norm: float
    seconds: float
    peak_bytes: int
    swap: SwapStatistics
    spans: list[Span] = field(repr=False)
    loss_scale: float = 1.0
    skipped_steps: int = 0
    trouble: str = ""
    learning_rate: float = 0.0
