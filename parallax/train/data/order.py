"""The order of rows: a function from the seed, the epoch and the position in the epoch to the rows of a step.

A shuffled epoch reads row ``permutation(position)``. The pseudorandom permutation is computed, not stored, so 10⁹ rows
need no memory, and any rank can compute the rows of any step. It is a Feistel network over the bits of a number, which
is a permutation for any round function. If the result is not a row number, the network is applied again until it is
("cycle walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallax.errors import check_choice, check_positive

Numbers = NDArray[np.int64]
Seeds = NDArray[np.uint64]

LAST = ("continue", "keep", "drop", "repeat")
_ROUNDS = 6
_BLOCK = 1024  # places whose rows are computed together
_FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_SHIFTS = np.uint64(32), np.uint64(29)


def mixed(*parts: Any) -> Seeds:
    """Return a hash of ``parts``, which are integers or arrays of integers, elementwise, as 64-bit integers.

    A change of any part changes about half of the bits. The finalizer of SplitMix64 (Steele et al. 2014) is applied
    once for each part.
    """
    found = np.zeros(1, dtype=np.uint64)
    for part in parts:
        found = found ^ np.atleast_1d(np.asarray(part)).astype(np.uint64)
        found = found + np.uint64(0x9E3779B97F4A7C15)
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found = found ^ (found >> np.uint64(31))
    return found


class Permutation:
    """A pseudorandom permutation of the numbers 0 to ``size`` - 1. ``key`` selects the permutation."""

    def __init__(self, size: int, *key: int) -> None:
        bits = max(2, (size - 1).bit_length())
        self._size, self._low = size, bits // 2
        self._masks = np.uint64((1 << bits - self._low) - 1), np.uint64((1 << self._low) - 1)
        self._keys = [mixed(*key, turn)[0] for turn in range(_ROUNDS)]

    def __call__(self, numbers: Numbers) -> Numbers:
        """Return the permuted ``numbers``."""
        found = self._network(numbers)
        while (outside := found >= self._size).any():
            found[outside] = self._network(found[outside])
        return found

    def _network(self, numbers: Numbers) -> Numbers:
        low = np.uint64(self._low)
        plain = numbers.astype(np.uint64)
        halves = [plain >> low, plain & self._masks[1]]
        for turn, key in enumerate(self._keys):
            changed = turn % 2
            found = (halves[1 - changed] ^ key) * _FACTORS[0]
            found = (found ^ (found >> _SHIFTS[0])) * _FACTORS[1]
            halves[changed] ^= (found ^ (found >> _SHIFTS[1])) & self._masks[changed]
        return ((halves[0] << low) | halves[1]).astype(np.int64)


@functools.lru_cache(maxsize=16)
def _permutation(size: int, seed: int, epoch: int) -> Permutation:
    return Permutation(size, seed, epoch)


@functools.lru_cache(maxsize=64)
def _block(size: int, seed: int, epoch: int, block: int) -> Numbers:
    """Return the numbers of the rows at consecutive positions of a shuffled epoch of ``size`` rows. The positions are
    divided into blocks of 1024, and ``block`` is the index of the block whose positions are returned. Computing a whole
    block costs little more than computing one row number."""
    places = np.arange(block * _BLOCK, min(size, (block + 1) * _BLOCK), dtype=np.int64)
    return _permutation(size, seed, epoch)(places)


@dataclass(frozen=True, slots=True)
class Taken:
    """The rows of a batch: the number of each row, and the epoch in which it is read."""

    epochs: Numbers
    rows: Numbers

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> Taken:
        return Taken(self.epochs[part], self.rows[part])

    def seeds(self, seed: int) -> Seeds:
        """Return a seed for the random numbers of each row: a hash of ``seed``, the row's epoch and its number."""
        return mixed(seed, self.epochs, self.rows)

    def digest(self) -> int:
        """Return a hash of the rows and their order."""
        return int(mixed(self.epochs, self.rows, np.arange(len(self))).sum(dtype=np.uint64))


@dataclass(frozen=True, slots=True)
class Place:
    """A position in the sequence of rows: ``taken`` rows of ``epoch`` have been read."""

    epoch: int = 0
    taken: int = 0


class RowOrder:
    """The order of ``size`` rows: shuffled in each epoch, or by number.

    ``last``: what to do with an incomplete batch at the end of an epoch. ``continue`` fills it with rows of the next
    epoch, ``keep`` returns a smaller batch, ``drop`` skips its rows, ``repeat`` fills it with the first rows of the
    same epoch.
    """

    def __init__(self, size: int, seed: int, *, shuffle: bool = True, last: str = LAST[0]) -> None:
        check_positive("rows", size)
        check_choice("data.last_batch", last, LAST)
        self._size, self._seed, self._shuffle, self._last = size, seed, shuffle, last

    def take(self, place: Place, rows: int) -> tuple[Taken, Place]:
        """Return the rows of the batch of ``rows`` rows that starts at ``place``, and the position after it."""
        check_positive("rows", rows)
        epoch, start = place.epoch, place.taken
        left = self._size - start
        if self._last != "continue" and (
            left <= 0 or (self._last == "drop" and start > 0 and left < rows)
        ):
            epoch, start, left = epoch + 1, 0, self._size
        if self._last in ("continue", "repeat"):
            count = rows
        else:
            count = min(rows, left)
        places = np.arange(start, start + count, dtype=np.int64)
        if self._last == "continue":
            epochs = epoch + places // self._size
            after = epoch * self._size + start + count
            following = Place(*divmod(after, self._size))
        else:
            epochs = np.full(count, epoch, dtype=np.int64)
            following = Place(epoch, min(self._size, start + count))
        return Taken(epochs, self._rows(epochs, places % self._size)), following

    def __str__(self) -> str:
        return f"{'shuffled' if self._shuffle else 'in order'}, {self._last}"

    def seeded(self, seed: int) -> RowOrder:
        """Return an order of the same rows with another seed."""
        return RowOrder(self._size, seed, shuffle=self._shuffle, last=self._last)

    def steps(self, epochs: int, rows: int) -> int:
        """Return the number of batches of ``rows`` rows in ``epochs`` epochs."""
        if self._last == "continue":
            return -(-epochs * self._size // rows)
        return epochs * self._batches(rows)

    def place(self, steps: int, rows: int) -> Place:
        """Return the position after ``steps`` batches of ``rows`` rows."""
        if self._last == "continue":
            return Place(*divmod(steps * rows, self._size))
        epoch, batches = divmod(steps, self._batches(rows))
        return Place(epoch, batches * rows)

    def _batches(self, rows: int) -> int:
        if self._last == "drop":
            return max(1, self._size // rows)
        return -(-self._size // rows)

    def _rows(self, epochs: Numbers, places: Numbers) -> Numbers:
        if not self._shuffle:
            return places
        found = np.empty_like(places)
        blocks = places // _BLOCK
        for epoch, block in sorted(set(zip(epochs.tolist(), blocks.tolist()))):
            chosen = (epochs == epoch) & (blocks == block)
            rows = _block(self._size, self._seed, epoch, block)
            found[chosen] = rows[places[chosen] - block * _BLOCK]
        return found
