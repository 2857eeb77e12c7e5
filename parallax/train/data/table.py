"""Tables: rows by number, which is all that a kind of data has to offer.

A table reads any of its rows in any order. The order of the rows, epochs, workers, resuming and the held-out rows are
:mod:`parallax.train.data.indexed`'s. Random numbers of a row, such as those of an augmentation, come from the seed
that is given with it, so a row is the same on whichever rank or worker reads it.
"""

from __future__ import annotations

import contextlib
import random
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from parallax.model.block import leaves
from parallax.runtime.checkpoint.checksums import checksum
from parallax.train.data.order import Numbers, Seeds

INPUTS, TARGETS = "inputs", "targets"
BOTH = frozenset({INPUTS, TARGETS})
Values = dict[str, Any]
"""The inputs, the targets or both of some rows: nested tensors or arrays, with the rows in the first dimension."""


class Table(Protocol):
    """Rows by number.

    ``fingerprint`` identifies the rows: tables of the same rows have the same one, wherever their files are.
    ``whole``: whether reading the inputs of a row reads its targets as well, so that both are kept for one reading."""

    fingerprint: str
    whole: bool

    def __len__(self) -> int:
        """Return the number of rows."""

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:
        """Return the ``parts`` ("inputs", "targets") of ``rows``, at least; random numbers of row i come from
        ``seeds[i]``. Called in forked workers too."""


class Chosen:
    """The rows ``first`` to ``first`` + ``count`` of ``table`` in the order of ``order``."""

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
    """Restore the global generators of Python, numpy and torch's CPU afterwards: reading rows must not change what the
    model draws. Nothing is restored in a worker, where nothing else draws."""
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
    """What this process is, and the generator that numpy's global functions draw from while rows are read."""

    reads_only = False
    generator = np.random.MT19937(0)


def read_only_process() -> None:
    """Mark this process as one that reads rows and does nothing else."""
    _Process.reads_only = True


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch's CPU for one row."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    torch.default_generator.manual_seed(seed >> 1)


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
    """Add the seconds within to those of ``part`` of reading: read, decode, transform, tokenize or collate."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        _SECONDS[part] += time.perf_counter() - begun


def taken_seconds() -> dict[str, float]:
    """Return the seconds of each part in this process since the last call."""
    found = dict(_SECONDS)
    _SECONDS.clear()
    return found
