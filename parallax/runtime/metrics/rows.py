"""The outputs and targets of some rows in the shapes that metrics take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from parallax.errors import ConfigError
from parallax.model.block import to_device
from parallax.model.losses import scores_of
from parallax.runtime.metrics.config import MetricsConfig, Task


@dataclass(frozen=True)
class ScoredRows:
    """Outputs with their targets. In a multiclass task, each vector of ``scores`` has a class in ``targets``, and
    ``kept`` marks the targets that count. In other tasks, each score has its own target, and ``probabilities`` says
    whether scores are probabilities or logits."""

    task: Task
    scores: Tensor
    targets: Tensor
    kept: Tensor | None = None
    probabilities: bool = False

    @classmethod
    def of(cls, results: Any, targets: Any, config: MetricsConfig) -> ScoredRows:
        """Return the rows of ``results``, a model's return value, with their ``targets``. Raises :class:`ConfigError`
        if the targets do not fit."""
        scores, key = scores_of(results), f"metrics=[{', '.join(config.names)}]"
        if not isinstance(scores, Tensor) or not isinstance(targets, Tensor):
            raise ConfigError(
                f"{key}: accepted are a tensor of outputs, or logits among them, and a tensor of targets; the model "
                f"returns a {type(results).__name__} and the targets are a {type(targets).__name__}"
            )
        scores, targets = scores.detach(), to_device(targets.detach(), scores.device)
        if scores.dim() > 1 and scores.shape[-1] == 1 and len(scores) == targets.numel():
            scores, targets = scores.flatten(), targets.flatten()
        same, floating = targets.shape == scores.shape, targets.is_floating_point()
        if same and floating and config.mixed and scores.dim() > 1:
            targets, same, floating = targets.argmax(-1), False, False
        if not floating and scores.dim() > 1 and scores.shape[:-1].numel() == targets.numel():
            classes = targets.flatten().long()
            kept = (classes >= 0) & (classes != config.ignored)
            return cls(Task("multiclass", scores.shape[-1]), scores.flatten(0, -2), classes, kept)
        if not same:
            raise ConfigError(
                f"{key}: the model's outputs have shape {list(scores.shape)} and the targets {list(targets.shape)}, "
                f"{targets.dtype}; accepted are a class for each vector of scores in the last dimension, or a target "
                "for each output"
            )
        task = Task("multilabel", scores.shape[-1]) if scores.dim() > 1 else Task("binary", 1)
        return cls(task, scores, targets, probabilities=config.probabilities)

    def wrong(self, metric: Any) -> Tensor:
        """Return the number of targets that should count, but are no valid class or label. The result is 0 if
        ``metric`` is no classification metric, because it then accepts all targets."""
        if self.kept is not None:
            return (self.kept & (self.targets >= self.task.outputs)).sum()
        if not is_classification(metric):
            return self.targets.new_zeros((), dtype=torch.int64)
        return (self._not_ignored(metric) & (self.targets != 0) & (self.targets != 1)).sum()

    def add_to(self, metric: Any) -> None:
        """Update the states of ``metric`` with these rows."""
        if counts_labels(metric):
            self._count(metric)
        elif self.kept is not None:
            if len(self._kept_targets):
                metric.update(*self._of_classes(metric))
        elif not is_classification(metric):
            wide = torch.float32 if self.scores.device.type == "mps" else torch.float64
            metric.update(self.scores.to(wide), self.targets.to(wide))
        else:
            values = self._probabilities, self.targets.long()
            flat = self.task.name == "binary"
            metric.update(*(values if flat else (each.flatten(0, -2) for each in values)))

    def _count(self, metric: Any) -> None:
        """Add these rows to the counts that are the states of ``metric``. The metric's own update would wait for the
        device, in boolean indexing and bincount. In a multilabel task, label n is counted as the classes 2n (its target
        is 0) and 2n + 1 (its target is 1)."""
        predicted, targets, counted = self._labels(metric)
        classes = self.task.outputs if self.kept is not None else 2
        first = torch.arange(predicted.shape[1], device=targets.device) * classes
        if hasattr(metric, "confmat"):
            pairs, state = (first + targets) * classes + predicted, metric.confmat
            metric.confmat = state + _bins(pairs, counted, state.numel()).view_as(state)
            return
        size, shape = len(first) * classes, (len(first), classes)
        right, of_outputs, of_targets = (
            _bins(first + each, chosen, size).view(shape)
            for each, chosen in (
                (targets, counted & (predicted == targets)),
                (predicted, counted),
                (targets, counted),
            )
        )
        rest = of_targets.sum(1, keepdim=True) - of_targets - of_outputs + right
        for name, found in {
            "tp": right,
            "fp": of_outputs - right,
            "tn": rest,
            "fn": of_targets - right,
        }.items():
            state = getattr(metric, name)
            chosen = found[0] if self.kept is not None else found[:, 1]
            setattr(metric, name, state + chosen.sum_to_size(state.shape))

    def _labels(self, metric: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors: the predicted classes or labels, the targets, and whether ``metric`` counts each
        target. In a multilabel task they have one column per label, otherwise a single column."""
        counted = self._not_ignored(metric)
        if self.kept is None:
            targets = self.targets.long()
            predicted = (self._probabilities > metric.threshold).long()
            counted = counted & ((self.targets == 0) | (self.targets == 1))
        else:
            targets, predicted = self.targets, self._best
            counted = counted & self.kept & (targets < self.task.outputs)
            if (most := top_k(metric)) > 1:
                among = self.scores.topk(most).indices == targets.unsqueeze(1)
                predicted = torch.where(among.any(1), targets, predicted)
        columns = self.task.outputs if self.task.name == "multilabel" else 1
        return (
            predicted.reshape(-1, columns),
            targets.reshape(-1, columns),
            counted.reshape(-1, columns),
        )

    def _not_ignored(self, metric: Any) -> Tensor:
        ignored = getattr(metric, "ignore_index", None)
        if ignored is None:
            return torch.ones_like(self.targets, dtype=torch.bool)
        return self.targets != ignored

    def _of_classes(self, metric: Any) -> tuple[Tensor, Tensor]:
        if type(metric).__name__ == "Perplexity":
            return self._kept_scores.unsqueeze(0), self._kept_targets.unsqueeze(0)
        if is_classification(metric) and top_k(metric) == 1:
            return self._kept_scores.softmax(-1), self._kept_targets
        return self._kept_scores, self._kept_targets

    @cached_property
    def _probabilities(self) -> Tensor:
        """The probabilities of labels.

        Logits are converted here. torchmetrics itself would convert them only if a batch has a score outside of [0, 1],
        so it could treat a micro-batch differently from the whole batch.
        """
        scores = _wide(self.scores)
        return scores if self.probabilities else scores.sigmoid()

    @cached_property
    def _best(self) -> Tensor:
        """The class with the highest score of each vector."""
        return self.scores.argmax(-1)

    @cached_property
    def _kept_scores(self) -> Tensor:
        return _wide(self.scores[self.kept])

    @cached_property
    def _kept_targets(self) -> Tensor:
        return self.targets[self.kept]


