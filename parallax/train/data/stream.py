"""Rows of an iterable dataset. A resumed run restores the position from the dataset's own state, or by reading the
epoch from its start.

The saved state of an iterable dataset may be incomplete: for example, Hugging Face's state lacks the rows of a shuffle
buffer. So a checkpoint holds the state before the last batch, and a digest of that batch. A resumed run reads the batch
again. If its digest differs, or if the dataset has no state, the run reads the epoch from its start instead. The run
then continues with exactly the right rows, if the dataset yields the same rows in each pass.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from parallax.errors import CheckpointError, DataError, UserError
from parallax.runtime.batch import Rows
from parallax.train.data.indexed import SIZES_OF, HeldOutSets, IndexedSource, largest
from parallax.train.data.order import mixed
from parallax.train.data.table import (
    INPUTS,
    TARGETS,
    Table,
    Values,
    check_collated,
    digest_of,
    own_generators,
    placed,
    rows_of,
    seed_all,
)

logger = logging.getLogger("parallax")

_END = object()


def has_state(dataset: Any) -> bool:
    """Return whether an iterable dataset saves and restores its position."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


class StreamRows:
    """A batch of examples in memory. Only the requested rows are collated or, with ``as_whole``, always all rows.
    ``collate(examples)`` returns inputs and targets. ``first``: the index of the first example in its epoch, from which
    the random numbers of collating are seeded."""

    def __init__(
        self,
        examples: list[Any],
        collate: Callable[[list[Any]], Values],
        first: int,
        *,
        as_whole: bool,
    ) -> None:
        self._examples, self._collate, self._first = examples, collate, first
        self._as_whole = as_whole
        self._found: tuple[int, int, Values] | None = None

    def __len__(self) -> int:
        return len(self._examples)

    def inputs(self, start: int, stop: int) -> Any:
        return self._part(start, stop, INPUTS)

    def targets(self, start: int, stop: int) -> Any:
        return self._part(start, stop, TARGETS)

    def _part(self, start: int, stop: int, part: str) -> Any:
        if not self._as_whole:
            return self._values(start, stop)[part]
        rows = len(self)
        return rows_of(self._values(0, rows)[part], rows, start, stop)

    def _values(self, start: int, stop: int) -> Values:
        if self._found is None or self._found[:2] != (start, stop):
            with own_generators():
                seed_all(int(mixed(self._first, start)[0]))
                self._found = start, stop, self._collate(self._examples[start:stop])
        return self._found[2]


