"""The start and end of each action of a step, on the device that runs it.

On a CPU these are the times of call and return. An accelerator runs asynchronously: an action returns when its kernels
are queued, so on the host's clock all time would fall on the one action that synchronizes. There two events are
recorded around each action, and read when the device has passed them. The last actions of a step are read in the next
step, so nothing synchronizes for the sake of timing.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, Protocol

import torch

from parallax.common.events import Span
from parallax.machine.device import CopyEngine, Stalls
from parallax.plan.schedule import Action, Kind

_RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)


class SpanClock(Protocol):
    """Measures the times of one rank's actions, which run one after another."""

    def begin(self) -> float:
        """Start an action; return the host's time."""

    def end(self, rank: int, step: int, action: Action, waited: float) -> None:
        """End ``action``; the host waited for ``waited`` seconds in it."""

    def take(self) -> list[Span]:
        """Return the spans completed since the last call, in order."""

    def aside(self) -> HostSpans:
        """Return a clock with the same interface for actions whose spans are discarded, such as those of an
        evaluation."""


class HostSpans:
    """Times actions by the host's clock."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._begun = 0.0

    def begin(self) -> float:
        self._begun = time.perf_counter()
        return self._begun

    def end(self, rank: int, step: int, action: Action, waited: float) -> None:
        begun, now = self._begun, time.perf_counter()
        self._spans.append(
            Span(rank, step, action.kind, action.stage, action.micro, begun, now, waited)
        )

    def take(self) -> list[Span]:
        taken, self._spans = self._spans, []
        return taken

    def aside(self) -> HostSpans:
        return HostSpans()


class _Untimed(HostSpans):
    """Times a device's actions by the host's clock. It also discards the device's stall events, which would
    accumulate."""

    def __init__(self, copies: CopyEngine) -> None:
        super().__init__()
        self._copies = copies

    def begin(self) -> float:
        self._copies.take_stalls()
        return super().begin()


class _Timed(NamedTuple):
    """An action between two device events; ``stalls`` are pairs of events between which its stream waited."""

    rank: int
    step: int
    action: Action
    waited: float
    begun: torch.Event
    ended: torch.Event
    stalls: Stalls


class DeviceSpans:
    """Times the actions of an accelerator by device events. The first event is tied to the host's clock. Later times
    are sums of the differences between consecutive events: the device measures a long interval with less precision."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._timed: deque[_Timed] = deque()
        self._begun: torch.Event | None = None
        self._last: tuple[torch.Event, float] | None = None

    def begin(self) -> float:
        """Record an event after all queued work."""
        self._copies.take_stalls()
        self._begun = self._event()
        if self._last is None:
            self._begun.synchronize()
            self._last = self._begun, time.perf_counter()
        return time.perf_counter()

    def end(self, rank: int, step: int, action: Action, waited: float) -> None:
        """Record an event after all queued work."""
        assert self._begun is not None
        stalls = self._copies.take_stalls()
        self._timed.append(_Timed(rank, step, action, waited, self._begun, self._event(), stalls))

    def take(self) -> list[Span]:
        """Return the spans of actions that the device has completed."""
        found: list[Span] = []
        while self._timed and self._timed[0].ended.query():
            found.append(self._span(self._timed.popleft()))
        return found

    def aside(self) -> HostSpans:
        return _Untimed(self._copies)

    def _span(self, timed: _Timed) -> Span:
        begun = self._time(timed.begun)
        ended = self._time(timed.ended)
        stalled = sum(first.elapsed_time(last) for first, last in timed.stalls) / 1000
        # The host may have waited while the device was busy; a device that receives only waits.
        waited = ended - begun if timed.action.kind in _RECEIVES else timed.waited + stalled
        return Span(
            timed.rank,
            timed.step,
            timed.action.kind,
            timed.action.stage,
            timed.action.micro,
            begun,
            ended,
            min(waited, ended - begun),
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


def spans_of(device: torch.device, copies: CopyEngine) -> SpanClock:
    """Return the clock for actions on ``device``; ``copies`` makes the device's copies."""
    return HostSpans() if device.type == "cpu" else DeviceSpans(device, copies)
