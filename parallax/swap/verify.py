"""swap.verify: proof at run time that what comes back is what left, while transfers are held up at random.

A missing wait shows rarely, because a copy is mostly faster than the code that should wait for it. So here every
transfer may be late, what is read goes into memory that was made unlike any tensor's first, and the sum of each
storage is checked on the thread, and the stream, that goes on to use it.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor


def checksum(tensor: Tensor) -> int:
    """A sum of the bytes of ``tensor``, of any type and on any device; waits for its device."""
    return int(sum_bytes(tensor))


def sum_bytes(tensor: Tensor) -> Tensor:
    """The same, on the tensor's device and in the order of its stream, so that taking it hides no race."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)


class Delays:
    """Seconds by which the next transfer is held up, at random from ``seed``. Any thread may ask."""

    def __init__(self, seed: int = 0, most_seconds: float = 0.003) -> None:
        self._generator, self._most = random.Random(seed), most_seconds

    def __call__(self) -> float:
        return self._generator.random() * self._most