class StreamSource(HeldOutSets):
    """The rows of ``dataset``, in the order in which it yields them; after its end, the dataset is iterated again. Each
    rank iterates over all rows, but collates only its own. ``collate`` converts a list of examples to a batch, and
    ``split`` divides a batch into inputs and targets. ``held_out``: name → table of each held-out set. ``label``: the
    name of the source in error messages."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        split: Callable[[Any], Values],
        held_out: Mapping[str, Table],
        label: str,
    ) -> None:
        self._dataset, self._label = dataset, label
        self._collate = partial(self._collated, collate, split)
        self._as_whole = collate is not default_collate  # it may depend on all rows of a batch
        self._has_state = has_state(dataset)
        self._start = self._state()
        self._epoch, self._taken = 0, 0  # rows of the epoch so far
        self._iterator: Iterator[Any] | None = None
        self._generators: Any = None
        self._before: dict[str, Any] = self._place()
        self._last: StreamRows | None = None
        self.validation_sets = IndexedSource.sets_of(held_out)

    def batch(self, rows: int) -> Rows:
        """Return the next ``rows`` rows."""
        self._before = self._place()
        self._last = self._rows(rows, self._before["taken"])
        return self._last

    def sample(self, rows: int) -> Rows:
        """Return ``rows`` rows without advancing, for measuring and planning: the first batch, or the largest of the
        first few if a collate function may pad rows to the longest of their batch."""
        assert self._last is None, "rows have been taken"
        batches = [self._rows(rows, 0) for _ in range(SIZES_OF if self._as_whole else 1)]
        self._go_to({"epoch": 0, "taken": 0, "dataset": self._start})
        return largest(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position before the latest batch, and the number of rows and a digest of that batch."""
        rows = 0 if self._last is None else len(self._last)
        return {**self._before, "rows": rows, "digest": self._digest(self._last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Raises :class:`CheckpointError` if the dataset yields other rows than before."""
        rows, digest = int(state["rows"]), int(state["digest"])
        if not rows:
            self._go_to(state)
            return
        if self._has_state:
            self._go_to(state)
            if self._digest(self.batch(rows)) == digest:
                return
        logger.info("%s: reading %d rows again to find the place", self._label, state["taken"])
        self._go_to({**state, "taken": 0, "dataset": self._start})
        self._read(int(state["taken"]))
        if self._digest(self.batch(rows)) != digest:
            raise CheckpointError(
                f"{self._label}: the dataset gives other rows than those that the checkpoint was trained on: restore "
                "its data and settings, and let it draw from the generators of torch, numpy and random alone"
            )

    def _rows(self, rows: int, first: int) -> StreamRows:
        return StreamRows(self._read(rows), self._collate, first, as_whole=self._as_whole)

    def _collated(
        self,
        collate: Callable[[list[Any]], Any],
        split: Callable[[Any], Values],
        examples: list[Any],
    ) -> Values:
        with self._named("no batch can be made of its rows"):
            batch = collate(examples)
        found = split(batch)
        check_collated(self._label, found, len(examples))
        return found

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """A context that converts errors of the user's dataset to :class:`DataError`. ``what``: the activity in which
        they occur, for the message."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise DataError(f"{self._label}: {what}: {placed(error)}") from error

    def _read(self, rows: int) -> list[Any]:
        found: list[Any] = []
        with self._own_generators():
            while len(found) < rows:
                with self._named(f"row {self._taken} of epoch {self._epoch}"):
                    if self._iterator is None:
                        self._iterator = iter(self._dataset)
                    example = next(self._iterator, _END)
                if example is not _END:
                    found.append(example)
                    self._taken += 1
                elif not self._taken:
                    raise DataError(f"{self._label}: the iterable dataset has no rows")
                else:
                    self._go_to({"epoch": self._epoch + 1, "taken": 0, "dataset": self._start})
                    self._seed()
        return found

    def _go_to(self, place: Mapping[str, Any]) -> None:
        self._epoch, self._taken = int(place["epoch"]), int(place["taken"])
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(self._epoch)
        if self._has_state:
            with self._named("its load_state_dict does not take what its state_dict gave"):
                self._dataset.load_state_dict(copy.deepcopy(place["dataset"]))
        self._iterator = self._generators = None

    def _state(self) -> Any:
        with self._named("its state_dict"):
            return copy.deepcopy(self._dataset.state_dict()) if self._has_state else None

    def _place(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "taken": self._taken, "dataset": self._state()}

    def _digest(self, rows: Rows | None) -> int:
        if rows is None:
            return 0
        return digest_of((rows.inputs(0, len(rows)), rows.targets(0, len(rows))))

    def _seed(self) -> None:
        seed_all(int(mixed(self._epoch)[0]))

    @contextlib.contextmanager
    def _own_generators(self) -> Iterator[None]:
        """A context in which the dataset draws from its own random generators, which keep their state from batch to
        batch. The model's generators stay unchanged."""
        with own_generators():
            if self._generators is None:
                self._seed()
            else:
                python, arrays, tensors = self._generators
                random.setstate(python)
                np.random.get_bit_generator().state = arrays  # type: ignore[attr-defined]
                torch.set_rng_state(tensors)
            yield
            arrays = np.random.get_bit_generator().state  # type: ignore[attr-defined]
            self._generators = random.getstate(), arrays, torch.get_rng_state()
