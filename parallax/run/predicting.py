"""One rank's part of a prediction, which applies a run's model to new rows. Rank 0 writes the outputs in the order of
the rows.

::

    a batch ──> forward on all ranks ──> last stages: tensors of their rows ──> rank 0: part files ──> one file

Rank 0 writes finished batches as part files beside the output, each completely or not at all, and joins them at the
end. A prediction that was killed continues after the last part. The division into parts depends only on the rows and
the size of their outputs, so the joined file does not depend on interruptions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from parallax.errors import ConfigError, DataError
from parallax.mesh import Mesh
from parallax.model.losses import scores_of
from parallax.nodes.together import broadcast_result
from parallax.run.inference import output_tensors
from parallax.run.predictions import Outputs, PredictedRows
from parallax.runtime.batch import Rows, RowsOf
from parallax.runtime.forward import ForwardEngine
from parallax.train.data.indexed import IndexedSource
from parallax.train.data.progress import progress
from parallax.train.data.table import INPUTS
from parallax.train.unlabelled import SKIPPED, UnlabelledTable
from parallax.train.watchdog import Watchdog

Named = list[tuple[str, Tensor]]
_TAG = 2**20  # of messages with outputs; no route between stages uses this tag


@dataclass(frozen=True)
class PredictedRun:
    """The result of a prediction: the total numbers of rows that were written and skipped, the number of rows that this
    start of the command computed, and the seconds that it took."""

    rows: int
    skipped: int
    computed: int
    seconds: float


class _NotingRows(RowsOf):
    """A batch that records the bad rows among the inputs that this rank reads: ``bad`` maps the number of each bad row
    to the reason why it cannot be read."""

    def __init__(self, batch: Rows) -> None:
        super().__init__(batch)
        self.bad: dict[int, str] = {}

    def inputs(self, start: int, stop: int) -> Any:
        found = self._batch.inputs(start, stop)
        part: Any = self._batch
        self.bad |= dict(json.loads(part.part(start, stop, SKIPPED)))
        return found

    def targets(self, start: int, stop: int) -> Any:
        raise AssertionError(f"rows {start} to {stop} have no targets")


def predict(
    engine: ForwardEngine, source: IndexedSource, size: int, watchdog: Watchdog, to: Outputs
) -> PredictedRun:
    """Write the model's outputs for all rows of ``source`` to ``to``, computed by ``engine`` in batches of ``size``
    rows.

    All ranks must call this function. Rank 0 shows progress and writes the outputs. ``watchdog`` limits the time of
    each batch.
    """
    mesh, table = engine.mesh, source.table
    assert isinstance(table, UnlabelledTable)
    first = broadcast_result(lambda: to.begin(table.fingerprint))
    begun, rows = time.perf_counter(), source.validation_sets[INPUTS]
    left = len(table) - first
    with progress("predicting", left, quiet=mesh.rank > 0, rate="rows") as advance:
        for start in range(first, len(table), size):
            with watchdog.phase("predicting"):
                batch = _NotingRows(rows.validation(start // size, size))
                parts = engine.predict(batch)
                mine = [(start + at, _tensors(results, to.top)) for at, results in parts]
                found, bad = _collected(mesh, mine, batch.bad)
                if mesh.rank == 0:
                    to.add(_batch_of(table, start, len(batch), found, bad))
            advance(len(batch))
    seconds = time.perf_counter() - begun
    with watchdog.phase("writing the output"):
        written, skipped = to.finish() if mesh.rank == 0 else (0, 0)
        mesh.barrier()
    return PredictedRun(written, skipped, left, seconds)


def _tensors(results: Any, top: int) -> Named:
    """Return the tensors in ``results``, a model's return value, by name, in host memory. A single tensor is called
    ``output``; others are named by their keys or numbers. With ``top``, return instead the ``top`` best classes and
    their softmax scores."""
    if top:
        return _top(scores_of(results), top)
    found = output_tensors(results)
    if not found:
        raise ConfigError(
            f"predict: the model returns no tensors with rows, but a {type(results).__name__}"
        )
    return [(name, _on_host(name, tensor)) for name, tensor in found]


def _top(scores: Any, top: int) -> Named:
    if not isinstance(scores, Tensor) or scores.ndim < 2 or not scores.is_floating_point():
        raise ConfigError(
            f"--top {top}: it needs class scores in the last dimension of the model's output or of its logits; leave "
            "it out"
        )
    if scores.shape[-1] < top:
        raise ConfigError(f"--top {top}: the model has {scores.shape[-1]} classes")
    values, classes = torch.softmax(scores.float(), -1).topk(top)
    return [("classes", classes.cpu()), ("scores", values.cpu())]


def _on_host(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor in host memory. bfloat16, which numpy lacks, becomes float32. Raises :class:`ConfigError` for
    other formats that numpy lacks."""
    found = tensor.detach()
    found = found.float() if found.dtype == torch.bfloat16 else found
    try:
        torch.empty(0, dtype=found.dtype).numpy()
    except TypeError:
        raise ConfigError(
            f"predict: the model's output {name} is {found.dtype}, which files cannot hold: return it as torch.float32"
        ) from None
    return found.cpu().contiguous()


