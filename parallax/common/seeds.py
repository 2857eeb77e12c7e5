"""Derive seeds per block, step and row, so that random numbers in one place do not depend on another place."""

from __future__ import annotations

import hashlib


def block_seed(seed: int, *where: int) -> int:
    """Return a 63-bit seed for one place (block, step, rows …), unrelated to the seeds of other places."""
    digest = hashlib.blake2b(repr((seed, *where)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
