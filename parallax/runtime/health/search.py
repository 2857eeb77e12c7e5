"""Which rows make a loss or a gradient that is not finite.

After the step has failed, parts of its batch are computed again, without an update: halves of its micro-batches, of
those that fail the halves, and the halves of these, down to one micro-batch; then the same with its rows::

    micro-batches 0..3    the step has failed
      0, 1                fine
      2, 3                fail ── 2   fine
                               └─ 3   fails ── rows 12, 13   fine
                                            └─ rows 14, 15   fail ── row 14   fails
                                                                  └─ row 15   is fine

So one bad row among M micro-batches of b rows takes 2·log2(M·b) runs. Several micro-batches together are a step with
fewer of them: each has the shape that it had, and no more of them are held at one time. Rows of a part of a micro-batch
stand in it again and again instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

Interval = tuple[int, int]
Fails = Callable[[Interval, Interval], str]
"""Given micro-batches and rows of the global batch in them, all rows where these are several: what is not finite when
these are computed; empty where all is. The same on every rank."""

MOST = 4  # culprits that are looked for: each takes as many runs as there are halvings


@dataclass(frozen=True, slots=True)
class Culprit:
    """Rows [start, stop) of the global batch, in micro-batches [micros[0], micros[1]), which make ``what`` by
    themselves; of several rows, none does so alone."""

    micros: Interval
    start: int
    stop: int
    what: str

    def __str__(self) -> str:
        first, stop = self.micros
        where = (
            f"micro-batch {first}" if stop - first == 1 else f"micro-batches {first} to {stop - 1}"
        )
        if self.stop - self.start == 1:
            return f"row {self.start} of the batch ({where}) makes {self.what} by itself"
        rows = f"rows {self.start} to {self.stop - 1} of the batch ({where})"
        return f"{rows} make {self.what} together"


def culprits(
    parts: Sequence[Interval],
    fails: Fails,
    *,
    halves: bool = True,
    fits: Callable[[Interval], bool] = lambda micros: True,
) -> list[Culprit]:
    """The first :data:`MOST` of the rows of micro-batches ``parts`` that fail, in order; without ``halves`` whole
    micro-batches. ``fits``: whether several micro-batches are the same ones when they are computed together; where they
    are not, each is computed alone."""

    def among(micros: Interval, what: str) -> Iterator[Culprit]:
        """Those in micro-batches of which ``what`` is known, or nothing."""
        first, stop = micros
        if stop - first == 1:
            within = fails if halves else lambda micros, rows: ""
            yield from _within(micros, parts[first], what, within)
            return
        middle, alone = (first + stop) // 2, bool(what)
        for half in ((first, middle), (middle, stop)):
            rows = parts[half[0]][0], parts[half[1] - 1][1]
            known = half[1] - half[0] == 1 or fits(half)
            why = fails(half, rows) if known else ""
            if why or not known:
                alone = False
                yield from among(half, why)
        if alone:
            yield Culprit(micros, parts[first][0], parts[stop - 1][1], what)

    if len(parts) > 1:
        return list(islice(among((0, len(parts)), ""), MOST))
    what = fails((0, 1), parts[0])
    return list(islice(among((0, 1), what), MOST)) if what else []


def _within(micros: Interval, rows: Interval, what: str, fails: Fails) -> Iterator[Culprit]:
    """Those in rows that fail together: in either half, or, where both are fine, all of them."""
    start, stop = rows
    middle = (start + stop) // 2
    parts = [(start, middle), (middle, stop)] if stop - start > 1 else []
    alone = True
    for part in parts:
        if why := fails(micros, part):
            alone = False
            yield from _within(micros, part, why, fails)
    if alone:
        yield Culprit(micros, start, stop, what)


def in_words(found: Sequence[Culprit]) -> str:
    """What is said of them."""
    if not found:
        return "no micro-batch makes one by itself"
    more = "; there may be more" if len(found) == MOST else ""
    return ", and ".join(map(str, found)) + more
