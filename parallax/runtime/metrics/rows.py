"""The outputs and targets of some rows in the shapes that metrics take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from parallax.errors import ConfigError
from parallax.model.losses import scores_of
from parallax.runtime.metrics.config import MetricsConfig, Task


@dataclass(frozen=True)
class ScoredRows:
    """Outputs with their targets. With the task multiclass, ``scores`` are vectors with a class each in ``targets``, of
    which ``kept`` count; otherwise each score has a target."""

    task: Task
    scores: Tensor
    targets: Tensor
    kept: Tensor | None = None
    probabilities: bool = False

    @classmethod
    def of(cls, results: Any, targets: Any, config: MetricsConfig) -> ScoredRows:
        """Return the rows of a model's return value. Raises :class:`ConfigError` if the targets do not fit."""
        scores, key = scores_of(results), f"metrics=[{', '.join(config.names)}]"
        if not isinstance(scores, Tensor) or not isinstance(targets, Tensor):
            raise ConfigError(
                f"{key}: accepted are a tensor of outputs, or logits among them, and a tensor of targets; the model "
                f"returns a {type(results).__name__} and the targets are a {type(targets).__name__}"
            )
        scores, targets = scores.detach(), targets.detach().to(scores.device)
        if scores.dim() > 1 and scores.shape[-1] == 1 and len(scores) == targets.numel():
            scores, targets = scores.flatten(), targets.flatten()
        same, floating = targets.shape == scores.shape, targets.is_floating_point()
        if same and floating and config.mixed and scores.dim() > 1:
            targets, same, floating = targets.argmax(-1), False, False
        if not floating and scores.dim() > 1 and scores.shape[:-1].numel() == targets.numel():
            classes = targets.flatten().long()
            kept = (classes >= 0) & (classes != config.ignored)
            task, counted = Task("multiclass", scores.shape[-1]), classes[kept]
            if len(counted) and (most := int(counted.max())) >= task.outputs:
                raise ConfigError(
                    f"{key}: the targets hold classes up to {most}, and the model has scores for {task.outputs}"
                )
            return cls(task, scores.flatten(0, -2), counted, kept)
        if not same:
            raise ConfigError(
                f"{key}: the model's outputs have shape {list(scores.shape)} and the targets {list(targets.shape)}, "
                f"{targets.dtype}; accepted are a class for each vector of scores in the last dimension, or a target "
                "for each output"
            )
        task = Task("multilabel", scores.shape[-1]) if scores.dim() > 1 else Task("binary", 1)
        return cls(task, scores, targets, probabilities=config.probabilities)

    def for_metric(self, metric: Any) -> tuple[Tensor, Tensor]:
        """Return the arguments of the metric's ``update``. Logits are converted to probabilities here. torchmetrics
        would only convert a batch in which some score is outside of [0, 1], which may be true of a batch and false of
        its micro-batches."""
        if self.kept is not None:
            return self._of_classes(metric)
        if not is_classification(metric):
            wide = torch.float32 if self.scores.device.type == "mps" else torch.float64
            return self.scores.to(wide), self.targets.to(wide)
        if self.targets.is_floating_point() and not bool(
            (self.targets == self.targets.round()).all()
        ):
            raise ValueError("the targets are not 0 and 1")
        scores = _wide(self.scores)
        values = (scores if self.probabilities else scores.sigmoid()), self.targets.long()
        return values if self.task.name == "binary" else tuple(v.flatten(0, -2) for v in values)  # type: ignore[return-value]

    def _of_classes(self, metric: Any) -> tuple[Tensor, Tensor]:
        if takes_classes(metric):
            return self._classes, self.targets
        if type(metric).__name__ == "Perplexity":
            return self._kept_scores.unsqueeze(0), self.targets.unsqueeze(0)
        if is_classification(metric) and top_k(metric) == 1:
            return self._kept_scores.softmax(-1), self.targets
        return self._kept_scores, self.targets

    @cached_property
    def _classes(self) -> Tensor:
        """The class with the highest score of each vector that counts."""
        return self.scores.argmax(-1)[self.kept]

    @cached_property
    def _kept_scores(self) -> Tensor:
        return _wide(self.scores[self.kept])


def top_k(metric: Any) -> int:
    """Return the number of classes among which a metric looks for the target."""
    return int(getattr(metric, "top_k", None) or 1)


def is_classification(metric: Any) -> bool:
    """Whether the metric is one of torchmetrics.classification, or derived from one."""
    return any(k.__module__.startswith("torchmetrics.classification") for k in type(metric).__mro__)


def takes_classes(metric: Any) -> bool:
    """Whether the metric needs only the class with the highest score."""
    from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassStatScores

    kinds = MulticlassConfusionMatrix, MulticlassStatScores
    return isinstance(metric, kinds) and top_k(metric) == 1


def _wide(scores: Tensor) -> Tensor:
    half = scores.is_floating_point() and scores.dtype.itemsize < 4
    return scores.to(torch.float32) if half else scores
