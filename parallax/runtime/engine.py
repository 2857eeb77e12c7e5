"""The facade of the runtime: :class:`Engine` is one rank of a planned training run.

::

    engine = Engine.build(chain, plan, loss=loss)
    result = engine.step(TensorRows(inputs, targets))     # the same global batch on every rank
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallax.common.events import Span
from parallax.errors import ParallaxError
from parallax.mesh import Mesh
from parallax.model.describe import Chain
from parallax.model.layers.norms import BatchNorms
from parallax.model.losses import check_loss
from parallax.model.precision import PrecisionConfig
from parallax.model.saved import Selector
from parallax.plan.plan import Plan
from parallax.runtime.asynchronous import AsynchronousSteps, Interval
from parallax.runtime.batch import Rows, row_count
from parallax.runtime.checkpoint import ALL_STAY, Retention
from parallax.runtime.evaluation import Evaluator, step_loss
from parallax.runtime.executor import CurrentAction, TrainingParts
from parallax.runtime.forward import ForwardEngine, StageConfigs, build_stage
from parallax.runtime.health.buffers import KeptBuffers
from parallax.runtime.health.row_comparison import RowComparison
from parallax.runtime.loss import Evaluation, Loss
from parallax.runtime.meters.spans import TimedRows
from parallax.runtime.meters.step import StepResult
from parallax.runtime.metrics import Metrics, MetricsConfig
from parallax.runtime.optim.builder import OptimizerBuilder
from parallax.runtime.optim.config import Group, OptimizerConfig, as_config
from parallax.runtime.optim.ema import Averages, EmaConfig
from parallax.runtime.optim.emas.off import EmaOff
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.scaling import LossScale
from parallax.runtime.optim.schedule import ScheduleConfig
from parallax.runtime.optim.schedules.constant import ConstantSchedule
from parallax.runtime.plan_check import (
    accepted,
    check_training,
    check_updates,
    shared_between_ranks,
)
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.runtime.replicas.replicate import sync_for
from parallax.runtime.replicas.rounds import ReplicaMean, Rounds
from parallax.runtime.saving import Saving
from parallax.runtime.update import Update, agreed_sum, open_optimizer
from parallax.swap.activations.manager import SwapManager
from parallax.swap.config import SwapConfig
from parallax.swap.statistics import SwapStatistics

logger = logging.getLogger("parallax")


class Engine:
    """One rank of a training run: its stage with optimizer, channels and swap manager. It adds training to a
    :class:`~parallax.runtime.forward.ForwardEngine`. Build it with :meth:`build`."""

    def __init__(
        self, chain: Chain, plan: Plan, mesh: Mesh, loss: Loss, configs: EngineConfigs
    ) -> None:
        self.plan, self.mesh = plan, mesh
        self._chain = chain
        # Before memory is measured, so that the library's is not the stage's.
        self.metrics = Metrics(configs.metrics, mesh)
        shared = shared_between_ranks(chain, plan)
        norms = BatchNorms(configs.replicas.batchnorm, mesh)
        self._averages = Averages(configs.ema)
        self._exchanged = False
        averages = configs.ema.averages
        builder = OptimizerBuilder.of(
            configs.optimizer,
            chain.model,
            averages=averages,
            outer=configs.replicas.outer,
            fragments=configs.replicas.fragments,
            delays=plan.updates.delays,
        )
        self._mean = ReplicaMean(mesh, configs.replicas.outer_compress)
        builder.means = self._mean.means if mesh.outer is not None else None
        divides = builder.nature.divides
        built = build_stage(chain, mesh, configs.stage, norms, trains=True, divides=divides)
        self._stage, self._tiers, copies = built.stage, built.tiers, built.copies
        swap = self._open_swap(configs.stage.swap)
        self._manager = None if swap is None else swap[0]
        self._optimizer = open_optimizer(self._stage, mesh, shared, builder, self._tiers, copies)
        self._stage.wait_for_weights(self._optimizer.ready)
        # Gradients of asynchronous replicas are final where their shares are summed.
        reduced = self._unshared if mesh.asynchronous else self._optimizer.reduced
        splits = plan.schedule.splits
        self._sync = sync_for(self._stage, mesh, reduced, configs.replicas, split=splits)
        later = {
            n for n, pipeline_ranks in shared.items() if mesh.pipeline_rank in pipeline_ranks[1:]
        }
        self._scale = LossScale(configs.stage.precision, configs.nonfinite_skips)
        kept = self._stage, self._optimizer, self._scale, self._averages
        self.saving = Saving(chain, plan, mesh, *kept, later, copies)
        self._rounds = Rounds(
            configs.replicas, self._optimizer.exchange_fragments, norms, averages=averages
        )
        self._evaluation = Evaluation(loss, chain, configs.stage.precision, self.metrics)
        self._update = self._open_update(configs, builder, later)
        self._buffers = KeptBuffers(self._stage.modules())
        training = TrainingParts(self._sync, self._update, swap, self._stalls())
        of_step = step_loss(self._evaluation, chain, mesh)
        self._forward = ForwardEngine(chain, plan, mesh, built, of_step, training)
        self._evaluator = Evaluator(self._forward, chain, loss, self._evaluation, self._update.rows)
        self._shares = self._open_shares() if mesh.asynchronous else None
        self._step = 0
        # The batch with which the next step has begun, as given and as read.
        self._ahead: tuple[Rows, TimedRows] | None = None

    def _open_update(
        self, configs: EngineConfigs, builder: OptimizerBuilder, later: Collection[str]
    ) -> Update:
        owners = replace(self.mesh, world=self.mesh.pipeline)
        return Update(
            owners if self.mesh.asynchronous else self.mesh,
            self._stage,
            self._optimizer,
            self._scale,
            configs.factor,
            builder.lr,
            self._averages,
            groups=builder.groups,
            later=later,
            losses=self._evaluation.parts,
            read=self.metrics.copy_states,
            dtype=self._chain.dtype,
            rounds=self._rounds,
            rows=RowComparison(self.mesh),
        )

    def _open_shares(self) -> AsynchronousSteps:
        parts = self._stage, self._optimizer, self._update, self._scale, self._averages
        return AsynchronousSteps(self.mesh, *parts, self._forward.peak_bytes)

    def _stalls(self) -> Callable[[], float]:
        """Return a function that returns how many seconds the host has waited so far for weights and activations."""
        waiting = [each for each in (*self._optimizer.waiting, self._manager) if each is not None]
        return (lambda: sum(each.stall_seconds for each in waiting)) if waiting else float

    def _open_swap(self, config: SwapConfig) -> tuple[SwapManager, Selector] | None:
        """Return the swap manager, and the selector of the tensors that the manager offloads; None if the plan offloads
        no activations."""
        plans = (self.plan.stages[stage] for stage in self.mesh.stages)
        offloading = [each for each in plans if each.offloads]
        if not offloading:
            return None
        manager = SwapManager(
            self._tiers.open_activations(),
            limit_bytes=sum(each.swap_limit_bytes for each in offloading),
            verify=config.verify,
        )
        held, memory = self._stage.held(), self._stage.holds_offloaded_memory
        return manager, Selector(held, config.smallest_bytes(self.mesh.device.type), streams=memory)

    @classmethod
    def build(
        cls,
        chain: Chain,
        plan: Plan,
        *,
        loss: Loss,
        steps: int = 1000,
        device: torch.device | None = None,
        optimizer: OptimizerConfig | Callable[[Sequence[Group]], Optimizer] | None = None,
        schedule: ScheduleConfig | None = None,
        ema: EmaConfig | None = None,
        updates: str | None = None,
        precision: PrecisionConfig | None = None,
        swap: SwapConfig | None = None,
        replicas: ReplicasConfig | None = None,
        compile: bool = False,
        scratch: Path | None = None,
        nonfinite_skips: int = 0,
        metrics: MetricsConfig | None = None,
    ) -> Engine:
        """Build this rank's stage of ``plan``, with real parameters. Every rank calls this method, with
        torch.distributed initialised if the plan has more than one rank.

        ``optimizer``        AdamW by default; settings, or a function that takes parameter groups and returns a torch
                             optimizer
        ``schedule``         the learning rate over ``steps`` steps, constant by default
        ``ema``              averaged weights, none by default
        ``updates``          synchronous or delayed; by default those of the plan, and it must agree with the plan
        ``compile``          compile each block
        ``scratch``          the folder of swap files
        ``nonfinite_skips``  how many steps in a row may be skipped because their loss or gradients are not finite;
                             one more ends the run
        ``metrics``          computed for evaluated rows and, if cheap, for the rows of each step
        """
        check_loss(loss)
        check_training(plan, chain)
        plan = accepted(plan, chain)
        skips = LossScale(precision or PrecisionConfig(), nonfinite_skips).skips
        check_updates(plan, updates, skips=skips)
        replicas, ema = replicas or ReplicasConfig(), ema or EmaOff()
        replicas.check(plan, drops=nonfinite_skips > 0)
        replicas.check_beside(
            gather_loss=plan.gather_loss,
            delays=plan.updates.delays,
            scales=precision is not None and precision.scales,
        )
        mesh = Mesh.create(plan, device or torch.device("cpu"), shared_between_ranks(chain, plan))
        configs = EngineConfigs(
            StageConfigs.given(precision, swap, scratch, compile=compile),
            AdamWConfig() if optimizer is None else as_config(optimizer),
            partial((schedule or ConstantSchedule()).factor, steps=steps),
            replicas,
            nonfinite_skips,
            metrics or MetricsConfig(),
            ema,
        )
        return cls(chain, plan, mesh, loss, configs)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters and buffers of this rank's stages, by their names in the model. With delayed updates, they are
        those with which the next step computes; within :meth:`newest`, they are the newest.

        An offloaded parameter is returned as a copy, which optimizers refuse.
        """
        self._optimizer.finish()
        return self._forward.parameters

    @property
    def gradients_by_name(self) -> dict[str, Tensor]:
        """The gradients of this rank's resident and offloaded parameters, by the parameters' names in the model.

        Parameters without a gradient are omitted.
        """
        found = {n: self._stage.gradient(t) for n, t in self._stage.named_tensors().items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def tier_bytes(self) -> dict[str, int]:
        """Return how many bytes this rank's tensors use between steps: a dict from the description of each kind of
        tensor, such as "the optimizer's states", to the bytes of this kind."""
        held = self._stage.held()
        given = [p.grad for p in held if p.is_leaf and p.grad is not None]
        stored = self._manager.stored_bytes + self._manager.resident_bytes if self._manager else 0
        return {
            "parameters and gradients": sum(t.nbytes for t in (*held, *given)),
            "the optimizer's states": self._optimizer.state_bytes,
            "offloaded activations (host arena, pinned or not)": stored,
        }

    @property
    def completed_steps(self) -> int:
        return self._step

    @property
    def current(self) -> CurrentAction | None:
        """The action that this rank is running, its step, and its start time (time.perf_counter); None between steps.
        Watchdog threads read it."""
        return self._forward.executor.current

    @property
    def beside(self) -> dict[str, threading.Thread]:
        """The threads of background activities, such as writing a checkpoint, by the name of the activity. Watchdog
        threads read them."""
        return self.saving.pending.threads

    @property
    def all_reduces(self) -> int:
        """Number of all-reduces of replicated gradients since the engine was built."""
        return self._sync.all_reduces

    @property
    def local_steps(self) -> int:
        """The local steps of a round; 0 if replicas sum their gradients in every step."""
        return self._rounds.local_steps

    @property
    def staleness(self) -> dict[int, int]:
        """How many gradients of asynchronous replicas had each staleness since the engine was built. Equal on all
        ranks; empty if replicas are not asynchronous."""
        return {} if self._shares is None else self._shares.staleness

    @property
    def lost(self) -> bool:
        """Whether a replica was lost in the last :meth:`steps`. The owners of states may save, within
        :func:`parallax.nodes.together.among` their ``mesh.pipeline``, and nothing else."""
        return self._shares is not None and self._shares.lost

    def lose(self, rank: int) -> Collection[int]:
        """Continue :meth:`steps` without the replica of ``rank``, whose process has ended, and return the ranks of this
        replica. Return no ranks if all ranks are needed. A watchdog thread of rank 0 calls this method."""
        return () if self._shares is None else self._shares.lose(rank)

    @property
    def synced_bytes(self) -> int:
        """Bytes that this rank has sent since the engine was built: weights for the means of its replicas, or the
        gradients or weights of asynchronous replicas."""
        return self._mean.sent_bytes + (self._shares.sent_bytes if self._shares else 0)

    def end_round(self) -> None:
        """End the round of local steps now, for all fragments, so that all replicas of a stage have the same weights
        and averaged weights. All ranks call this method.

        A no-op if all replicas already have the same weights.
        """
        self._rounds.end()

    @property
    def continues(self) -> bool:
        """Whether :meth:`step` may begin the next step, and so accepts the batch of the next step."""
        return self.plan.schedule.continues

    def _check_settled(self, doing: str) -> None:
        if self._ahead is not None:
            raise ParallaxError(
                f"{doing} while a step has begun: call engine.step(batch) with its batch, without following, first"
            )
        if self._rounds.differ:
            raise ParallaxError(
                f"{doing} within a round of local steps, in which replicas have different weights: call "
                "engine.end_round() first"
            )

    def step(self, batch: Rows, following: Rows | None = None) -> StepResult:
        """Run one optimizer update over a global batch. The batch may have any number of rows, but the same number on
        all ranks.

        ``following`` is the batch of the next call. Pass it only if the plan :attr:`continues`, and no other method is
        called before the next step. This call then begins the next step, so that the pipeline does not drain. It does
        not begin it if the two batches have different numbers of rows, or fewer micro-batches than there are stages.

        If the loss or a gradient is not finite and the step may not be skipped, all ranks raise
        :class:`~parallax.errors.NonFiniteError`, with unchanged weights.
        """
        self._check_trained()
        if self._shares is not None:
            return self.steps(batch, Interval.of_one_step(self._step))[0]
        start, scale = time.perf_counter(), self._scale.factor
        timed, rows = self._forward.executor.timed, self._begun(batch)
        if rows is None:
            self._optimizer.zero_grad()
            rows = timed(batch)
        self._buffers.remember()
        ahead = None
        if following is not None and self._overlaps(batch, following):
            ahead = timed(following)
        spans = self._run(rows, training=True, updates=True, scale=scale, following=ahead)
        if following is not None and ahead is not None:
            self._ahead = following, ahead
        done = self._update
        loss, norm, seconds = done.loss, done.norm, time.perf_counter() - start
        swapped = self._take_statistics()
        trouble = "" if done.verdict.accepted else self._undo()
        self._step += 1
        return StepResult(
            loss=loss,
            gradient_norm=norm,
            seconds=seconds,
            peak_bytes=self._forward.peak_bytes(),
            swap=swapped,
            spans=spans,
            loss_scale=scale,
            skipped_steps=self._scale.skipped,
            trouble=trouble,
            learning_rate=self._update.rate,
            metrics=self.metrics.stepped(),
            read_seconds=rows.seconds,
        )

    def _overlaps(self, batch: Rows, following: Rows) -> bool:
        same = len(following) == len(batch)
        return same and self.plan.overlaps(self.plan.micro_batches(len(batch)))

    def _begun(self, batch: Rows) -> TimedRows | None:
        """Return the timed rows of ``batch`` with which the previous call of :meth:`step` has begun this step; None if
        it has not begun this step. Raises :class:`ParallaxError` if it has begun this step with another batch."""
        if self._ahead is None:
            return None
        given, rows = self._ahead
        if given is not batch:
            raise ParallaxError(
                f"step {self._step} has begun with another batch: give the one that was the last step's following"
            )
        self._ahead = None
        return rows

    def steps(
        self, batch: Rows, interval: Interval, following: Rows | None = None
    ) -> list[StepResult]:
        """Run the updates of ``interval``, the first of them over ``batch``, and return their results.

        Asynchronous replicas run all of these updates. The figures of this rank in a result then cover only the rows
        that this rank has computed. Other replicas run one update, and begin the next one over ``following``
        (:meth:`step`).
        """
        if self._shares is None:
            return [self.step(batch, following)]
        self._check_trained()
        start = time.perf_counter()
        rows = self._update.rows
        rows.check(agreed_sum(self.mesh, *rows.numbers(batch)), f"the batch of step {self._step}")
        done = self._shares.train(self._step, batch, interval, self._compute)
        if self._stage.norms.statistics_differ and not self.lost:
            self._stage.norms.average_statistics()
        self._step += len(done)
        seconds, swapped = time.perf_counter() - start, self._take_statistics()
        return [
            each.result(
                seconds=seconds / len(done),
                peak_bytes=self._forward.peak_bytes(),
                swap=swapped if each is done[-1] else SwapStatistics(),
            )
            for each in done
        ]

    def _compute(self, batch: Rows, update: int, share: int) -> tuple[float, list[Span]]:
        """Compute the gradients of a share of ``batch``, the batch of ``update``. Return this rank's part of the loss,
        and the spans. ``share``: the replica to which these rows belong in synchronous training."""
        self._optimizer.zero_grad()
        row_count(batch, update)
        spans = self._forward.run(
            self._forward.executor.timed(batch),
            update,
            training=True,
            denominator=self._evaluator.weight_of_last(batch) or 1.0,
            share=share,
        )
        return self._forward.executor.loss_share.item(), spans

    def _unshared(self, parameter: Tensor) -> None:
        """No-op, called for asynchronous replicas when a share's gradient of ``parameter`` is complete: the optimizer
        steps only the sum of the gradients of all shares."""

    def _undo(self) -> str:
        """Restore the buffers after a skipped step, and return why the step was skipped.

        Raises :class:`~parallax.errors.NonFiniteError` if as many steps in a row as allowed were already skipped.
        """
        self._forward.executor.abandon()
        self._ahead = None
        self._buffers.restore()
        return self._update.verdict.report(self._step)

    def _take_statistics(self) -> SwapStatistics:
        swapped = self._manager.take_statistics() if self._manager else SwapStatistics()
        self._optimizer.add_statistics(swapped)
        return swapped

    def gradients(self, batch: Rows) -> float:
        """Run forward and backward without an update, and return the loss. Afterwards :attr:`gradients_by_name` holds
        the gradients."""
        self._check_settled("computing gradients")
        self._optimizer.finish()
        self._optimizer.zero_grad()
        rows = self._update.rows.numbers(batch)
        self._run(batch, training=True)
        loss, *sums = agreed_sum(self.mesh, self._forward.executor.loss_share.item(), *rows)
        self._update.rows.check(sums, f"the batch of step {self._step}")
        return loss

    def check_metrics(self, batch: Rows) -> None:
        """Compute the metrics of ``batch`` in evaluation mode. Raises :class:`~parallax.errors.ConfigError` if a metric
        does not accept the model's outputs or the targets. Steps report metrics only after this call."""
        if self.metrics.names:
            self.metrics.begin(training=False)
            self.evaluate(batch)
            self.metrics.evaluated()
            if not self.mesh.asynchronous:
                self.metrics.settle()

    def evaluate(self, batch: Rows) -> float:
        """Return the loss of a batch in evaluation mode, computed without autograd."""
        return self.evaluate_weighted(batch)[0]

    def evaluate_weighted(self, batch: Rows) -> tuple[float, float]:
        """Return the loss of a batch, and the batch's weight in a mean over batches.

        The weight is the number of rows. If the loss ignores some targets, it is the number of targets that count.
        """
        self._check_settled("evaluating")
        with self.newest():
            return self._evaluator.evaluate(batch, self._step)

    @property
    def evaluates_averages(self) -> bool:
        """Whether the settings ask for validation with averaged weights."""
        return self._averages.config.evaluates

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the averaged weights replace the trained weights; all ranks enter it. Buffers stay
        unchanged. Without averages it does nothing.

        Steps and checkpoints are refused inside the context. They stay refused afterwards if there are replicas and the
        code inside the context has raised an exception. In this case the averaged weights stay in place: to restore the
        trained weights, all ranks would have to communicate, but only the failed rank leaves the context.
        """
        self._check_trained()
        with self._exchanging(self._exchange_averages) if self._averages.updates else self.newest():
            yield

    def _exchange_averages(self) -> None:
        self._optimizer.exchange_averages()
        if self._shares is not None:  # only the owner has averages
            self._shares.broadcast_weights()

    @contextlib.contextmanager
    def newest(self) -> Iterator[None]:
        """A context in which the model has its newest weights; all ranks enter it. Without delayed updates it has them
        anyway. With delayed updates, a step computes with older or predicted weights.

        Evaluations and predictions enter this context themselves, once for each batch. If you enter it around several
        batches, weights are exchanged only once. Within :meth:`averaged` the context does nothing.

        As in :meth:`averaged`, steps and checkpoints are refused inside the context.
        """
        if self._exchanged or not self._optimizer.delays:
            yield
            return
        with self._exchanging(self._optimizer.exchange_versions):
            yield

    @contextlib.contextmanager
    def _exchanging(self, exchange: Callable[[], None]) -> Iterator[None]:
        self._check_settled("exchanging weights")
        self._rounds.end()  # averaged weights differ after a round, too
        exchange()
        self._exchanged, failed = True, True
        try:
            yield
            failed = False
        finally:
            if not failed or self.mesh.replicas is None:
                exchange()
                self._exchanged = False

    def _check_trained(self) -> None:
        if self._exchanged:
            raise ParallaxError(
                "within engine.averaged() or newest(), and after an error in it, the trained weights are not in place: "
                "leave the context first, or load a checkpoint into a new engine"
            )

    def predict(self, batch: Rows) -> list[tuple[int, Any]]:
        """Return the model's outputs for a batch, without reading its targets. A rank of the last stage returns a list
        of (index of the first row, outputs), one entry for each micro-batch; other ranks return an empty list."""
        self._check_settled("predicting")
        with self.newest():
            return self._forward.predict(batch, self._step)

    def checkpoints(self, directory: Path) -> tuple[list[Path], list[str]]:
        """Return the checkpoints in ``directory`` that :meth:`load` can read, and one message about each of the others.

        The last entry of the first list is the checkpoint from which a run should resume. Files of interrupted saves
        are removed.
        """
        return self.saving.usable(directory)

    def save(
        self, directory: Path, state: dict[str, Any], *, retention: Retention = ALL_STAY
    ) -> Path:
        """Write a checkpoint of all stages into ``directory`` and return its folder. :meth:`load` returns a state equal
        to ``state``. ``retention`` selects the older checkpoints to keep. If nodes do not share ``directory``, each
        node writes the files of its own ranks.

        If one rank cannot write, all ranks raise, and earlier checkpoints stay unchanged.
        """
        self._check_trained()
        self._check_settled("saving")
        self._rounds.end()
        return self.saving.save(directory, self._step, {"state": state}, retention)

    def load(self, directory: Path) -> dict[str, Any]:
        """Load a checkpoint of this model, saved under any plan, and return the ``state`` that was saved with it.

        If one rank cannot read its part, all ranks raise, before anything is changed.
        """
        self._check_trained()
        found = self.saving.load(directory)
        self._step = found.step
        self._rounds.reset()
        self._scale.load_state(found.scale)
        self._averages.load_state(found.averages)
        if self.mesh.rank == 0 and self._averages.config.averages and not found.averages:
            logger.info(
                "step %d was saved without averaged weights; they begin with the next update",
                found.step,
            )
        if self.mesh.rank == 0 and found.averages and not self._averages.config.averages:
            logger.warning(
                "step %d was saved with averaged weights, and ema=off: they are dropped, and later checkpoints have "
                "none; resume with the settings ema of the first start to keep them",
                found.step,
            )
        return found.state

    @property
    def transports(self) -> dict[str, str]:
        """The name of the transport for each edge on which this rank sends, for example {"0 -> 1": "shared memory"}."""
        return self._forward.transports

    def close(self) -> None:
        """Release the stores, the channels and the process groups; the engine cannot be used any more."""
        self.saving.close()
        self._shares = None  # it and its exchange refer to each other, which would keep the memory of the stage
        self._optimizer.close()
        if self._manager is not None:
            self._manager.close()
        self._forward.close()

    def _run(
        self,
        batch: Rows,
        *,
        training: bool,
        updates: bool = False,
        scale: float = 1.0,
        following: Rows | None = None,
    ) -> list[Span]:
        row_count(batch, self._step)
        weight, after = self._evaluator.weight(batch), None
        if following is not None:
            after = following, self._evaluator.weight(following) or 1.0
        return self._forward.run(
            batch,
            self._step,
            training=training,
            updates=updates,
            denominator=weight or 1.0,
            scale=scale,
            following=after,
        )


@dataclass(frozen=True)
class EngineConfigs:
    """The settings of :class:`Engine` besides model and plan. ``factor(step)`` returns the factor by which the learning
    rates of a step are multiplied. The other fields are settings that :meth:`Engine.build` takes."""

    stage: StageConfigs
    optimizer: OptimizerConfig
    factor: Callable[[int], float]
    replicas: ReplicasConfig
    nonfinite_skips: int
    metrics: MetricsConfig
    ema: EmaConfig
