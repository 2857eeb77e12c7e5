"""Metrics by their names: which of two values is the better one."""

from __future__ import annotations

import re

_LARGER = (
    "accuracy",
    "acc",
    "auc",
    "auroc",
    "bleu",
    "explained",
    "f1",
    "iou",
    "jaccard",
    "kappa",
    "map",
    "mcc",
    "pearson",
    "precision",
    "r2",
    "recall",
    "rouge",
    "score",
    "spearman",
    "specificity",
)
_LARGER_ENDS = ("_per_second", "overlap", "explained_variance")
_TOP = re.compile(r"top_?\d+")


def larger_is_better(name: str) -> bool:
    """Return whether the larger of two values of the metric ``name`` is the better one, as for accuracies and rates.
    Of any other metric, such as a loss, an error, seconds or bytes, it is the smaller one."""
    last = name.lower().partition("/")[0]  # a set of held-out rows may have a name behind it
    parts = re.split(r"[_\-.@ ]", last)
    if "loss" in parts or "error" in parts:
        return False
    return (
        last.endswith(_LARGER_ENDS)
        or any(part in _LARGER for part in parts)
        or bool(_TOP.search(last))
    )
