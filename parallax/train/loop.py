"""The training loop: step, log, evaluate, save, resume."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from parallax.common.events import EventLog
from parallax.errors import (
    CheckpointError,
    ConfigError,
    check_choice,
    check_count,
    check_positive,
)
from parallax.nodes.together import among
from parallax.plan.profile import Utilization
from parallax.plan.tier import AUTO
from parallax.plan.updates import Updates
from parallax.runtime.asynchronous import Interval
from parallax.runtime.batch import Rows
from parallax.runtime.checkpoint import state_text
from parallax.runtime.checkpoint.config import CHECKPOINTS, TRAINING_LOSS, CheckpointConfig
from parallax.runtime.engine import Engine
from parallax.runtime.meters.step import StepResult
from parallax.runtime.metrics.config import VALIDATION
from parallax.swap.statistics import SwapStatistics
from parallax.train.callbacks import Callback, Callbacks, CallbackStop, NamedCallback, TrainingRun
from parallax.train.data.source import Source
from parallax.train.debug import DebugConfig, Recorder, recorder
from parallax.train.early import OutOfPatience, TargetReached, TrackedMetric
from parallax.train.evaluation import Evaluated, HeldOut
from parallax.train.health.monitor import HealthMonitor
from parallax.train.logger import RankZeroLogger, open_logger
from parallax.train.loggers.destination import LoggedRun
from parallax.train.monitor import LoggerConfig, StepLine, Unwritten, finite
from parallax.train.nodes import NodeRecords, events_path
from parallax.train.record import RunRecord
from parallax.train.rows_end import ENDED, RowsEnd
from parallax.train.saving.saves import Saves
from parallax.train.status import NoStepObserver, StepObserver
from parallax.train.stop import Drifted, Requested, Stopping, StopReason, drift
from parallax.train.watchdog import NoWatchdog, Watchdog

OFF = "off"
_MOST_UPDATES = 100  # of asynchronous replicas between two meetings, whose spans are in memory
_MOST_SKIPS = 10  # consecutive steps with a non-finite loss or gradient


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Length and batch of a training run.

    ``steps``: the length of the run as the number of optimizer steps.
    ``epochs``: the length of the run as the number of passes over the training rows. One of the two must be set (0: not
        set).
    ``global_batch``: rows per optimizer step over all replicas.
    ``microbatch``: rows per micro-batch; with auto the planner chooses.
    ``gather_loss``: gather the outputs of all micro-batches and replicas, and compute the loss once over the whole
        batch, as contrastive losses need.
    ``updates``: with synchronous, gradients are those of the newest weights. With delayed, they are those of the
        weights one version older, as in PipeDream-2BW, on every stage; validation and checkpoints use the newest
        weights.
    ``eval_every``, ``checkpoint_every``: the number of steps between evaluations or checkpoints; 0: only at the end of
        the run.
    ``eval_batches``: the maximum number of global batches per evaluation; auto is all held-out rows.
    ``resume``: auto resumes from the run directory's last checkpoint; with never the run restarts from the beginning.
    ``watchdog_seconds``: the seconds after which a rank counts as hanging, at least the time of two predicted steps; 0
        disables this. A rank hangs if it stays in one action, does not answer, or shows no sign of life outside of
        steps. The run then ends with a message that names the rank.
    ``phase_seconds``: the limit of each phase outside of steps, such as loading data, building the engine, the first
        steps with ``compile``, an evaluation, a checkpoint; 0 sets no limit.
    ``grace_seconds``: the time for saving a checkpoint after a request to end (SIGTERM, Ctrl-C); when it is over, the
        run ends without the checkpoint; 0 sets no limit.
    ``max_restarts``: how often all ranks restart from the last checkpoint after a rank has died, crashed, hung, or
        failed with an error that may be transient. With 0, they never restart. If you start torchrun yourself,
        torchrun's ``--max-restarts`` applies instead.
    ``nonfinite``: the reaction to a step with a non-finite loss or gradient: stop ends the run; skip leaves out the
        step, but at most ten in a row.
    ``patience``: the run ends, with a checkpoint, after this many evaluations in a row without an improvement of
        ``checkpoint.metric``; 0 turns this off.
    ``target``: the run ends, with a checkpoint, after an evaluation in which ``checkpoint.metric`` reaches this value;
        off sets no target.
    """

    steps: int = 0
    epochs: int = 0
    global_batch: int = 16
    microbatch: int | str = "auto"
    gather_loss: bool = False
    updates: str = Updates.SYNCHRONOUS.value
    eval_every: int = 100
    eval_batches: int | str | None = AUTO
    checkpoint_every: int = 30
    resume: str = "auto"
    watchdog_seconds: float = 60.0
    phase_seconds: float = 3600.0
    grace_seconds: float = 60.0
    max_restarts: int = 3
    nonfinite: str = "stop"
    patience: int = 0
    target: float | str = OFF

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
            "patience",
        ):
            check_positive(f"trainer.{key}", getattr(self, key), zero=True)
        check_choice("trainer.updates", self.updates, list(map(str, Updates)))
        check_choice("trainer.resume", self.resume, ["auto", "never"])
        check_choice("trainer.nonfinite", self.nonfinite, ["stop", "skip"])
        check_count("trainer.microbatch", self.microbatch)
        if isinstance(self.target, str) and self.target != OFF:
            raise ConfigError(f"trainer.target={self.target}: accepted is a number, or {OFF}")
        check_count(
            "trainer.eval_batches", AUTO if self.eval_batches is None else self.eval_batches
        )

    @property
    def ends_by_metric(self) -> bool:
        """Whether ``patience`` or ``target`` may end the run by a metric of the held-out rows."""
        return self.patience > 0 or self.target != OFF

    def check_metric(self, metric: str) -> None:
        """Raise :class:`ConfigError` if ``metric`` may end the run but no evaluation computes it."""
        if not self.ends_by_metric:
            return
        key = (
            f"trainer.patience={self.patience}"
            if self.patience
            else f"trainer.target={self.target}"
        )
        if metric == TRAINING_LOSS:
            raise ConfigError(
                f"{key}: checkpoint.metric={metric} is not of held-out rows; use checkpoint.metric=validation_loss"
            )
        if not self.eval_every:
            raise ConfigError(
                f"{key}: no evaluation precedes the end of the run; set trainer.eval_every"
            )

    def check_steps(self) -> None:
        """Raise :class:`ConfigError` if neither ``steps`` nor ``epochs`` is set."""
        if not self.steps and not self.epochs:
            raise ConfigError(
                "trainer.steps: a run needs the number of steps to train for; add trainer.steps=N, for example "
                "trainer.steps=1000, or trainer.epochs=N"
            )

    def with_steps(self, count: Callable[[int, int], int]) -> TrainerConfig:
        """Return the settings with ``epochs`` converted to ``steps``. ``count(epochs, rows)`` returns the number of
        batches of ``rows`` rows."""
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
        """How many consecutive steps with a non-finite loss or gradient may be skipped."""
        return _MOST_SKIPS if self.nonfinite == "skip" else 0


