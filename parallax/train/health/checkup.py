"""What the ranks find out about a run beside training it, told with what they exchange after each step anyway."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from parallax.common.events import busy_seconds
from parallax.runtime.batch import Rows
from parallax.runtime.engine import Engine
from parallax.runtime.meters.step import StepResult
from parallax.train.health.inputs import TimedRows
from parallax.train.health.memory import BETWEEN, ROWS, STEP, Growth, MemoryAlarm
from parallax.train.health.stragglers import Straggler, StragglerJudge

_HIDDEN = 0.1  # of a device's seconds: reading that takes no more than that does not matter


class Checkup:
    """One rank's part. :meth:`fetch` and :meth:`stepped` are called in each step, then :meth:`columns`, which are told
    to all, and :meth:`agree` with those of all."""

    def __init__(self, engine: Engine) -> None:
        self._mesh = engine.mesh
        self._judge = StragglerJudge(engine.plan)
        self._alarm = MemoryAlarm(
            engine.tier_bytes, engine.mesh.device, engine.mesh.nodes.local_count
        )
        self._batch: TimedRows | None = None
        self._fetching = self._seconds = self._busy = 0.0
        self._growth: Growth | None = None
        self._waited = self._total = 0.0
        self._input_seconds = self.input_share = 0.0
        self.stragglers: list[Straggler] = []
        self._growths: list[str] = []

    def fetch(self, get: Callable[[], Rows]) -> Rows:
        """The rows of the next step, which ``get`` gives."""
        self._alarm.mark(BETWEEN)
        begun = time.perf_counter()
        self._batch = TimedRows(get())
        self._fetching = time.perf_counter() - begun
        self._alarm.mark(ROWS)
        return self._batch

    def stepped(self, result: StepResult) -> None:
        """A step was taken with them."""
        on_demand = self._batch.seconds if self._batch is not None else 0.0
        self._busy = self._own_seconds(busy_seconds(result.spans), on_demand)
        self._input_seconds, self._seconds = self._fetching + on_demand, result.seconds
        self._alarm.mark(STEP)
        self._growth = self._alarm.look()

    def _own_seconds(self, busy: float, on_demand: float) -> float:
        """For how long this rank computed; 0 where nobody knows. Spans of an accelerator are the device's, and how much
        of the reading is in them, which the host did beside it, is not known."""
        if self._mesh.device.type == "cpu":
            return max(0.0, busy - on_demand)
        return busy if on_demand <= _HIDDEN * busy else 0.0

    def columns(self) -> dict[str, float]:
        """Of this rank: seconds that it waited for rows, that it computed, and whether its memory rises."""
        return {
            "input_seconds": self._input_seconds,
            "busy_seconds": self._busy,
            "memory_grows": float(self._growth is not None),
        }

    def agree(self, columns: Mapping[str, Sequence[float]], *, saving: bool = False) -> list[str]:
        """What is to be said after "step n", given the numbers of all ranks by name; all ranks call it.
        ``saving``: a checkpoint was written beside the step, which slows down the ranks that write."""
        waited, busy = columns["input_seconds"], columns["busy_seconds"]
        step = self._seconds + self._fetching
        self.input_share = min(1.0, max(waited) / step) if step > 0 else 0.0
        self._waited, self._total = self._waited + max(waited), self._total + step
        slow = [] if saving else self._judge.add(self._seconds, busy)
        found = [
            self._judge.straggler(rank, factor, self._mesh.nodes.name(rank))
            for rank, factor in slow
        ]
        self.stragglers += found
        growths = self._tell_growth() if any(columns["memory_grows"]) else []
        self._growths += growths
        return [f": {each}" for each in (*(f"{one}; training goes on" for one in found), *growths)]

    def metrics(self) -> dict[str, Any]:
        return {"input_seconds": self._input_seconds, "input_share": self.input_share}

    def slow(self) -> str:
        """Why another plan is worth while: a rank is slow; empty where none is."""
        return "; ".join(map(str, self.stragglers))

    def summary(self) -> dict[str, Any]:
        return {
            "input_share": self._waited / self._total if self._total else None,
            "stragglers": [asdict(each) for each in self.stragglers],
            "memory_growth": self._growths,
        }

    def _tell_growth(self) -> list[str]:
        mine = str(self._growth) if self._growth is not None else ""
        told = self._mesh.gather_objects(mine)
        self._growth = None
        return [f"rank {rank}: {words}" for rank, words in enumerate(told) if words]
