"""Host memory for what a checkpoint is made of, until it is written.

Training goes on as soon as everything is copied; a thread writes the copies and gives their memory back. So memory is
what a save takes instead of time: with room for all that a rank saves it waits for the copies alone, with less it waits
for writes, too, and with room for one buffer it waits for nearly all of them::

    main     copy A ─▶ copy B ─▶ copy C (into A's memory, where there is no room for three) ─▶ step …
    thread             write A ─────▶ write B ─▶ write C
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from parallax.common.units import format_bytes
from parallax.errors import CheckpointError, SwapError, printable
from parallax.machine.pinned import Arena


class SnapshotMemory:
    """Buffers that are kept from one save to the next, of ``limit_bytes`` together, or one buffer where that is more.
    ``arena`` makes the memory of one."""

    def __init__(self, arena: Callable[[int], Arena], limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._arena = arena
        self._free: list[Arena] = []
        self._taken: dict[int, Arena] = {}
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Of all buffers, those that are free among them."""
        return sum(each.data.numel() for each in (*self._free, *self._taken.values()))

    def take(self, size: int) -> Tensor:
        """``size`` bytes; waits until others are given back where there is no room."""
        with self._changed:
            while (found := self._find(size)) is None:
                self._changed.wait()
            self._taken[found.data.data_ptr()] = found
            return found.data

    def give(self, data: Tensor) -> None:
        """What :meth:`take` gave is written."""
        with self._changed:
            self._free.append(self._taken.pop(data.data_ptr()))
            self._changed.notify_all()

    def close(self) -> None:
        """Release what is free; nothing is taken any more."""
        while self._free:
            self._free.pop().close()

    def _find(self, size: int) -> Arena | None:
        """A free buffer of that size, or a new one where there is room for it or nothing to wait for."""
        for index, free in enumerate(self._free):
            if free.data.numel() == size:
                return self._free.pop(index)
        while self._free and self.held_bytes + size > self.limit_bytes:
            self._free.pop().close()
        if not self._taken or self.held_bytes + size <= self.limit_bytes:
            return self._make(size)
        return None

    def _make(self, size: int) -> Arena | None:
        """A new buffer; None where there is no memory for it, but others that will be given back."""
        try:
            return self._arena(size)
        except (RuntimeError, MemoryError, SwapError) as error:
            if self._taken:
                self.limit_bytes = self.held_bytes
                return None
            reason = printable((str(error).splitlines() or [type(error).__name__])[0])
            raise CheckpointError(
                f"there is no host memory for {format_bytes(size)} of a checkpoint: {reason}"
            ) from error
