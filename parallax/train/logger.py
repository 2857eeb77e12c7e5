"""The rank-zero logger: progress lines and metrics of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from parallax.train.loggers.destination import LoggedRun
from parallax.train.monitor import LoggerConfig, MetricsLog, Progress, StepLine, Unwritten

OUTPUT = "the progress lines to standard output"
NO_METRICS: Mapping[str, float] = MappingProxyType({})
_EVALUATING_SECONDS = 10.0  # between two lines of a long evaluation


class RankZeroLogger:
    """Prints progress lines and writes metrics on rank 0. On other ranks ``outputs`` is None and no call does
    anything."""

    def __init__(self, outputs: tuple[MetricsLog, Progress] | None, unwritten: Unwritten) -> None:
        self._outputs, self._unwritten = outputs, unwritten
        self._noted = 0.0  # the time of the last line of an evaluation

    def step(self, line: StepLine, metrics: Mapping[str, Any], ranks: Mapping[str, float]) -> None:
        """Print the progress ``line`` of a step, and write its ``metrics``. ``ranks``: further figures of each rank,
        which only loggers get."""
        if self._outputs is not None:
            log, progress = self._outputs
            log.write(metrics, ranks)
            with self._unwritten.trying(OUTPUT):
                progress.show(line)

    def evaluating(self, step: int, done: int, count: int | None) -> None:
        """Print, every ten seconds, that an evaluation has done ``done`` of ``count`` batches (None: unknown)."""
        now = time.monotonic()
        if done == 1:
            self._noted = now
        elif now - self._noted > _EVALUATING_SECONDS and done != count:
            self._noted = now
            of = f" of {count}" if count is not None else ""
            self.note(f"step {step}: evaluating, {done}{of} held-out batches done")

    def evaluation(
        self, step: int, loss: float, name: str = "", metrics: Mapping[str, float] = NO_METRICS
    ) -> dict[str, float]:
        """Print, write and return the validation loss and the metrics of the held-out set ``name``; "" is the main
        set."""
        end = f"/{name}" if name else ""
        numbers = {"loss": loss, **metrics}
        figures = {f"validation_{key}{end}": number for key, number in numbers.items()}
        if self._outputs is not None:
            self._outputs[0].write({"step": step, **figures})
        of = f" of {name}" if name else ""
        others = "".join(f", {key} {number:.4f}" for key, number in metrics.items())
        self.note(f"step {step}: validation loss{of} {loss:.4f}{others}")
        return figures

    def note(self, text: str) -> None:
        """Print a line."""
        if self._outputs is not None:
            with self._unwritten.trying(OUTPUT):
                self._outputs[1].note(text)

    def close_loggers(self) -> None:
        """Close the loggers, which may take a while."""
        if self._outputs is not None:
            self._outputs[0].close_loggers()


@contextlib.contextmanager
def open_logger(
    rank: int, logger: LoggerConfig, run: LoggedRun, total: int, unwritten: Unwritten
) -> Iterator[RankZeroLogger]:
    """Yield the logger of this rank in a run of ``total`` steps."""
    if rank > 0:
        yield RankZeroLogger(None, unwritten)
        return
    with (
        MetricsLog(run.directory, logger, unwritten, run) as metrics,
        Progress(total, run.done + 1, print_every=logger.print_every) as progress,
    ):
        yield RankZeroLogger((metrics, progress), unwritten)
