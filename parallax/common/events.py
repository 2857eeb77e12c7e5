"""What happened, one line each: every layer drops spans down here, the monitor reads them from above.

A span is one action of one rank: what it was, for which step, stage and micro-batch, when it began and ended
on this host's monotonic clock, and how many of those seconds the rank only waited. The planner's simulator
produces the same record from predicted costs, so prediction and measurement are compared field by field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from parallax.common.documents import plain_json, read_lines
from parallax.common.files import AppendedFile
from parallax.errors import ConfigError, printable

COMPUTES = ("forward", "backward", "backward_weight")  # kinds of spans


class Span(NamedTuple):
    """One action of one rank. Times in seconds; ``wait`` is the part of the span spent blocked."""

    rank: int
    step: int
    kind: str
    stage: int
    micro: int
    start: float
    end: float
    wait: float = 0.0


class EventLog:
    """Appends spans to ``events-rank<r>.jsonl``; nothing touches the disk before :meth:`flush`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: list[Span] = []
        self._file = AppendedFile(path)

    def extend(self, spans: list[Span]) -> None:
        """Remember the spans of one step."""
        self._pending.extend(spans)

    def flush(self) -> None:
        """Write what was remembered, and forget it, even where it cannot be written."""
        spans, self._pending = self._pending, []
        if spans:
            self._file.append("".join(json.dumps(span._asdict()) + "\n" for span in spans).encode())

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.flush()
        finally:
            self._file.close()


def read_events(path: Path) -> Iterator[Span]:
    """The spans of a file in order; a last line cut short by a crash is skipped. Raises :class:`ConfigError` for what
    is no span."""
    read = 0
    try:
        for line in read_lines(path):
            read += 1
            yield span_of(plain_json(line))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{printable(str(path))}, line {read}: cannot be read as what a rank did "
            f"({printable(str(error))[:200]}); restore it, or move it away"
        ) from error


def span_of(data: Any) -> Span:
    """What a file says of one action. Raises ValueError or TypeError unless its numbers are numbers."""
    span = Span(**data)
    whole, timed = (span.rank, span.step, span.stage, span.micro), (span.start, span.end, span.wait)
    good = all(type(value) is int for value in whole) and all(
        type(value) in (int, float) for value in timed
    )
    if (
        not good
        or not isinstance(span.kind, str)
        or not all(map(math.isfinite, timed))
        or span.end < span.start
    ):
        raise ValueError(f"{data!r:.200} is no span")
    return span


def busy_seconds(spans: Iterable[Span]) -> float:
    """How long these actions computed, without what they waited."""
    return sum(s.end - s.start - s.wait for s in spans if s.kind in COMPUTES)


def bubble_fraction(spans: Sequence[Span]) -> float:
    """Idle share of the pipeline: 1 − compute seconds / (ranks × seconds from first to last compute).

    Only forward and backward (both of its halves) count as compute, and their waits for swapped data do not: the same
    definition for a predicted and for a measured timeline (GPipe, Huang et al. 2019, section 2).
    """
    compute = [span for span in spans if span.kind in COMPUTES]
    if not compute:
        return 0.0
    ranks = len({span.rank for span in compute})
    length = max(span.end for span in compute) - min(span.start for span in compute)
    return max(0.0, 1.0 - busy_seconds(compute) / (ranks * length)) if length > 0 else 0.0
