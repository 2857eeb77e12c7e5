"""Measure by how many seconds a block slows down if its saved tensors are offloaded."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from parallax.model.profiling.clock import Clock

# Minimum and maximum number of differences, each of two readings.
_DIFFERENCES = 3, 9

Saving = contextlib.AbstractContextManager[object]


class Offloads(Protocol):
    """The interface to an object that offloads and prefetches the saved activations of one block."""

    def saving(self) -> Saving:
        """Return the saved-tensor hooks under which a forward runs."""

    def bring_back(self) -> None:
        """Wait until all activations are offloaded, then start prefetching them for the backward."""

    @property
    def stall_seconds(self) -> float:
        """The seconds spent waiting for transfers so far."""


class Offloader(Protocol):
    """The interface to an object that creates :class:`Offloads` for a block. These offload as in a run."""

    @property
    def tier(self) -> str:
        """The name of the offload tier."""

    def of(
        self, block: nn.Module, moved: int, device: torch.device
    ) -> contextlib.AbstractContextManager[Offloads]:
        """Return a context that yields the :class:`Offloads` of ``block``.

        ``moved``: the bytes of its saved activations.
        """


def slowdown_seconds(
    offloads: Offloads,
    forward: Callable[[Saving], tuple[Tensor, ...]],
    backward: Callable[[tuple[Tensor, ...]], None],
    clock: Clock,
    seconds: float,
) -> float:
    """Return the seconds by which offloading slows down ``forward`` and ``backward`` together.

    Waits for transfers do not count. The result is the median difference between a run with and a run without
    offloading. Such pairs of runs are repeated for about ``seconds``, as measured by ``clock``.
    """

    def plain() -> float:
        clock.evict_caches()
        start = clock.elapsed()
        backward(forward(contextlib.nullcontext()))
        return clock.elapsed() - start

    def offloaded() -> float:
        clock.evict_caches()
        start, stalled = clock.elapsed(), offloads.stall_seconds
        results = forward(offloads.saving())
        taken = clock.elapsed() - start
        offloads.bring_back()
        clock.evict_caches()
        start = clock.elapsed()
        backward(results)
        return taken + clock.elapsed() - start - (offloads.stall_seconds - stalled)

    differences: list[float] = []
    begun = time.perf_counter()
    while len(differences) <= _DIFFERENCES[0] or (
        len(differences) <= _DIFFERENCES[1] and time.perf_counter() - begun < seconds
    ):
        differences.append(-plain() + offloaded())
    return max(0.0, statistics.median(differences[1:]))  # the first is a warm-up
