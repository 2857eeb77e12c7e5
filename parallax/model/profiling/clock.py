"""Time blocks: a clock, the eviction of caches before each measurement, and a measure of how busy the machine was.

A profile holds the costs on an idle machine. The planner predicts how ranks slow each other down, and other users of
the machine must not count. So if one thread does all work, its CPU time is read, which excludes the time in which other
threads run. In a step, other blocks have evicted a block's weights and inputs from the caches, so the caches are
evicted before each measurement.

CPU time excludes waits for a core, but not every disturbance. Other programs also slow down caches and the shared units
of a core. And if several threads compute and one of them has no core, the others wait for it. Two figures, taken for
each timed part, show such disturbances. One is the ratio of the part's wall time to its wall time without waits for a
core. The other is the time of a fixed matrix product, which is constant on an idle machine.
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
    """Measures the seconds of work on one device.

    ``undisturbed``: whether the clock excludes time in which other users of the machine run. On an accelerator the
    clock uses events. It first warms the device up to full speed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.undisturbed = device.type == "cpu" and torch.get_num_threads() == 1
        self._tells_queue = queued_seconds() > 0
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
        """Return seconds since an arbitrary origin, after waiting for all work on the device.

        On a CPU these are seconds of CPU time if ``undisturbed``, and of wall time otherwise.
        """
        if self.undisturbed:
            return time.thread_time()  # backward runs on the calling thread too
        if self._device.type != "cpu":
            return self._device_now()
        return time.perf_counter()

    def elapsed(self) -> float:
        """Return seconds since an arbitrary origin, to time work that several threads of this process share.

        Waits of this thread for the other threads are included. Its waits for a core are excluded, if the system
        reports them.
        """
        if self._device.type != "cpu":
            return self._device_now()
        return time.perf_counter() - queued_seconds()

    def waited_seconds(self) -> float:
        """Return a counter of the seconds for which this thread has waited for a core. Only differences are meaningful.

        If the system has no such counter, the value is wall time minus CPU time if one thread computes, and 0 if
        several do. On an accelerator the value is 0.
        """
        if self._device.type != "cpu":
            return 0.0
        if self._tells_queue or not self.undisturbed:
            return queued_seconds()
        return time.perf_counter() - time.thread_time()

    def mark(self) -> float | torch.Event:
        """Return a time stamp of the moment at which the work enqueued so far is done, without waiting for it."""
        return self.now() if self._device.type == "cpu" else self._event()

    def seconds_since(self, mark: float | torch.Event) -> float:
        """Return the seconds from ``mark`` until all work on the device is done, after waiting for this work."""
        if isinstance(mark, float):
            return self.now() - mark
        end = self._event()
        end.synchronize()
        return float(mark.elapsed_time(end)) / 1000

    def evict_caches(self) -> None:
        """Evict earlier data from the caches of a core, or from the caches of an accelerator."""
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
        """Run work until the device is at full speed, because an idle device is slow at first."""
        until = time.perf_counter() + _WARM_SECONDS
        while time.perf_counter() < until:
            self.evict_caches()
            torch.accelerator.synchronize(self._device)


def queued_seconds() -> float:
    """Return the seconds for which this thread was ready to run without a core; 0 if the system does not report it."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


LEAST_SECONDS = 0.1  # least seconds of timed work for a meaningful ratio
_MATRIX_SIZE = 256  # size of the matrices in the reference product
_PRODUCTS = 3  # per reference; the fastest counts


def disturbance(wall: float, waited: float, references: Sequence[float]) -> float:
    """Return the factor, at least 1, by which timed work was slower than on an idle machine.

    It is the larger of two ratios: ``wall`` / (``wall`` − ``waited``), and median / minimum of ``references``.
    ``wall``: the seconds of the work. ``waited``: the part of ``wall`` for which the work waited for a core.
    ``references``: seconds of a fixed matrix product. The factor is 1 if ``wall`` is too short to judge.
    """
    if wall < LEAST_SECONDS:
        return 1.0
    processor = max(wall - max(0.0, waited), wall / 1000)
    fastest = min(references, default=0.0)
    slower = statistics.median(references) / fastest if fastest > 0 else 1.0
    return max(1.0, wall / processor, slower)


class NoiseMeter:
    """Adds up the wall time of timed parts and their waits for a core.

    Before each part, it times a fixed matrix product. ``clock`` measures the waits and the products. ``wall()`` returns
    the wall time in seconds.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Clock,
        wall: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock, self._read_wall = clock, wall
        self._matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, device=device)
        self._references: list[float] = []
        self._wall = self._waited = 0.0

    @contextmanager
    def timed_part(self) -> Iterator[None]:
        self._references.append(self._reference())
        wall, waited = self._read_wall(), self._clock.waited_seconds()
        yield
        self._wall += self._read_wall() - wall
        self._waited += self._clock.waited_seconds() - waited

    @property
    def disturbance(self) -> float:
        """Return the :func:`disturbance` of all parts so far."""
        return disturbance(self._wall, self._waited, self._references)

    def _reference(self) -> float:
        seconds = []
        for _ in range(_PRODUCTS):
            start = self._clock.now()
            torch.mm(self._matrix, self._matrix)
            seconds.append(self._clock.now() - start)
        return min(seconds)
