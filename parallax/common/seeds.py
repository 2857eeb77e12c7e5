"""Seeds of single places, so that what is drawn in one does not depend on what is drawn in another."""

from __future__ import annotations

import hashlib


def block_seed(seed: int, *where: int) -> int:
    """A 63-bit seed for one place (block, step, rows …), unrelated between places."""
    digest = hashlib.blake2b(repr((seed, *where)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
