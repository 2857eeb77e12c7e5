"""Compares the rows of all ranks in each step.

Each rank opens its own data source: ranks of the first stage read inputs, ranks of the last stage read targets. If the
source draws from an unseeded generator, or depends on the order of a set, inputs of one row are paired with targets of
another, and no loss shows this. So every rank computes a digest of some rows of each batch. The all-reduce that each
step makes anyway sums the digests: the digests h of N ranks are equal exactly if N · Σh² = (Σh)².

The digest of a small batch in memory covers all rows. The digest of any other batch covers two rows, and these are
different rows in each step. If a batch has ``row_numbers``, a digest of the numbers of its rows, this digest is
compared and no row is read.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallax.errors import DataError, HangError
from parallax.machine.device import private_random_state
from parallax.mesh import Mesh
from parallax.model.block import leaves
from parallax.runtime.batch import Rows
from parallax.runtime.checkpoint.checksums import checksum

RowDigest = tuple[int | None, ...]
"""Digests of inputs and of targets; None where this rank cannot read them."""

PARTS = "inputs", "targets"
_WHOLE_BYTES = 2**20  # largest batch that is digested as a whole
_SAMPLED_ROWS = 2
_STRIDE = 7919  # distance from one step's sampled rows to the next step's: a prime, so all rows are sampled
_DIGEST_BITS = 20  # sums of squares over 2**13 ranks are exact in float64
_NAMED = 8  # ranks that a message lists, at most
_REMEDY = (
    "a data source must make the same rows on every rank: draw from a generator with a fixed seed, such as "
    "random.Random(0), numpy.random.default_rng(0) or torch.Generator().manual_seed(0), and sort sets and listed "
    "folders"
)


def digest(tensor: Tensor) -> int:
    """Return a digest of the bits of a tensor; any flipped bit changes it."""
    plain = tensor.detach()
    if plain.is_nested:
        jagged = plain.layout is torch.jagged
        plain = (
            plain.values() if jagged else torch.cat([part.reshape(-1) for part in plain.unbind()])
        )
    return checksum(plain.contiguous().cpu())


class RowComparison:
    """Compares batches between ranks. For each batch, the caller sums :meth:`numbers` over all ranks and passes the
    sums to :meth:`check`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._batch: Rows | None = None
        self._turn = 0
        self._digests: RowDigest = ()
        self._repeats = [True] * len(PARTS)

    def numbers(self, batch: Rows) -> list[float]:
        """Return six numbers: for the inputs 1, the digest, and the digest's square; then the same for the targets.

        Three zeros stand for inputs or targets that this rank cannot read, or that are not compared because they
        differ on each read. Return an empty list in a plan of one rank.
        """
        if self._mesh.world is None:
            return []
        self._batch, self._turn = batch, self._turn + 1
        self._digests = self._digested(batch)
        return [
            float(number)
            for each in self._digests
            for number in ((0, 0, 0) if each is None else (1, each, each * each))
        ]

    def check(self, sums: Sequence[float], name: str) -> None:
        """Raise :class:`DataError` on all ranks if they have different rows in the batch ``name``. ``sums``:
        :meth:`numbers`, summed over the ranks. Rows that differ on each read, as with random augmentation, are not
        compared."""
        differing = [
            part
            for part in range(len(sums) // 3)
            if int(sums[3 * part]) * int(sums[3 * part + 2]) != int(sums[3 * part + 1]) ** 2
        ]
        batch, self._batch = self._batch, None
        if differing and batch is not None:
            again = self._digested(batch)
            mine = self._digests, [a == b for a, b in zip(again, self._digests)]
            answers = self._mesh.all_gather_object(mine)
            self._repeats = [
                known and all(repeats[part] for _, repeats in answers)
                for part, known in enumerate(self._repeats)
            ]
            self._refuse([digests for digests, _ in answers], differing, name)

    def _refuse(self, answers: Sequence[RowDigest], differing: Sequence[int], name: str) -> None:
        parts = [part for part in differing if self._repeats[part]]
        others = set[int]()
        for part in parts:
            found = {rank: d for rank, each in enumerate(answers) if (d := each[part]) is not None}
            usual = Counter(found.values()).most_common(1)[0][0]
            others |= {rank for rank, value in found.items() if value != usual}
        if others:
            what = " and ".join(PARTS[part] for part in parts)
            raise DataError(
                f"{_rank_names(sorted(others))} other {what} than the other ranks in {name}: {_REMEDY}"
            )

    def _digested(self, batch: Rows) -> RowDigest:
        with private_random_state(self._mesh.device):
            return row_digest(batch, self._turn, self._repeats)


def row_digest(
    batch: Rows, turn: int = 0, wanted: Sequence[bool] = (True,) * len(PARTS)
) -> RowDigest:
    """Return a digest of the inputs and a digest of the targets. ``wanted`` has a flag for each of the two; a digest
    that is not wanted is None.

    A digest covers all rows of a small batch, or else two rows, which differ from one ``turn`` to the next. If the
    batch has ``row_numbers``, the digests are computed from them, and no row is read.
    """
    if (numbers := getattr(batch, "row_numbers", None)) is not None:
        return tuple(numbers % 2**_DIGEST_BITS if want else None for want in wanted)
    rows, size = len(batch), getattr(batch, "memory_bytes", math.inf)
    low, high = 0, rows
    if size > _WHOLE_BYTES and rows > _SAMPLED_ROWS:
        low = turn * _STRIDE % (rows - _SAMPLED_ROWS + 1)
        high = low + _SAMPLED_ROWS
    return tuple(
        _digest(getattr(batch, part), low, high) if want else None
        for part, want in zip(PARTS, wanted)
    )


def _digest(read: Callable[[int, int], Any], low: int, high: int) -> int | None:
    """Return a digest of rows [low, high), which ``read(low, high)`` returns; None if ``read`` raises an exception. No
    error is lost: a rank that needs these rows reads them again in its step."""
    try:
        return _folded(read(low, high))
    except HangError:
        raise
    except Exception:  # a user's source may raise any
        return None


def _folded(value: Any) -> int:
    """Return a digest of a nested value, of ``_DIGEST_BITS`` bits."""
    found = 0
    for path, part in leaves(value):
        found = zlib.crc32(repr([str(key) for key in path]).encode(), found)
        found = zlib.crc32(_known_by(part), found)
    return (found ^ found >> _DIGEST_BITS) % 2**_DIGEST_BITS


def _known_by(part: Any) -> bytes:
    if isinstance(part, Tensor):
        if part.layout not in (torch.strided, torch.jagged):
            part = part.to_dense()
        shape = part.size(0) if part.is_nested else part.shape
        return f"{part.dtype} {shape} {digest(part)}".encode()
    if isinstance(part, np.ndarray):
        return f"{part.dtype} {part.shape}".encode() + part.tobytes()
    return repr(part).encode() if isinstance(part, str | int | float | None) else b""


def _rank_names(ranks: Sequence[int]) -> str:
    """Return ``rank 1 has`` or ``ranks 1, 2 have``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED]))}{more} have"
