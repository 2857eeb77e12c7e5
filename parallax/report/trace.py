"""Convert a timeline to a Chrome trace, for https://ui.perfetto.dev and chrome://tracing.

Each rank is one process with three tracks: computing, messages, and swapping. Format: "Trace Event Format", Google
(2016), with complete events (X) in microseconds, instants (i) for actions that only start an operation, and metadata
(M) for names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from parallax.common.events import Span

TRACKS = ("compute", "send", "swap")
# Everything else computes.
_TRACK_OF = {"send": 1, "receive": 1, "reduce": 1, "fetch": 2}
_MICROSECONDS = 1e6


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Return the spans (times of actions) as Chrome trace events. Time begins at the first span."""
    origin = min((span.start for span in spans), default=0.0)
    events = [
        event for rank in sorted({span.rank for span in spans}) for event in _names(rank, spans)
    ]
    events += [event for span in spans for event in _events(span, origin)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(rank: int, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    stages = sorted({span.stage for span in spans if span.rank == rank})
    title = f"rank {rank}, stage {', '.join(map(str, stages))}"
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": title}}
    yield {
        "ph": "M",
        "pid": rank,
        "tid": 0,
        "name": "process_sort_index",
        "args": {"sort_index": rank},
    }
    for track, name in enumerate(TRACKS):
        yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {
            "ph": "M",
            "pid": rank,
            "tid": track,
            "name": "thread_sort_index",
            "args": {"sort_index": track},
        }


def _events(span: Span, origin: float) -> Iterator[dict[str, Any]]:
    lasted, waited = span.end - span.start, min(span.wait, span.end - span.start)
    common = {
        "pid": span.rank,
        "tid": _TRACK_OF.get(span.kind.split("_")[0], 0),
        "cat": span.kind,
        "ts": (span.start - origin) * _MICROSECONDS,
    }
    name = span.kind if span.micro < 0 else f"{span.kind} {span.micro}"
    about = {
        "step": span.step,
        "stage": span.stage,
        "micro_batch": span.micro,
        "wait_seconds": waited,
    }
    if lasted <= 0:
        yield {**common, "ph": "i", "s": "t", "name": name, "args": about}
        return
    yield {**common, "ph": "X", "name": name, "dur": lasted * _MICROSECONDS, "args": about}
    if 0 < waited < lasted:  # drawn inside the span, at its start
        yield {**common, "ph": "X", "name": "wait", "cat": "wait", "dur": waited * _MICROSECONDS}
