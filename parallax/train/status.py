"""The status file of a rank, which ``parallax top`` shows."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from parallax.machine.host import memory_limits, node_name, resident_bytes
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile, Utilization
from parallax.report.ranks import RankSnapshot
from parallax.runtime.failure.heartbeat import BeatStatus
from parallax.runtime.meters.step import StepResult

_WRITE_SECONDS = 1.0  # between two files
_SENSE_SECONDS = 5.0  # between two readings of a device's sensors
_PACE_STEPS = 20
_WARM_UP = 2  # steps that the means leave out

Sensors = Callable[[], tuple[float | None, float | None]]


class StepObserver(Protocol):
    """Receives the figures of each step of a rank."""

    def stepped(self, result: StepResult, step: int, fetch_seconds: float) -> None:
        """Record step number ``step`` of the run, and the seconds that fetching its rows took."""


class NoStepObserver:
    """Ignores all figures."""

    def stepped(self, result: StepResult, step: int, fetch_seconds: float) -> None:
        """No-op."""


class RankStatusFile:
    """The status file of a rank, replaced at most once a second. The rank's watchdog thread calls this object as a
    :class:`~parallax.runtime.failure.heartbeat.Heartbeat`. A separate thread writes the file, so that neither training
    nor the watchdog waits for a file system that does not answer."""

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        rank: int,
        steps: int,
        *,
        profile: ModelProfile | None = None,
        tokens_per_row: int = 1,
        ranks_here: int = 1,
        sensors: Sensors = lambda: (None, None),
    ) -> None:
        """``steps``: the number of steps of the run. ``sensors()`` returns the device's temperature in °C and its power
        in watts; None if unknown. ``ranks_here``: the number of ranks that share the memory of the host."""
        place = plan.coordinate(rank)
        self._directory, self._sensors, self._tokens = directory, sensors, tokens_per_row
        self._rows, self._budget = plan.rows_of(rank), plan.allocator_bytes(rank)
        self._utilization = _utilization_of(plan, profile, place.pipeline_rank)
        self._base = RankSnapshot(
            rank=rank,
            ranks=plan.world_size,
            stage=place.pipeline_rank,
            replica=place.replica,
            host=node_name(),
            time=time.time(),
            begun=time.monotonic(),
            steps=steps,
            host_budget_bytes=_host_bytes() // ranks_here,
        )
        self._figures: Mapping[str, Any] = {}
        self._times: deque[tuple[float, int]] = deque(maxlen=_PACE_STEPS + 1)
        self._fetched, self._counted, self._begun = 0.0, 0, 0
        self._written_at = self._sensed_at = float("-inf")
        self._sensed: tuple[float | None, float | None] = (None, None)
        self._writing = threading.Lock()
        self._writer: threading.Thread | None = None

    def stepped(self, result: StepResult, step: int, fetch_seconds: float) -> None:
        """Store the figures of a step for the next write. All of them are stored in one new object, because the writing
        thread reads them at any time."""
        now = time.monotonic()
        self._times.append((now, step))
        self._begun += 1
        if self._begun > _WARM_UP:
            self._counted += 1
            self._fetched += fetch_seconds + result.read_seconds
        whole, swap = result.seconds + fetch_seconds, result.swap
        waited = fetch_seconds + result.input_seconds
        moved, rate = swap.bytes_out + swap.bytes_in, self._rows / whole if whole > 0 else 0.0
        swaps = swap.limit_bytes + moved > 0
        self._figures = {
            "step": step,
            "step_seconds": whole,
            "rows_per_second": rate,
            "tokens_per_second": rate * self._tokens if self._tokens > 1 else None,
            "utilization": self._utilization.share(rate, 1),
            "device_bytes": result.peak_bytes,
            "device_budget_bytes": self._budget,
            "stall_share": swap.stall_seconds / result.seconds if swaps else None,
            "input_share": min(1.0, waited / whole) if whole > 0 else 0.0,
            "swap_bytes_per_second": moved / result.seconds if swaps else None,
            "fetch_seconds": self._fetched / max(1, self._counted),
            "seconds_left": self._seconds_left(step, now),
        }

    def _seconds_left(self, step: int, now: float) -> float | None:
        first, done = self._times[0]
        return (now - first) / (step - done) * (self._base.steps - step) if step > done else None

    def beat(self, status: BeatStatus) -> None:
        """Start to write the file in a thread. Does nothing if the last write is less than a second ago or still
        running, or if the run has ended."""
        due = time.monotonic() - self._written_at >= _WRITE_SECONDS and not self._base.ended
        if due and (self._writer is None or not self._writer.is_alive()):
            doing = (str(status.seen).partition(", ")[0],)
            self._writer = threading.Thread(
                target=self._write, args=doing, name="parallax-status", daemon=True
            )
            self._writer.start()

    def wait(self) -> None:
        """Wait until the current write has ended."""
        if self._writer is not None:
            self._writer.join()

    def end(self, how: str = "ended") -> None:
        """Write the file for the last time, with ``how``, the way in which the run ended."""
        self._base = replace(self._base, ended=how)
        self._write("")

    def _write(self, doing: str) -> None:
        with self._writing:  # the main thread ends it
            self._write_now(doing)

    def _write_now(self, doing: str) -> None:
        self._written_at = now = time.monotonic()
        if now - self._sensed_at >= _SENSE_SECONDS:
            self._sensed_at, self._sensed = now, self._sensors()
        snapshot = replace(
            self._base,
            **self._figures,
            time=time.time(),
            doing=doing,
            host_bytes=resident_bytes(),
            temperature=self._sensed[0],
            power_watts=self._sensed[1],
        )
        with contextlib.suppress(OSError):
            snapshot.save(self._directory)


def _utilization_of(plan: Plan, profile: ModelProfile | None, pipeline_rank: int) -> Utilization:
    """Return the meter of model FLOP utilization for one pipeline rank: it uses the operations of the rank's blocks for
    one row, and the peak performance of the rank's device."""
    if profile is None:
        return Utilization()
    blocks = [
        block
        for stage in plan.stages_of(pipeline_rank)
        for block in profile.blocks[plan.stages[stage].start : plan.stages[stage].stop]
    ]
    flops = sum(block.flops_per_row for block in blocks)
    return Utilization(flops, profile.peak_flops, profile.peak_source)


def _host_bytes() -> int:
    """Return the bytes of memory that all processes on this host together may use."""
    shared = [limit.limit_bytes for limit in memory_limits() if not limit.per_process]
    return min([psutil.virtual_memory().total, *shared])
