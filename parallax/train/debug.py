"""Record some steps for debugging, as traces, profiles, or tables of memory. Recordings are large and slow, so they are
made only on request."""

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
_ALLOCATIONS = 1_000_000  # allocations that a CUDA snapshot holds


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Recordings of a few steps by each rank, in the run directory.

    ``record``: what each rank records. ``trace`` records the rank's actions and their waits, as a Chrome trace.
    ``profiler`` records every operator, by torch.profiler. ``memory`` records every allocation, and a table with the
    memory of the process and of the device after each step. Allocations on CUDA are recorded as a snapshot for
    https://pytorch.org/memory_viz, and on the CPU by torch.profiler. ``steps``: the first and the last step to record,
    counted from 1 at the start of the process, so that resumed runs can be recorded too. A recording costs time and
    memory, which no plan predicts.
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
    """Records training steps for debugging."""

    def step(self) -> AbstractContextManager[None]:
        """Return a context for one step."""

    def add(self, result: StepResult) -> None:
        """Record the result of a step. Call this method after the context of the step has ended."""

    def close(self) -> None:
        """Write all recorded data that has not been written."""


def recorder(config: DebugConfig, directory: Path, rank: int, device: torch.device) -> Recorder:
    """Return the recorder for ``config``. The recorded files are complete after the last step to record, or at the end
    of the loop."""
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
        """No-op: no steps are recorded."""

    def close(self) -> None:
        """No-op: there is no recorded data to write."""


class Trace:
    """Records the spans (times of actions) of steps as a Chrome trace. The executor measures them in every step, so
    a trace adds no measurements."""

    def __init__(self, steps: tuple[int, int], path: Path) -> None:
        self._count, (self._first, self._last), self._path = 0, steps, path
        self._spans: list[Span] = []

    def step(self) -> AbstractContextManager[None]:
        """Return an empty context, since the executor measures spans in every step."""
        return contextlib.nullcontext()

    def add(self, result: StepResult) -> None:
        """Store the spans of a step if it is to be recorded. After the last step to record, write all stored spans."""
        self._count += 1
        if self._first <= self._count <= self._last:
            self._spans += result.spans
        if self._count == self._last:
            self.close()

    def close(self) -> None:
        """Write the stored spans."""
        if self._spans:
            self._path.write_text(json.dumps(chrome_trace(self._spans)), encoding="utf-8")
            self._spans = []


class Window:
    """Records consecutive steps with a tool of torch. ``start`` is called before the first step, and ``stop`` after the
    last one; ``stop`` writes the file."""

    def __init__(self, steps: tuple[int, int], start: Call, stop: Call) -> None:
        self._count, (self._first, self._last) = 0, steps
        self._start, self._stop, self._open = start, stop, False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context for one step. Recording starts when the context of the first step to record is entered, and stops
        when the context of the last one has ended."""
        self._count += 1
        if self._count == self._first:
            self._start()
            self._open = True
        with record_function(f"step {self._count}") if self._open else contextlib.nullcontext():
            yield
        if self._count == self._last:
            self.close()

    def add(self, result: StepResult) -> None:
        """No-op: torch's tool records the step inside the context."""

    def close(self) -> None:
        """Write the recording, if it was started."""
        if self._open:
            self._open = False
            self._stop()


def _profiler(path: Path, device: torch.device, *, memory: bool = False) -> tuple[Call, Call]:
    """Return the functions that start and stop torch.profiler. ``memory``: also record every allocation with its
    stack."""
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
    """Records a table of the memory after each step. ``allocations`` also records every allocation of the steps to
    record."""

    def __init__(self, allocations: Window, table: Path, device: torch.device) -> None:
        self._allocations, self._device, self._count = allocations, device, 0
        self._file = table.open("w", newline="", encoding="utf-8")
        self._table: csv.DictWriter[str] | None = None

    def step(self) -> AbstractContextManager[None]:
        """Return a context for one step, in which ``allocations`` records every allocation if the step is to be
        recorded."""
        return self._allocations.step()

    def add(self, result: StepResult) -> None:
        """Append a line to the table: the bytes in use now, the peak since the engine was built, and the bytes swapped
        in this step."""
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
