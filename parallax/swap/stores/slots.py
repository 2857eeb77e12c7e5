"""Places in a store."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator
from typing import NamedTuple

from parallax.common.units import format_bytes
from parallax.errors import SwapError
from parallax.swap.stores.forks import call_after_fork

_ALIGNMENT = 4096
_SLACK = 1.25  # a line may be so many times as long as the most bytes that were ever in use in it


class StoreSlot(NamedTuple):
    """A place in a store: ``size`` bytes from ``offset`` on, or in several stretches (offset, bytes), of which
    ``offset`` begins the first."""

    offset: int
    size: int
    stretches: tuple[tuple[int, int], ...] = ()

    def parts(self, start: int, size: int) -> Iterator[tuple[int, int]]:
        """Where ``size`` of its bytes are, from its byte ``start`` on: (offset, bytes) in order."""
        for offset, length in self.stretches or ((self.offset, self.size),):
            if start < length and size:
                found = min(length - start, size)
                yield offset + start, found
                size -= found
            start = max(0, start - length)


class SlotMap:
    """Places in one growing line of bytes.

    Sizes that differ from step to step leave gaps between what stays. A place is the smallest gap that holds it, or
    new at the end of the line, which may become a quarter longer than the most bytes that were ever in use. Where
    neither is found, a place is made of several gaps, the longest first. So the line stays bounded whatever is asked
    in whatever order, and a tier is full only when its bytes are in use.
    """

    def __init__(self, capacity: int, name: str, remedy: str = "give it more room") -> None:
        self.used_bytes = self.high_water = 0
        self._capacity, self._name, self._remedy = capacity, name, remedy
        self._end = self._most = 0
        self._gaps: dict[int, int] = {}  # offset → bytes; no two are neighbours, none ends the line
        self._ends: dict[int, int] = {}  # where a gap ends → its offset
        self._sorted: list[tuple[int, int]] = []  # (bytes, offset) of each gap
        self.after_fork()
        call_after_fork(self)

    def after_fork(self) -> None:
        """Another thread may have held the lock."""
        self._lock = threading.Lock()

    def take(self, size: int) -> StoreSlot:
        """A place for ``size`` bytes."""
        rounded = _rounded(size)
        with self._lock:
            if self.used_bytes + rounded > self._capacity:
                raise SwapError(
                    f"{self._name} is full: {format_bytes(self.used_bytes)} in use of "
                    f"{format_bytes(self._capacity)}, {format_bytes(size)} more asked; {self._remedy}"
                )
            self.used_bytes += rounded
            self.high_water = max(self.high_water, self.used_bytes)
            self._most = max(self._most, self.used_bytes)
            return _slot(size, self._find(rounded))

    def give(self, slot: StoreSlot) -> None:
        with self._lock:
            for offset, size in slot.stretches or ((slot.offset, _rounded(slot.size)),):
                self._free(offset, _rounded(size))
                self.used_bytes -= _rounded(size)

    def take_high_water(self) -> int:
        """The most bytes in use since the last call."""
        with self._lock:
            found, self.high_water = self.high_water, self.used_bytes
        return found

    def _find(self, size: int) -> list[tuple[int, int]]:
        """Stretches that are free, now taken; there are enough bytes."""
        smallest = bisect.bisect_left(self._sorted, (size, 0))
        if smallest < len(self._sorted):
            return [self._cut(smallest, size)]
        found = []
        longest = min(self._capacity, int(self._most * _SLACK))
        while self._sorted and self._end + size > longest:
            found.append(self._cut(len(self._sorted) - 1, size))
            size -= found[-1][1]
            if not size:
                return found
        found.append((self._end, size))
        self._end += size
        return found

    def _cut(self, index: int, size: int) -> tuple[int, int]:
        """Take the front of a gap, or all of it."""
        length, offset = self._sorted.pop(index)
        del self._gaps[offset], self._ends[offset + length]
        if length > size:
            self._add(offset + size, length - size)
        return offset, min(length, size)

    def _free(self, offset: int, size: int) -> None:
        """Join with the gaps before and behind; what ends the line shortens it."""
        before, behind = self._ends.get(offset), self._gaps.get(offset + size)
        if before is not None:
            self._remove(before)
            offset, size = before, size + offset - before
        if behind is not None:
            self._remove(offset + size)
            size += behind
        if offset + size == self._end:
            self._end = offset
        else:
            self._add(offset, size)

    def _add(self, offset: int, size: int) -> None:
        self._gaps[offset], self._ends[offset + size] = size, offset
        bisect.insort(self._sorted, (size, offset))

    def _remove(self, offset: int) -> None:
        size = self._gaps.pop(offset)
        del self._ends[offset + size]
        del self._sorted[bisect.bisect_left(self._sorted, (size, offset))]


def _slot(size: int, found: list[tuple[int, int]]) -> StoreSlot:
    """The last stretch is whole pages too, of which the place needs not all."""
    return StoreSlot(found[0][0], size, tuple(found) if len(found) > 1 else ())


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
