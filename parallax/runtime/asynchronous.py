"""Steps of asynchronous replicas (:mod:`parallax.runtime.replicas.asynchronous`) between two meetings of all ranks.

Evaluations and checkpoints need equal weights on all ranks. So ranks train asynchronously for an interval of updates,
and meet at its end: no more shares are handed out, and every replica takes the weights after the last update.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallax.common.events import Span
from parallax.errors import ConfigError, NonFiniteError
from parallax.mesh import Mesh
from parallax.runtime.batch import Rows
from parallax.runtime.meters.step import StepResult
from parallax.runtime.optim.ema import Averages
from parallax.runtime.optim.optimizer import StageOptimizer
from parallax.runtime.optim.scaling import LossScale
from parallax.runtime.replicas.asynchronous import (
    Gradients,
    StateClient,
    StateExchange,
    StateOwner,
    Use,
)
from parallax.runtime.stage import Stage
from parallax.runtime.update import Update
from parallax.swap.statistics import SwapStatistics

Compute = Callable[[Rows, int, int], tuple[float, list[Span]]]
"""A function (batch, update, index of a share) that computes the gradients of the share, and leaves them in the
parameters. It returns this rank's part of the loss, and the spans."""


@dataclass(frozen=True)
class Interval:
    """The updates between two meetings of all ranks: those up to update ``stop`` − 1.

    ``fetch()``                returns the batch of the next update, for each update after the first; None after the
                               last row
    ``ends()``                 returns whether this rank requests an early meeting
    ``report(step, figures)``  is called after each update on the owner of the first stage, with the number of completed
                               updates. Other ranks do not wait for it.
    ``outlives``               whether :meth:`AsynchronousSteps.lose` is called for a rank whose process ends
    """

    stop: int
    fetch: Callable[[], Rows | None]
    ends: Callable[[], bool]
    report: Callable[[int, StepResult], None]
    outlives: bool = False

    @classmethod
    def of_one_step(cls, step: int) -> Interval:
        """Return the interval of the update ``step`` alone."""
        return cls(step + 1, lambda: None, lambda: False, lambda step, result: None)


@dataclass
class UpdateFigures:
    """The figures of one update. ``spans``: the spans (times of actions) of the shares that this rank has computed."""

    loss: float
    norm: float
    rate: float
    skipped: int
    trouble: str = ""
    refusal: str = ""
    spans: list[Span] = field(default_factory=list)

    def result(self, **figures: Any) -> StepResult:
        return StepResult(
            loss=self.loss,
            gradient_norm=self.norm,
            skipped_steps=self.skipped,
            trouble=self.trouble,
            learning_rate=self.rate,
            spans=self.spans,
            **figures,
        )


