"""What a plan is for: to train, to evaluate, or to compute outputs."""

from __future__ import annotations

from enum import StrEnum


class PlanTask(StrEnum):
    """The task of a plan. An evaluation and an inference run forwards only: they hold no gradients, no optimizer states
    and no saved activations. An evaluation computes the loss of each batch; an inference keeps the outputs of its
    rows."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    INFERENCE = "inference"

    @property
    def trains(self) -> bool:
        return self is PlanTask.TRAINING
