"""Loss and metrics of batches, computed by forwards only.

::

    engine = EvaluationEngine.build(chain, plan, loss=loss, metrics=metrics)
    engine.load(checkpoint)
    loss, weight = engine.evaluate_weighted(batch)        # the same batch on every rank
    engine.metrics.evaluated()

:class:`~parallax.runtime.engine.Engine` uses the same :class:`Evaluator`, so both give equal figures.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from parallax.mesh import Mesh
from parallax.model.describe import Chain
from parallax.model.layers.norms import BatchNorms
from parallax.model.losses import check_loss
from parallax.model.precision import PrecisionConfig
from parallax.plan.plan import Plan
from parallax.runtime.batch import Rows, as_tensors, row_count
from parallax.runtime.executor import CurrentAction
from parallax.runtime.forward import ForwardEngine, StageConfigs, build_stage
from parallax.runtime.health.row_comparison import RowComparison
from parallax.runtime.loss import Evaluation, GatheredLoss, Loss, LossOfParts, StepLoss
from parallax.runtime.metrics import Metrics, MetricsConfig
from parallax.runtime.plan_check import accepted
from parallax.runtime.update import agreed_sum
from parallax.swap.config import SwapConfig


def step_loss(evaluation: Evaluation, chain: Chain, mesh: Mesh) -> StepLoss:
    """Return the object that computes a step's loss with ``evaluation`` as the plan of ``mesh`` requires: for each
    micro-batch separately, or once for the rows of all micro-batches."""
    if mesh.plan.gather_loss:
        return GatheredLoss(evaluation, chain, mesh)
    return LossOfParts(evaluation)


class Evaluator:
    """Evaluates batches: ``forward`` runs the forwards, ``evaluation`` computes the losses of their outputs, and
    ``rows`` checks that all ranks read the same rows."""

    def __init__(
        self,
        forward: ForwardEngine,
        chain: Chain,
        loss: Loss,
        evaluation: Evaluation,
        rows: RowComparison,
    ) -> None:
        self._forward, self._dtype, self._mesh = forward, chain.dtype, forward.mesh
        self._count = getattr(loss, "count", None)
        self._evaluation, self._rows = evaluation, rows

    def evaluate(self, batch: Rows, step: int) -> tuple[float, float]:
        """Return the loss of a batch in evaluation mode, computed without autograd, and the batch's weight in a mean
        over batches.

        The weight is the number of rows. If the loss ignores some targets, it is the number of targets that count.
        ``step`` is used in messages and random seeds.
        """
        row_count(batch, step)
        rows, weight = self._rows.numbers(batch), self.weight(batch)
        with self._forward.evaluating():
            self._forward.run(batch, step, denominator=weight or 1.0)
        mine = self._forward.executor.loss_share.item(), self._evaluation.mass
        loss, mass, *sums = agreed_sum(self._mesh, *mine, *rows)
        self._rows.check(sums, f"a batch that is evaluated at step {step}")
        return loss, weight if self._count is not None else mass

    def weight(self, batch: Rows) -> float:
        """Return the batch's number of rows or, if the loss defines a method ``count``, the number of targets that this
        method counts.

        The last stage calls ``count`` for all ranks. So every rank must call this method.
        """
        if self._count is None:
            return float(len(batch))
        mine = self.weight_of_last(batch) if self._mesh.replica == 0 else 0.0
        return agreed_sum(self._mesh, mine)[0]

    def weight_of_last(self, batch: Rows) -> float:
        """Return the result of :meth:`weight` without an exchange with other ranks. If the loss defines ``count``, the
        result is 0 on ranks without the last stage."""
        if self._count is None or not self._mesh.is_last:
            return 0.0 if self._count else float(len(batch))
        targets = batch.targets(0, len(batch))
        return float(self._count(as_tensors("targets", targets, len(batch), self._dtype)))


class EvaluationEngine:
    """One rank of an evaluation: its stage with a loss and metrics, but without optimizer and gradients. Build it with
    :meth:`build`."""

    def __init__(
        self,
        forward: ForwardEngine,
        evaluator: Evaluator,
        metrics: Metrics,
    ) -> None:
        self.plan, self.mesh, self.metrics = forward.plan, forward.mesh, metrics
        self._forward, self._evaluator = forward, evaluator
        self.completed_steps = 0
        """The step of the loaded weights."""

    @classmethod
    def build(
        cls,
        chain: Chain,
        plan: Plan,
        *,
        loss: Loss,
        metrics: MetricsConfig | None = None,
        device: torch.device | None = None,
        precision: PrecisionConfig | None = None,
        swap: SwapConfig | None = None,
        compile: bool = False,
        scratch: Path | None = None,
    ) -> EvaluationEngine:
        """Build this rank's stage of ``plan`` for evaluations.

        Every rank calls this method, with torch.distributed initialised if the plan has more than one rank. The
        parameters are those of :meth:`~parallax.runtime.engine.Engine.build`.
        """
        check_loss(loss)
        plan = accepted(plan, chain)
        mesh = Mesh.create(plan, device or torch.device("cpu"), {})
        computed = Metrics(metrics or MetricsConfig(), mesh)
        configs = StageConfigs.given(precision, swap, scratch, compile=compile)
        built = build_stage(chain, mesh, configs, BatchNorms(), trains=False)
        evaluation = Evaluation(loss, chain, configs.precision, computed)
        forward = ForwardEngine(chain, plan, mesh, built, step_loss(evaluation, chain, mesh))
        evaluator = Evaluator(forward, chain, loss, evaluation, RowComparison(mesh))
        return cls(forward, evaluator, computed)

    def load(self, directory: Path, *, averaged: bool = False) -> None:
        """Load the weights of a checkpoint; see :meth:`ForwardEngine.load`."""
        self.completed_steps = self._forward.load(directory, averaged=averaged)

    def evaluate_weighted(self, batch: Rows) -> tuple[float, float]:
        """Return the loss of a batch, and the batch's weight in a mean over batches.

        The weight is the number of rows. If the loss ignores some targets, it is the number of targets that count.
        """
        return self._evaluator.evaluate(batch, self.completed_steps)

    @property
    def current(self) -> CurrentAction | None:
        """The action that this rank is running, its step, and its start time (time.perf_counter); None between steps.
        Watchdog threads read it."""
        return self._forward.executor.current

    @property
    def beside(self) -> Mapping[str, threading.Thread]:
        """An empty dict: an evaluation has no background activities that watchdog threads could read."""
        return {}

    @property
    def transports(self) -> dict[str, str]:
        """The name of the transport to each rank to which this rank sends, for example {"0 -> 1": "shared memory"}."""
        return self._forward.transports

    def peak_bytes(self) -> int:
        """Return the peak of device memory since the engine was built."""
        return self._forward.peak_bytes()

    def close(self) -> None:
        """Release stores, channels and process groups; the engine cannot be used any more."""
        self._forward.close()
