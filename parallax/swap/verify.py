"""swap.verify: proof at run time that what comes back is what left, while transfers are held up at random.

A missing wait shows rarely, because a copy is mostly faster than the code that should wait for it. So here every
transfer may be late, what is read goes into memory that was made unlike any tensor's first, and the sum of each
storage is checked on the thread, and the stream, that goes on to use it.
"""

from __future__ import annotations

import random
from typing import Protocol

import torch
from torch import Tensor

from parallax.errors import SwapError
from parallax.swap.records import Record
from parallax.units import format_bytes

_UNWRITTEN = 0xA5  # nothing that training makes is full of it


def checksum(tensor: Tensor) -> int:
    """A sum of the bytes of ``tensor``, of any type and on any device; waits for its device."""
    return int(_sum(tensor))


def _sum(tensor: Tensor) -> Tensor:
    """The sum, on the tensor's device and in the order of its stream, so that taking it hides no race."""
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
        """The next one."""
        return self._generator.random() * self._most


class Checks(Protocol):
    """What the manager does to a record's bytes to be sure of them."""

    def saved(self, record: Record) -> None:
        """The record is new."""

    def reading(self, target: Tensor) -> None:
        """Bytes will be read into ``target``."""

    def returned(self, record: Record) -> None:
        """The record's bytes are handed back; raises :class:`SwapError` if they are not those that were saved."""


class NoChecks:
    """Nothing is added to the transfers."""

    def saved(self, record: Record) -> None:
        """Not summed."""

    def reading(self, target: Tensor) -> None:
        """Left as it is."""

    def returned(self, record: Record) -> None:
        """Not looked at."""


class SumChecks:
    """A sum when it is saved, and each time it is handed back after it was away."""

    def saved(self, record: Record) -> None:
        """Sum, without waiting for the device."""
        record.sum = _sum(_bytes(record))

    def reading(self, target: Tensor) -> None:
        """Make stale bytes visible: an allocator likes to give back the very block that held the right ones."""
        target.fill_(_UNWRITTEN)

    def returned(self, record: Record) -> None:
        """Sum again."""
        if record.sum is None or not record.returned:
            return
        expected, found = int(record.sum), checksum(_bytes(record))
        if found != expected:
            raise SwapError(
                f"swap.verify: {format_bytes(record.size)} that micro-batch {record.batch.micro} saved with a tensor "
                f"of shape {list(record.shape)} came back changed (sum {found:x}, saved {expected:x}): test this "
                "machine's memory and disk; if they are sound, a wait is missing in Parallax: train without "
                "swap (swap=off) and report it"
            )


def _bytes(record: Record) -> Tensor:
    assert record.storage is not None
    return torch.empty(0, dtype=torch.uint8, device=record.device).set_(record.storage)