class AsynchronousSteps:
    """Runs the steps of one rank of asynchronous replicas.

    ``update``        makes the updates of the rank's stage, if the rank is an owner
    ``scale``         the loss scale, which is equal on all ranks whenever all ranks join
    ``averages``      the counts of the averaged weights, likewise
    ``peak_bytes()``  returns the peak of the rank's device memory
    ``staleness``     for each staleness, the number of gradients of all stages that had it. The staleness of a gradient
                      is the number of updates between its weights and the update that used it.
    ``uses``          the uses of gradients on this rank in the last interval; empty if the rank is no owner
    """

    def __init__(
        self,
        mesh: Mesh,
        stage: Stage,
        optimizer: StageOptimizer,
        update: Update,
        scale: LossScale,
        averages: Averages,
        peak_bytes: Callable[[], int],
    ) -> None:
        if mesh.asynchronous and scale.skips and stage.norms.statistics_differ:
            raise ConfigError(
                "trainer.nonfinite=skip: asynchronous replicas keep the running statistics of BatchNorms of a skipped "
                "update; use replicas.batchnorm=frozen, or trainer.nonfinite=stop"
            )
        self._mesh, self._optimizer, self._update = mesh, optimizer, update
        self._scale, self._averages = scale, averages
        self._peak_bytes = peak_bytes
        tensors = dict.fromkeys(stage.named_tensors().values())
        self._parameters = [p for p in tensors if isinstance(p, nn.Parameter) and p.requires_grad]
        self._used = [False] * len(self._parameters)
        self._exchange: StateExchange = (
            StateOwner(mesh, mesh.plan.staleness, self._parameters, self._apply)
            if mesh.owns_state
            else StateClient(mesh, self._parameters)
        )
        self._interval = Interval.of_one_step(0)
        self._began = 0.0
        self._done: list[UpdateFigures] = []
        self.uses: list[Use] = []
        self.staleness: dict[int, int] = {}

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients or weights that this rank has sent."""
        return self._exchange.sent_bytes

    @property
    def lost(self) -> bool:
        """Whether a replica was lost in the last interval, so that the ranks cannot meet any more."""
        return self._exchange.lost

    def lose(self, rank: int) -> Collection[int]:
        """Continue the interval without the replica of ``rank``, whose process has ended. Return the ranks of this
        replica; none if this is not possible. Another thread calls this method, on rank 0."""
        plan = self._mesh.plan
        replica = plan.coordinate(rank).replica
        if not self._exchange.lose(replica):
            return ()
        return [plan.ranks(stage)[replica] for stage in range(plan.pipeline_ranks)]

    def train(
        self, start: int, batch: Rows, interval: Interval, compute: Compute
    ) -> list[UpdateFigures]:
        """Make the updates of ``interval``, the first with the index ``start`` and the rows ``batch``. Return their
        figures, which are equal on all ranks except for the spans. All ranks call this method.

        Raises :class:`NonFiniteError` on all ranks for an update that is not finite and may not be skipped. If a
        replica was :attr:`lost`, only the owners return: the figures, or nothing after such an update.
        """
        self._interval, self._began, self._done = interval, time.perf_counter(), []
        kept = self._mesh.plan.staleness + 1 if self._mesh.owns_state else 1
        batches = _Batches(start, batch, interval.fetch, kept)
        spans: dict[int, list[Span]] = {}
        exchange = self._exchange
        exchange.begin(start, interval.stop, outlives=interval.outlives)
        while (share := exchange.next_share(ends=interval.ends())) is not None:
            rows = batches.of(share.update)
            if rows is None:
                exchange.end_rows(share)
                continue
            loss, found = compute(rows, *share)
            exchange.give(share, loss)
            spans.setdefault(share.update, []).extend(found)
        self.uses = exchange.end()
        done = self._done if self.lost else self._meet()
        if self.lost and done[-1].refusal:
            return []
        batches.fetch_to(start + len(done) - 1)  # all ranks are at the same position in the data
        for index, each in enumerate(done):
            each.spans = spans.get(start + index, [])
            if each.refusal:
                raise NonFiniteError(f"step {start + index}: {each.refusal}: {each.trouble}")
        return done

    def broadcast_weights(self) -> None:
        """Set the weights of all replicas to those of the owner. All ranks call this method, between two intervals."""
        self._optimizer.finish()
        for parameter in self._parameters:
            weights = parameter.detach().to("cpu", copy=True).contiguous()
            dist.broadcast(weights, group=self._mesh.outer_host, group_src=0)
            if not self._mesh.owns_state:
                with torch.no_grad():
                    parameter.copy_(weights)

    def _meet(self) -> list[UpdateFigures]:
        """Exchange the figures of all ranks, and count the staleness. Return the figures of the updates."""
        counts = Counter(use.staleness for use in self.uses)
        mine = self._done, self._scale.state(), self._averages.state(), [*counts.items()]
        found = self._mesh.all_gather_object(mine)
        done, scale, averages, _ = found[self._mesh.plan.ranks(0)[0]]
        if not self._mesh.owns_state:
            self._scale.load_state(scale)
            self._averages.load_state(averages)
        for *_, pairs in found:
            for staleness, count in pairs:
                self.staleness[staleness] = self.staleness.get(staleness, 0) + count
        return list(done)

    def _apply(self, update: int, gradients: Gradients, loss: float) -> bool:
        optimizer = self._optimizer
        optimizer.finish()
        optimizer.zero_grad()
        with torch.no_grad():
            self._set_gradients(gradients)
        for parameter in self._parameters:
            optimizer.reduced(parameter)
        self._update.announce(torch.tensor(loss, dtype=torch.float64))
        self._update.run(update)
        optimizer.finish()
        done, verdict = self._update, self._update.verdict
        text = f"{verdict.what}: {verdict.why}" if verdict.why else ""
        self._done.append(
            UpdateFigures(
                done.loss,
                done.norm,
                done.rate,
                self._scale.skipped,
                verdict.why if verdict.refusal else text,
                verdict.refusal,
            )
        )
        if self._mesh.pipeline_rank == 0 and not verdict.refusal:
            mean = (time.perf_counter() - self._began) / len(self._done)
            figures = self._done[-1].result(
                seconds=mean, peak_bytes=self._peak_bytes(), swap=SwapStatistics()
            )
            self._interval.report(update + 1, figures)
        return not verdict.refusal

    def _set_gradients(self, gradients: Gradients) -> None:
        """Set the gradients of an update. A parameter that no share has ever used must have no gradient, because with a
        gradient of zero weight decay would change it."""
        for index, (parameter, gradient) in enumerate(zip(self._parameters, gradients)):
            self._used[index] |= gradient is not None
            if not self._used[index]:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if gradient is not None:
                parameter.grad.copy_(gradient)


class _Batches:
    """The batches of an interval, of which the last ``kept`` are in memory. All ranks fetch the same batches in one
    order."""

    def __init__(
        self, start: int, first: Rows, fetch: Callable[[], Rows | None], kept: int
    ) -> None:
        self._place, self._fetch = start, fetch
        self._last: deque[Rows | None] = deque([first], kept)

    def of(self, update: int) -> Rows | None:
        """Return the batch of ``update``, which is one of the last ``kept`` or a later one; None if the rows have
        ended before it."""
        self.fetch_to(update)
        return self._last[update - self._place - 1] if update <= self._place else None

    def fetch_to(self, update: int) -> None:
        """Fetch the batches up to that of ``update``, or up to the last one of all rows."""
        while self._last[-1] is not None and self._place < update:
            self._last.append(self._fetch())
            self._place += 1
