"""The output of a run while it trains: a progress line, metrics as JSON, and TensorBoard curves."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from parallax.common.files import AppendedFile, disk_free_bytes, temporary_folder
from parallax.common.units import format_bytes
from parallax.errors import ConfigError, check_count, printable
from parallax.train.repeats import METRICS, forget_steps


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """The logs of a run besides ``metrics.jsonl``.

    ``tensorboard``: curves for TensorBoard. ``events``: every action of every rank, with its times. ``print_every``: if
    the output is not a terminal, one line is printed for this many steps; auto prints the first ten steps and then
    about a hundred lines in a run. ``metrics.jsonl`` has every step.
    """

    tensorboard: bool = True
    events: bool = True
    print_every: int | str = "auto"

    def __post_init__(self) -> None:
        check_count("logger.print_every", self.print_every)


class Unwritten:
    """Failed writes of logs. They do not end a run: the first failure of each file is reported at once; all are counted
    and reported at the end."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, int]] = {}
        self._news: list[str] = []

    @contextlib.contextmanager
    def trying(self, path: Path | str) -> Iterator[None]:
        """Suppress an OSError of writing to ``path`` in the block, and record it."""
        try:
            yield
        except OSError as error:
            text, count = self._found.get(str(path), ("", 0))
            if not count:
                text = f"cannot write {printable(str(path))}: {_reason(error, path)}"
                self._news.append(text)
            self._found[str(path)] = text, count + 1

    @property
    def has_news(self) -> bool:
        """Whether a failure has not been reported yet."""
        return bool(self._news)

    def news(self) -> list[str]:
        """Return messages about the files that failed for the first time since the last call."""
        news, self._news = self._news, []
        return news

    def lines(self) -> list[str]:
        """Return messages about all failures, with counts."""
        return [
            f"{text} ({f'{count} times' if count > 1 else 'once'})"
            for text, count in self._found.values()
        ]


def _reason(error: OSError, path: Path | str) -> str:
    why = printable(error.strerror or str(error))
    if isinstance(path, Path):
        with contextlib.suppress(OSError):
            return f"{why}, {format_bytes(disk_free_bytes(path))} free"
    return why


# --------------------------------------------------------------------------------------------- metrics


class Curves(Protocol):
    """A writer of scalars; TensorBoard's own writer has these methods."""

    def add_scalar(self, tag: str, data: float, step: int) -> None:
        """Write a point."""

    def close(self) -> None:
        """Flush and close."""


def _tensorboard(directory: Path) -> Curves:
    try:
        from tensorboard.summary import (
            Writer,  # 0.3 s, and torch's own writer 1.7 s: only when asked
        )
    except ImportError as error:
        raise ConfigError(
            f"logger.tensorboard=true: tensorboard cannot be imported ({error}); "
            "pip install tensorboard, or set logger.tensorboard=false"
        ) from error
    if not isinstance(threading.excepthook, _ThreadErrors):
        threading.excepthook = _ThreadErrors(threading.excepthook)
    return Writer(str(directory))


class _ThreadErrors:
    """An excepthook that ignores errors of TensorBoard's thread, because its writer raises them again."""

    def __init__(self, before: Callable[[threading.ExceptHookArgs], object]) -> None:
        self._before = before

    def __call__(self, found: threading.ExceptHookArgs) -> None:
        if not (
            isinstance(found.exc_value, OSError)
            and type(found.thread).__module__.startswith("tensorboard.")
        ):
            self._before(found)


