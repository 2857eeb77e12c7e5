"""Tiers below the device. A store writes bytes, reads them back, and frees them; nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from parallax.device import CopyEngine, DoneEvent, Event
from parallax.errors import SwapError
from parallax.swap.files import private_file
from parallax.swap.slots import Slot, SlotMap
from parallax.units import format_bytes

_DONE = DoneEvent()
_REQUEST = 8 * 2**20  # bytes per system call: large enough for bandwidth, small enough to share the disk


class Pending(Protocol):
    """A transfer under way."""

    def done(self) -> bool:
        """Whether it has finished; raises :class:`SwapError` if it failed."""

    def wait(self) -> None:
        """Wait on this thread until the source may be released, or the target be read by the device's
        stream."""

    def cancel(self) -> bool:
        """Whether it was stopped before it began."""


class Store(Protocol):
    """The tier contract. ``data`` and ``target`` are one-dimensional uint8 tensors on the device; the caller
    keeps them alive and unchanged until the transfer is done."""

    tier: str
    slots: SlotMap

    def write(self, data: Tensor) -> tuple[Slot, Pending]:
        """Begin to copy ``data`` down."""

    def read(self, slot: Slot, target: Tensor) -> Pending:
        """Begin to copy the bytes of ``slot`` into ``target``."""

    def free(self, slot: Slot) -> None:
        """Give the place back; its bytes may be overwritten at once."""

    def close(self) -> None:
        """Finish or drop what is under way and release everything."""


class _EventPending:
    """A device-to-host or host-to-device copy."""

    def __init__(self, event: Event, *, up: bool) -> None:
        self._event, self._up = event, up

    def done(self) -> bool:
        return self._event.done()

    def wait(self) -> None:
        if self._up:
            self._event.wait_stream()
        else:
            self._event.wait_host()

    def cancel(self) -> bool:
        return False


class HostStore:
    """One arena of host memory, pinned under CUDA, allocated once."""

    tier = "host"

    def __init__(self, capacity: int, copies: CopyEngine) -> None:
        self.slots = SlotMap(capacity, "the host tier")
        self._copies = copies
        self._arena = copies.empty_host(capacity)

    def write(self, data: Tensor) -> tuple[Slot, Pending]:
        """Copy down on the side stream."""
        slot = self.slots.take(data.numel())
        return slot, _EventPending(self._copies.copy(data, self._view(slot)), up=False)

    def read(self, slot: Slot, target: Tensor) -> Pending:
        """Copy up on the side stream."""
        return _EventPending(self._copies.copy(self._view(slot), target), up=True)

    def free(self, slot: Slot) -> None:
        """The next copy into this place is ordered after this one by its stream."""
        self.slots.give(slot)

    def close(self) -> None:
        """Wait for copies, then release the arena."""
        self._copies.synchronize()
        self._arena = torch.empty(0, dtype=torch.uint8)

    def _view(self, slot: Slot) -> Tensor:
        return self._arena[slot.offset : slot.offset + slot.size]


class _FilePending:
    """File work on a worker thread, followed by a copy to the device where there is one. Work that ended or
    was cancelled is let go of at once: it holds the tensor."""

    def __init__(self, pool: ThreadPoolExecutor, work: Callable[[], Event]) -> None:
        self._work: Callable[[], Event] | None = work
        self._future: Future[Event] = pool.submit(self._run)

    def done(self) -> bool:
        return self._future.done() and self._result().done()

    def wait(self) -> None:
        self._result().wait_stream()

    def cancel(self) -> bool:
        if not self._future.cancel():
            return False
        self._work = None
        return True

    def _run(self) -> Event:
        work, self._work = self._work, None
        assert work is not None
        return work()

    def _result(self) -> Event:
        try:
            error = self._future.exception()
        except CancelledError:
            raise SwapError("the swap tier was closed while this transfer waited") from None
        if error is not None:  # a new one each time: the old one would collect frames that hold this transfer
            raise SwapError(str(error)) from error
        return self._future.result()


class DiskStore:
    """One file per rank, written and read by worker threads; reads do not queue behind writes, because
    someone waits for them. What comes back is checked against a sum of what was written (30 GB/s on one core,
    so it costs nothing beside the file).

    The file is made with mode 0600 in a directory that only its owner can enter, never through a symbolic
    link, and unlinked while open: whatever ends the process, nothing is left over.
    """

    tier = "disk"

    def __init__(self, directory: Path, capacity: int, copies: CopyEngine, *, threads: int) -> None:
        self.slots = SlotMap(capacity, f"the disk tier in {directory}")
        self._copies = copies
        self.directory = directory
        self._file = private_file(directory)
        self._writers = ThreadPoolExecutor(threads, thread_name_prefix="parallax-swap-write")
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="parallax-swap-read")
        self._sums: dict[Slot, int] = {}
        self._closed = False

    def write(self, data: Tensor) -> tuple[Slot, Pending]:
        """Queue a write; device data goes through a host copy first."""
        slot = self.slots.take(data.numel())
        host, copied = self._to_host(data)

        def work() -> Event:
            copied.wait_host()
            self._sums[slot] = _sum(host)
            self._each(slot, host, lambda view, at: os.pwrite(self._file, view, at), "write")
            return copied

        return slot, _FilePending(self._writers, work)

    def read(self, slot: Slot, target: Tensor) -> Pending:
        """Queue a read."""
        if not target.is_cuda:
            return _FilePending(self._readers, lambda: self._fill(slot, target))
        host = self._copies.empty_host(slot.size)
        compute = torch.cuda.current_stream(target.device)  # whose earlier work may still use the target's block

        def work() -> Event:
            self._fill(slot, host)
            with torch.cuda.stream(compute):
                return self._copies.copy(host, target)

        return _FilePending(self._readers, work)

    def free(self, slot: Slot) -> None:
        """The caller has waited for the transfers of this place."""
        self._sums.pop(slot, None)
        self.slots.give(slot)

    def close(self) -> None:
        """Drop what has not begun, wait for the rest, close the file."""
        if self._closed:
            return
        self._closed = True
        for pool in (self._writers, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)
        os.close(self._file)

    def _to_host(self, data: Tensor) -> tuple[Tensor, Event]:
        if not data.is_cuda:
            return data, _DONE
        host = self._copies.empty_host(data.numel())
        return host, self._copies.copy(data, host)

    def _fill(self, slot: Slot, host: Tensor) -> Event:
        self._each(slot, host, lambda view, at: os.preadv(self._file, [view], at), "read")
        if _sum(host) != self._sums[slot]:
            raise SwapError(
                f"{format_bytes(slot.size)} at byte {slot.offset} of the swap file in {self.directory} are not what "
                "was written: check the disk, or set swap.directory to another"
            )
        return _DONE

    def _each(self, slot: Slot, data: Tensor, call: Callable[[memoryview, int], int], verb: str) -> None:
        view = memoryview(data.numpy())  # type: ignore[arg-type]
        done = 0
        while done < slot.size:
            try:
                count = call(view[done : done + _REQUEST], slot.offset + done)
            except OSError as error:
                raise SwapError(
                    f"cannot {verb} {format_bytes(slot.size)} of swapped data in {self.directory}: "
                    f"{error.strerror}; {format_bytes(self.slots.used_bytes)} are in use there: "
                    "free space or set swap.directory"
                ) from error
            if count == 0:
                raise SwapError(
                    f"swap file in {self.directory} ends {format_bytes(slot.size - done)} too early; "
                    "something else truncated it"
                )
            done += count


def _sum(data: Tensor) -> int:
    """Differs after any one flipped bit, and almost surely for a hole or another tensor's bytes."""
    view = data.numpy()
    whole = view.size - view.size % 8
    return int(np.add.reduce(view[:whole].view(np.uint64))) + int(np.add.reduce(view[whole:], dtype=np.uint64))
