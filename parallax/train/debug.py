"""What a rank leaves of some of its steps for those who look for a fault: on request, for it is large and slows down.

Every recorder has the same two calls, and one that records nothing is used where nothing was asked for, so the loop
does not know.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from parallax.common.events import Span
from parallax.errors import ConfigError, check_choice
from parallax.machine.accelerators import accelerator_of
from parallax.machine.host import resident_bytes
from parallax.report.trace import chrome_trace
from parallax.runtime.meters.step import StepResult

RECORDS = ("off", "trace", "profiler", "memory")
Call = Callable[[], None]
_ALLOCATIONS = 1_000_000  # that a CUDA snapshot remembers


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """What each rank records of a few steps, into the run directory.

    ``record``: ``trace``, its actions with their waits as a Chrome trace; ``profiler``, every operator, by
    torch.profiler; ``memory``, every allocation: on CUDA a snapshot for https://pytorch.org/memory_viz, on the CPU
    torch.profiler's account of memory; and for each step a line of a table with what the process and its device hold.
    ``steps``: the first and the last step, counted from 1 where the process starts, so that a run that goes on is
    recorded too. What is recorded costs time and memory: the figures of a run that records are not those of the plan.
    """

    record: str = "off"
    steps: tuple[int, int] = (3, 5)

    def __post_init__(self) -> None:
        check_choice("debug.record", self.record, RECORDS)
        first, last = self.steps
        if not 1 <= first <= last:
            raise ConfigError(
                f"debug.steps=[{first},{last}]: accepted are a first step from 1 and a last one from it"
            )


class Recorder(Protocol):
    """Around every step of a loop."""

    def step(self) -> AbstractContextManager[None]:
        """Around one step."""

    def add(self, result: StepResult) -> None:
        """What came of it."""

    def close(self) -> None:
        """The loop has ended: write what has not been written."""


def recorder(config: DebugConfig, directory: Path, rank: int, device: torch.device) -> Recorder:
    """What ``config`` asks for. Its files are complete when the last of the steps has ended, or the loop."""
    if config.record == "off":
        return NoRecord()
    if config.record == "trace":
        return Trace(config.steps, directory / f"trace-rank{rank}.json")
    path = directory / f"{config.record}-rank{rank}.json"
    if config.record == "profiler":
        return Window(config.steps, *_profiler(path, device))
    about = None
    if device.type != "cpu":
        accelerator, pickle = accelerator_of(device), path.with_suffix(".pickle")
        about = accelerator.allocation_history(pickle, device, _ALLOCATIONS)
    about = about or _profiler(path, device, memory=True)
    return MemoryTable(Window(config.steps, *about), path.with_suffix(".csv"), device)


class NoRecord:
    """Records nothing."""

    def step(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def add(self, result: StepResult) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Trace:
    """The spans of the steps, which the executor measures anyway."""

    def __init__(self, steps: tuple[int, int], path: Path) -> None:
        self._count, (self._first, self._last), self._path = 0, steps, path
        self._spans: list[Span] = []

    def step(self) -> AbstractContextManager[None]:
        """Nothing: spans say themselves when they began."""
        return contextlib.nullcontext()

    def add(self, result: StepResult) -> None:
        """Take the spans of a step; write them after the last."""
        self._count += 1
        if self._first <= self._count <= self._last:
            self._spans += result.spans
        if self._count == self._last:
            self.close()

    def close(self) -> None:
        """Write the spans that there are."""
        if self._spans:
            self._path.write_text(json.dumps(chrome_trace(self._spans)), encoding="utf-8")
            self._spans = []


class Window:
    """Something of torch that records between ``start`` and ``stop``, which writes the file."""

    def __init__(self, steps: tuple[int, int], start: Call, stop: Call) -> None:
        self._count, (self._first, self._last) = 0, steps
        self._start, self._stop, self._open = start, stop, False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Record it if it is one of the steps."""
        self._count += 1
        if self._count == self._first:
            self._start()
            self._open = True
        with record_function(f"step {self._count}") if self._open else contextlib.nullcontext():
            yield
        if self._count == self._last:
            self.close()

    def add(self, result: StepResult) -> None:
        """Nothing: torch has seen it all."""

    def close(self) -> None:
        """Write what was recorded, if anything was."""
        if self._open:
            self._open = False
            self._stop()


def _profiler(path: Path, device: torch.device, *, memory: bool = False) -> tuple[Call, Call]:
    """torch.profiler; with ``memory`` it also notes every allocation, and from where it came."""
    own = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.CPU)
    activities = list(dict.fromkeys([ProfilerActivity.CPU, own]))
    profiler = profile(
        activities=activities, record_shapes=memory, profile_memory=memory, with_stack=memory
    )

    def stop() -> None:
        profiler.stop()
        profiler.export_chrome_trace(str(path))

    return profiler.start, stop


class MemoryTable:
    """What was held after each step of the run as a table, and every allocation of some."""

    def __init__(self, allocations: Window, table: Path, device: torch.device) -> None:
        self._allocations, self._device, self._count = allocations, device, 0
        self._file = table.open("w", newline="", encoding="utf-8")
        self._table: csv.DictWriter[str] | None = None

    def step(self) -> AbstractContextManager[None]:
        """Record it if it is one of the steps."""
        return self._allocations.step()

    def add(self, result: StepResult) -> None:
        """A line of the table: what is held now, and since the engine was built at most."""
        self._count += 1
        line = {
            "step": self._count,
            "resident_bytes": resident_bytes(),
            "peak_bytes": result.peak_bytes,
            "swapped_out_bytes": result.swap.bytes_out,
            "swapped_in_bytes": result.swap.bytes_in,
        }
        if self._device.type != "cpu":
            line["allocated_bytes"] = torch.accelerator.memory_allocated(self._device)
            line["reserved_bytes"] = torch.accelerator.memory_reserved(self._device)
        if self._table is None:
            self._table = csv.DictWriter(self._file, list(line))
            self._table.writeheader()
        self._table.writerow(line)
        self._file.flush()

    def close(self) -> None:
        self._allocations.close()
        self._file.close()
