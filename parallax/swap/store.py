"""Tiers below the device. A store writes bytes, reads them back, and frees them; nothing else."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from parallax.device import CopyEngine, DoneEvent, Event
from parallax.errors import SwapError
from parallax.units import format_bytes

_ALIGNMENT = 4096
_DONE = DoneEvent()
_REQUEST = 8 * 2**20  # bytes per system call: large enough for bandwidth, small enough to share the disk


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a store."""

    offset: int
    size: int


class Pending(Protocol):
    """A transfer under way."""

    def done(self) -> bool:
        """Whether it has finished; raises :class:`SwapError` if it failed."""

    def wait(self) -> None:
        """Wait on this thread until the source may be released or the target be read by the device's stream."""

    def cancel(self) -> bool:
        """Whether it was stopped before it began."""


class Store(Protocol):
    """The tier contract. ``data`` and ``target`` are one-dimensional uint8 tensors on the device; the caller keeps
    them alive and unchanged until the transfer is done."""

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


class SlotMap:
    """Places of fixed sizes in one growing line of bytes. A training step asks for the same sizes again and again,
    so a freed place waits for its own size: no fragmentation, no growth after the first step."""

    def __init__(self, capacity: int, name: str) -> None:
        self.used_bytes = self.high_water = 0
        self._capacity, self._name = capacity, name
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> Slot:
        """A place for ``size`` bytes."""
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            waiting = self._free.get(rounded)
            if waiting:
                offset = waiting.pop()
            elif self._end + rounded <= self._capacity:
                offset, self._end = self._end, self._end + rounded
            else:
                raise SwapError(
                    f"{self._name} is full: {format_bytes(self.used_bytes)} in use of {format_bytes(self._capacity)}, "
                    f"{format_bytes(size)} more asked; give the tier more room (cluster.disk, cluster.host_memory)"
                )
            self.used_bytes += rounded
            self.high_water = max(self.high_water, self.used_bytes)
        return Slot(offset, size)

    def give(self, slot: Slot) -> None:
        """Take a place back."""
        rounded = -(-slot.size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._free.setdefault(rounded, []).append(slot.offset)
            self.used_bytes -= rounded


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
    """A file transfer on a worker thread, followed by a copy to the device where there is one."""

    def __init__(self, future: Future[Event]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done() and self._future.result().done()

    def wait(self) -> None:
        self._future.result().wait_stream()

    def cancel(self) -> bool:
        return self._future.cancel()


class DiskStore:
    """One file per rank, written and read by worker threads.

    The file is made with mode 0600 in a directory that only its owner can enter, never through a symbolic link,
    and unlinked while open: whatever ends the process, nothing is left over.
    """

    tier = "disk"

    def __init__(self, directory: Path, capacity: int, copies: CopyEngine, *, threads: int) -> None:
        self.slots = SlotMap(capacity, f"the disk tier in {directory}")
        self._copies = copies
        self.directory = directory
        self._file = _private_file(directory)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="parallax-swap")

    def write(self, data: Tensor) -> tuple[Slot, Pending]:
        """Queue a write; device data goes through a host copy first."""
        slot = self.slots.take(data.numel())
        host, copied = self._to_host(data)

        def transfer() -> Event:
            copied.wait_host()
            self._each(slot, host, lambda view, at: os.pwrite(self._file, view, at), "write")
            return copied

        return slot, _FilePending(self._pool.submit(transfer))

    def read(self, slot: Slot, target: Tensor) -> Pending:
        """Queue a read."""
        host = self._copies.empty_host(slot.size) if target.is_cuda else target

        def transfer() -> Event:
            self._each(slot, host, lambda view, at: os.preadv(self._file, [view], at), "read")
            return self._copies.copy(host, target) if target.is_cuda else _DONE

        return _FilePending(self._pool.submit(transfer))

    def free(self, slot: Slot) -> None:
        """The caller has waited for the transfers of this place."""
        self.slots.give(slot)

    def close(self) -> None:
        """Drop what has not begun, wait for the rest, close the file."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        os.close(self._file)

    def _to_host(self, data: Tensor) -> tuple[Tensor, Event]:
        if not data.is_cuda:
            return data, _DONE
        host = self._copies.empty_host(data.numel())
        return host, self._copies.copy(data, host)

    def _each(self, slot: Slot, data: Tensor, call: Callable[[memoryview, int], int], verb: str) -> None:
        view = memoryview(data.numpy())
        done = 0
        while done < slot.size:
            try:
                count = call(view[done : done + _REQUEST], slot.offset + done)
            except OSError as error:
                raise SwapError(
                    f"cannot {verb} {format_bytes(slot.size)} of swapped data in {self.directory}: {error.strerror}; "
                    f"{format_bytes(self.slots.used_bytes)} are in use there: free space or set swap.directory"
                ) from error
            if count == 0:
                raise SwapError(
                    f"swap file in {self.directory} ends {format_bytes(slot.size - done)} too early; "
                    "something else truncated it"
                )
            done += count


def _private_file(directory: Path) -> int:
    """An open, unlinked file in ``directory``; refuses a directory that others could tamper with."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid():
            raise SwapError(f"swap directory {directory} is a symbolic link or another user's: set swap.directory")
        directory.chmod(0o700)
        handle, name = tempfile.mkstemp(prefix="swap-", dir=directory)
    except OSError as error:
        raise SwapError(f"cannot use swap directory {directory}: {error.strerror}; set swap.directory") from error
    os.unlink(name)
    return handle
