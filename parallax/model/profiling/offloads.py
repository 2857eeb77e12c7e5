"""How much longer a block computes where what it saves is offloaded, measured with and without in turn."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from parallax.model.profiling.clock import Clock

# Of two readings each, at least and at most: a difference is less certain than either.
_DIFFERENCES = 3, 9

Saving = contextlib.AbstractContextManager[object]


class Offloads(Protocol):
    """One block's saved activations, offloaded and brought back."""

    def saving(self) -> Saving:
        """The context of a forward."""

    def bring_back(self) -> None:
        """Wait until all has left, then begin to bring it back for the backward."""

    @property
    def stall_seconds(self) -> float:
        """How long anyone has waited for transfers so far."""


class Offloader(Protocol):
    """Offloads as a run would."""

    @property
    def tier(self) -> str:
        """Its name."""

    def of(
        self, block: nn.Module, moved: int, device: torch.device
    ) -> contextlib.AbstractContextManager[Offloads]:
        """Offloading of what ``block`` saves, ``moved`` bytes."""


def slowdown_seconds(
    offloads: Offloads,
    forward: Callable[[Saving], tuple[Tensor, ...]],
    backward: Callable[[tuple[Tensor, ...]], None],
    clock: Clock,
    seconds: float,
) -> float:
    """What ``forward`` and ``backward`` take longer where what is saved leaves and comes back, without the time in
    which they wait for it: the median of turns with and without, one after the other, for about ``seconds``."""

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
    return max(0.0, statistics.median(differences[1:]))  # the first warms up
