"""Rows of a user's ``torch.utils.data.Dataset``, or of a Hugging Face dataset."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from parallax.common.targets import call_target, load_target
from parallax.errors import ConfigError, DataError, printable
from parallax.model.block import leaves
from parallax.model.source import ModelConfig
from parallax.plan.tier import AUTO
from parallax.train.data.indexed import SIZES_OF, IndexedDataConfig
from parallax.train.data.order import Numbers, Seeds
from parallax.train.data.source import Source, seed_generators
from parallax.train.data.stream import StreamSource, has_state
from parallax.train.data.table import (
    INPUTS,
    TARGETS,
    Table,
    Values,
    check_collated,
    digest_of,
    draws_numbers,
    host_states,
    own_generators,
    placed,
    seed_all,
    seed_torch,
    timed,
)

Collate = Callable[[list[Any]], Any]

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True, kw_only=True)
class DatasetDataConfig(IndexedDataConfig):
    """Settings of a user's ``Dataset``.

    ``target``: a factory as ``package.module:function`` that returns a map-style dataset (with ``__len__`` and
        ``__getitem__``), a Hugging Face dataset, an iterable dataset, or a ``DataLoader``. Only the dataset and the
        ``collate_fn`` of a ``DataLoader`` are used.
    ``kwargs``: keyword arguments of the factory.
    ``collate``: a function that converts a list of examples to a batch; auto is the loader's ``collate_fn`` or torch's
        ``default_collate``.
    ``inputs``, ``targets``: for examples that are mappings, the keys of the model's inputs and of the loss's targets.
        With auto, the targets are the first of labels, label, targets, target and y that exists, and the inputs are all
        other keys. A model of transformers, which computes its own loss, also gets the labels as an input. For examples
        that are tuples, the last value is the targets.
    """

    name: str = "dataset"
    target: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    collate: str = AUTO
    inputs: list[str] | str = AUTO
    targets: str = AUTO

    @property
    def label(self) -> str:
        return f"data.target={printable(self.target)}"

    def open(self, model: ModelConfig, seed: int, *, quiet: bool = True) -> Source:
        """Return the source of rows. The global random generators are seeded with ``seed`` before the dataset is
        created."""
        seed_generators(seed)
        found, collate = self._created()
        if isinstance(found, IterableDataset) or _is_iterable_only(found):
            return self._stream(found, collate, model)
        return super().open(model, seed, quiet=quiet)

    def table(self, model: ModelConfig, *, quiet: bool = True) -> Table:  # noqa: ARG002
        found, collate = self._created()
        return DatasetTable(found, collate, self._split(model), self.label)

    def _created(self) -> tuple[Any, Collate]:
        """Return the user's dataset and the function that makes batches of its examples."""
        made = call_target("data", self.target, self.kwargs)
        self._check_made(made)
        collate: Collate = default_collate
        if isinstance(made, DataLoader):
            self._check_loader(made)
            collate, made = made.collate_fn or default_collate, made.dataset
        elif isinstance(made, tuple) and len(made) == 2 and callable(made[1]):
            made, collate = made
        if self.collate != AUTO:
            collate = load_target("data.collate", self.collate)
        return _of_tensors(made), collate

    def _check_made(self, made: Any) -> None:
        """Raise :class:`DataError` for objects that factories often return by mistake: a class, several datasets, or a
        data frame of pandas."""
        several = made if isinstance(made, tuple | list) and made else ()
        keys = list(made)[:9] if isinstance(made, Mapping) and 0 not in made else []
        what = ""
        if isinstance(made, type):
            what = f"the class {made.__name__}: return an object of it"
        elif keys:
            what = (
                f"a {type(made).__name__} with the keys {', '.join(map(str, keys))}: return one dataset "
                "(data.kwargs.split=train, if the target is datasets.load_dataset)"
            )
        elif several and all(isinstance(each, Dataset | DataLoader) for each in several):
            what = f"a {type(made).__name__} of {len(several)} datasets: return one"
        elif hasattr(made, "iloc"):
            what = (
                f"a {type(made).__name__} of pandas: return datasets.Dataset.from_pandas(frame), or a TensorDataset of "
                "its columns"
            )
        if what:
            raise DataError(
                f"{self.label} returned {what}; held-out rows have arguments of their own "
                "(data.validation.NAME.kwargs.KEY=VALUE)"
            )

    def _check_loader(self, loader: DataLoader[Any]) -> None:
        """Raise :class:`ConfigError` if a loader's dataset makes batches itself, or if the loader sets an order of
        rows, because the run decides both."""
        if loader.batch_size is None and loader.batch_sampler is None:
            raise ConfigError(
                f"{self.label}: its DataLoader has batch_size=None, so its dataset makes the batches: return a dataset "
                "of single examples, of which trainer.global_batch make a step"
            )
        if isinstance(loader.dataset, IterableDataset):
            return
        for name, usual in (
            ("batch_sampler", (BatchSampler,)),
            ("sampler", (RandomSampler, SequentialSampler)),
        ):
            found = getattr(loader, name)
            if found is not None and type(found) not in usual:
                raise ConfigError(
                    f"{self.label}: its DataLoader has a {name} of its own ({type(found).__name__}): which rows make a "
                    "batch is decided by trainer.global_batch, data.shuffle and data.last_batch; return the dataset, "
                    "or one that maps the sampler's order to rows (torch.utils.data.Subset(dataset, indices))"
                )

    def _split(self, model: ModelConfig) -> Split:
        inputs = None if isinstance(self.inputs, str) else tuple(self.inputs)
        if isinstance(self.inputs, str) and self.inputs != AUTO:
            inputs = (self.inputs,)
        return Split(self.label, inputs, self.targets, keep=lambda: model.takes_labels)

    def _stream(self, found: Any, collate: Collate, model: ModelConfig) -> Source:
        if isinstance(found, Iterator) and not has_state(found):
            raise ConfigError(
                f"{self.label} returned a {type(found).__name__}, which can be read once alone: return an object whose "
                "__iter__ begins anew (a class with `def __iter__(self): yield ...`)"
            )
        if not isinstance(self.validation, Mapping) and self.validation not in (AUTO, 0):
            raise ConfigError(
                f"data.validation={self.validation}: a share of an iterable dataset cannot be held out; give held-out "
                "rows of their own (data.validation.NAME.kwargs.KEY=VALUE)"
            )
        held_out: dict[str, Table] = {}
        if isinstance(self.validation, Mapping):
            for name in self.validation:
                own = self._validation_set(str(name))
                made, collated = own._created()
                if isinstance(made, IterableDataset) or _is_iterable_only(made):
                    made = list(itertools.islice(iter(made), _MOST_HELD_OUT))
                held_out[str(name)] = DatasetTable(made, collated, own._split(model), own.label)
        return StreamSource(found, collate, self._split(model), held_out, self.label)


