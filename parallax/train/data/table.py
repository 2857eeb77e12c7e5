"""Tables: random access to rows by number. Most kinds of data implement only a table.

A table reads any rows in any order. :mod:`parallax.train.data.indexed` adds the order of rows, epochs, workers,
resuming and held-out rows. The caller passes a seed with each row number, from which the table draws all random numbers
for this row, such as for augmentation. So a row is equal on all ranks and workers.
"""

from __future__ import annotations

import contextlib
import random
import time
import traceback
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from parallax.errors import DataError, printable
from parallax.model.block import leaves, parts_of, transform
from parallax.runtime.checkpoint.checksums import checksum
from parallax.train.data.order import Numbers, Seeds

INPUTS, TARGETS = "inputs", "targets"
BOTH = frozenset({INPUTS, TARGETS})
Values = dict[str, Any]
"""The inputs, the targets or both of some rows: nested tensors or arrays, with the rows in the first dimension."""


class Table(Protocol):
    """Rows by number.

    ``fingerprint`` identifies the rows: it depends on their values, not on the location of the files. ``whole``:
    whether reading the inputs of a row also reads its targets, so that one read serves both.
    """

    fingerprint: str
    whole: bool

    def __len__(self) -> int:
        """Return the number of rows."""

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:
        """Return at least the ``parts`` ("inputs", "targets") of ``rows``. Random numbers of row i come from
        ``seeds[i]``. Forked workers also call this method."""


class Chosen:
    """A part of ``table`` with ``count`` rows in another order: row i is the row of ``table`` with the number
    ``order(first + i)``."""

    def __init__(self, table: Table, order: Any, first: int, count: int) -> None:
        self._table, self._order, self._first, self._count = table, order, first, count
        self.whole = table.whole
        self.fingerprint = f"{table.fingerprint}[{first}:{first + count}]"

    def __len__(self) -> int:
        return self._count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._table, name)

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:
        return self._table.read(self._order(rows + self._first), seeds, parts)


@contextlib.contextmanager
def own_generators() -> Iterator[None]:
    """A context in which a user's code may draw random numbers. At the end of the context, the global generators of
    Python, numpy and torch's CPU are restored, so that the model's random numbers do not change. In a worker, which
    runs no model, nothing is restored."""
    if _Process.reads_only:
        yield
        return
    python, arrays, tensors = (
        random.getstate(),
        np.random.get_bit_generator(),  # type: ignore[attr-defined]
        torch.get_rng_state(),
    )
    np.random.set_bit_generator(_Process.generator)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_bit_generator(arrays)  # type: ignore[attr-defined]
        torch.set_rng_state(tensors)


class _Process:
    """State of this process. ``reads_only``: whether this process is a worker, which runs no model. ``generator``:
    numpy's global generator while rows are read."""

    reads_only = False
    generator = np.random.MT19937(0)


def read_only_process() -> None:
    """Mark this process as a worker, which only reads rows."""
    _Process.reads_only = True


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch's CPU for one row."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed the global generator of torch's CPU for one row."""
    torch.default_generator.manual_seed(seed >> 1)


def host_states() -> tuple[Any, ...]:
    """Return the states of the global generators of Python and numpy. Equal states are equal tuples."""
    arrays: Any = np.random.get_bit_generator().state  # type: ignore[attr-defined]
    return random.getstate(), arrays["state"]["pos"], arrays["state"]["key"].tobytes()


def placed(error: BaseException) -> str:
    """Return the class, message and source line of an error in the user's code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).splitlines() or [""])[0]
    return printable(f"{type(error).__name__}: {text} ({frame.filename}:{frame.lineno})")


def draws_numbers(function: Callable[..., Any], *given: Any) -> bool:
    """Return whether ``function``, called with ``given``, draws from the global generators. Errors of ``function`` are
    ignored."""
    with own_generators():
        seed_all(0)
        before = *host_states(), torch.get_rng_state().tolist()
        with contextlib.suppress(Exception):
            function(*given)
        return (*host_states(), torch.get_rng_state().tolist()) != before


def rows_of(values: Any, rows: int, start: int, stop: int) -> Any:
    """Return the rows ``start`` to ``stop`` - 1 of nested tensors and arrays of ``rows`` rows. Other values are
    returned unchanged."""

    def part(value: Any) -> Any:
        has_rows = isinstance(value, Tensor | np.ndarray) and value.ndim and len(value) == rows
        return value[start:stop] if has_rows else value

    return transform(values, part, (Tensor, np.ndarray))


def check_collated(label: str, values: Values, rows: int) -> None:
    """Raise :class:`DataError` if the targets are texts, or if the collate function has left out some of ``rows``
    examples. With missing examples, a row's weight in the loss would depend on the division into micro-batches.
    Examples are missing if all tensors have the same length, and this length is 0 or not a multiple of ``rows``.
    Tensors of different lengths and tensors in lists are not checked, because they may hold other things than one entry
    for each example, such as nodes of graphs."""
    targets = [part for _, part in leaves(values[TARGETS])]
    if targets and all(isinstance(part, str) for part in targets):
        raise DataError(
            f"{label}: the targets are texts, such as {printable(targets[0])[:40]}: number them in the dataset "
            "(class_encode_column of a Hugging Face dataset), or name others (data.targets=KEY)"
        )
    counts = set(_lengths(values))
    if len(counts) == 1 and ((count := counts.pop()) % rows or not count):
        raise DataError(
            f"{label}: its collate function returns {count} row(s) of {rows} example(s): return a row for each, in the "
            "first dimension, and leave examples out in the dataset (torch.utils.data.Subset(dataset, indices))"
        )


def _lengths(values: Any) -> Iterator[int]:
    if isinstance(values, Tensor | np.ndarray):
        if values.ndim:
            yield len(values)
    elif not isinstance(values, list):
        for _, part in parts_of(values):
            yield from _lengths(part)


def digest_of(values: Any) -> int:
    """Return a digest of nested tensors, arrays and other values."""
    found = 0
    for path, part in leaves(values):
        found = zlib.crc32(repr(path).encode(), found)
        if isinstance(part, Tensor):
            found = zlib.crc32(
                f"{part.dtype}{part.shape}{checksum(part.contiguous().cpu())}".encode(), found
            )
        elif isinstance(part, np.ndarray):
            found = zlib.crc32(f"{part.dtype}{part.shape}".encode() + part.tobytes(), found)
        else:
            found = zlib.crc32(repr(part).encode(), found)
    return found


# ---------------------------------------------------------------------------------- seconds of each part

_SECONDS: defaultdict[str, float] = defaultdict(float)


@contextlib.contextmanager
def timed(part: str) -> Iterator[None]:
    """A context that adds its duration to the seconds of ``part``: read, decode, transform, tokenize or collate."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        _SECONDS[part] += time.perf_counter() - begun


def taken_seconds() -> dict[str, float]:
    """Return a mapping from each part of reading, such as ``decode``, to the seconds that it took in this process since
    the last call of this function."""
    found = dict(_SECONDS)
    _SECONDS.clear()
    return found
