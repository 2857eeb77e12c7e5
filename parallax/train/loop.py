"""The training loop: step, log, evaluate, save, resume."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from parallax.common.events import EventLog
from parallax.errors import (
    CheckpointError,
    ConfigError,
    check_choice,
    check_count,
    check_positive,
)
from parallax.plan.tier import AUTO
from parallax.runtime.batch import Rows
from parallax.runtime.checkpoint import state_text
from parallax.runtime.checkpoint.config import CHECKPOINTS, CheckpointConfig
from parallax.runtime.engine import Engine
from parallax.runtime.meters.step import StepResult
from parallax.swap.statistics import SwapStatistics
from parallax.train.data.source import Source
from parallax.train.debug import DebugConfig, Recorder, recorder
from parallax.train.evaluation import HeldOut
from parallax.train.health.monitor import HealthMonitor
from parallax.train.logger import RankZeroLogger, open_logger
from parallax.train.monitor import LoggerConfig, StepLine, Unwritten, finite
from parallax.train.nodes import NodeRecords, events_path
from parallax.train.record import RunRecord
from parallax.train.rows_end import ENDED, RowsEnd
from parallax.train.saving.saves import Saves
from parallax.train.stop import Drifted, Requested, Stopping, StopReason, drift
from parallax.train.watchdog import NoWatchdog, Watchdog

_MOST_SKIPS = 10  # consecutive steps with a non-finite loss or gradient


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Length and batch of a training run.

    ``steps``: optimizer steps to train for; ``epochs``: the same in passes over the training rows. There is no default,
    so a run without one of them is rejected (0: not set).
    ``global_batch``: rows per optimizer step over all replicas. ``microbatch``: rows per micro-batch; with auto the
    planner chooses. ``gather_loss``: compute one loss over the outputs of the whole batch, gathered from all
    micro-batches and replicas, for losses over the whole batch, such as contrastive ones. ``eval_every``,
    ``checkpoint_every``: steps between evaluations or checkpoints; 0: only at the end. ``eval_batches``: maximum global
    batches per evaluation; auto is all held-out rows.
    ``resume``: auto resumes from the run directory's last checkpoint; with never the run restarts from the beginning.
    ``watchdog_seconds``: seconds after which a rank ends the run, and is named, if it stays in one action, does not
    answer or, outside of steps, shows no sign of life (never less than two predicted steps); 0 disables this.
    ``phase_seconds``: limit of every other phase, such as loading data, building the engine, the first steps with
    ``compile``, an evaluation, a checkpoint; 0 sets no limit. ``grace_seconds``: seconds in which a run that is asked
    to end must have saved its checkpoint; after that it ends without; 0 sets no limit. ``max_restarts``: how often all
    ranks restart from the last checkpoint after a rank has died, crashed, hung, or failed with an error that may be
    transient; 0 is never. Under your own torchrun, its ``--max-restarts`` applies instead. ``nonfinite``: the reaction
    to a step with a non-finite loss or gradient: stop, or skip it, at most ten in a row.
    """

    steps: int = 0
    epochs: int = 0
    global_batch: int = 16
    microbatch: int | str = "auto"
    gather_loss: bool = False
    eval_every: int = 100
    eval_batches: int | str | None = AUTO
    checkpoint_every: int = 30
    resume: str = "auto"
    watchdog_seconds: float = 60.0
    phase_seconds: float = 3600.0
    grace_seconds: float = 60.0
    max_restarts: int = 3
    nonfinite: str = "stop"

    def __post_init__(self) -> None:
        check_positive("trainer.global_batch", self.global_batch)
        for key in (
            "steps",
            "epochs",
            "eval_every",
            "checkpoint_every",
            "watchdog_seconds",
            "phase_seconds",
            "grace_seconds",
            "max_restarts",
        ):
            check_positive(f"trainer.{key}", getattr(self, key), zero=True)
        check_choice("trainer.resume", self.resume, ["auto", "never"])
        check_choice("trainer.nonfinite", self.nonfinite, ["stop", "skip"])
        check_count("trainer.microbatch", self.microbatch)
        check_count(
            "trainer.eval_batches", AUTO if self.eval_batches is None else self.eval_batches
        )

    def check_steps(self) -> None:
        """Raise :class:`ConfigError` if neither the number of steps nor that of epochs is set."""
        if not self.steps and not self.epochs:
            raise ConfigError(
                "trainer.steps: a run needs the number of steps to train for; add trainer.steps=N, for example "
                "trainer.steps=1000, or trainer.epochs=N"
            )

    def with_steps(self, count: Callable[[int, int], int]) -> TrainerConfig:
        """Return the settings with the steps of their epochs; ``count(epochs, rows)`` is the number of batches of
        ``rows`` rows."""
        if not self.epochs:
            return self
        steps = count(self.epochs, self.global_batch)
        if self.steps not in (0, steps):
            raise ConfigError(
                f"trainer.steps={self.steps} and trainer.epochs={self.epochs}, which are {steps} steps: set one of "
                f"them; for a number of steps, trainer.epochs=0 trainer.steps={self.steps}"
            )
        return replace(self, steps=steps)

    @property
    def nonfinite_skips(self) -> int:
        """Consecutive steps that may be skipped because loss or gradients are non-finite."""
        return _MOST_SKIPS if self.nonfinite == "skip" else 0


