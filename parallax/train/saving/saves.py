"""When a training loop saves, what it waits for, and what it says of it.

Training waits while its state is copied, and for the rest only where it must: the checkpoint with which a run ends, and
the one before where the next is already due. Everything else is written beside the steps, and what ranks tell each
other after a step says when all of them are done (:mod:`parallax.runtime.pending`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallax.errors import NonFiniteError
from parallax.runtime.checkpoint import step_of
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.engine import Engine
from parallax.train.logger import RankZeroLogger
from parallax.train.onlooker import Onlooker

_PHASE = "saving a checkpoint"
_LONG_SECONDS = 1.0  # of waiting for the checkpoint before that are worth a line


class Saves:
    """The checkpoints of one rank's loop, in ``directory``, of which the last ``keep_last`` stay, and those that
    ``config`` names."""

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        config: CheckpointConfig,
        keep_last: int,
        onlooker: Onlooker,
    ) -> None:
        self._engine, self._directory, self._config = engine, directory, config
        self._retention, self._onlooker = config.retention(keep_last), onlooker
        self.seconds = 0.0
        """For how long training has waited for checkpoints so far."""
        self._told = 0.0  # of them by :meth:`columns`
        # The step after which the last was begun; before the first there is nothing to lose.
        self._saved: int | None = 0
        self._saves_none = True  # of its own so far

    def columns(self) -> dict[str, float]:
        """How far this rank is with what is being written, and for how long its training has waited for checkpoints
        since the last call."""
        waited, self._told = self.seconds - self._told, self.seconds
        progress = float(self._engine.saving.pending.progress)
        return {"saving_progress": progress, "checkpoint_seconds": waited}

    def advance(self, logger: RankZeroLogger, columns: Mapping[str, Sequence[float]]) -> None:
        """Go on with what is being written as far as all ranks are; all call it."""
        progress = columns["saving_progress"]
        if any(progress):
            with self._waiting():
                self._say(logger, self._engine.saving.pending.advance(progress))

    def resumed(self, path: Path) -> None:
        """The run goes on from there."""
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
        """A checkpoint with the caller's ``state``, judged by ``metrics``, where there is none of this step. It is
        waited for where it is the ``last``, or not to be asynchronous."""
        step = self._engine.completed_steps
        with self._waiting():
            self.finish(logger, next_step=step)
            if step != self._saved:
                known = {k: v for k, v in metrics.items() if v is not None}
                told = {"state": state, "metrics": known}
                self._engine.saving.begin(self._directory, step, told, self._retention)
                self._saved, self._saves_none = step, False
            if last or not self._config.asynchronous:
                self.finish(logger)

    def finish(self, logger: RankZeroLogger, *, next_step: int = 0) -> None:
        """Wait for what is being written; for ``next_step`` where that is already due."""
        pending, start = self._engine.saving.pending, time.perf_counter()
        with self._waiting():
            self._say(logger, pending.finish())
        waited = time.perf_counter() - start
        if next_step and waited > _LONG_SECONDS:
            logger.note(
                f"step {next_step}: waited {waited:.1f} s for the checkpoint before to be written; raise "
                "trainer.checkpoint_every"
            )

    def end(self, logger: RankZeroLogger) -> None:
        """No more is saved. What a start that was killed behind its last checkpoint has left of older ones goes."""
        self.finish(logger)
        if self._saves_none and self._saved:
            self._engine.saving.trim(self._directory, self._saved, self._retention)

    @contextlib.contextmanager
    def saved_before(self, logger: RankZeroLogger) -> Iterator[None]:
        """Around a step: where all ranks end in it, because a number is not finite, what is being written is from
        before."""
        try:
            yield
        except NonFiniteError:
            self.finish(logger)
            raise

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Training waits, for a checkpoint."""
        start, before = time.perf_counter(), self.seconds
        try:
            with self._onlooker.phase(_PHASE):
                yield
        finally:
            self.seconds = before + time.perf_counter() - start  # once where it is nested

    def _say(self, logger: RankZeroLogger, path: Path | None) -> None:
        if path is not None:
            logger.note(f"step {step_of(path)}: checkpoint {path}")
