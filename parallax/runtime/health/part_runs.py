"""Questions about a batch that was computed: parts of it are computed again, without an update, and leave nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from parallax.mesh import Mesh
from parallax.model.block import is_ragged, transform
from parallax.plan.plan import Plan
from parallax.plan.rows import micro_batch_rows
from parallax.runtime.batch import Rows
from parallax.runtime.health.buffers import KeptBuffers
from parallax.runtime.health.search import Interval, culprits, in_words
from parallax.runtime.optim.optimizer import StageOptimizer
from parallax.runtime.stage import Stage


class RunPart(Protocol):
    """Runs a batch's actions."""

    def __call__(
        self, batch: Rows, *, training: bool, update: Callable[[Tensor], None], first_row: int
    ) -> object:
        """``first_row``: the place of its first row in the batch that it is a part of."""


class Measures(Protocol):
    """What all ranks know of a loss and a gradient norm after :meth:`measure`."""

    loss: float
    norm: float

    def measure(self, loss: Tensor) -> object:
        """Agree, given this rank's share of the loss."""


class PartRuns:
    """Computes micro-batches of a batch again, as a step would; all ranks together. Weights, states, gradients, buffers
    and statistics are as before afterwards."""

    def __init__(
        self,
        run: RunPart,
        plan: Plan,
        mesh: Mesh,
        stage: Stage,
        optimizer: StageOptimizer,
        measures: Measures,
        take_statistics: Callable[[], object],
    ) -> None:
        self.plan, self.mesh, self.stage = plan, mesh, stage
        self._run, self._optimizer, self._measures = run, optimizer, measures
        self._take_statistics = take_statistics

    def blame(self, batch: Rows) -> str:
        """Which rows of a batch make a loss or gradients that are not finite."""
        parts = self.parts(batch)

        def fails(micros: Interval, rows: Interval) -> str:
            low, high = parts[micros[0]][0], parts[micros[1] - 1][1]
            loss, norm = self.run(RepeatedRows(batch, low, high, *rows), low)
            if not math.isfinite(loss):
                return f"loss {loss}"
            return "" if math.isfinite(norm) else f"gradients of norm {norm}"

        def fits(micros: Interval) -> bool:
            some = parts[slice(*micros)]
            low, rows = some[0][0], some[-1][1] - some[0][0]
            return self._cut(rows) == [(start - low, stop - low) for start, stop in some]

        return in_words(culprits(parts, fails, halves=self.can_repeat(batch), fits=fits))

    def run(
        self, part: Rows, first_row: int, look: Callable[[], None] = lambda: None
    ) -> tuple[float, float]:
        """The loss and the gradient norm of a part of a batch: some of its micro-batches, or a part of one. ``look`` is
        called while its gradients are there."""
        kept = KeptBuffers(self.stage.modules())
        kept.remember()
        self._optimizer.finish()
        self._optimizer.zero_grad()
        found: list[float] = []

        def measure(share: Tensor) -> None:
            self._measures.measure(share)
            found.extend((self._measures.loss, self._measures.norm))
            look()
            self._optimizer.skip()

        self._run(part, training=True, update=measure, first_row=first_row)
        self._take_statistics()
        kept.restore()
        return found[0], found[1]

    def settle(self) -> None:
        """Wait for a step below the device, of which replicas tell each other beside the next forward."""
        self._optimizer.finish()

    def forward(self, part: Rows, first_row: int) -> None:
        """Its forward alone, as in an evaluation."""
        with self.stage.evaluating():
            self._run(part, training=False, update=lambda share: None, first_row=first_row)

    def parts(self, batch: Rows) -> list[Interval]:
        """The rows of its micro-batches."""
        return self._cut(len(batch))

    def _cut(self, rows: int) -> list[Interval]:
        count = self.plan.micro_batches(rows)
        return [micro_batch_rows(rows, count, micro) for micro in range(count)]

    def can_repeat(self, batch: Rows) -> bool:
        """Whether its rows can be put beside each other anew, as all ranks know."""
        ragged = self.mesh.stage == 0 and not can_repeat(batch.inputs)
        ragged |= self.mesh.is_last and not can_repeat(batch.targets)
        return not self.mesh.sum(torch.tensor([float(ragged)])).item()


class RepeatedRows:
    """Rows ``low`` to ``high`` of ``batch``, of a micro-batch or of several whole ones, with those of [start, stop) in
    their own places, and again in all others: it has as many rows as the whole, so that whatever computes on it sees
    the same shapes."""

    def __init__(self, batch: Rows, low: int, high: int, start: int, stop: int) -> None:
        self._batch, self._low, self._high = batch, low, high
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return self._high - self._low

    def __getattr__(self, name: str) -> Any:
        """What else the batch says, such as ``longest``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batch, name)

    def inputs(self, start: int, stop: int) -> Any:
        """Model inputs."""
        return self._take(self._batch.inputs, self._low + start, self._low + stop)

    def targets(self, start: int, stop: int) -> Any:
        """Loss targets."""
        return self._take(self._batch.targets, self._low + start, self._low + stop)

    def _take(self, read: Callable[[int, int], Any], low: int, high: int) -> Any:
        if self._start <= low and high <= self._stop:
            return read(low, high)
        found, count = read(self._start, self._stop), self._stop - self._start
        chosen = [(row - self._start) % count for row in range(low, high)]

        def pick(tensor: Any) -> Any:
            if isinstance(tensor, Tensor) and tensor.dim() and len(tensor) == count:
                return tensor[torch.tensor(chosen, dtype=torch.int64, device=tensor.device)]
            return tensor

        return transform(found, pick, (Tensor, PackedSequence))


def can_repeat(read: Callable[[int, int], Any]) -> bool:
    """Whether rows can be put beside each other anew; those of several lengths cannot."""
    found: list[bool] = []
    transform(read(0, 1), lambda part: found.append(is_ragged(part)), (Tensor, PackedSequence))
    return not any(found)
