"""The times of a step's actions on the device that runs them.

A span is the start and the end of one action. On a CPU these are the times of call and return. An accelerator runs
asynchronously: an action returns when its kernels are queued, so by the host's clock the one action that synchronizes
would take all the time. There, two events are recorded around each action, and read when the device has passed them.
The last actions of a step are read in the next step, so that timing needs no synchronization.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from parallax.common.events import Span
from parallax.machine.device import CopyEngine, Stalls
from parallax.plan.schedule import Action, Kind
from parallax.runtime.batch import Rows, RowsOf

_RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)


class SpanClock(Protocol):
    """Measures the spans of one rank's actions, which run one after another."""

    def begin(self) -> float:
        """Start to measure an action. Return the host's time (time.perf_counter)."""

    def end(self, rank: int, step: int, action: Action, waited: float) -> None:
        """End ``action``, in which the host waited for ``waited`` seconds."""

    @property
    def within(self) -> bool:
        """Whether an action has begun and has not ended."""

    def reading(self) -> AbstractContextManager[None]:
        """Return a context in which the time counts as reading rows."""

    def take(self) -> list[Span]:
        """Return the spans completed since the last call, in order."""

    def aside(self) -> HostSpans:
        """Return a clock for actions whose spans are discarded, such as those of an evaluation."""


class HostSpans:
    """Times actions by the host's clock."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._begun = self._read = 0.0
        self.within = False

    def begin(self) -> float:
        self._begun, self._read, self.within = time.perf_counter(), 0.0, True
        return self._begun

    def end(self, rank: int, step: int, action: Action, waited: float) -> None:
        begun, now, read = self._begun, time.perf_counter(), self._read
        place = rank, step, action.kind, action.stage, action.micro
        self._spans.append(Span(*place, begun, now, waited + read, read))
        self.within = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._read += time.perf_counter() - begun

    def take(self) -> list[Span]:
        taken, self._spans = self._spans, []
        return taken

    def aside(self) -> HostSpans:
        return HostSpans()


class _Untimed(HostSpans):
    """Times a device's actions by the host's clock. It discards the device's stall events, which would otherwise
    accumulate."""

    def __init__(self, copies: CopyEngine) -> None:
        super().__init__()
        self._copies = copies

    def begin(self) -> float:
        self._copies.take_stalls()
        return super().begin()


class _Timed(NamedTuple):
    """An action of a device, between the events ``begun`` and ``ended``. ``stalls``: pairs of events between which the
    compute stream waited. ``reads``: pairs of events around the reading of rows."""

    rank: int
    step: int
    action: Action
    waited: float
    begun: torch.Event
    ended: torch.Event
    stalls: Stalls
    reads: Stalls


class DeviceSpans:
    """Times the actions of an accelerator by device events. The first event is matched with the host's clock. Later
    times are sums of differences between consecutive events, because the device measures long intervals less
    precisely."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._timed: deque[_Timed] = deque()
        self._begun: torch.Event | None = None
        self._reads: Stalls = []
        self._last: tuple[torch.Event, float] | None = None

    def begin(self) -> float:
        """Record the start of an action as an event behind all queued work. Return the host's time
        (time.perf_counter)."""
        self._copies.take_stalls()
        self._begun, self._reads = self._event(), []
        if self._last is None:
            self._begun.synchronize()
            self._last = self._begun, time.perf_counter()
        return time.perf_counter()

    def end(self, rank: int, step: int, action: Action, waited: float) -> None:
        """Record the end of ``action`` as an event behind all queued work."""
        assert self._begun is not None
        stalls, reads, ended = self._copies.take_stalls(), self._reads, self._event()
        self._timed.append(_Timed(rank, step, action, waited, self._begun, ended, stalls, reads))
        self._begun = None

    @property
    def within(self) -> bool:
        return self._begun is not None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Record an event before and after the reading of rows.

        If the device still has queued work, it passes both events at the same time, and the reading counts as no delay.
        """
        begun = self._event()
        try:
            yield
        finally:
            self._reads.append((begun, self._event()))

    def take(self) -> list[Span]:
        """Return the spans of the actions that the device has completed since the last call."""
        found: list[Span] = []
        while self._timed and self._timed[0].ended.query():
            found.append(self._span(self._timed.popleft()))
        return found

    def aside(self) -> HostSpans:
        return _Untimed(self._copies)

    def _span(self, timed: _Timed) -> Span:
        begun = self._time(timed.begun)
        ended = self._time(timed.ended)
        stalled, read = _seconds_between(timed.stalls), _seconds_between(timed.reads)
        # The host may have waited while the device was busy; a device that receives only waits.
        waited = ended - begun if timed.action.kind in _RECEIVES else timed.waited + stalled + read
        return Span(
            timed.rank,
            timed.step,
            timed.action.kind,
            timed.action.stage,
            timed.action.micro,
            begun,
            ended,
            min(waited, ended - begun),
            min(read, ended - begun),
        )

    def _time(self, event: torch.Event) -> float:
        assert self._last is not None
        before, then = self._last
        self._last = event, then + before.elapsed_time(event) / 1000
        return self._last[1]

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


def _seconds_between(pairs: Stalls) -> float:
    return sum(first.elapsed_time(last) for first, last in pairs) / 1000


class TimedRows(RowsOf):
    """A wrapper of ``batch`` that measures the time of reading rows. The time of a read inside of an action is a part
    of the action's span. The time of all other reads is summed in ``seconds``."""

    def __init__(self, batch: Rows, spans: SpanClock) -> None:
        super().__init__(batch)
        self._spans, self.seconds = spans, 0.0

    def inputs(self, start: int, stop: int) -> Any:
        return self._timed(self._batch.inputs, start, stop)

    def targets(self, start: int, stop: int) -> Any:
        return self._timed(self._batch.targets, start, stop)

    def _timed(self, read: Callable[[int, int], Any], start: int, stop: int) -> Any:
        if self._spans.within:
            with self._spans.reading():
                return read(start, stop)
        begun = time.perf_counter()
        try:
            return read(start, stop)
        finally:
            self.seconds += time.perf_counter() - begun


def spans_of(device: torch.device, copies: CopyEngine) -> SpanClock:
    """Return the clock for actions on ``device``. ``copies`` makes the device's copies, and records its stalls."""
    return HostSpans() if device.type == "cpu" else DeviceSpans(device, copies)
