"""The health monitor of a run: waits for rows, slow ranks and growing memory. Ranks exchange their figures together
with the statistics of each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from parallax.common.events import busy_seconds
from parallax.runtime.batch import Rows
from parallax.runtime.engine import Engine
from parallax.runtime.meters.step import StepResult
from parallax.train.health.memory import BETWEEN, ROWS, STEP, Growth, MemoryAlarm
from parallax.train.health.stragglers import Straggler, StragglerDetector

_STARVED = 0.1  # share of a step that ranks wait for rows, from which they are starved
_STARVED_SECONDS = 0.005  # of waits in a step; shorter ones are not worth a message
_STARVED_STEPS = 5  # starved steps in a row after which the reason is printed


class HealthMonitor:
    """Monitors the health of one rank. In each step call :meth:`fetch` and :meth:`stepped`, send :meth:`columns` to all
    ranks, and call :meth:`agree` with the columns of all ranks. ``fetch_seconds``: the duration of the last
    :meth:`fetch`."""

    def __init__(self, engine: Engine, why_slow: Callable[[], str] = lambda: "") -> None:
        """``why_slow()`` returns why reading this rank's rows takes long."""
        self._mesh = engine.mesh
        self._detector = StragglerDetector(engine.plan)
        # Asynchronous replicas do not wait for slow ones, and compute different numbers of rows.
        self._compares = not engine.mesh.asynchronous
        self._alarm = MemoryAlarm(
            engine.tier_bytes, engine.mesh.device, engine.mesh.nodes.local_count
        )
        self._why_slow, self._starved = why_slow, 0
        self.fetch_seconds = self._seconds = self._busy = 0.0
        self._growth: Growth | None = None
        self._waited = self._total = 0.0
        self._input_seconds = self.input_share = 0.0
        self.stragglers: list[Straggler] = []
        self._growths: list[str] = []

    def fetch(self, get: Callable[[], Rows]) -> Rows:
        """Return the rows of the next step from ``get()``, and measure how long ``get()`` takes."""
        self._alarm.mark(BETWEEN)
        begun = time.perf_counter()
        batch = get()
        self.fetch_seconds = time.perf_counter() - begun
        self._alarm.mark(ROWS)
        return batch

    def stepped(self, result: StepResult) -> None:
        """Record the figures of the step that used the rows of the last :meth:`fetch`."""
        self._busy, self._seconds = busy_seconds(result.spans), result.seconds
        self._input_seconds = self.fetch_seconds + result.input_seconds
        self._alarm.mark(STEP)
        self._growth = self._alarm.find_growth()

    def columns(self) -> dict[str, float]:
        """Return this rank's figures for the other ranks: the seconds that it waited for rows, the seconds of the whole
        step, the seconds that it computed, and whether its memory grows."""
        return {
            "input_seconds": self._input_seconds,
            "whole_seconds": self._seconds + self.fetch_seconds,
            "busy_seconds": self._busy,
            "memory_grows": float(self._growth is not None),
        }

    def agree(self, columns: Mapping[str, Sequence[float]], *, saving: bool = False) -> list[str]:
        """Return messages to print after "step n". All ranks must call this method. ``columns``: the figures of all
        ranks. ``saving``: whether a checkpoint was written during the step, because writing slows ranks down."""
        waited, busy = columns["input_seconds"], columns["busy_seconds"]
        # Of all ranks, so that all decide alike whether to gather why.
        step = max(columns["whole_seconds"])
        self.input_share = min(1.0, max(waited) / step) if step > 0 else 0.0
        self._waited, self._total = self._waited + max(waited), self._total + step
        slow = [] if saving or not self._compares else self._detector.add(self._seconds, busy)
        found = [
            self._detector.straggler(rank, factor, self._mesh.nodes.name(rank))
            for rank, factor in slow
        ]
        self.stragglers += found
        starved = self._gather_starvation(waited)
        growths = self._gather_growth_messages() if any(columns["memory_grows"]) else []
        self._growths += growths
        return [
            f": {each}"
            for each in (*(f"{one}; training continues" for one in found), *growths, *starved)
        ]

    def metrics(self) -> dict[str, Any]:
        return {"input_seconds": self._input_seconds, "input_share": self.input_share}

    def slow(self) -> str:
        """Return a text that names all ranks that were found to be slow so far; empty if there are none. With slow
        ranks, another plan may be faster."""
        return "; ".join(map(str, self.stragglers))

    def summary(self) -> dict[str, Any]:
        return {
            "input_share": self._waited / self._total if self._total else None,
            "stragglers": [asdict(each) for each in self.stragglers],
            "memory_growth": self._growths,
        }

    def _gather_starvation(self, waited: Sequence[float]) -> list[str]:
        """Return a message that names the rank that waits longest for rows, and the reason. The result is empty unless
        ranks have waited for rows in several consecutive steps. The message is returned only once in a run."""
        starved = self.input_share > _STARVED and max(waited) > _STARVED_SECONDS
        self._starved = self._starved + 1 if starved else min(0, self._starved)
        if self._starved < _STARVED_STEPS:
            return []
        self._starved = -(2**62)
        slowest = max(range(len(waited)), key=lambda rank: waited[rank])
        why = self._mesh.all_gather_object(self._why_slow())[slowest]
        return [
            f"rank {slowest} waits for rows {self.input_share:.0%} of a step{why and f' ({why})'}"
        ]

    def _gather_growth_messages(self) -> list[str]:
        mine = str(self._growth) if self._growth is not None else ""
        messages = self._mesh.all_gather_object(mine)
        self._growth = None
        return [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message]
