"""Allocate slots (ranges of bytes) in a store."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator
from typing import NamedTuple

from parallax.common.units import format_bytes
from parallax.errors import SwapError
from parallax.swap.stores.forks import call_after_fork

_ALIGNMENT = 4096
_SLACK = 1.25  # most length of the address range, relative to the most bytes ever in use


class StoreSlot(NamedTuple):
    """A slot of ``size`` bytes in a store.

    The slot is one range of bytes from ``offset``, or several ranges in ``stretches``, each (offset, bytes). The first
    of several ranges begins at ``offset``.
    """

    offset: int
    size: int
    stretches: tuple[tuple[int, int], ...] = ()

    def parts(self, start: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges (offset, bytes) of ``size`` bytes of the slot, beginning at byte ``start`` of the slot."""
        for offset, length in self.stretches or ((self.offset, self.size),):
            if start < length and size:
                found = min(length - start, size)
                yield offset + start, found
                size -= found
            start = max(0, start - length)


class SlotMap:
    """Allocates slots in one growing address range.

    Sizes that differ from step to step leave gaps between slots. A new slot uses the smallest gap that fits. If no gap
    fits, the slot is placed at the end of the range. The range may become at most a quarter longer than the peak of
    bytes in use. A slot that does not fit within this length is divided among several gaps, longest first. So the range
    stays bounded for any sequence of requests, and a store is full only when all its bytes are in use.
    """

    def __init__(self, capacity: int, name: str, remedy: str = "raise its capacity") -> None:
        self.used_bytes = self.high_water = 0
        self._capacity, self._name, self._remedy = capacity, name, remedy
        self._end = self._most = 0
        self._gaps: dict[
            int, int
        ] = {}  # offset → bytes; never adjacent, never at the end of the range
        self._ends: dict[int, int] = {}  # end of a gap → its offset
        self._sorted: list[tuple[int, int]] = []  # (bytes, offset) of each gap
        self.after_fork()
        call_after_fork(self)

    def after_fork(self) -> None:
        """Replace the lock in a forked child, because another thread of the parent may have held it."""
        self._lock = threading.Lock()

    def allocate(self, size: int) -> StoreSlot:
        """Return a slot of ``size`` bytes. Raises :class:`SwapError` if the store is full."""
        rounded = _rounded(size)
        with self._lock:
            if self.used_bytes + rounded > self._capacity:
                raise SwapError(
                    f"{self._name} is full: {format_bytes(self.used_bytes)} in use of "
                    f"{format_bytes(self._capacity)}, {format_bytes(size)} more requested; {self._remedy}"
                )
            self.used_bytes += rounded
            self.high_water = max(self.high_water, self.used_bytes)
            self._most = max(self._most, self.used_bytes)
            return _slot(size, self._find(rounded))

    def release(self, slot: StoreSlot) -> None:
        with self._lock:
            for offset, size in slot.stretches or ((slot.offset, _rounded(slot.size)),):
                self._free(offset, _rounded(size))
                self.used_bytes -= _rounded(size)

    def take_high_water(self) -> int:
        """Return the peak of bytes in use since the last call."""
        with self._lock:
            found, self.high_water = self.high_water, self.used_bytes
        return found

    def _find(self, size: int) -> list[tuple[int, int]]:
        """Allocate ``size`` bytes and return their ranges. The caller has checked that enough bytes are free."""
        smallest = bisect.bisect_left(self._sorted, (size, 0))
        if smallest < len(self._sorted):
            return [self._take_gap(smallest, size)]
        found = []
        longest = min(self._capacity, int(self._most * _SLACK))
        while self._sorted and self._end + size > longest:
            found.append(self._take_gap(len(self._sorted) - 1, size))
            size -= found[-1][1]
            if not size:
                return found
        found.append((self._end, size))
        self._end += size
        return found

    def _take_gap(self, index: int, size: int) -> tuple[int, int]:
        """Allocate ``size`` bytes at the start of the gap ``index``, or the whole gap if it is smaller.

        Return the allocated range as (offset, bytes).
        """
        length, offset = self._sorted.pop(index)
        del self._gaps[offset], self._ends[offset + length]
        if length > size:
            self._add(offset + size, length - size)
        return offset, min(length, size)

    def _free(self, offset: int, size: int) -> None:
        """Mark ``size`` bytes from ``offset`` as free and merge them with adjacent gaps.

        Free bytes at the end shorten the address range.
        """
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
    """Return a slot of ``size`` bytes in the ranges ``found``.

    The last range consists of whole pages, so it may be longer than needed.
    """
    return StoreSlot(found[0][0], size, tuple(found) if len(found) > 1 else ())


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
