"""What a training loop says: rank 0 for all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from parallax.train.monitor import LoggerConfig, MetricsLog, Progress, StepLine, Unwritten

OUTPUT = "the progress lines to standard output"
_EVALUATING_SECONDS = 10.0  # between two lines of a long evaluation


class Voice(Protocol):
    """What the loop says while it runs."""

    def step(self, line: StepLine, metrics: dict[str, Any]) -> None:
        """One step has ended."""

    def evaluating(self, step: int, done: int, count: int | None) -> None:
        """An evaluation goes on: ``done`` batches of ``count``, where that is known."""

    def evaluation(self, step: int, loss: float) -> None:
        """An evaluation has ended."""

    def note(self, text: str) -> None:
        """Anything else worth a line."""


class _Speaker:
    """Rank 0: the progress line and the metrics file."""

    def __init__(self, metrics: MetricsLog, progress: Progress, unwritten: Unwritten) -> None:
        self._metrics, self._progress, self._unwritten = metrics, progress, unwritten
        self._told = 0.0  # when an evaluation was last said to go on

    def step(self, line: StepLine, metrics: dict[str, Any]) -> None:
        self._metrics.write(metrics)
        with self._unwritten.trying(OUTPUT):
            self._progress.show(line)

    def evaluating(self, step: int, done: int, count: int | None) -> None:
        """Show it now and then."""
        now = time.monotonic()
        if done == 1:
            self._told = now
        elif now - self._told > _EVALUATING_SECONDS and done != count:
            self._told = now
            of = f" of {count}" if count is not None else ""
            self.note(f"step {step}: evaluating, {done}{of} held-out batches done")

    def evaluation(self, step: int, loss: float) -> None:
        self._metrics.write({"step": step, "validation_loss": loss})
        self.note(f"step {step}: validation loss {loss:.4f}")

    def note(self, text: str) -> None:
        with self._unwritten.trying(OUTPUT):
            self._progress.note(text)


class _Silence:
    """Every other rank."""

    def step(self, line: StepLine, metrics: dict[str, Any]) -> None:
        """Rank 0 says it."""

    def evaluating(self, step: int, done: int, count: int | None) -> None:
        """Rank 0 says it."""

    def evaluation(self, step: int, loss: float) -> None:
        """Rank 0 says it."""

    def note(self, text: str) -> None:
        """Rank 0 says it."""


@contextlib.contextmanager
def open_voice(
    rank: int, directory: Path, logger: LoggerConfig, total: int, done: int, unwritten: Unwritten
) -> Iterator[Voice]:
    """The voice of ``rank`` in a run of ``total`` steps, ``done`` of which are behind it."""
    if rank > 0:
        yield _Silence()
        return
    with (
        MetricsLog(directory, logger, unwritten) as metrics,
        Progress(total, done + 1, print_every=logger.print_every) as progress,
    ):
        yield _Speaker(metrics, progress, unwritten)
