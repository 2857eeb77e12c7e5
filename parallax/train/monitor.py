"""The output of a run while it trains: a progress line, metrics as JSON, and figures for loggers."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from parallax.common.files import AppendedFile, disk_free_bytes
from parallax.common.metrics import METRICS
from parallax.common.units import format_bytes
from parallax.errors import ConfigError, check_choice, check_count, printable
from parallax.train.loggers.destination import LOGGERS, LoggedRun, logger_named
from parallax.train.loggers.sender import LogSender, figures_of
from parallax.train.repeats import forget_steps, last_step


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """The logs of a run besides ``metrics.jsonl``.

    ``to``: the loggers to use: any of tensorboard, csv, wandb, mlflow and trackio. They get the figures of each step,
        the memory and utilisation of each rank, the settings, and the run's name and tags.
    ``project``: the project of Weights & Biases and Trackio, and the experiment of MLflow.
    ``tags``: tags of the run at these loggers.
    ``events``: record every action of every rank, with its times.
    ``print_every``: the number of steps from one printed line to the next, if the output is not a terminal; auto prints
        the first ten steps and then about a hundred lines in a run. ``metrics.jsonl`` has every step.
    """

    to: list[str] = field(default_factory=lambda: ["tensorboard"])
    project: str = "parallax"
    tags: list[str] = field(default_factory=list)
    events: bool = True
    print_every: int | str = "auto"

    def __post_init__(self) -> None:
        for name in self.to:
            check_choice("logger.to", name, sorted(LOGGERS))
        if not self.project:
            raise ConfigError("logger.project: it is empty; accepted is a name")
        check_count("logger.print_every", self.print_every)

    def check_packages(self) -> None:
        """Raise :class:`ConfigError` if the package of a logger is missing, without importing it."""
        for name in self.to:
            if LOGGERS[name] and find_spec(name) is None:
                logger_named(name)


class Unwritten:
    """Failures of files, loggers and callbacks that do not end a run. The first failure of each file, logger or
    callback is reported at once. All failures are counted, and reported at the end of the run."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, int]] = {}
        self._news: list[str] = []

    @contextlib.contextmanager
    def trying(self, path: Path | str) -> Iterator[None]:
        """A context that records an OSError of writing to ``path`` instead of raising it."""
        try:
            yield
        except OSError as error:
            self.add(str(path), f"cannot write {printable(str(path))}: {_reason(error, path)}")

    def add(self, key: str, text: str, count: int = 1) -> None:
        """Record ``count`` failures of ``key``, which names a file, logger or callback. Only the ``text`` of the first
        failure is reported."""
        first, before = self._found.get(key, ("", 0))
        if not before:
            first = text
            self._news.append(text)
        self._found[key] = first, before + count

    @property
    def has_news(self) -> bool:
        """Whether there is a failure that has not been reported yet."""
        return bool(self._news)

    def news(self) -> list[str]:
        """Return messages about the failures that occurred for the first time since the last call."""
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


