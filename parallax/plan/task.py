"""The task of a plan: training, evaluation or inference."""

from __future__ import annotations

from enum import StrEnum


class PlanTask(StrEnum):
    """The task of a plan.

    Evaluation and inference run forwards only, without gradients, optimizer states and saved activations. An evaluation
    computes the loss of each batch. An inference keeps the outputs of all rows.
    """

    TRAINING = "training"
    EVALUATION = "evaluation"
    INFERENCE = "inference"

    @property
    def trains(self) -> bool:
        return self is PlanTask.TRAINING