class OnDrift(StrEnum):
    """The reaction at the next checkpoint if steps are a fifth slower or faster than predicted: ignore it, report it,
    or end the loop, so that the run resumes from this checkpoint under another plan."""

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
    parameters: Mapping[str, Any] = MappingProxyType({}),
    callbacks: Sequence[Callback | NamedCallback] = (),
    status: StepObserver | None = None,
    utilization: Utilization | None = None,
) -> dict[str, Any]:
    """Train until ``trainer.steps`` and return the summary, which rank 0 also writes into the run ``directory``. All
    ranks must call this function. ``checkpoints`` is the folder of checkpoints, by default one in the run directory;
    ``checkpoint`` configures the checkpoints. ``parameters`` are the settings that loggers record; the entry ``name``
    is the name of the run. ``callbacks`` are called on every rank, and must be the same on all
    (:mod:`parallax.train.callbacks`).

    ``status`` receives the figures of each step. ``utilization`` computes the model FLOP utilization. ``watchdog``
    receives the name of each phase outside of steps, and knows whether this rank was requested to end. If there is a
    reason to end early (:mod:`parallax.train.stop`), all ranks end after the same step, with a checkpoint.

    The summary's ``ended`` is "steps"; "rows" if the source has no more rows; or the reason of an early end: "drift"
    (``drift`` has the explanation), "stopped" (``stopped`` has the number of the signal), "patience", "target", or
    "callback" (``callback`` has its reason).
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
        parameters,
        callbacks,
        status or NoStepObserver(),
        utilization or Utilization(),
    )
    return run.run()


class _Run:
    """The state of the training loop on one rank. Rank 0 writes the files of all ranks."""

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
        parameters: Mapping[str, Any],
        callbacks: Sequence[Callback | NamedCallback],
        status: StepObserver,
        utilization: Utilization,
    ) -> None:
        self._status, self._utilization = status, utilization
        self._engine, self._source, self._trainer = engine, source, trainer
        self._watchdog, self._unfinished, self._recording = watchdog, False, recording
        self._health = HealthMonitor(engine, getattr(source, "why_slow", lambda: ""))
        metric = checkpoint.metric
        trainer.check_metric(metric)
        self._tracked = TrackedMetric(metric, higher=engine.metrics.config.higher_is_better(metric))
        target = None if isinstance(trainer.target, str) else trainer.target
        self._early = (
            OutOfPatience(self._tracked, trainer.patience),
            TargetReached(self._tracked, target),
        )
        self._unwritten = Unwritten()
        seen = TrainingRun(engine, directory, trainer.steps)
        self._callbacks = Callbacks(callbacks, seen, watchdog, self._unwritten.add)
        self._stopping = Stopping(self._reasons(on_drift), engine.mesh)
        self._logger, self._directory, self._tokens = logger, directory, tokens_per_row
        self._parameters = parameters
        self._rank, self._mesh = engine.mesh.rank, engine.mesh
        self._checkpoints, self._checkpoint = checkpoints, checkpoint
        ranks = range(engine.plan.world_size)
        self._budgets = [engine.plan.allocator_bytes(rank) for rank in ranks]
        self._saves = Saves(engine, checkpoints, checkpoint, watchdog)
        self._refused: list[str] = []
        names = [f"{VALIDATION}{name}" for name in ("loss", *engine.metrics.names)]
        self._record = RunRecord(engine.mesh, engine.plan, directory, self._unwritten, names)
        self._nodes = NodeRecords(engine.mesh, directory)
        self._rows_end = RowsEnd(engine.mesh, trainer.global_batch)
        most = trainer.eval_batches if isinstance(trainer.eval_batches, int) else None
        sets = getattr(source, "validation_sets", {"": source})
        self._held_out = {
            name: HeldOut(engine, each, trainer.global_batch, most) for name, each in sets.items()
        }
        self._ahead: deque[Callable[[], Rows | None]] = deque()  # the batches of the next steps
        # Whether callbacks have asked for a checkpoint, and for an evaluation, which wait for the begun steps.
        self._asked = False, False
        self._draining = False  # whether no more steps are begun before these, or before the end
        self._reports: deque[_Contributed] = deque()
        self._reported = 0  # the last step that this rank has reported alone
        self._evaluated: int | None = (
            None  # the step after which the held-out rows were last evaluated
        )

    def run(self) -> dict[str, Any]:
        phase = self._watchdog.phase
        self._callbacks.check_equal(self._mesh)
        with phase("loading a checkpoint"):
            resumed = self._resume()
            state_text(self._state())  # rejects, before the first step, what no checkpoint can hold
        self._record.begin(self._engine.completed_steps)
        total = self._trainer.steps
        with (
            EventLog(events_path(self._directory, self._rank)) as events,
            contextlib.closing(self._recording),
            open_logger(self._rank, self._logger, self._logged(), total, self._unwritten) as logger,
        ):
            for refused in self._refused:
                logger.note(f"skipped: {refused}")
            if resumed:
                logger.note(self._resume_text(resumed))
            self._callbacks.call("on_run_start")
            self._stopping.exchange()  # requests that arrived while the engine was built
            if not self._stopping.ends_run:
                self._begin_evaluations(logger)
            self._agree_requests(logger)
            while self._engine.completed_steps < total and (
                self._ahead or not self._stopping.ends_run
            ):
                batch, following = self._next_batches(total)
                if batch is None:
                    self._end_of_rows(logger)
                    break
                self._callbacks.call("on_step_start")
                results = self._steps(logger, batch, following, events)
                for result in map(self._nodes.on_common_clock, results):
                    self._add(result, events)
                self._report_missed(logger, results)
                with phase("reporting a step"):
                    self._contribute(result)
                    self._report(logger)
                self._tell_checkpoints()
                self._callbacks.call("on_step_end")
                self._agree_requests(logger)
                self._evaluate_and_save(logger, result, total)
            self._saves.end(logger)
            self._watchdog.served()
            self._tell_checkpoints()
            self._callbacks.run.ended = self._ended["ended"]
            self._callbacks.call("on_run_end")
            with phase("closing the loggers"):
                logger.close_loggers()
        with phase("writing the report"):
            return self._end()

    def _steps(
        self, logger: RankZeroLogger, batch: Rows, following: Rows | None, events: EventLog
    ) -> list[StepResult]:
        """Run one step, or those of asynchronous replicas until the next meeting, and return their results. The process
        ends if a replica was lost meanwhile."""
        with (
            self._recording.step(),
            self._saves.saved_before(logger),
            self._watchdog.outliving(self._engine.lose),
        ):
            results = self._engine.steps(batch, self._interval(logger), following)
            if self._engine.lost:
                self._end_after_loss(logger, results, events)
        return results

    def _end_after_loss(
        self, logger: RankZeroLogger, results: Sequence[StepResult], events: EventLog
    ) -> None:
        """Save the weights after the updates ``results``, which the ranks have made without a lost replica, and end all
        ranks. The launcher starts them again from there. Only the ranks of the first replica call this method, because
        only they have states. An evaluation of this step is left to the next start."""
        step, trainer = self._engine.completed_steps, self._trainer
        for result in map(self._nodes.on_common_clock, results):
            self._add(result, events)
        if results:
            self._report_missed(logger, results)
            self._report_alone(logger, step, results[-1])
            self._unfinished |= step == trainer.steps or self._due(trainer.eval_every, step)
            with among(self._mesh.pipeline), self._watchdog.phase("saving a checkpoint"):
                metrics = finite({"loss": results[-1].loss})
                self._saves.save(logger, self._state(), metrics, last=True)
        self._watchdog.end_after_loss(f"the other replicas continued to step {step}")

    def _add(self, result: StepResult, events: EventLog) -> None:
        self._health.stepped(result)
        with self._unwritten.trying(self._directory / "debug"):
            self._recording.add(result)
        self._record.add(result)
        self._status.stepped(result, self._engine.completed_steps, self._health.fetch_seconds)
        if self._logger.events:
            with self._unwritten.trying(events.path):
                events.extend(result.spans)
                events.flush()

    def _interval(self, logger: RankZeroLogger) -> Interval:
        """Return the updates until the next evaluation or checkpoint, at most 100, which asynchronous replicas make
        without waiting for each other."""
        done, trainer = self._engine.completed_steps, self._trainer
        every = [each for each in (trainer.eval_every, trainer.checkpoint_every) if each]
        ends = [trainer.steps, *(done - done % each + each for each in (*every, _MOST_UPDATES))]
        stop = min(ends)

        def fetch() -> Rows | None:
            with self._watchdog.phase("fetching rows"):
                return self._rows_end.fetch_alone(lambda: self._health.fetch(self._fetch))

        reached, losses = list[tuple[int, StepResult]](), list[str]()

        def report(step: int, result: StepResult) -> None:
            if self._watchdog.loss and not losses:
                losses.append(self._watchdog.loss)
                logger.note(f"step {step}: {losses[0]}; the other replicas continue to step {stop}")
            reached.append((step, result))
            if len(reached) > 1:  # the last update is reported where all ranks meet
                self._report_alone(logger, *reached.pop(0))

        def asks() -> bool:
            return any(self._stopping.columns().values())

        return Interval(stop, fetch, asks, report, self._watchdog.outlives)

    def _report_missed(self, logger: RankZeroLogger, results: Sequence[StepResult]) -> None:
        """Report the updates of asynchronous replicas that were made on another rank than rank 0."""
        step = self._engine.completed_steps - len(results)
        for number, result in enumerate(results[:-1], step + 1):
            if number > self._reported:
                self._report_alone(logger, number, result)

    def _report_alone(self, logger: RankZeroLogger, step: int, result: StepResult) -> None:
        """Print and write the figures of an update without those of other ranks."""
        self._reported = step
        rows = self._trainer.global_batch
        line = StepLine(
            step=step,
            loss=result.loss,
            rate=rows * self._tokens / result.seconds,
            unit="tokens" if self._tokens > 1 else "rows",
            peak_bytes=result.peak_bytes,
            budget_bytes=self._budgets[self._rank],
            offloaded_bytes=None,
            overlap=result.swap.overlap,
            stall_seconds=0.0,
            skipped=result.skipped_steps,
            input_share=self._health.input_share,
            learning_rate=result.learning_rate,
            utilization=self._utilization.share(rows / result.seconds, len(self._budgets)),
        )
        logger.step(line, _metrics(line, result), {})
        if text := _skip_text(result):
            logger.note(f"step {step}{text}")

    def _resume_text(self, checkpoint: object) -> str:
        done = self._engine.completed_steps
        ended = done >= self._trainer.steps
        more = ": all steps are done; raise trainer.steps or trainer.epochs to go on"
        return f"continuing after step {done} from {checkpoint}{more if ended else ''}"

    def _begin_evaluations(self, logger: RankZeroLogger) -> None:
        """Check before the first step that the metrics accept the model's outputs and the targets, and that there are
        held-out rows if a metric may end the run; raise :class:`ConfigError` otherwise. If the previous start was ended
        by a request during an evaluation, repeat that evaluation."""
        with self._watchdog.phase("evaluating"):
            main = next(iter(self._held_out.values()), None)
            if self._trainer.ends_by_metric and (main is None or main.first_batch() is None):
                raise ConfigError(
                    "trainer.patience, trainer.target: the data has no held-out rows whose metric could end the run; "
                    "hold some out (data.validation), or leave them out"
                )
            if self._engine.completed_steps < self._trainer.steps:
                for held_out in self._held_out.values():
                    if self._engine.metrics.names and (batch := held_out.first_batch()) is not None:
                        self._engine.check_metrics(batch)
            if self._unfinished:
                self._evaluate(logger, self._engine.completed_steps)

    def _logged(self) -> LoggedRun:
        return LoggedRun(
            directory=self._directory,
            name=str(self._parameters.get("name", self._directory.name)),
            project=self._logger.project,
            tags=self._logger.tags,
            parameters=self._parameters,
            done=self._engine.completed_steps,
        )

    def _next_batches(self, total: int) -> tuple[Rows | None, Rows | None]:
        """Return the batches of the next step and of the step after it.

        A batch is None on all ranks if any rank has no more rows. The second batch is also None if the pipeline drains
        between the two steps. If steps overlap, batches are fetched two steps ahead: the ranks then exchange whether
        all of them have rows while a step runs. No batch is fetched beyond a step after which the run evaluates or
        saves.
        """
        first = last = self._engine.completed_steps + 1
        if self._engine.continues and not self._draining:
            while last < first + 2 and last < total and not self._drains_after(last):
                last += 1
        with self._watchdog.phase("fetching rows"):
            while first + len(self._ahead) <= last:
                self._ahead.append(self._rows_end.fetch(lambda: self._health.fetch(self._fetch)))
            batch = self._ahead.popleft()()
            return batch, self._ahead[0]() if self._ahead and batch is not None else None

    def _drains_after(self, step: int) -> bool:
        return self._due(self._trainer.checkpoint_every, step) or self._due(
            self._trainer.eval_every, step
        )

    def _end_of_rows(self, logger: RankZeroLogger) -> None:
        """Evaluate and save after the last row. Raises :class:`DataError` if the rows must not end after this step. If
        some ranks still have rows, nothing is saved, because the sources of these ranks are one batch ahead of the
        weights."""
        step, metrics = self._engine.completed_steps, dict[str, float | None]()
        self._report(logger)
        self._stopping.exchange()
        if self._rows_end.everywhere:
            self._end_round(logger)
            logger.note(f"the rows end after step {step} of {self._trainer.steps}: training ends")
            if step and self._evaluated != step:
                with self._watchdog.phase("evaluating"):
                    metrics = finite(self._evaluate(logger, step))
            self._saves.save(logger, self._state(), metrics, last=True)
        self._rows_end.refuse(step)

    def _fetch(self) -> Rows:
        return self._source.batch(self._trainer.global_batch)

    def _state(self) -> dict[str, Any]:
        """Return the loop's part of a checkpoint's state: the states of the source, the tracked metric and the
        callbacks."""
        states = self._callbacks.state()
        return {
            "source": self._source.state_dict(),
            "tracked": self._tracked.state_dict(),
            "unfinished": self._unfinished,
            **({"callbacks": states} if states else {}),
        }

    def _tell_checkpoints(self) -> bool:
        """Call the callbacks for each checkpoint that became complete; return whether there was one."""
        completed, self._saves.completed = self._saves.completed, []
        for path in completed:
            self._callbacks.run.checkpoint = path
            self._callbacks.call("on_checkpoint")
        return bool(completed)

    def _agree_requests(self, logger: RankZeroLogger) -> None:
        """Exchange the requests of callbacks between the ranks, if there are callbacks. All ranks must call this
        method."""
        if not self._callbacks:
            return
        known = self._callbacks.reason
        columns = self._mesh.gather_columns(self._stopping.columns() | self._callbacks.columns())
        self._stopping.agree(columns)
        self._callbacks.agree(columns, self._mesh)
        if self._callbacks.reason and not known:
            step = self._engine.completed_steps
            logger.note(f"step {step}: training ends: {self._callbacks.reason}")

    def _end(self) -> dict[str, Any]:
        # Written before the ranks synchronise, so that every run with a summary has it.
        self._record.write_occupancy(self._engine.completed_steps)
        self._nodes.gather(self._unwritten)
        summary = self._summary()
        hurries = self._stopping.is_last_step and summary["ended"] != CallbackStop.name
        self._record.write(summary, picture=not hurries)
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
            plan = self._engine.plan
            predicted = plan.prediction.step_seconds
            return slow or drift(self._record.seconds, predicted, plan.local_steps)

        return [
            Requested(self._watchdog),
            *self._early,
            *([CallbackStop(self._callbacks)] if self._callbacks else []),
            Drifted(evaluate, at_checkpoints=at_checkpoints, ends=ends),
        ]

    def _resume(self) -> Path | None:
        """Load the last valid checkpoint of the run, and return its path; None if there is none."""
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
            self._tracked.load_state_dict(state.get("tracked", {}))
            self._unfinished = state.get("unfinished", False)
            self._callbacks.load_state(state.get("callbacks", {}))
            self._saves.resumed(path)
            return path
        if first is not None:
            raise first
        return None

    def _contribute(self, result: StepResult) -> None:
        """Begin to gather the statistics of the step from every rank."""
        contributed: tuple[dict[str, float], ...] = (
            {"peak_bytes": result.peak_bytes, "unwritten": self._unwritten.has_news},
            result.swap.columns(),
            self._saves.columns(),
            self._health.columns(),
            self._stopping.columns(),
            {f"{_OF_ROWS}{name}": number for name, number in result.metrics.items()},
        )
        mine = {name: number for each in contributed for name, number in each.items()}
        assert len(mine) == sum(map(len, contributed)), "two contributors use one name"
        table, step = self._mesh.begin_gathering(mine), self._engine.completed_steps
        self._reports.append(_Contributed(step, result, table))

    def _report(self, logger: RankZeroLogger) -> None:
        """Report the steps whose statistics have been gathered. If steps overlap, a step is reported after the next
        one, because its statistics are gathered while the next step runs."""
        while len(self._reports) > min(1, len(self._ahead)):
            self._report_step(logger, self._reports.popleft())

    def _report_step(self, logger: RankZeroLogger, contributed: _Contributed) -> None:
        """Rank 0 prints and writes the statistics of a step, which are gathered from every rank."""
        result, columns, budgets = contributed.result, contributed.columns(), self._budgets
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
            step=contributed.step,
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
            utilization=self._utilization.share(
                self._trainer.global_batch / result.seconds, len(budgets)
            ),
        )
        moved = {
            "offloaded_bytes": offloaded,
            "fetched_bytes": fetched,
            "swap_overlap": line.overlap if swapping else None,
            "checkpoint_seconds": max(columns["checkpoint_seconds"]),
            "mfu": line.utilization,
        }
        of_rows = {name: sum(columns[f"{_OF_ROWS}{name}"]) for name in result.metrics}
        metrics = _metrics(line, result) | of_rows | moved | self._health.metrics()
        self._callbacks.run.metrics = metrics
        logger.step(line, metrics, _of_ranks(columns, budgets))
        for message in filter(None, (_skip_text(result), *messages)):
            logger.note(f"step {line.step}{message}")
        self._saves.advance(logger, columns)

    def _report_unwritten(self, logger: RankZeroLogger) -> None:
        for rank, lines in enumerate(self._mesh.all_gather_object(self._unwritten.news())):
            for line in lines:
                who = f"rank {rank} " if line.startswith("cannot ") else ""
                logger.note(f"{who}{line}; training continues without it")

    def _evaluate_and_save(self, logger: RankZeroLogger, result: StepResult, total: int) -> None:
        step = self._engine.completed_steps
        last, trainer = step == total, self._trainer
        wanted, evaluates = self._callbacks.take_agreed()
        if self._ahead:  # the next step has begun
            self._asked = self._asked[0] or wanted, self._asked[1] or evaluates
            self._draining |= wanted or evaluates or self._stopping.is_last_step
            return
        self._draining, asked, self._asked = False, self._asked, (False, False)
        wanted, evaluates = asked[0] or wanted, asked[1] or evaluates
        saves = last or self._due(trainer.checkpoint_every, step) or wanted
        evaluates = last or self._due(trainer.eval_every, step) or evaluates
        if saves or evaluates or self._stopping.is_last_step:
            self._end_round(logger)
        found = dict[str, float]()
        if evaluates or (saves and self._checkpoint.needs_validation):
            with self._watchdog.phase("evaluating"):
                found = self._evaluate(logger, step)
            self._agree_requests(logger)
            wanted, _ = self._callbacks.take_agreed()
            saves = saves or wanted
        if saves or self._stopping.is_last_step:
            with self._watchdog.phase("saving a checkpoint"):
                state = self._state()
            self._saves.save(
                logger,
                state,
                finite({"loss": result.loss, **found}),
                last=last or self._stopping.is_last_step,
            )
            self._stopping.exchange()
            if self._tell_checkpoints():
                self._agree_requests(logger)
            for message in self._stopping.evaluate() if not last else ():
                logger.note(f"step {step}: {message}")

    def _due(self, every: int, step: int) -> bool:
        """Whether an evaluation or a checkpoint takes place after ``step``, if one is due every ``every`` steps; 0 is
        never. With local steps, it is postponed to the end of the round."""
        round_ = self._engine.local_steps or 1
        return every > 0 and step % round_ == 0 and step // every > (step - round_) // every

    def _end_round(self, logger: RankZeroLogger) -> None:
        """Give all replicas the same weights, which an evaluation and a checkpoint need."""
        step, every = self._engine.completed_steps, self._engine.local_steps
        if every and step % every and step < self._trainer.steps:
            logger.note(
                f"step {step}: the replicas average their weights {every - step % every} steps early"
            )
        self._engine.end_round()

    def _evaluate(self, logger: RankZeroLogger, step: int) -> dict[str, float]:
        """Evaluate and report all held-out sets. Return loss and metrics of the main set, or nothing if a rank has been
        requested to end. The metric that ``patience`` and ``target`` use may end the run."""
        first: Evaluated | None = None
        self._callbacks.run.validation = {}
        averages = self._engine.evaluates_averages and not self._stopping.is_last_step
        with self._engine.averaged() if averages else self._engine.newest():
            for number, (name, held_out) in enumerate(self._held_out.items()):
                found = self._evaluate_set(logger, step, name if number else "", held_out)
                if found is None:
                    return {}
                first = first or found
        if first is None:
            return {}
        numbers = {"loss": first.loss, **first.metrics}
        named = {f"{VALIDATION}{name}": number for name, number in numbers.items()}
        self._callbacks.call("on_evaluate")
        self._tracked.add(named.get(self._tracked.metric))
        self._stopping.exchange()
        for message in filter(None, (reason.message() for reason in self._early)):
            logger.note(f"step {step}: {message}")
        return named

    def _evaluate_set(
        self, logger: RankZeroLogger, step: int, name: str, held_out: HeldOut
    ) -> Evaluated | None:
        def progress(done: int, count: int | None) -> bool:
            logger.evaluating(step, done, count)
            self._stopping.exchange()
            return not self._stopping.is_last_step

        found = None if self._stopping.is_last_step else held_out.evaluate(progress)
        self._unfinished = found is None
        if found is None:
            return None
        self._evaluated = step
        self._record.evaluated(found, name)
        figures = logger.evaluation(step, found.loss, name, found.metrics)
        self._callbacks.run.validation = {**self._callbacks.run.validation, **figures}
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
        return found

    def _summary(self) -> dict[str, Any]:
        """Return how the run ended, and the predicted and measured figures. All figures are equal on every rank, except
        the waits, which are those of this rank."""
        first = self._rank == 0
        return {
            "steps": self._engine.completed_steps,
            "checkpoint_seconds": self._saves.seconds,
            **self._ended,
            "unigram_entropy": getattr(self._source, "unigram_entropy", None) if first else None,
            **self._health.summary(),
            "synced_bytes": self._engine.synced_bytes,
            "staleness": self._engine.staleness,
            **self._record.summary(self._trainer.global_batch, self._tokens, self._utilization),
        }

    @property
    def _ended(self) -> dict[str, Any]:
        """Return the summary's entries that tell why the run ended."""
        ended = {"ended": ENDED} if self._rows_end.everywhere else {}
        return self._stopping.summary(complete=self._complete) | ended

    @property
    def _complete(self) -> bool:
        return not self._unfinished and self._engine.completed_steps >= self._trainer.steps