class OnDrift(StrEnum):
    """The action at the next checkpoint when steps are a fifth slower or faster than predicted: continue, report it, or
    end the loop with that checkpoint, so that another plan resumes from it."""

    IGNORE = "ignore"
    NOTE = "note"
    STOP = "stop"


def train(
    engine: Engine,
    source: Source,
    trainer: TrainerConfig,
    logger: LoggerConfig,
    directory: Path,
    *,
    tokens_per_row: int,
    on_drift: OnDrift = OnDrift.IGNORE,
    checkpoints: Path | None = None,
    checkpoint: CheckpointConfig | None = None,
    debug: DebugConfig | None = None,
    watchdog: Watchdog | None = None,
) -> dict[str, Any]:
    """Train to ``trainer.steps`` in the run directory, and return the summary, which rank 0 also writes there; every
    rank calls it. ``checkpoints`` is the folder of checkpoints, by default one in the run directory; ``checkpoint``
    configures them.

    ``watchdog`` receives the phases outside of steps, and knows whether this rank was asked to end. If there is a
    reason to end early (:mod:`parallax.train.stop`), all ranks end after the same step, with a checkpoint.

    The summary's ``ended`` is "steps", "rows" if the source has no more rows, or the name of the reason: "drift", with
    the explanation in ``drift``, or "stopped", with the signal's number in ``stopped``.
    """
    trainer.check_steps()
    recording = recorder(debug or DebugConfig(), directory, engine.mesh.rank, engine.mesh.device)
    run = _Run(
        engine,
        source,
        trainer,
        logger,
        directory,
        checkpoints or directory / CHECKPOINTS,
        checkpoint or CheckpointConfig(),
        tokens_per_row,
        on_drift,
        recording,
        watchdog or NoWatchdog(),
    )
    return run.run()


