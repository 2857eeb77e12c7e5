"""Record the actions of a run as spans, one line of JSON each; the monitor reads them.

A span describes one action of one rank: its kind, step, stage and micro-batch, its start and end on this host's
monotonic clock, and the seconds that the rank waited during it. The planner's simulator produces the same record from
predicted costs, so prediction and measurement are compared field by field.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from parallax.common.documents import plain_json, read_lines
from parallax.common.files import AppendedFile
from parallax.errors import ConfigError, printable

COMPUTES = ("forward", "backward", "backward_weight")  # kinds of spans that compute


class Span(NamedTuple):
    """One action of one rank, with times in seconds.

    ``kind``             the action's kind, such as forward
    ``micro``            the index of the micro-batch
    ``start``, ``end``   on the monotonic clock of the rank's host
    ``wait``             the part of the duration for which the rank was blocked
    ``read``             the part of ``wait`` in which the rank read rows
    """

    rank: int
    step: int
    kind: str
    stage: int
    micro: int
    start: float
    end: float
    wait: float = 0.0
    read: float = 0.0


class EventLog:
    """Appends spans to ``events-rank<r>.jsonl``. Spans are collected in memory until :meth:`flush`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: list[Span] = []
        self._file = AppendedFile(path)

    def extend(self, spans: list[Span]) -> None:
        """Collect the spans of one step."""
        self._pending.extend(spans)

    def flush(self) -> None:
        """Write the collected spans to the file, and discard them. They are also discarded if writing fails."""
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
    """Yield the spans of a file in order. A last line that a crash has truncated is skipped.

    Raises :class:`ConfigError` for invalid lines.
    """
    read = 0
    try:
        for line in read_lines(path):
            read += 1
            yield span_of(plain_json(line))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{printable(str(path))}, line {read}: is no valid event "
            f"({printable(str(error))[:200]}); restore it, or move it away"
        ) from error


def span_of(data: Any) -> Span:
    """Return the span described by a parsed line of JSON. Raises ValueError or TypeError for invalid values."""
    span = Span(**data)
    whole, timed = (span.rank, span.step, span.stage, span.micro), span[5:]
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
    """Return the total seconds for which the actions ``spans`` computed: their durations without their waits.

    Actions that do not compute, such as transfers, count as 0.
    """
    return sum(s.end - s.start - s.wait for s in spans if s.kind in COMPUTES)


def busy_by_rank(spans: Iterable[Span]) -> dict[int, float]:
    """Return {rank: seconds per step for which the rank computed, without waits}.

    The seconds of a rank are the median over the steps in ``spans``.
    """
    found: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.kind in COMPUTES:
            found[span.rank][span.step] += span.end - span.start - span.wait
    return {rank: statistics.median(steps.values()) for rank, steps in found.items()}


def idle_fraction(spans: Sequence[Span], step_seconds: float) -> float:
    """Return the idle fraction of a pipeline whose steps overlap: 1 − compute seconds / (ranks × seconds of a step).

    ``spans`` are the actions of each rank between two updates. Other steps are measured by :func:`bubble_fraction`.
    """
    ranks = len({span.rank for span in spans if span.kind in COMPUTES})
    return max(0.0, 1.0 - busy_seconds(spans) / (ranks * step_seconds)) if step_seconds > 0 else 0.0


def bubble_fraction(spans: Sequence[Span]) -> float:
    """Return the idle fraction of the pipeline: 1 − compute seconds / (ranks × seconds from first to last compute).

    Forward and backward count as compute, without their waits for swapped data and rows. Of a split backward, both
    passes count. The definition is the same for predicted and measured timelines (GPipe, Huang et al. 2019, section 2).
    """
    compute = [span for span in spans if span.kind in COMPUTES]
    if not compute:
        return 0.0
    ranks = len({span.rank for span in compute})
    length = max(span.end for span in compute) - min(span.start for span in compute)
    return max(0.0, 1.0 - busy_seconds(compute) / (ranks * length)) if length > 0 else 0.0
