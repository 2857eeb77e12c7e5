"""The name of the file with a run's metrics, and the direction in which each metric improves."""

from __future__ import annotations

import re

METRICS = "metrics.jsonl"  # of a run directory
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
_LARGER_ENDS = ("_per_second", "overlap")
_TOP = re.compile(r"top_?\d+")


def larger_is_better(name: str) -> bool:
    """Return whether a larger value of the metric ``name`` is better, as for accuracies and rates.

    For any other metric, such as a loss, an error, seconds or bytes, a smaller value is better.
    """
    last = name.lower().partition("/")[0]  # the name of a set of held-out rows may follow
    parts = re.split(r"[_\-.@ ]", last)
    if "loss" in parts or "error" in parts:
        return False
    return (
        last.endswith(_LARGER_ENDS)
        or any(part in _LARGER for part in parts)
        or bool(_TOP.search(last))
    )
