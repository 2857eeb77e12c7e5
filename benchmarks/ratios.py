"""Ratios of times that were taken by turns on a noisy machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return two ratios of our times to theirs, which noise disturbs differently.

    ``fastest`` is the best time over the best time: other work only ever slows a step down. ``median`` is that of the
    ratios of neighbouring turns, ``low`` and ``high`` their quartiles: what slows a whole turn down cancels out.
    """
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, median, high = (
        statistics.quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else pairs * 3
    )
    return {"fastest": min(ours) / min(theirs), "median": median, "low": low, "high": high}


def show(found: dict[str, float]) -> str:
    """The median with its quartiles, for a table."""
    return f"{found['median']:.3f} ({found['low']:.2f}–{found['high']:.2f})"