@dataclass(frozen=True)
class _Contributed:
    """The result of a step on this rank. ``columns()`` waits for the numbers of all ranks."""

    step: int
    result: StepResult
    columns: Callable[[], dict[str, list[float]]]


_OF_ROWS = "of_rows/"  # before the names of metrics, among the numbers that ranks exchange


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


def _of_ranks(columns: Mapping[str, Sequence[float]], budgets: Sequence[int]) -> dict[str, float]:
    """Return figures for the loggers, under names such as ``rank/0/peak_bytes``: the peak memory of each rank in bytes
    and as a fraction of its budget, the fraction of the step in which the rank computes, and the seconds that it waits
    for swapped data. An unknown fraction is 0."""
    figures: dict[str, float] = {}
    for rank, budget in enumerate(budgets):
        peak, busy = columns["peak_bytes"][rank], columns["busy_seconds"][rank]
        whole = columns["whole_seconds"][rank]
        figures[f"rank/{rank}/peak_bytes"] = peak
        figures[f"rank/{rank}/memory"] = peak / budget if budget else 0.0
        figures[f"rank/{rank}/utilisation"] = min(1.0, busy / whole) if whole else 0.0
        figures[f"rank/{rank}/stall_seconds"] = columns["stall_seconds"][rank]
    return figures


def _skip_text(result: StepResult) -> str:
    return f" was skipped, {result.trouble}" if result.trouble else ""
