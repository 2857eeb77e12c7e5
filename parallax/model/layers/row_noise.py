"""Random masks that are equal for a row on any rank and device, computed in a few kernels for all rows.

Torch's generators give other numbers on another device, and would need a seed for each row. Hashing the index of each
number with torch operators would need twenty passes over memory. Here the numbers of a row are hashed linearly, modulo
2⁶⁴ and 2³²: multiply, add, and keep the upper bits (Dietzfelbinger et al. 1997, "A reliable randomized algorithm for
the closest-pair problem"). There are two levels, with one kernel each::

    four words per row, from (seed, step, row, block, call) by blake2b         a, b, c, d             64 bits each
    per run of 1024 numbers, with the run's constant R                         A = (a·R + b) >> 32    odd
                                                                               C = (c·R + d) >> 32
    per number, with its position's constant P                                 A·P + C                32 bits

R and P are fixed pseudo-random constants. All P differ in their lowest ten bits, so the difference of two is not
divisible by a high power of two, and the upper bits of two numbers of a run are nearly independent. Temporary tensors
take four bytes per number and forty per run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_RUN_BITS = 10
RUN = 1 << _RUN_BITS
_WORDS = 4  # per row


class RowNoise:
    """Generates masks on ``device``.

    It stores constants there: 4 KiB, and 8 bytes for each 1024 numbers of the longest row.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._places = torch.empty(0, dtype=torch.int32)
        self._runs = torch.empty(0, dtype=torch.int64)

    def kept(self, rows: Sequence[tuple[int, ...]], count: int, p: float) -> Tensor:
        """Return a mask of shape (rows, count). An element is False with probability ``p``.

        ``rows`` are the keys of the rows, from which their random numbers are computed.
        """
        runs, length = -(-count // RUN), min(count, RUN)
        words = self._on_device(_words_of(rows))[..., None]
        found = _choices(words, self._numbers_of_runs(runs), self._numbers_of_places()[:length])
        return found.view(len(rows), -1)[:, :count] >= _threshold(p)

    def kept_ragged(
        self, rows: Sequence[tuple[int, ...]], counts: Sequence[int], p: float
    ) -> list[Tensor]:
        """Return a mask for each row, with ``counts[i]`` values for row i; see :meth:`kept`.

        The masks are views of one tensor.
        """
        needed = [-(-count // RUN) for count in counts]
        length = min(max(counts), RUN)
        words = np.repeat(_words_of(rows), needed, axis=1)
        runs = np.concatenate([_scattered(count) for count in needed])
        found = _choices(
            self._on_device(words),
            self._on_device(runs.view(np.int64)),
            self._numbers_of_places()[:length],
        )
        parts = (found >= _threshold(p)).split(needed)
        return [part.view(-1)[:count] for part, count in zip(parts, counts)]

    def _numbers_of_runs(self, count: int) -> Tensor:
        if len(self._runs) < count:
            self._runs = self._on_device(_scattered(count).view(np.int64))
        return self._runs[:count]

    def _numbers_of_places(self) -> Tensor:
        if not len(self._places):
            lowest = np.arange(RUN, dtype=np.uint32)
            highest = (_scattered(2 * RUN)[RUN:] >> np.uint64(32)).astype(np.uint32)
            found = (highest << np.uint32(_RUN_BITS)) | lowest
            self._places = self._on_device(found.view(np.int32))
        return self._places

    def _on_device(self, numbers: np.ndarray[Any, Any]) -> Tensor:
        """Return ``numbers`` as a tensor on the device. The copy is asynchronous."""
        here = torch.from_numpy(numbers.copy())
        if self.device.type in ("cpu", "meta"):
            return here.to(self.device)
        return here.pin_memory().to(self.device, non_blocking=True)


def _words_of(rows: Sequence[tuple[int, ...]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return an array of shape (4, rows): the words a, b, c and d of each row (see the module's docstring).

    ``rows`` are the keys of the rows, of which the words are hashes.
    """
    digests = [hashlib.blake2b(repr(row).encode(), digest_size=8 * _WORDS) for row in rows]
    words = np.frombuffer(b"".join(digest.digest() for digest in digests), dtype="<i8")
    return words.astype(np.int64).reshape(len(rows), _WORDS).T


def _choices(words: Tensor, runs: Tensor, places: Tensor) -> Tensor:
    """Return a pseudo-random 32-bit number for each row, each run of 1024 numbers, and each position in a run.

    The number is computed from the row's ``words``, the run's constant in ``runs``, and the position's constant in
    ``places``.
    """
    slopes, heights = words[::2], words[1::2]
    both = torch.addcmul(heights, slopes, runs).bitwise_right_shift_(32).to(torch.int32)
    slope, height = both[0].bitwise_or_(1)[..., None], both[1][..., None]
    return torch.addcmul(height, slope, places)


def _threshold(p: float) -> int:
    """Return a signed 32-bit number. A fraction ``p`` of all signed 32-bit numbers is below it."""
    return min(2**32 - 1, round(p * 2**32)) - 2**31


def _scattered(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return ``count`` fixed pseudo-random numbers of 64 bits.

    The generator is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
    """
    with np.errstate(over="ignore"):
        found = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            found = (found ^ (found >> np.uint64(shift))) * np.uint64(factor)
        return found ^ (found >> np.uint64(31))
