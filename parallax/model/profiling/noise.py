"""Measure how busy the machine was while blocks were timed.

The clock of a single thread does not count its waits for a core, but the caches and the shared units of a core are
slower beside other work, and several threads wait for the one that has no core. So two figures are taken around each
timed part: wall time against the time in which the thread had a core, and a matrix product of one size, which takes the
same time whenever the machine is in the same state.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from parallax.model.profiling.clock import Clock

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
        wall, waited = self._read_wall(), self._clock.waited()
        yield
        self._wall += self._read_wall() - wall
        self._waited += self._clock.waited() - waited

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
