"""Detect missing waits and bad memory in transfers (``swap.verify``), with random delays and checksums.

A missing wait rarely shows, because a copy is usually faster than the code that should wait for it. So every transfer
may be delayed, and the memory that a transfer reads into is filled with a pattern first. The checksum of each storage
is compared on the thread and the stream that use the storage next.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor


def checksum(tensor: Tensor) -> int:
    """Return the sum of the bytes of ``tensor``, of any dtype and on any device, after waiting for the device."""
    return int(sum_bytes(tensor))


def sum_bytes(tensor: Tensor) -> Tensor:
    """Return the sum of the bytes of ``tensor`` as a tensor on the device.

    The function does not wait for the device, because a wait could hide a race.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)


class Delays:
    """A thread-safe callable that returns random seconds by which to delay the next transfer, drawn from ``seed``."""

    def __init__(self, seed: int = 0, most_seconds: float = 0.003) -> None:
        self._generator, self._most = random.Random(seed), most_seconds

    def __call__(self) -> float:
        return self._generator.random() * self._most
