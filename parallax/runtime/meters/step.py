"""The result of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallax.common.events import Span
from parallax.swap.statistics import SwapStatistics


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one step. ``loss`` and ``gradient_norm`` are global; the other fields are this rank's.

    ``read_seconds``   seconds of reading rows outside of actions; each of the ``spans`` has the seconds inside its
                       action
    ``peak_bytes``     peak device memory since the engine's build; on a CPU, the process's peak minus its memory before
    ``loss_scale``     the factor by which the loss was multiplied
    ``skipped_steps``  number of steps skipped so far because of non-finite values
    ``trouble``        why this step was skipped; empty if it was not, or if a dynamic loss scale expected the overflow
    ``learning_rate``  the learning rate of this step
    ``metrics``        metrics of this step's rows, on the first replica of the last stage; 0 on all other ranks
    """

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
    metrics: dict[str, float] = field(default_factory=dict)
    read_seconds: float = 0.0

    @property
    def input_seconds(self) -> float:
        """Return the seconds of the step in which the rank waited for rows."""
        return self.read_seconds + sum(span.read for span in self.spans)
