"""Where to cut a row of blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence


def even_cuts(sums: Sequence[float], stages: int) -> list[int]:
    """Where to cut blocks into stages of nearly equal seconds; ``sums`` are those of the first 0, 1, … blocks."""
    blocks, cuts = len(sums) - 1, [0]
    for stage in range(1, stages):
        ideal = bisect_left(sums, sums[-1] * stage / stages)
        cuts.append(min(max(ideal, cuts[-1] + 1), blocks - (stages - stage)))
    return [*cuts, blocks]


def furthest(works: Callable[[int], bool], low: int, high: int, guess: int) -> int:
    """The smallest start in ``low`` to ``high`` that works, looked for around ``guess``; ``high`` where none does."""
    start = min(max(guess, low), high)
    step = 1
    if works(start):
        while start > low and works(max(low, start - step)):
            start, step = max(low, start - step), step * 2
        found, fails = start, max(low - 1, start - step)
    else:
        fails = start
        while start < high and not works(start):
            fails, start, step = start, min(high, start + step), step * 2
        found = start
    while found - fails > 1:
        middle = (found + fails) // 2
        if works(middle):
            found = middle
        else:
            fails = middle
    return found
