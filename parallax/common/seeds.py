"""Derive a seed for each step and block from the run's seed, so that the random numbers of a block do not depend on how
many numbers other blocks draw."""

from __future__ import annotations

import hashlib


def block_seed(seed: int, *where: int) -> int:
    """Return a 63-bit seed for the integers ``where``, such as (step, block).

    Different integers give unrelated seeds.
    """
    digest = hashlib.blake2b(repr((seed, *where)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