class _Run:
    """The state of one rank's loop. Rank 0 writes for all."""

    def __init__(
        self,
        engine: Engine,
        source: Source,
        trainer: TrainerConfig,
        logger: LoggerConfig,
        directory: Path,
        checkpoints: Path,
        checkpoint: CheckpointConfig,
        tokens_per_row: int,
        on_drift: OnDrift,
        recording: Recorder,
        watchdog: Watchdog,
    ) -> None:
        self._engine, self._source, self._trainer = engine, source, trainer
        self._watchdog, self._unfinished, self._recording = watchdog, False, recording
        self._health = HealthMonitor(engine, getattr(source, "why_slow", lambda: ""))
        self._stopping = Stopping(self._reasons(on_drift), engine.mesh)
        self._logger, self._directory, self._tokens = logger, directory, tokens_per_row
        self._rank, self._mesh = engine.mesh.rank, engine.mesh
        self._checkpoints, self._checkpoint = checkpoints, checkpoint
        ranks = range(engine.plan.world_size)
        self._budgets = [engine.plan.allocator_bytes(rank) for rank in ranks]
        self._saves = Saves(engine, checkpoints, checkpoint, watchdog)
        self._refused: list[str] = []
        self._unwritten = Unwritten()
        self._record = RunRecord(engine.mesh, engine.plan, directory, self._unwritten)
        self._nodes = NodeRecords(engine.mesh, directory)
        self._rows_end = RowsEnd(engine.mesh, trainer.global_batch)
        most = trainer.eval_batches if isinstance(trainer.eval_batches, int) else None
        sets = getattr(source, "validation_sets", {"": source})
        self._held_out = {
            name: HeldOut(engine, each, trainer.global_batch, most) for name, each in sets.items()
        }
        self._evaluated: int | None = (
            None  # the step after which the held-out rows were last evaluated
        )

    def run(self) -> dict[str, Any]:
        phase = self._watchdog.phase
        with phase("loading a checkpoint"):
            resumed = self._resume()
            state_text(
                self._state()
            )  # state that no checkpoint can hold is rejected before the first step
        self._record.begin(self._engine.completed_steps)
        total = self._trainer.steps
        with (
            EventLog(events_path(self._directory, self._rank)) as events,
            contextlib.closing(self._recording),
            open_logger(
                self._rank,
                self._directory,
                self._logger,
                total,
                self._engine.completed_steps,
                self._unwritten,
            ) as logger,
        ):
            for refused in self._refused:
                logger.note(f"skipped: {refused}")
            if resumed:
                logger.note(f"continuing after step {self._engine.completed_steps} from {resumed}")
            self._stopping.exchange()  # requests that arrived while the engine was built
            while self._engine.completed_steps < total and not self._stopping.ends_run:
                if (batch := self._next_batch()) is None:
                    self._end_of_rows(logger)
                    break
                with self._recording.step(), self._saves.saved_before(logger):
                    result = self._nodes.on_common_clock(self._engine.step(batch))
                self._health.stepped(result)
                with self._unwritten.trying(self._directory / "debug"):
                    self._recording.add(result)
                self._record.add(result)
                if self._logger.events:
                    with self._unwritten.trying(events.path):
                        events.extend(result.spans)
                        events.flush()
                with phase("reporting a step"):
                    self._report(logger, result)
                self._evaluate_and_save(logger, result, total)
            self._saves.end(logger)
        with phase("writing the report"):
            return self._end()

    def _next_batch(self) -> Rows | None:
        """Return the next rows; None on all ranks if the rows of any rank have ended."""
        with self._watchdog.phase("fetching rows"):
            return self._rows_end.fetch(lambda: self._health.fetch(self._fetch))

    def _end_of_rows(self, logger: RankZeroLogger) -> None:
        """Evaluate and save; raise :class:`DataError` if rows must not end after this step. If some ranks still have
        rows, the state of their source is a batch ahead of the weights, so nothing is saved."""
        step, metrics = self._engine.completed_steps, dict[str, float | None]()
        self._stopping.exchange()
        if self._rows_end.everywhere:
            logger.note(f"the rows end after step {step} of {self._trainer.steps}: training ends")
            if step and self._evaluated != step:
                with self._watchdog.phase("evaluating"):
                    metrics = finite({"validation_loss": self._evaluate(logger, step)})
            self._saves.save(logger, self._state(), metrics, last=True)
        self._rows_end.refuse(step)

    def _fetch(self) -> Rows:
        return self._source.batch(self._trainer.global_batch)

    def _state(self) -> dict[str, Any]:
        """Return the part of a checkpoint's state that is not the engine's."""
        return {"source": self._source.state_dict()}

    def _end(self) -> dict[str, Any]:
        self._watchdog.served()
        # Written before the ranks synchronise, so that every run with a summary has it.
        self._record.write_occupancy(self._engine.completed_steps)
        self._nodes.gather(self._unwritten)
        summary = self._summary()
        self._record.write(summary, picture=not self._stopping.is_last_step)
        lines = [
            line
            for found in self._mesh.all_gather_object(self._unwritten.lines())
            for line in found
        ]
        return {**summary, "unwritten": lines}

    def _reasons(self, on_drift: OnDrift) -> list[StopReason]:
        """Return the reasons for which this run may end early."""

        at_checkpoints, ends = on_drift is not OnDrift.IGNORE, on_drift is OnDrift.STOP

        def evaluate() -> str:
            slow = self._health.slow() if ends else ""  # otherwise it has been reported
            predicted = self._engine.plan.prediction.step_seconds
            return slow or drift(self._record.seconds, predicted)

        return [
            Requested(self._watchdog),
            Drifted(evaluate, at_checkpoints=at_checkpoints, ends=ends),
        ]

    def _resume(self) -> Path | None:
        """Load the last valid checkpoint of the run directory; return its path."""
        if self._trainer.resume != "auto":
            self._engine.saving.begin_start(self._checkpoints)
            return None
        found, self._refused = self._engine.checkpoints(self._checkpoints)
        first: CheckpointError | None = None
        for path in reversed(found):
            try:
                state = self._engine.load(path)
            except CheckpointError as error:
                first = first or error
                self._refused.append(str(error))
                continue
            self._source.load_state_dict(state["source"])
            self._saves.resumed(path)
            return path
        if first is not None:
            raise first
        return None

    def _report(self, logger: RankZeroLogger, result: StepResult) -> None:
        """Gather the statistics of the step from every rank; rank 0 prints and writes them."""
        budgets = self._budgets
        contributed: tuple[dict[str, float], ...] = (
            {"peak_bytes": result.peak_bytes, "unwritten": self._unwritten.has_news},
            result.swap.columns(),
            self._saves.columns(),
            self._health.columns(),
            self._stopping.columns(),
        )
        mine = {name: number for each in contributed for name, number in each.items()}
        assert len(mine) == sum(map(len, contributed)), "two contributors use one name"
        columns = self._mesh.gather_columns(mine)
        messages = self._health.agree(columns, saving=any(columns["saving_progress"]))
        self._stopping.agree(columns)
        if any(columns["unwritten"]):
            self._report_unwritten(logger)
        peaks, stalls = columns["peak_bytes"], columns["stall_seconds"]
        offloaded, fetched = sum(columns["offloaded_bytes"]), sum(columns["fetched_bytes"])
        swapping = sum(columns["swap_limit_bytes"]) + offloaded + fetched > 0
        transfers = sum(columns["transfer_seconds"])
        overall = SwapStatistics(stall_seconds=sum(stalls), transfer_seconds=transfers)
        fullest = max(range(len(budgets)), key=lambda rank: peaks[rank] / budgets[rank])
        line = StepLine(
            step=self._engine.completed_steps,
            loss=result.loss,
            rate=self._trainer.global_batch * self._tokens / result.seconds,
            unit="tokens" if self._tokens > 1 else "rows",
            peak_bytes=int(peaks[fullest]),
            budget_bytes=budgets[fullest],
            offloaded_bytes=int(offloaded) if swapping else None,
            overlap=overall.overlap,
            stall_seconds=max(stalls),
            skipped=result.skipped_steps,
            input_share=self._health.input_share,
            learning_rate=result.learning_rate,
        )
        moved = {
            "offloaded_bytes": offloaded,
            "fetched_bytes": fetched,
            "swap_overlap": line.overlap if swapping else None,
            "checkpoint_seconds": max(columns["checkpoint_seconds"]),
        }
        logger.step(line, _metrics(line, result) | moved | self._health.metrics())
        for message in filter(None, (_trouble(result), *messages)):
            logger.note(f"step {line.step}{message}")
        self._saves.advance(logger, columns)

    def _report_unwritten(self, logger: RankZeroLogger) -> None:
        for rank, lines in enumerate(self._mesh.all_gather_object(self._unwritten.news())):
            for line in lines:
                logger.note(f"rank {rank} {line}; training continues without it")

    def _evaluate_and_save(self, logger: RankZeroLogger, result: StepResult, total: int) -> None:
        step = self._engine.completed_steps
        last, trainer = step == total, self._trainer
        saves, found = last or _due(trainer.checkpoint_every, step), None
        if last or _due(trainer.eval_every, step) or (saves and self._checkpoint.needs_validation):
            with self._watchdog.phase("evaluating"):
                found = self._evaluate(logger, step)
        if saves or self._stopping.is_last_step:
            with self._watchdog.phase("saving a checkpoint"):
                state = self._state()
            self._saves.save(
                logger,
                state,
                finite({"loss": result.loss, "validation_loss": found}),
                last=last or self._stopping.is_last_step,
            )
            self._stopping.exchange()
            for message in self._stopping.evaluate() if not last else ():
                logger.note(f"step {step}: {message}")

    def _evaluate(self, logger: RankZeroLogger, step: int) -> float | None:
        """Return the loss of the first set of held-out rows, and report all; None if there are none or a rank has been
        asked to end."""
        first: float | None = None
        for number, (name, held_out) in enumerate(self._held_out.items()):
            loss = self._evaluate_set(logger, step, name if number else "", held_out)
            if self._unfinished:
                return None
            first = loss if not number else first
        return first

    def _evaluate_set(
        self, logger: RankZeroLogger, step: int, name: str, held_out: HeldOut
    ) -> float | None:
        def progress(done: int, count: int | None) -> bool:
            logger.evaluating(step, done, count)
            self._stopping.exchange()
            return not self._stopping.is_last_step

        found = None if self._stopping.is_last_step else held_out.evaluate(progress)
        self._unfinished = found is None
        if found is None:
            return None
        self._evaluated = step
        if not name:
            self._record.validation_loss = found.loss
        logger.evaluation(step, found.loss, name)
        of = f" of {name}" if name else ""
        if found.bad is not None:
            index, loss = found.bad
            logger.note(
                f"step {step}: the validation loss{of} is not finite: held-out batch {index} gives {loss}"
            )
        if found.truncated:
            logger.note(
                f"step {step}: the validation loss{of} is of the first {found.batches} held-out batches, and there are "
                "more: set trainer.eval_batches, or give the source validation_rows, their number of rows"
            )
        return found.loss

    def _summary(self) -> dict[str, Any]:
        """Return how the run ended, and prediction against measurement; equal on every rank, except for its own
        waits."""
        first = self._rank == 0
        return {
            "steps": self._engine.completed_steps,
            "checkpoint_seconds": self._saves.seconds,
            **self._stopping.summary(complete=self._complete),
            **({"ended": ENDED} if self._rows_end.everywhere else {}),
            "unigram_entropy": getattr(self._source, "unigram_entropy", None) if first else None,
            **self._health.summary(),
            **self._record.summary(self._trainer.global_batch, self._tokens),
        }

    @property
    def _complete(self) -> bool:
        return not self._unfinished and self._engine.completed_steps >= self._trainer.steps


def _metrics(line: StepLine, result: StepResult) -> dict[str, Any]:
    return {
        "step": line.step,
        "loss": result.loss,
        "gradient_norm": result.gradient_norm,
        "learning_rate": result.learning_rate,
        "skipped_steps": result.skipped_steps,
        "step_seconds": result.seconds,
        f"{line.unit}_per_second": line.rate,
        "peak_bytes": line.peak_bytes,
        "stall_seconds": line.stall_seconds,
    }


def _trouble(result: StepResult) -> str:
    return f" was skipped, {result.trouble}" if result.trouble else ""


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
