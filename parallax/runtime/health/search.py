"""Which rows make a loss or a gradient that is not finite.

After the step has failed, parts of its batch are computed again, without an update: each micro-batch, and of those that
fail the halves, and the halves of these, down to rows::

    micro-batch 0   fine
    micro-batch 1   fails ── rows 8..11 fine
                          └─ rows 12..15 fail ── rows 12, 13 fine
                                              └─ rows 14, 15 fail ── row 14 fails, row 15 is fine
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Interval = tuple[int, int]
Fails = Callable[[int, Interval], str]
"""Given a micro-batch and rows of the global batch in it: what is not finite when these are computed; empty where all
is. The same on every rank."""

MOST = 4  # culprits that are looked for: each takes as many runs as its micro-batch has halvings


@dataclass(frozen=True, slots=True)
class Culprit:
    """Rows [start, stop) of the global batch, in one micro-batch, which make ``what`` by themselves; of several rows,
    none does so alone."""

    micro: int
    start: int
    stop: int
    what: str

    def __str__(self) -> str:
        if self.stop - self.start == 1:
            return f"row {self.start} of the batch (micro-batch {self.micro}) makes {self.what} by itself"
        rows = f"rows {self.start} to {self.stop - 1} of the batch (micro-batch {self.micro})"
        return f"{rows} make {self.what} together"


def culprits(parts: Sequence[Interval], fails: Fails, *, halves: bool = True) -> list[Culprit]:
    """The first :data:`MOST` of the rows of micro-batches ``parts`` that fail, in order; without ``halves`` whole
    micro-batches."""
    found: list[Culprit] = []
    for micro, rows in enumerate(parts):
        if len(found) < MOST and rows[0] < rows[1] and (what := fails(micro, rows)):
            each = _within(micro, rows, what, fails if halves else lambda micro, rows: "")
            found += [next(each)]
            while len(found) < MOST and (more := next(each, None)) is not None:
                found.append(more)
    return found


def _within(micro: int, rows: Interval, what: str, fails: Fails) -> Iterator[Culprit]:
    """Those in rows that fail together: in either half, or, where both are fine, all of them."""
    start, stop = rows
    middle = (start + stop) // 2
    parts = [(start, middle), (middle, stop)] if stop - start > 1 else []
    alone = True
    for part in parts:
        if why := fails(micro, part):
            alone = False
            yield from _within(micro, part, why, fails)
    if alone:
        yield Culprit(micro, start, stop, what)


def in_words(found: Sequence[Culprit]) -> str:
    """What is said of them."""
    if not found:
        return "no micro-batch makes one by itself"
    more = "; there may be more" if len(found) == MOST else ""
    return ", and ".join(map(str, found)) + more
