"""Compute the validation loss: the mean over all held-out rows, or over all targets that the loss does not ignore. The
batch size does not change this mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from parallax.errors import DataError, EmptyBatchError, HangError
from parallax.mesh import Mesh
from parallax.runtime.batch import FirstRows, Rows
from parallax.runtime.health.row_comparison import RowDigest, row_digest
from parallax.runtime.metrics import Metrics

MOST_BATCHES = 1000  # for a source that neither ends nor has ``validation_rows``
_ENDS = StopIteration, IndexError, EmptyBatchError


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation: the mean ``loss`` and the ``metrics`` over ``rows`` rows in ``batches`` batches.
    ``truncated``: whether the source may have more batches, because it does not tell its number of rows. ``bad``: index
    and loss of the first batch whose loss is not finite."""

    loss: float
    batches: int
    rows: int
    metrics: dict[str, float]
    truncated: bool = False
    bad: tuple[int, float] | None = None


class HeldOutSet(Protocol):
    """The part of a :class:`~parallax.train.data.source.Source` that an evaluation reads."""

    def validation(self, index: int, rows: int) -> Rows:
        """Return held-out batch ``index``."""


class EvaluatingEngine(Protocol):
    """The part of an :class:`~parallax.runtime.engine.Engine` that an evaluation uses."""

    mesh: Mesh
    metrics: Metrics

    def evaluate_weighted(self, batch: Rows) -> tuple[float, float]:
        """Return the loss of a batch, and the weight of this loss in a mean over batches."""


class HeldOut:
    """The held-out rows of ``source`` in batches of ``rows`` rows; at most ``most`` batches (None: all)."""

    def __init__(
        self, engine: EvaluatingEngine, source: HeldOutSet, rows: int, most: int | None
    ) -> None:
        self._engine, self._source, self._rows, self._most = engine, source, rows, most

    def evaluate(self, progress: Callable[[int, int | None], bool]) -> Evaluated | None:
        """Return loss and metrics of the held-out rows. All ranks must call this method. After each batch,
        ``progress(done, count)`` is called with the number of evaluated batches and the number of all batches. If the
        latter is unknown, it is the maximum ``most`` (None: no maximum). If ``progress`` returns False, the evaluation
        stops and returns None."""
        total, weights, done, rows, bad = 0.0, 0.0, 0, 0, None
        self._engine.metrics.begin(training=False)
        known = self.known_batches()
        batches = self._batches() if known is None else self._known(known)
        while (batch := self._agreed(next(batches, None))) is not None:
            loss, weight = self._engine.evaluate_weighted(batch)
            if not math.isfinite(loss) and bad is None:
                bad = done, loss
            total, weights, done = total + loss * weight, weights + weight, done + 1
            rows += len(batch)
            if not progress(done, known if known is not None else self._most):
                return None
        truncated = known is None and self._most is None and done == MOST_BATCHES
        loss, metrics = total / weights if weights else math.nan, self._engine.metrics.evaluated()
        return Evaluated(loss, done, rows, metrics, truncated, bad)

    def first_batch(self) -> Rows | None:
        """Return the first batch that :meth:`evaluate` evaluates; None if there is none."""
        known = self.known_batches()
        return next(self._batches() if known is None else self._known(known), None)

    def known_batches(self) -> int | None:
        """Return the number of batches to evaluate; None if the source does not define ``validation_rows``."""
        rows = getattr(self._source, "validation_rows", None)
        if rows is None:
            return None
        batches = -(-int(rows) // self._rows)
        return batches if self._most is None else min(batches, self._most)

    def _known(self, count: int) -> Iterator[Rows]:
        left = int(self._source.validation_rows)  # type: ignore[attr-defined]
        for index in range(count):
            batch = self._source.validation(index, self._rows)
            yield FirstRows(batch, left) if left < len(batch) else batch
            left -= len(batch)

    def _batches(self) -> Iterator[Rows]:
        """Yield the batches of a source that does not tell its number of rows, until it ends or repeats its first
        batch."""
        first: RowDigest | None = None
        short = False
        for index in itertools.islice(itertools.count(), self._most or MOST_BATCHES):
            try:
                batch = self._source.validation(index, self._rows)
            except HangError:
                raise
            except Exception as error:  # after a short batch any error is the end
                if index and (short or isinstance(error, _ENDS)):
                    return
                raise
            if index and not len(batch):
                return
            if self._most is None:
                found = row_digest(batch)
                if index and found == first and None not in found:
                    return
                first = first or found
            short = short or len(batch) < self._rows
            yield batch

    def _agreed(self, batch: Rows | None) -> Rows | None:
        """Return ``batch`` if all ranks have a batch, and None if no rank has one. Raises :class:`DataError` if only
        some ranks have one."""
        mesh = self._engine.mesh
        have = int(mesh.sum(torch.tensor([float(batch is not None)])).item())
        if have in (0, mesh.plan.world_size):
            return batch
        raise DataError(
            f"{have} of {mesh.plan.world_size} ranks have more held-out rows than the others: a data source must give "
            "the same rows on every rank"
        )
