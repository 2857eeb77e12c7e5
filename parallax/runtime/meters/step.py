"""The result of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallax.common.events import Span
from parallax.swap.statistics import SwapStatistics


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one step. ``loss`` and ``gradient_norm`` are global; the rest is this rank's. ``peak_bytes``: the
    device's peak since the engine was built (on a CPU: of the process, beyond its memory before). ``loss_scale``:
    the factor of the loss. ``skipped_steps``: how many steps were skipped so far because of non-finite values.
    ``trouble``: why this step was skipped, empty where it was not or an overflow was expected. ``learning_rate``:
    that of this step."""

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
