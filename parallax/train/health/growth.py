"""Detect a series of bytes that keeps growing: a leak, in contrast to noise and to a cache that fills up.

A value is added after each step. A series counts as growing if it grows in each of three consecutive windows of steps,
and in the last window not much more slowly than in the first. The slope in a window is the Theil–Sen estimate, the
median over all pairs of points (Sen 1968), which is robust to jumps and outliers. The slope must exceed the scatter
about the line::

    bytes ▲        ╱ grows                  ╭──────── a cache: the last window is flat
          │     ╱╱                       ╭──╯
          │  ╱╱                        ╭─╯
          └──┴──┴──┴─▶ steps           └──┴──┴──┴─▶

Growth that would soon fill the memory is reported at the second check. Other growth is reported only if it continues
for as many steps again as it has already lasted. If the growth slows down during this time, the series is observed for
another such period. For slow leaks there is a second series, of the minima over 4, 8, 16, ... steps; the intervals get
longer with the run.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

WINDOW = 16  # points
LEAST_BYTES = 2**20  # least growth within a window that counts
SCATTER = 3.0  # least growth within a window, in median distances of its points from the line
STEADY = 0.6  # least slope of the last window, as a fraction of the first one's
REPEATED = 0.8  # least slope at the second check, as a fraction of that at the first check
SOON_STEPS = 500
_SLOW_STEPS = 4  # per point, from which on the second series counts


@dataclass(frozen=True, slots=True)
class Trend:
    """A line fitted to points: its ``slope`` in bytes per step, and ``scatter``, the median distance of the points from
    the line in bytes."""

    slope: float
    scatter: float


def line(points: Sequence[tuple[int, float]]) -> Trend:
    """Return the Theil–Sen line through ``points`` of (step, bytes)."""
    pairs = combinations(points, 2)
    slope = statistics.median([(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs])
    offset = statistics.median([value - slope * step for step, value in points])
    scatter = statistics.median([abs(value - slope * step - offset) for step, value in points])
    return Trend(slope, scatter)


def rise(points: Sequence[tuple[int, float]]) -> float:
    """Return by how many bytes per step ``points`` of (step, bytes) keep growing over three windows of steps; 0 if they
    do not."""
    parts = [points[start : start + WINDOW] for start in range(0, 3 * WINDOW, WINDOW)]
    lines = [line(part) for part in parts]
    for part, found in zip(parts, lines):
        risen = found.slope * (part[-1][0] - part[0][0])
        if risen < max(LEAST_BYTES, SCATTER * found.scatter):
            return 0.0
    whole = line(points).slope
    levels = [statistics.median([value for _, value in part]) for part in parts]
    # Otherwise the growth within a window is lost in the next.
    lasts = levels == sorted(levels) and whole >= STEADY * min(found.slope for found in lines)
    return whole if lasts and lines[-1].slope >= STEADY * lines[0].slope else 0.0


class GrowthDetector:
    """Detects steady growth of a quantity of bytes that is measured after each step."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=3 * WINDOW)
        self._slow: list[tuple[int, float]] = []
        self._point: list[tuple[int, float]] = []
        self._stride = 1
        # The step at which growth was first found, and the step since which it has not slowed down.
        self._begun, self._since = 0, 0
        self._speed = 0.0

    @property
    def suspects(self) -> bool:
        """Whether growth is suspected and a second check is due."""
        return self._begun > 0

    def add(self, step: int, count: float, free_bytes: Callable[[], float]) -> float:
        """Add ``count``, the bytes after ``step``; return the growth in bytes per step if it is certain, else 0.
        ``free_bytes()`` returns the free memory."""
        self._recent.append((step, count))
        slowly = self._add_slowly(step, count)
        if len(self._recent) < 3 * WINDOW or step % WINDOW:
            return slowly
        slope = rise(list(self._recent))
        if slope > 0 and self._begun and free_bytes() < SOON_STEPS * slope:
            return slope
        if slope <= 0:
            self._begun = 0
        elif not self._begun:
            self._begun, self._since, self._speed = step, step, slope
        elif slope < REPEATED * self._speed:  # slower than before: observe it for as long again
            self._since, self._speed = step, slope
        elif step - self._since >= max(3 * WINDOW, self._since - self._begun):
            return slope
        return slowly

    def _add_slowly(self, step: int, count: float) -> float:
        self._point.append((step, count))
        if len(self._point) < self._stride:
            return 0.0
        self._slow.append((self._point[0][0], min(value for _, value in self._point)))
        self._point = []
        if len(self._slow) < 3 * WINDOW:
            return 0.0
        found = rise(self._slow) if self._stride >= _SLOW_STEPS else 0.0
        pairs = zip(self._slow[::2], self._slow[1::2])
        self._slow = [(first[0], min(first[1], second[1])) for first, second in pairs]
        self._stride *= 2
        return found