def top_k(metric: Any) -> int:
    """Return the metric's ``top_k``: a target counts as found if it is among the ``top_k`` classes with the highest
    scores. 1 if the metric has no such setting."""
    return int(getattr(metric, "top_k", None) or 1)


def is_classification(metric: Any) -> bool:
    """Whether the metric is one of torchmetrics.classification, or derived from one."""
    return any(k.__module__.startswith("torchmetrics.classification") for k in type(metric).__mro__)


def counts_labels(metric: Any) -> bool:
    """Whether the metric's states are the sums of torchmetrics' StatScores or ConfusionMatrix.

    The result is False if the metric keeps a list of values for each row instead of sums over all rows.
    """
    from torchmetrics import classification

    kinds = (
        getattr(classification, f"{task}{states}")
        for task in ("Binary", "Multiclass", "Multilabel")
        for states in ("StatScores", "ConfusionMatrix")
    )
    summed = all(isinstance(each, Tensor) for each in metric._defaults.values())
    return summed and any(type(metric).update is kind.update for kind in kinds)


def _bins(classes: Tensor, counted: Tensor, size: int) -> Tensor:
    """Return how often each class below ``size`` occurs among the ``classes`` that are ``counted``."""
    places = torch.where(counted, classes, size).flatten()
    found = places.new_zeros(size + 1)
    return found.scatter_add_(0, places, torch.ones_like(places))[:size]


def _wide(scores: Tensor) -> Tensor:
    half = scores.is_floating_point() and scores.dtype.itemsize < 4
    return scores.to(torch.float32) if half else scores
