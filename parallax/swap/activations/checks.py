"""Sums of the activations that come back, where ``swap.verify`` asks for them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from parallax.common.units import format_bytes
from parallax.errors import SwapError
from parallax.swap.activations.records import Record, bytes_of
from parallax.swap.verify import checksum, sum_bytes

_UNWRITTEN = 0xA5  # nothing that training makes is full of it


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
        record.sum = sum_bytes(_bytes(record))

    def reading(self, target: Tensor) -> None:
        """Make stale bytes visible: an allocator likes to give back the very block that held the right ones."""
        target.fill_(_UNWRITTEN)

    def returned(self, record: Record) -> None:
        if record.sum is None or not record.returned:
            return
        assert record.layout is not None
        expected, found = int(record.sum), checksum(_bytes(record))
        if found != expected:
            raise SwapError(
                f"swap.verify: {format_bytes(record.size)} that micro-batch {record.batch.micro} saved with a tensor "
                f"of shape {list(record.layout[1])} came back changed (sum {found:x}, saved {expected:x}): test this "
                "machine's memory and disk; if they are sound, a wait is missing in Parallax: train without "
                "swap (swap=off) and report it"
            )


def _bytes(record: Record) -> Tensor:
    assert record.storage is not None
    return bytes_of(record.storage, record.device)
