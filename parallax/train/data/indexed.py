"""Training and held-out rows from tables, with order, epochs, workers and resuming for every kind of data.

The rows of a step depend only on the data, the seed, the epoch and the position in the epoch. The number of ranks,
stages, replicas, micro-batches and workers decides which process reads a row, never which rows are read. So a
checkpoint saves only the position.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor

from parallax.common.units import parse_bytes
from parallax.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    check_choice,
    check_count,
    printable,
)
from parallax.model.block import leaves
from parallax.model.source import ModelConfig
from parallax.plan.tier import AUTO
from parallax.runtime.batch import Rows
from parallax.train.data.loader import Loader
from parallax.train.data.order import LAST, Permutation, Place, RowOrder, Taken
from parallax.train.data.source import DataConfig, Source
from parallax.train.data.table import BOTH, Chosen, Table
from parallax.train.data.workers import Workers

HELD_OUT = "validation"  # the name of held-out rows that are a share of the data
_AUTO_SHARE, _AUTO_ROWS = 0.05, 1000  # held out by default
SIZES_OF = 8  # batches, of which the largest is planned for, if they have several sizes
_SPLIT_KEY = 0x5B17  # constant, so that the held-out rows do not depend on the run's seed
_TIMED_ROWS = 4
_QUICK_SECONDS = 50e-6  # to read a row: less is not worth a worker
_MOST_AUTO_WORKERS = 4


@dataclass(frozen=True, kw_only=True)
class IndexedDataConfig(DataConfig):
    """Settings of all kinds of data with numbered rows.

    ``validation``: the share of rows to hold out; auto holds out a twentieth, at most 1000 rows; 0 holds out none.
        Instead of a share, you can name separate validation sets: ``data.validation.NAME.KEY=VALUE`` gives each setting
        in which the set NAME differs from the training rows.
    ``shuffle``: visit the rows in a new order in each epoch.
    ``last_batch``: what to do with an incomplete batch at the end of an epoch: continue fills it with rows of the next
        epoch, keep uses a smaller batch, drop skips its rows, repeat fills it with the first rows of the same epoch.
    ``workers``: processes of each rank that prefetch rows; 0 reads in the rank itself; auto is 0 if reading a row takes
        less than 50 µs, otherwise the rank's share of the cores, at most 4.
    ``prefetch``: the maximum bytes that a rank prefetches.
    """

    reading: ClassVar[frozenset[str]] = frozenset({"workers", "prefetch"})

    validation: Any = AUTO
    shuffle: bool = True
    last_batch: str = LAST[0]
    workers: int | str = AUTO
    prefetch: int | str = "256MiB"

    def __post_init__(self) -> None:
        check_choice("data.last_batch", self.last_batch, LAST)
        if self.workers != 0:
            check_count("data.workers", self.workers)
        parse_bytes(self.prefetch, "data.prefetch")
        if isinstance(self.validation, Mapping):
            for name in self.validation:
                self._validation_set(str(name))
        elif self.validation != AUTO and not (
            isinstance(self.validation, int | float) and 0 <= self.validation < 1
        ):
            raise ConfigError(
                f"data.validation={printable(str(self.validation))}: accepted are auto, shares from 0 to 1, and sets "
                "with settings of their own (data.validation.NAME.KEY=VALUE)"
            )

    @property
    def identifies_rows(self) -> bool:
        return True

    def table(self, model: ModelConfig, *, quiet: bool = True) -> Table:
        """Return the rows for ``model``. ``quiet`` hides progress."""
        raise NotImplementedError(f"{type(self).__name__} has no table")

    def unlabelled(self, model: ModelConfig, *, quiet: bool = True) -> Table:
        """Return a table of rows without targets and without random augmentation. A kind of data overrides this method
        if its files may have no targets. The table may have two more methods: ``row_names(rows)`` returns the file of
        each row, and ``lengths(rows)`` returns the length of each row without the padding up to ``padded_length``."""
        return self.for_evaluation(self.table(model, quiet=quiet))

    def for_evaluation(self, table: Any) -> Table:
        """Return ``table`` for evaluation, without random augmentation."""
        found: Table = table
        return found

    def tables(self, model: ModelConfig, *, quiet: bool = True) -> tuple[Table, dict[str, Table]]:
        """Return the training rows, and a mapping from the name of each held-out set to its rows."""
        whole = self.table(model, quiet=quiet)
        if not len(whole):
            raise DataError(f"{self.label}: it has no rows")
        if isinstance(self.validation, Mapping):
            sets = {str(name): self._validation_set(str(name)) for name in self.validation}
            return whole, {
                name: each.for_evaluation(each.table(model, quiet=quiet))
                for name, each in sets.items()
            }
        count = self._held_out(len(whole))
        if not count:
            return whole, {}
        order = Permutation(len(whole), _SPLIT_KEY)
        return (
            Chosen(whole, order, count, len(whole) - count),
            {HELD_OUT: Chosen(self.for_evaluation(whole), order, 0, count)},
        )

    def open(self, model: ModelConfig, seed: int, *, quiet: bool = True) -> Source:
        return self.indexed(model, seed, quiet=quiet)

    def indexed(self, model: ModelConfig, seed: int, *, quiet: bool = True) -> IndexedSource:
        """Return a source of the rows of :meth:`tables`."""
        training, held_out = self.tables(model, quiet=quiet)
        order = RowOrder(len(training), seed, shuffle=self.shuffle, last=self.last_batch)
        limit = parse_bytes(self.prefetch, "data.prefetch")
        return IndexedSource(training, held_out, order, seed, self.count_workers, limit)

    def check_size(self, source: Source, model: ModelConfig, rows: int) -> None:  # noqa: ARG002
        if isinstance(source, IndexedSource) and len(source) < rows:
            raise DataError(
                f"trainer.global_batch={rows}: {self.label} has {len(source)} training row(s); use "
                f"trainer.global_batch={len(source)} or less, or give more rows"
            )

    def _held_out(self, rows: int) -> int:
        """Return the number of rows to hold out of ``rows``."""
        if self.validation == AUTO:
            return min(max(1, round(rows * _AUTO_SHARE)), _AUTO_ROWS) if rows > 1 else 0
        return min(rows - 1, round(rows * float(self.validation)))

    def _validation_set(self, name: str) -> Self:
        """Return the settings of the validation set ``name``."""
        own = self.validation[name]
        known = {each.name for each in fields(self)} - {"name", "validation"}
        if not isinstance(own, Mapping) or (wrong := set(own) - known):
            which = "" if not isinstance(own, Mapping) else f".{min(map(str, wrong))}"
            raise ConfigError(
                f"data.validation.{printable(name)}{printable(which)}: a set has the keys of data in which it differs: "
                f"{', '.join(sorted(known))}"
            )
        own = dict(own)
        if "kwargs" in own and "kwargs" in known:
            own["kwargs"] = {**vars(self)["kwargs"], **own["kwargs"]}
        return replace(self, **own, validation=0)

    def count_workers(self, table: Table) -> int:
        """Return the number of workers of a rank."""
        if isinstance(self.workers, int):
            return self.workers
        rows = np.arange(min(_TIMED_ROWS, len(table)), dtype=np.int64)
        taken = Taken(np.zeros_like(rows), rows)
        begun = time.perf_counter()
        table.read(taken.rows, taken.seeds(0), BOTH)
        if time.perf_counter() - begun < _QUICK_SECONDS * len(rows):
            return 0
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(1, min(_MOST_AUTO_WORKERS, len(os.sched_getaffinity(0)) // here))


class HeldOutRows:
    """A set of held-out rows, which are never shuffled."""

    def __init__(self, loader: Loader, rows: int) -> None:
        self._loader, self._order = loader, RowOrder(rows, 0, shuffle=False, last="keep")
        self.validation_rows = rows

    def validation(self, index: int, rows: int) -> Rows:
        """Return held-out rows [index · rows, (index + 1) · rows). The last batch may be smaller."""
        first = min(index * rows, self.validation_rows)
        if first == self.validation_rows:
            raise IndexError(f"there are {self.validation_rows} held-out rows")
        taken, place = self._order.take(Place(0, first), rows)
        return self._loader.batch(taken, partial(self._coming, place, rows))

    def _coming(self, place: Place, rows: int) -> Iterator[Taken]:
        while place.taken < self.validation_rows:
            taken, place = self._order.take(place, rows)
            yield taken


class HeldOutSets:
    """The held-out rows of a source. ``validation_sets``: name → set. The first is the main set, whose loss is the
    validation loss."""

    validation_sets: Mapping[str, HeldOutRows]

    @property
    def validation_rows(self) -> int:
        """The number of held-out rows of the main set."""
        return sum(each.validation_rows for each in list(self.validation_sets.values())[:1])

    def validation(self, index: int, rows: int) -> Rows:
        """Return batch ``index`` of the main set."""
        for held_out in self.validation_sets.values():
            return held_out.validation(index, rows)
        raise IndexError("no rows are held out")


class IndexedSource(HeldOutSets):
    """Training rows in the order of ``order``, and sets of held-out rows. After a resume, the source continues with
    exactly the rows that come next. ``seed``: the seed of the rows' random numbers. ``count_workers(table)`` returns
    the number of workers to start. ``limit``: the maximum bytes of prefetched rows of a table."""

    def __init__(
        self,
        training: Table,
        held_out: Mapping[str, Table],
        order: RowOrder,
        seed: int,
        count_workers: Callable[[Table], int],
        limit: int,
    ) -> None:
        self.table, self._held_out_tables = training, held_out
        tables = training, *held_out.values()
        self.fingerprint = "/".join([*(each.fingerprint for each in tables), str(order)])
        self._order, self._seed, self._limit = order, seed, limit
        self._count_workers, self._place = count_workers, Place()
        self._workers: Workers | None = None
        self._open()

    def _open(self) -> None:
        self._training = Loader("", self.table, self._seed, self._workers, self._limit)
        self.validation_sets = self.sets_of(
            self._held_out_tables, self._seed, self._workers, self._limit
        )

    @staticmethod
    def sets_of(
        tables: Mapping[str, Table],
        seed: int = 0,
        workers: Workers | None = None,
        limit: int = 2**28,
    ) -> dict[str, HeldOutRows]:
        """Return a mapping from name to held-out rows, for the tables in ``tables``. ``seed``: the seed of the rows'
        random numbers. ``workers``: the processes that prefetch rows; None if rows are not prefetched. ``limit``: the
        maximum bytes of prefetched rows of a table."""
        return {
            name: HeldOutRows(Loader(name, table, seed, workers, limit), len(table))
            for name, table in tables.items()
        }

    def __len__(self) -> int:
        return len(self.table)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the table of training rows, such as ``unigram_entropy``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.table, name)

    def start(self) -> None:
        """Start the workers. Call this method early, because each worker is a copy of this process."""
        if count := self._count_workers(self.table):
            tables = {"": self.table, **self._held_out_tables}
            self._workers = Workers(tables, count)
            self._open()

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()

    def batch(self, rows: int) -> Rows:
        """Return the next batch of ``rows`` rows."""
        taken, self._place = self._order.take(self._place, rows)
        return self._training.batch(taken, partial(self._coming, self._place, rows))

    def _coming(self, place: Place, rows: int) -> Iterator[Taken]:
        while True:
            taken, place = self._order.take(place, rows)
            yield taken

    def sample(self, rows: int) -> Rows:
        """Return ``rows`` training rows without advancing, for measuring and planning: the first batch, or the largest
        of the first few if batches have several sizes."""
        place, batches = Place(), []
        for _ in range(SIZES_OF if getattr(self.table, "pads", False) else 1):
            taken, place = self._order.take(place, rows)
            loader = Loader("", self.table, self._seed, None, self._limit)
            batches.append(loader.batch(taken, lambda: iter(())))
        return largest(batches)

    def steps(self, epochs: int, rows: int) -> int:
        """Return the number of batches of ``rows`` rows in ``epochs`` epochs."""
        return self._order.steps(epochs, rows)

    def go_to(self, step: int, rows: int) -> None:
        """Move to the position after ``step`` batches of ``rows`` rows each."""
        self._place = self._order.place(step, rows)

    def seconds(self) -> dict[str, float]:
        """Return a mapping from each part of reading, such as ``decode``, to the seconds that it took, summed over this
        rank and its workers."""
        return dict(self._training.seconds)

    def why_slow(self) -> str:
        """Return a message that tells how long each part of reading takes, and how to make it faster."""
        seconds = self._training.seconds
        whole = sum(seconds.values()) or 1.0
        slowest = sorted(seconds.items(), key=lambda each: -each[1])
        parts = ", ".join(f"{name} {took / whole:.0%}" for name, took in slowest)
        workers, cores = len(self._workers or ()), len(os.sched_getaffinity(0))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if (workers + 1) * here < cores:
            help_ = f"set data.workers={workers + 1} or more (now {workers})"
        elif seconds["read"] > whole / 2 and not getattr(self.table, "in_memory", True):
            help_ = "set data.in_memory=true, or put the files on a faster disk"
        else:
            help_ = f"all {cores} cores are in use: make rows cheaper, for example by resizing files once"
        return f"{parts or 'nothing was read yet'}; {help_}"

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, the seed of the order, and the fingerprint of the rows."""
        return {
            "epoch": self._place.epoch,
            "taken": self._place.taken,
            "seed": self._seed,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, in the order of the seed in ``state``, even if this run has another seed.

        Raises :class:`CheckpointError` if the rows differ from those of the saved run, because the position would then
        select other rows.
        """
        if state.get("fingerprint") != self.fingerprint:
            raise CheckpointError(
                f"the checkpoint was trained on rows {printable(str(state.get('fingerprint')))}, but data.* now gives "
                f"{self.fingerprint}: restore the data and its settings, or start a new run"
            )
        self._place = Place(int(state["epoch"]), int(state["taken"]))
        self._seed = int(state["seed"])
        self._order = self._order.seeded(self._seed)
        self._open()


def largest(batches: Sequence[Rows]) -> Rows:
    """Return the batch whose inputs have the most bytes; of several such batches, the first. If there is only one
    batch, return it without reading its rows."""

    def size(batch: Rows) -> int:
        parts = leaves(batch.inputs(0, len(batch)))
        return sum(part.nbytes for _, part in parts if isinstance(part, Tensor | np.ndarray))

    return batches[0] if len(batches) == 1 else max(batches, key=size)