_MOST_HELD_OUT = 10_000  # rows of an iterable validation set, which are kept in memory


@dataclass(frozen=True)
class Split:
    """Divides a collated batch into inputs and targets.

    ``label``    the name of the data in error messages
    ``inputs``   the keys of the inputs; None means all keys but that of the targets
    ``targets``  the key of the targets; auto means the first usual name of targets
    ``keep()``   returns whether the model takes labels as inputs
    """

    label: str
    inputs: tuple[str, ...] | None
    targets: str
    keep: Callable[[], bool]

    def __call__(self, batch: Any) -> Values:
        if is_dataclass(batch) and not isinstance(batch, Mapping):
            batch = {each.name: getattr(batch, each.name) for each in fields(batch)}
        if isinstance(batch, Mapping):
            return self._of_mapping(batch)
        if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) >= 2:
            *inputs, targets = self._targets_last(batch)
            return {INPUTS: inputs[0] if len(inputs) == 1 else tuple(inputs), TARGETS: targets}
        raise DataError(
            f"{self.label}: an example must be a pair (inputs, targets), a longer tuple with the targets last, or a "
            f"mapping or dataclass, and a batch of them is a {type(batch).__name__}"
        )

    def _targets_last(self, batch: Sequence[Any]) -> Sequence[Any]:
        """Return the values of a tuple with the targets last. In a named tuple, the targets may be any field."""
        names = getattr(batch, "_fields", ())
        known = TARGET_KEYS if self.targets == AUTO else (self.targets,)
        if (key := next((each for each in known if each in names), "")) == "":
            return batch
        return *(each for name, each in zip(names, batch) if name != key), getattr(batch, key)

    def _of_mapping(self, batch: Mapping[str, Any]) -> Values:
        key = self.targets
        if key == AUTO:
            key = next((each for each in TARGET_KEYS if each in batch), "")
        wanted = self.inputs
        if wanted is None:
            wanted = tuple(
                each for each in batch if each != key or (each == "labels" and self.keep())
            )
        missing = [each for each in (*wanted, key) if each not in batch]
        if missing or not key:
            what = f"examples have no {', '.join(missing)}" if key else "no key is known as targets"
            help_ = "set data.inputs=[KEY,...] and data.targets=KEY"
            if not key and "input_ids" in batch:
                help_ = (
                    "for a language model, return (dataset, transformers.DataCollatorForLanguageModeling(tokenizer, "
                    f"mlm=False)), which makes labels; otherwise {help_}"
                )
            raise DataError(
                f"{self.label}: {what}; the keys are {', '.join(map(str, batch))}: {help_}"
            )
        return {INPUTS: {each: batch[each] for each in wanted}, TARGETS: batch[key]}