def load_loggers(logger: LoggerConfig) -> None:
    """Import the packages of the loggers before memory is measured, so that their memory is not attributed to the
    stage. Raises :class:`ConfigError` if a package is missing."""
    for name in logger.to:
        logger_named(name)


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` with None in place of NaN and infinite numbers."""
    return {key: value if is_finite(value) else None for key, value in record.items()}


class MetricsLog:
    """Appends records to ``metrics.jsonl`` in ``directory``, and sends their numbers to the loggers.

    Each line is flushed, so a killed run loses at most one line. A partial line is removed when the file is opened
    again.
    """

    def __init__(
        self,
        directory: Path,
        logger: LoggerConfig,
        unwritten: Unwritten | None = None,
        run: LoggedRun | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / METRICS
        forget_steps(self.path, sys.maxsize)  # a partial line of a killed process
        self._unwritten = unwritten or Unwritten()
        self._file = AppendedFile(self.path)
        done = last_step(self.path)
        run = run or LoggedRun(directory=directory, name=directory.name, done=max(0, done))
        self._senders = [
            LogSender(name, logger_named(name), run) for name in dict.fromkeys(logger.to)
        ]

    def write(
        self, record: Mapping[str, Any], more: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Append ``record``, which has a ``step``. Non-finite numbers become null. ``more``: further figures, which
        only loggers get."""
        with self._unwritten.trying(self.path):
            self._file.append((json.dumps(finite(record), allow_nan=False) + "\n").encode())
        if self._senders:
            figures = {**figures_of(record), **more}
            for sender in self._senders:
                sender.send(int(record["step"]), figures)
            self._take_failures()

    def close_loggers(self, *, failed: bool = False) -> None:
        """Send the remaining figures to the loggers, for a limited time, and close them. A second call does nothing."""
        for sender in self._senders:
            sender.close(failed=failed)
        self._take_failures()
        self._senders = []

    def _take_failures(self) -> None:
        for sender in self._senders:
            for text, points in sender.take_failures().items():
                self._unwritten.add(sender.name, text, points)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        self.close_loggers(failed=kind is not None)


def is_finite(value: object) -> bool:
    """Whether JSON can represent ``value``."""
    return not isinstance(value, float) or math.isfinite(value)


# -------------------------------------------------------------------------------------------- progress


_LINES = 100  # lines of a run if the output is not a terminal
_FIRST_LINES = 10  # steps whose lines are all printed
_SHOWN_SHARE = 0.005  # least share of a step that is shown; less would read 0%


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """The figures in the progress line of a step.

    ``rate``                             the speed in rows or tokens per second, as ``unit`` says
    ``peak_bytes`` and ``budget_bytes``  peak memory and budget of the rank whose device is fullest
    ``offloaded_bytes``                  the bytes that all ranks have offloaded; None if no stage swaps
    ``overlap``                          the fraction of the transfer time during which no rank waited
    ``stall_seconds``                    the longest wait of a rank for swapped data
    ``skipped``                          the number of skipped steps so far
    ``input_share``                      the longest wait of a rank for rows, as a fraction of the step
    ``learning_rate``                    the learning rate of the step; 0 if unknown
    ``utilization``                      model FLOP utilization of all devices; None if unknown
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
    utilization: float | None = None


class Progress:
    """Shows progress. A terminal has one line that is updated. Any other output gets a plain line for each of the first
    ten steps, the last step, and every ``print_every``-th step (auto: about a hundred lines).

    Steps are numbered from ``first_step`` (1 for a new run) to ``total_steps``. The remaining time is estimated from
    the last 20 steps, so a slow first step or a checkpoint does not distort it for long.
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
        """Show ``line``, the figures of a finished step."""
        self._times.append((time.monotonic(), line.step))
        if (
            isinstance(self._line, _LiveLine)
            or line.step <= self._dense
            or line.step % self._every == 0
            or line.step == self._total
        ):
            self._line.show(printable(self._text(line)))

    def note(self, text: str) -> None:
        """Print a line that stays, for example about an evaluation or a checkpoint."""
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
                f"{_clock(self._seconds_left(line.step))} left",  # a narrow terminal cuts what follows
                *_utilized(line),
                f"memory {format_bytes(line.peak_bytes)} of {format_bytes(line.budget_bytes)} ({share:.0%})",
                *_swapped(line),
                *([f"input {line.input_share:.0%}"] if line.input_share >= _SHOWN_SHARE else []),
                *([f"{line.skipped} skipped"] if line.skipped else []),
            ]
        )

    def _seconds_left(self, step: int) -> float:
        start, first = self._times[0]
        done = step - first
        return (time.monotonic() - start) / done * (self._total - step) if done > 0 else math.nan


class _LiveLine:
    """A line that is rewritten in place. Notes are printed above it."""

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
    """Prints plain lines without control characters, and flushes each."""

    def __init__(self, console: Console) -> None:
        self._file = console.file

    def start(self) -> None:
        """No-op: plain lines need no display."""

    def show(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def note(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def stop(self) -> None:
        """No-op: plain lines need no display that would be closed."""


def _utilized(line: StepLine) -> list[str]:
    if line.utilization is None:
        return []
    wrong = " (impossible: the peak is too low)" if line.utilization > 1 else ""
    return [f"MFU {line.utilization:.0%}{wrong}"]


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
