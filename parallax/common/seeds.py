"""Derive seeds per block, step and row, so that random numbers in one place do not depend on another place."""

from __future__ import annotations

import hashlib


def block_seed(seed: int, *where: int) -> int:
    """Return a 63-bit seed for one place, given as numbers (block, step, rows …).

    Seeds of different places are unrelated.
    """
    digest = hashlib.blake2b(repr((seed, *where)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
