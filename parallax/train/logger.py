"""The rank-zero logger: progress lines and metrics of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallax.train.monitor import LoggerConfig, MetricsLog, Progress, StepLine, Unwritten

OUTPUT = "the progress lines to standard output"
_EVALUATING_SECONDS = 10.0  # between two lines of a long evaluation


class RankZeroLogger:
    """Prints progress lines and writes metrics on rank 0. On other ranks ``outputs`` is None, and every call is a
    no-op."""

    def __init__(self, outputs: tuple[MetricsLog, Progress] | None, unwritten: Unwritten) -> None:
        self._outputs, self._unwritten = outputs, unwritten
        self._noted = 0.0  # the time of the last line of an evaluation

    def step(self, line: StepLine, metrics: dict[str, Any]) -> None:
        """Print and write a step."""
        if self._outputs is not None:
            log, progress = self._outputs
            log.write(metrics)
            with self._unwritten.trying(OUTPUT):
                progress.show(line)

    def evaluating(self, step: int, done: int, count: int | None) -> None:
        """Print a line every ten seconds of an evaluation: ``done`` batches of ``count`` (None: unknown)."""
        now = time.monotonic()
        if done == 1:
            self._noted = now
        elif now - self._noted > _EVALUATING_SECONDS and done != count:
            self._noted = now
            of = f" of {count}" if count is not None else ""
            self.note(f"step {step}: evaluating, {done}{of} held-out batches done")

    def evaluation(self, step: int, loss: float, name: str = "") -> None:
        """Print and write the validation loss of all held-out rows, or of the set ``name``."""
        if self._outputs is not None:
            key = f"validation_loss/{name}" if name else "validation_loss"
            self._outputs[0].write({"step": step, key: loss})
        of = f" of {name}" if name else ""
        self.note(f"step {step}: validation loss{of} {loss:.4f}")

    def note(self, text: str) -> None:
        """Print a line."""
        if self._outputs is not None:
            with self._unwritten.trying(OUTPUT):
                self._outputs[1].note(text)


@contextlib.contextmanager
def open_logger(
    rank: int, directory: Path, logger: LoggerConfig, total: int, done: int, unwritten: Unwritten
) -> Iterator[RankZeroLogger]:
    """Yield the logger of ``rank`` in a run of ``total`` steps that resumes after step ``done``."""
    if rank > 0:
        yield RankZeroLogger(None, unwritten)
        return
    with (
        MetricsLog(directory, logger, unwritten) as metrics,
        Progress(total, done + 1, print_every=logger.print_every) as progress,
    ):
        yield RankZeroLogger((metrics, progress), unwritten)
