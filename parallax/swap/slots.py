"""Places in a store."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from parallax.errors import SwapError
from parallax.units import format_bytes

_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a store."""

    offset: int
    size: int


class SlotMap:
    """Places in one growing line of bytes. A training step asks for the same sizes again and again, so a
    freed place waits for its own size, and the line begins anew when all are back, after each step. Where it
    may grow no further, freed neighbours become one and are cut anew, so that changing sizes cannot fill a
    tier that has room."""

    def __init__(self, capacity: int, name: str) -> None:
        self.used_bytes = self.high_water = 0
        self._capacity, self._name = capacity, name
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> Slot:
        """A place for ``size`` bytes."""
        rounded = _rounded(size)
        with self._lock:
            offset = self._find(rounded)
            if offset is None:
                raise SwapError(
                    f"{self._name} is full: {format_bytes(self.used_bytes)} in use of "
                    f"{format_bytes(self._capacity)}, {format_bytes(size)} more asked; "
                    "give the tier more room (cluster.disk, cluster.host_memory)"
                )
            self.used_bytes += rounded
            self.high_water = max(self.high_water, self.used_bytes)
        return Slot(offset, size)

    def give(self, slot: Slot) -> None:
        """Take a place back."""
        rounded = _rounded(slot.size)
        with self._lock:
            self._free.setdefault(rounded, []).append(slot.offset)
            self.used_bytes -= rounded
            if not self.used_bytes:
                self._end, self._free = 0, {}

    def take_high_water(self) -> int:
        """The most bytes in use since the last call."""
        with self._lock:
            found, self.high_water = self.high_water, self.used_bytes
        return found

    def _find(self, rounded: int) -> int | None:
        waiting = self._free.get(rounded)
        if waiting:
            return waiting.pop()
        if self._end + rounded > self._capacity:
            self._merge()
            larger = min((size for size, places in self._free.items() if size >= rounded and places), default=0)
            if larger:
                offset = self._free[larger].pop()
                if larger > rounded:
                    self._free.setdefault(larger - rounded, []).append(offset + rounded)
                return offset
        if self._end + rounded > self._capacity:
            return None
        offset, self._end = self._end, self._end + rounded
        return offset

    def _merge(self) -> None:
        """Join free neighbours; those at the end of the line shorten it."""
        runs: list[tuple[int, int]] = []
        for offset, size in sorted((o, size) for size, offsets in self._free.items() for o in offsets):
            if runs and sum(runs[-1]) == offset:
                runs[-1] = (runs[-1][0], runs[-1][1] + size)
            else:
                runs.append((offset, size))
        if runs and sum(runs[-1]) == self._end:
            self._end = runs.pop()[0]
        self._free = {}
        for offset, size in runs:
            self._free.setdefault(size, []).append(offset)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
