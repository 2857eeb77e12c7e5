"""When the actions of a step began and ended, where the work is done.

On a CPU that is when they were called and returned. An accelerator works behind the host's back: an action returns when
its work has been given to the device, so the host's clock would put all time into the one action that waits for it.
There two events are recorded around each action, and read when the device has passed them. That is in the same step for
all but its last actions, which come with the next one's: nothing is waited for only to be timed.
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
    """Takes the times of one rank's actions, one after another."""

    def begin(self) -> float:
        """An action begins; the host's time."""

    def end(self, rank: int, step: int, action: Action, waited: float) -> None:
        """It was ``action``, and the host did nothing but wait for ``waited`` seconds of it."""

    def take(self) -> list[Span]:
        """The spans that are known and were not taken yet, in order."""

    def aside(self) -> HostSpans:
        """A clock for actions whose times nobody wants to know."""


class HostSpans:
    """Actions are over when they return."""

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
    """Of a device's actions when they were asked for. Their stalls would pile up."""

    def __init__(self, copies: CopyEngine) -> None:
        super().__init__()
        self._copies = copies

    def begin(self) -> float:
        self._copies.take_stalls()
        return super().begin()


class _Timed(NamedTuple):
    """An action between two events, of which its stream spent the time between each pair of ``stalls`` waiting."""

    rank: int
    step: int
    action: Action
    waited: float
    begun: torch.Event
    ended: torch.Event
    stalls: Stalls


class DeviceSpans:
    """Actions of an accelerator. Times are counted on from event to event: the device's own count loses digits, and is
    tied to the host's clock once, at the first action."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._timed: deque[_Timed] = deque()
        self._begun: torch.Event | None = None
        self._last: tuple[torch.Event, float] | None = None

    def begin(self) -> float:
        """After all that was given to the device before."""
        self._copies.take_stalls()
        self._begun = self._event()
        if self._last is None:
            self._begun.synchronize()
            self._last = self._begun, time.perf_counter()
        return time.perf_counter()

    def end(self, rank: int, step: int, action: Action, waited: float) -> None:
        """After all that was given to the device until now."""
        assert self._begun is not None
        stalls = self._copies.take_stalls()
        self._timed.append(_Timed(rank, step, action, waited, self._begun, self._event(), stalls))

    def take(self) -> list[Span]:
        """Those that the device has passed."""
        found: list[Span] = []
        while self._timed and self._timed[0].ended.query():
            found.append(self._span(self._timed.popleft()))
        return found

    def aside(self) -> HostSpans:
        """By the host's clock, which waits for nothing."""
        return _Untimed(self._copies)

    def _span(self, timed: _Timed) -> Span:
        begun = self._time(timed.begun)
        ended = self._time(timed.ended)
        stalled = sum(first.elapsed_time(last) for first, last in timed.stalls) / 1000
        # What the host waited for may have passed while the device was busy with something else; a device that
        # receives does nothing but wait.
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
    """The clock of a rank's device, whose copies are made by ``copies``."""
    return HostSpans() if device.type == "cpu" else DeviceSpans(device, copies)