_WHOLE = "so each rank reads all rows of a step and takes its own of them;"
_DRAWS = (
    f"{{}}: its collate function draws random numbers, {_WHOLE} draw in __getitem__ to read fewer"
)
_PADS = (
    f"{{}}: its collate function pads rows to the longest of their batch, {_WHOLE} pad to one length "
    "(padding='max_length' of a tokenizer) to read fewer, and for a plan that holds for every batch: memory is planned "
    f"for the largest of the first {SIZES_OF} batches"
)
_LENGTHS_OF = 32  # rows that are looked at for their lengths


_NAMED_ROWS = 8  # of a batch, in error messages
_CHECKED_ROWS = 8  # of fewer rows, a check of the generators costs more than seeding them


class DatasetTable:
    """The collated examples of a map-style dataset.

    ``pads``: whether the collate function pads rows to the longest of their batch. ``whole_batches``: whether the
    collate function pads rows in this way, or draws random numbers. A row then depends on the other rows of its batch,
    so each global batch is collated as a whole, and no row depends on the division into micro-batches.
    """

    whole = True

    def __init__(self, dataset: Any, collate: Collate, split: Split, label: str) -> None:
        for method in ("__len__", "__getitem__"):
            if not hasattr(dataset, method):
                raise DataError(
                    f"{label} returned a {type(dataset).__name__} without {method}: return a map-style Dataset, an "
                    "iterable one, or a DataLoader"
                )
        self._dataset, self._collate, self._split, self._label = dataset, collate, split, label
        try:
            self._rows = len(dataset)
        except Exception as error:
            raise DataError(f"{label}: its __len__: {placed(error)}") from error
        if not self._rows:
            raise DataError(f"{label}: the dataset has no rows")
        # Hugging Face's read many rows at once, and without a transform draw nothing.
        kind = getattr(dataset, "_format_type", "custom")
        self._row = dataset.__getitem__
        if getattr(type(dataset), "__getitem__", None) is Dataset.__getitem__:  # which is abstract
            self._row = lambda row: dataset.__getitems__([row])[0]
        self._at_once = kind != "custom" and hasattr(dataset, "__getitems__")
        self._set_epoch = getattr(dataset, "set_epoch", None)
        self._epoch, self._epochs = -1, list[int]()
        self._draws = False  # whether a row has drawn from the generators of Python or numpy
        own = collate is not default_collate
        draws, self.pads = own and self._collate_draws(), own and self._collate_pads()
        self.whole_batches = draws or self.pads
        self.remarks = [_DRAWS.format(label)] * draws + [_PADS.format(label)] * self.pads
        self.fingerprint = self._identified()

    def __len__(self) -> int:
        return self._rows

    def set_epochs(self, epochs: Numbers) -> None:
        """Set the epochs of the rows of the next :meth:`read`, for a dataset with a method ``set_epoch``."""
        self._epochs = epochs.tolist()

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:  # noqa: ARG002
        with own_generators():
            with timed("read"):
                examples = self._examples(rows, seeds)
            self._epochs = []
            with timed("collate"):
                seed_all(int(seeds[0]))
                found = self._split(self._collated(examples, rows))
                check_collated(self._label, found, len(rows))
                return found

    def _examples(self, rows: Numbers, seeds: Seeds) -> list[Any]:
        if self._at_once:
            try:
                return list(self._dataset.__getitems__(rows.tolist()))
            except Exception as error:
                raise DataError(f"{self._label}: {_named(rows)}: {placed(error)}") from error
        if not self._draws and len(rows) >= _CHECKED_ROWS:
            # Seeding the generators of Python and numpy takes most of the time. If their states are the same after all
            # rows, no row has drawn from them.
            seed_all(0)
            before = host_states()
            found = self._seeded(rows, seeds, seed_torch)
            if host_states() == before:
                return found
            self._draws = True
        return self._seeded(rows, seeds, seed_all)

    def _seeded(self, rows: Numbers, seeds: Seeds, seed_row: Callable[[int], None]) -> list[Any]:
        found = []
        epochs = self._epochs or itertools.repeat(0)
        for row, seed, epoch in zip(rows.tolist(), seeds.tolist(), epochs):
            try:
                if callable(self._set_epoch) and epoch != self._epoch:
                    self._set_epoch(epoch)
                    self._epoch = epoch
                seed_row(seed)
                found.append(self._row(row))
            except (Exception, SystemExit) as error:
                raise DataError(f"{self._label}: row {row}: {placed(error)}") from error
        return found

    def _collate_draws(self) -> bool:
        """Return whether the collate function draws random numbers, as for MixUp and random masks. This is tested with
        three rows of the dataset."""
        rows = np.unique([0, self._rows // 2, self._rows - 1])
        with own_generators():
            examples = self._examples(rows, rows.astype(np.uint64))
        return draws_numbers(self._collate, examples)

    def _collate_pads(self) -> bool:
        """Return whether the collate function pads rows to the longest of their batch. This is tested with a few rows:
        if two of them have different sizes when they are collated alone, the function pads if it can collate both to
        one batch."""
        numbers = np.unique(np.linspace(0, self._rows - 1, _LENGTHS_OF, dtype=np.int64))
        try:
            first = {self._sizes(numbers[n : n + 1]): numbers[n] for n in range(len(numbers))}
            if len(first) == 1:
                return False
            one, two, *_ = first
            both = self._sizes(np.array([first[one], first[two]]))
        except DataError:  # reported when the row is needed
            return False
        return len(one) == len(two) == len(both) and all(
            len(a) == len(b) == len(c) and a[:1] == b[:1] == (1,) and c[0] == 2
            for a, b, c in zip(one, two, both)
        )

    def _sizes(self, rows: Numbers) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each tensor and array of a batch of ``rows``."""
        parts = leaves(self.read(rows, rows.astype(np.uint64), frozenset()))
        found = (each for _, each in parts if isinstance(each, Tensor | np.ndarray))
        return tuple(
            () if getattr(each, "is_nested", False) else tuple(each.shape) for each in found
        )

    def _collated(self, examples: list[Any], rows: Numbers) -> Any:
        try:
            return self._collate(examples)
        except Exception as error:
            hint = _hint(error) if self._collate is default_collate else ""
            if empty := [str(row) for row, each in zip(rows, examples) if each is None]:
                hint = f"; row {empty[0]} is None: leave it out (torch.utils.data.Subset(dataset, indices))"
            raise DataError(
                f"{self._label}: {_named(rows)}: no batch can be made: {placed(error)}{hint}"
            ) from error

    def _identified(self) -> str:
        """Return a digest of the number of rows and of three rows. Raises :class:`DataError` if a second read of a row
        returns other values."""
        found = str(self._rows)
        for row in sorted({0, self._rows // 2, self._rows - 1}):
            rows, seeds = np.array([row]), np.array([row], dtype=np.uint64)
            one, two = (digest_of(self.read(rows, seeds, frozenset())) for _ in range(2))
            if one != two:
                raise DataError(
                    f"{self._label}: reading row {row} twice gives other values, although the generators of torch, "
                    "numpy and random are seeded for it: a run could not repeat its rows; draw from these generators "
                    "(torch.rand, numpy.random.rand, random.random) in __getitem__, and keep no count of calls"
                )
            found += f"-{one:08x}"
        return found


def _named(rows: Numbers) -> str:
    shown = ", ".join(map(str, rows[:_NAMED_ROWS].tolist()))
    return f"row{'s' * (len(rows) > 1)} {shown}{', …' * (len(rows) > _NAMED_ROWS)}"


def _of_tensors(made: Any) -> Any:
    """Return a Hugging Face dataset in torch's format, in which lists of numbers are tensors. Return it unchanged if it
    has a transform, or the format of torch or numpy. Return any other dataset unchanged."""
    if not hasattr(made, "with_format"):
        return made
    if hasattr(made, "_formatting"):  # an IterableDataset
        kind = getattr(made._formatting, "format_type", None)
        return made.with_format("torch") if kind in _NO_TENSORS else made
    if getattr(made, "_format_type", "") not in _NO_TENSORS:
        return made
    chosen, others = made._format_columns, made._output_all_columns
    return made.with_format("torch", columns=chosen, output_all_columns=others)


_NO_TENSORS = (None, "python", "arrow", "pandas", "polars", "jax", "tensorflow")


def _hint(error: Exception) -> str:
    """Return advice for an error of ``default_collate``."""
    own = "a function of your own (data.collate=package.module:function, which makes a batch of a list of examples)"
    if isinstance(error, TypeError) and "must contain tensors" in str(error):
        return f"; convert these values to tensors, arrays or numbers in __getitem__, or in {own}"
    return f"; where examples have several sizes, pad or resize them in {own}"


def _is_iterable_only(found: Any) -> bool:
    return hasattr(found, "__iter__") and not hasattr(found, "__getitem__")