def load_curves(logger: LoggerConfig) -> None:
    """Import and use the writer of a :class:`MetricsLog` once, before memory is measured, so that the writer's memory
    is not counted as the stage's."""
    if logger.tensorboard:
        with temporary_folder() as folder:
            curves = _tensorboard(folder)
            curves.add_scalar("nothing", 0.0, 0)
            curves.close()


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` with None in place of NaN and infinite numbers."""
    return {key: value if is_finite(value) else None for key, value in record.items()}


class MetricsLog:
    """Appends records to ``metrics.jsonl`` in ``directory``, and their numbers to ``tensorboard/``.

    Each line is flushed, so a killed run loses at most the line that it was writing; a partial line is removed when the
    file is opened again.
    """

    def __init__(
        self, directory: Path, logger: LoggerConfig, unwritten: Unwritten | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / METRICS
        forget_steps(self.path, sys.maxsize)  # a partial line of a killed process
        self._unwritten = unwritten or Unwritten()
        self._file = AppendedFile(self.path)
        self._curves: Curves | None = None
        if logger.tensorboard:
            with self._unwritten.trying(directory / "tensorboard"):
                self._curves = _tensorboard(directory / "tensorboard")
        self._folder = directory / "tensorboard"

    def write(self, record: Mapping[str, Any]) -> None:
        """Append ``record``, which has a ``step``; numbers that are not finite become null."""
        with self._unwritten.trying(self.path):
            self._file.append((json.dumps(finite(record), allow_nan=False) + "\n").encode())
        # A writer that has failed once is not used again.
        curves, self._curves = self._curves, None
        if curves is None:
            return
        with self._unwritten.trying(self._folder):
            for key, value in record.items():
                if key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                    curves.add_scalar(key, float(value), int(record["step"]))
            self._curves = curves

    def close(self) -> None:
        self._file.close()
        if self._curves is not None:
            with self._unwritten.trying(self._folder):
                self._curves.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_finite(value: object) -> bool:
    """Whether JSON can represent ``value``."""
    return not isinstance(value, float) or math.isfinite(value)


# -------------------------------------------------------------------------------------------- progress


_LINES = 100  # that a run prints where the output is no terminal
_FIRST_LINES = 10  # steps whose lines are all printed
_SHOWN_SHARE = 0.005  # of a step: less would be shown as 0%


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """The figures in a step's progress line.

    ``rate``: units per second. ``peak_bytes`` and ``budget_bytes``: of the rank whose device is fullest.
    ``offloaded_bytes``: of all ranks; None if no stage swaps. ``overlap``: the fraction of the transfer time during
    which no rank waited. ``stall_seconds``: the longest wait of a rank for swapped data. ``skipped``: skipped steps so
    far. ``input_share``: the longest wait of a rank for rows, as a share of the step. ``learning_rate``: 0 if unknown.
    """

    step: int
    loss: float
    rate: float
    unit: str = "tokens"
    peak_bytes: int
    budget_bytes: int
    offloaded_bytes: int | None = None
    overlap: float = 1.0
    stall_seconds: float = 0.0
    skipped: int = 0
    input_share: float = 0.0
    learning_rate: float = 0.0


class Progress:
    """Shows progress: on a terminal as one line that is updated; elsewhere as plain lines for the first ten steps, the
    last one, and every ``print_every``-th step (auto: about a hundred lines).

    Steps count from ``first_step`` (1 for a new run) to ``total_steps``. The time left is estimated from the last 20
    steps, so a slow first step or a checkpoint does not distort it for long.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 1,
        *,
        print_every: int | str = "auto",
        file: TextIO | None = None,
    ) -> None:
        self._total, self._dense = total_steps, 0
        if isinstance(print_every, str):
            print_every = -(-(total_steps - first_step + 1) // _LINES)
            self._dense = first_step + _FIRST_LINES - 1
        self._every = max(1, print_every)
        self._times: deque[tuple[float, int]] = deque(
            [(time.monotonic(), first_step - 1)], maxlen=20
        )
        console = Console(file=file or sys.stdout)
        self._line: _LiveLine | _PlainLines = (
            _LiveLine(console) if console.is_terminal else _PlainLines(console)
        )

    def show(self, line: StepLine) -> None:
        """Show a finished step."""
        self._times.append((time.monotonic(), line.step))
        if (
            isinstance(self._line, _LiveLine)
            or line.step <= self._dense
            or line.step % self._every == 0
            or line.step == self._total
        ):
            self._line.show(printable(self._text(line)))

    def note(self, text: str) -> None:
        """Print a permanent line, for example of an evaluation or a checkpoint."""
        self._line.note(printable(text))

    def __enter__(self) -> Progress:
        self._line.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._line.stop()

    def _text(self, line: StepLine) -> str:
        width = len(str(self._total))
        share = line.peak_bytes / line.budget_bytes if line.budget_bytes else 0.0
        return "  ".join(
            [
                f"step {line.step:>{width}}/{self._total}",
                f"loss {line.loss:.4f}",
                *([f"lr {line.learning_rate:.2e}"] if line.learning_rate else []),
                f"{_short(line.rate)} {line.unit}/s",
                f"memory {format_bytes(line.peak_bytes)} of {format_bytes(line.budget_bytes)} ({share:.0%})",
                *_swapped(line),
                *([f"input {line.input_share:.0%}"] if line.input_share >= _SHOWN_SHARE else []),
                *([f"{line.skipped} skipped"] if line.skipped else []),
                f"{_clock(self._seconds_left(line.step))} left",
            ]
        )

    def _seconds_left(self, step: int) -> float:
        start, first = self._times[0]
        done = step - first
        return (time.monotonic() - start) / done * (self._total - step) if done > 0 else math.nan


class _LiveLine:
    """One line that is rewritten in place; notes scroll above it."""

    def __init__(self, console: Console) -> None:
        # No thread; a line appears when there is news.
        self._live = Live(console=console, auto_refresh=False)

    def start(self) -> None:
        self._live.start()

    def show(self, text: str) -> None:
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def note(self, text: str) -> None:
        self._live.console.print(Text(text))

    def stop(self) -> None:
        self._live.stop()


class _PlainLines:
    """Plain lines, flushed, without control characters."""

    def __init__(self, console: Console) -> None:
        self._file = console.file

    def start(self) -> None:
        """No-op."""

    def show(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def note(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def stop(self) -> None:
        """No-op."""


def _swapped(line: StepLine) -> list[str]:
    if line.offloaded_bytes is None:
        return []
    waited = f"{line.overlap:.0%} overlapped, {line.stall_seconds:.3f} s stalled"
    return [f"swap {format_bytes(line.offloaded_bytes)} ({waited})"]


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.1f}"


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