_Head = list[tuple[int, list[tuple[str, tuple[int, ...], torch.dtype]]]]


def _collected(
    mesh: Mesh, mine: list[tuple[int, Named]], bad: dict[int, str]
) -> tuple[list[tuple[int, Named]], dict[int, str]]:
    """Return, on rank 0, the outputs and the bad rows of all ranks. The other ranks get back their own, ``mine`` and
    ``bad``. ``mine``: (first row, outputs) of each group of rows that this rank has computed. Only ranks of the last
    stage send tensors."""
    if mesh.world is None:
        return mine, bad
    head: _Head = [(at, [(n, tuple(t.shape), t.dtype) for n, t in named]) for at, named in mine]
    answers = mesh.all_gather_object((head, bad))
    if mesh.rank:
        for _, named in mine:
            for _, tensor in named:
                dist.send(_bytes_of(tensor), 0, group=mesh.forth, tag=_TAG)
        return mine, bad
    found = mine
    for rank, (theirs, more) in enumerate(answers):
        bad = bad | more
        if rank:
            found = found + list(_received(mesh, rank, theirs))
    return found, bad


def _received(mesh: Mesh, rank: int, head: _Head) -> Iterator[tuple[int, Named]]:
    for at, named in head:
        tensors = [(name, torch.empty(shape, dtype=dtype)) for name, shape, dtype in named]
        for _, tensor in tensors:
            dist.recv(_bytes_of(tensor), rank, group=mesh.forth, tag=_TAG)
        yield at, tensors


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a view of the tensor as bytes, which every communication backend can send."""
    return tensor.reshape(-1).view(torch.uint8)


def _batch_of(
    table: UnlabelledTable,
    start: int,
    count: int,
    parts: list[tuple[int, Named]],
    bad: dict[int, str],
) -> PredictedRows:
    """Return the outputs of the rows [start, start + count) of ``table`` in order, without the bad rows. ``parts``:
    (first row, outputs) of each group of rows that one rank has computed. ``bad``: row → why it cannot be read."""
    parts = sorted(parts, key=lambda part: part[0])
    columns: dict[str, NDArray[Any]] = {}
    for same in zip(*(named for _, named in parts), strict=True):
        name = same[0][0]
        columns[name] = np.concatenate([tensor.numpy() for _, tensor in same])
        if len(columns[name]) != count:
            raise DataError(
                f"predict: the model's {name} for {count} rows has the shape {list(columns[name].shape)}; accepted are "
                "outputs with the rows in the first dimension"
            )
    rows = np.arange(start, start + count)
    sound = ~np.isin(rows, list(bad))
    kept = rows[sound]
    return PredictedRows(
        end=start + count,
        rows=kept,
        names=table.row_names(kept),
        lengths=table.lengths(kept),
        padded=table.padded_length,
        columns={name: values[sound] for name, values in columns.items()},
        bad=sorted(bad.items()),
        bad_names=table.row_names(np.array(sorted(bad), np.int64)),
    )
