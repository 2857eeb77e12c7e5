"""Host memory for the copies of a checkpoint's tensors, until they are written.

Training resumes when all tensors are copied. A thread writes the copies and releases their memory. If the memory holds
all tensors of a rank, training waits only for the copies. Otherwise it also waits for writes: with a single buffer for
nearly all of them, with two buffers A and B for some::

    main     copy to A ─▶ copy to B ───▶ copy to A ─▶ step …
    thread                write A ─────▶ write B ───▶ write A
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from parallax.common.units import format_bytes
from parallax.errors import CheckpointError, SwapError, printable
from parallax.machine.pinned import Arena


class SnapshotMemory:
    """Host buffers that all saves reuse. Together they have at most ``limit_bytes``, except that a single buffer may be
    larger. ``arena`` allocates the memory of a buffer."""

    def __init__(self, arena: Callable[[int], Arena], limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._arena = arena
        self._free: list[Arena] = []
        self._acquired: dict[int, Arena] = {}
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, free or acquired."""
        return sum(each.data.numel() for each in (*self._free, *self._acquired.values()))

    def acquire(self, size: int) -> Tensor:
        """Return a buffer of ``size`` bytes. If memory is short, wait until another thread releases a buffer."""
        with self._changed:
            while (found := self._find(size)) is None:
                self._changed.wait()
            self._acquired[found.data.data_ptr()] = found
            return found.data

    def release(self, data: Tensor) -> None:
        """Release the buffer ``data``, which :meth:`acquire` returned and whose content has been written."""
        with self._changed:
            self._free.append(self._acquired.pop(data.data_ptr()))
            self._changed.notify_all()

    def close(self) -> None:
        """Free the released buffers. No buffer may be acquired afterwards."""
        while self._free:
            self._free.pop().close()

    def _find(self, size: int) -> Arena | None:
        """Return a free or a new buffer of ``size`` bytes.

        Return None if a new buffer would exceed the limit, or if the system has too little memory. The caller then
        waits until a buffer is released.
        """
        for index, free in enumerate(self._free):
            if free.data.numel() == size:
                return self._free.pop(index)
        while self._free and self.held_bytes + size > self.limit_bytes:
            self._free.pop().close()
        if not self._acquired or self.held_bytes + size <= self.limit_bytes:
            return self._make(size)
        return None

    def _make(self, size: int) -> Arena | None:
        """Return a new buffer, or None if the system has too little memory. The caller then waits until a buffer is
        released. If no buffer is in use, raise :class:`CheckpointError` instead."""
        try:
            return self._arena(size)
        except (RuntimeError, MemoryError, SwapError) as error:
            if self._acquired:
                self.limit_bytes = self.held_bytes
                return None
            reason = printable((str(error).splitlines() or [type(error).__name__])[0])
            raise CheckpointError(
                f"cannot allocate {format_bytes(size)} of host memory for a checkpoint: {reason}"
            ) from error
