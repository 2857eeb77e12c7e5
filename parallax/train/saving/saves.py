"""Decide when a training loop saves checkpoints and waits for them, and report them.

Training waits while its state is copied. It waits for the files only for the last checkpoint of a run, and for an
unfinished checkpoint when the next is due. All other writes run in parallel with the steps. The numbers that ranks
exchange after each step show when all ranks have finished (:mod:`parallax.runtime.pending`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallax.errors import NonFiniteError
from parallax.runtime.checkpoint import step_of
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.engine import Engine
from parallax.train.logger import RankZeroLogger
from parallax.train.watchdog import Watchdog

_PHASE = "saving a checkpoint"
_LONG_SECONDS = 1.0  # shortest wait for the previous checkpoint that is reported


class Saves:
    """The checkpoints that one rank's loop saves in ``directory``. ``config`` determines which are kept."""

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        config: CheckpointConfig,
        watchdog: Watchdog,
    ) -> None:
        self._engine, self._directory, self._config = engine, directory, config
        higher = engine.metrics.config.higher_is_better(config.metric)
        self._retention, self._watchdog = replace(config.retention, higher=higher), watchdog
        self.seconds = 0.0
        """Seconds for which training has waited for checkpoints so far."""
        self.completed: list[Path] = []
        """Checkpoints that are complete and that the caller has still to handle. The caller removes each one."""
        self._reported = 0.0  # part of :attr:`seconds` that :meth:`columns` has returned
        # The step of the last checkpoint; 0, because before the first step there is nothing to save.
        self._saved: int | None = 0
        self._saves_none = True  # whether this start has saved none so far

    def columns(self) -> dict[str, float]:
        """Return this rank's figures for the other ranks: the progress of the checkpoint that it is writing, and the
        seconds that training has waited for checkpoints since the last call."""
        waited, self._reported = self.seconds - self._reported, self.seconds
        progress = float(self._engine.saving.pending.progress)
        return {"saving_progress": progress, "checkpoint_seconds": waited}

    def advance(self, logger: RankZeroLogger, columns: Mapping[str, Sequence[float]]) -> None:
        """Advance the checkpoint that is being written to the progress that all ranks have reached. ``columns``: the
        figures of all ranks. All ranks must call this method."""
        progress = columns["saving_progress"]
        if any(progress):
            with self._waiting():
                self._log_saved(logger, self._engine.saving.pending.advance(progress))

    def resumed(self, path: Path) -> None:
        """Record that the run resumes from the checkpoint ``path``."""
        if path.parent == self._directory:
            self._saved = step_of(path)

    def save(
        self,
        logger: RankZeroLogger,
        state: dict[str, Any],
        metrics: dict[str, float | None],
        *,
        last: bool,
    ) -> None:
        """Save a checkpoint with the caller's ``state`` and ``metrics``, unless this step already has a checkpoint.
        Wait until it is complete if it is the run's final one (``last``), or if checkpoints are not asynchronous."""
        step = self._engine.completed_steps
        with self._waiting():
            self.finish(logger, next_step=step)
            if step != self._saved:
                known = {k: v for k, v in metrics.items() if v is not None}
                saved = {"state": state, "metrics": known}
                self._engine.saving.begin(self._directory, step, saved, self._retention)
                self._saved, self._saves_none = step, False
            if last or not self._config.asynchronous:
                self.finish(logger)

    def finish(self, logger: RankZeroLogger, *, next_step: int = 0) -> None:
        """Wait until the checkpoint that is being written is complete. ``next_step``: the step whose checkpoint has to
        wait for it, named in a message if the wait is long; 0 if none has to wait."""
        pending, start = self._engine.saving.pending, time.perf_counter()
        with self._waiting():
            self._log_saved(logger, pending.finish())
        waited = time.perf_counter() - start
        if next_step and waited > _LONG_SECONDS:
            logger.note(
                f"step {next_step}: waited {waited:.1f} s for the previous checkpoint; raise "
                "trainer.checkpoint_every"
            )

    def end(self, logger: RankZeroLogger) -> None:
        """Wait until the checkpoint that is being written is complete. If this start of the run has saved no
        checkpoint, remove old checkpoints that an earlier start should have removed but did not, because it was
        killed."""
        self.finish(logger)
        if self._saves_none and self._saved:
            self._engine.saving.trim(self._directory, self._saved, self._retention)

    @contextlib.contextmanager
    def saved_before(self, logger: RankZeroLogger) -> Iterator[None]:
        """A context for a step. If the step ends the run because of a non-finite number, and the checkpoint of an
        earlier step is still being written, the run waits until this checkpoint is complete."""
        try:
            yield
        except NonFiniteError:
            self.finish(logger)
            raise

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time inside this context as waiting for a checkpoint."""
        start, before = time.perf_counter(), self.seconds
        try:
            with self._watchdog.phase(_PHASE):
                yield
        finally:
            self.seconds = before + time.perf_counter() - start  # nested waits count once

    def _log_saved(self, logger: RankZeroLogger, path: Path | None) -> None:
        if path is not None:
            self.completed.append(path)
            logger.note(f"step {step_of(path)}: checkpoint {path}")
