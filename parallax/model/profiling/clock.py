"""The clock that a block's seconds are read from, and the state of the caches before it is read.

A profile is the cost on a machine that does nothing else: what ranks do to each other is the planner's business, what
other users of the machine do is nobody's. So where all work is done by one thread, its own processor time is read,
which stands still while others run. In a step a block finds its weights and its input where all other blocks have left
them, so the caches are cleared before each reading.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from parallax.machine.accelerators import accelerator_of

_WARM_SECONDS = 0.2
# More than the private caches of a core; shared ones serve a whole step.
EVICTING_BYTES = 16 * 2**20


class Clock:
    """Reads the seconds of work on one device; ``undisturbed`` by whoever else uses the machine, or not. An
    accelerator's are its own, from event to event, when it has been at work for long enough to be at full speed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.undisturbed = device.type == "cpu" and torch.get_num_threads() == 1
        self._tells_queue = _queued_seconds() > 0
        evicting = (
            EVICTING_BYTES
            if device.type == "cpu"
            else 2 * accelerator_of(device).cache_bytes(device)
        )
        self._other = torch.zeros(evicting, dtype=torch.uint8, device=device)
        self._last: torch.Event | None = None
        self._seconds = 0.0
        if device.type != "cpu":
            self._warm_up()

    def now(self) -> float:
        """Seconds since some moment, with all work on the device done."""
        if self.undisturbed:
            return time.thread_time()  # backward runs on the calling thread too
        if self._device.type != "cpu":
            return self._device_now()
        return time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since some moment, waits for other threads of the process included, those for a core excluded where
        the system tells them: when threads work together, but whoever else uses the machine should not count."""
        if self._device.type != "cpu":
            return self._device_now()
        return time.perf_counter() - _queued_seconds()

    def waited_seconds(self) -> float:
        """Seconds since some moment in which this thread had no core: as the system tells, otherwise those that are
        not its processor time. None are known where threads work together, or on an accelerator."""
        if self._device.type != "cpu":
            return 0.0
        if self._tells_queue or not self.undisturbed:
            return _queued_seconds()
        return time.perf_counter() - time.thread_time()

    def mark(self) -> float | torch.Event:
        """This moment, or the device's when it has done what it was given; nobody waits."""
        return self.now() if self._device.type == "cpu" else self._event()

    def seconds_since(self, mark: float | torch.Event) -> float:
        """Seconds since then, with all work on the device done."""
        if isinstance(mark, float):
            return self.now() - mark
        end = self._event()
        end.synchronize()
        return float(mark.elapsed_time(end)) / 1000

    def evict_caches(self) -> None:
        """Drive what was used before out of a core's own caches, or an accelerator's."""
        self._other.add_(1)

    def _device_now(self) -> float:
        event = self._event()
        event.synchronize()
        if self._last is not None:
            self._seconds += self._last.elapsed_time(event) / 1000
        self._last = event
        return self._seconds

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _warm_up(self) -> None:
        """A device that was idle runs slowly at first."""
        until = time.perf_counter() + _WARM_SECONDS
        while time.perf_counter() < until:
            self.evict_caches()
            torch.accelerator.synchronize(self._device)


def _queued_seconds() -> float:
    """How long this thread could have run and had no core; 0 where the system does not count it."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


LEAST_SECONDS = 0.1  # of timed work: less says nothing
_FIELDS = 256  # of the square matrices of the reference product
_PRODUCTS = 3  # of each reference: the fastest counts


def disturbance(wall: float, waited: float, references: Sequence[float]) -> float:
    """How many times as long the timed work took as on a free machine, at least 1: the larger of ``wall`` seconds over
    those without the ``waited`` ones, and of the typical over the fastest of the ``references``."""
    if wall < LEAST_SECONDS:
        return 1.0
    processor = max(wall - max(0.0, waited), wall / 1000)
    fastest = min(references, default=0.0)
    slower = statistics.median(references) / fastest if fastest > 0 else 1.0
    return max(1.0, wall / processor, slower)


class NoiseMeter:
    """Sums up the wall time and the waits of timed parts, with a reference product before each."""

    def __init__(
        self,
        device: torch.device,
        clock: Clock,
        wall: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock, self._read_wall = clock, wall
        self._matrix = torch.ones(_FIELDS, _FIELDS, device=device)
        self._references: list[float] = []
        self._wall = self._waited = 0.0

    @contextmanager
    def part(self) -> Iterator[None]:
        self._references.append(self._reference())
        wall, waited = self._read_wall(), self._clock.waited_seconds()
        yield
        self._wall += self._read_wall() - wall
        self._waited += self._clock.waited_seconds() - waited

    @property
    def disturbance(self) -> float:
        """Of all parts so far; see :func:`disturbance`."""
        return disturbance(self._wall, self._waited, self._references)

    def _reference(self) -> float:
        seconds = []
        for _ in range(_PRODUCTS):
            start = self._clock.now()
            torch.mm(self._matrix, self._matrix)
            seconds.append(self._clock.now() - start)
        return min(seconds)
