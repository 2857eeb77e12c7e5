"""Stores of offloaded data, which write tensors, read them back and free them."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from parallax.common.units import format_bytes
from parallax.errors import SwapError
from parallax.machine.device import CopyEngine, Event, no_delay
from parallax.machine.pinned import Arena
from parallax.plan.tier import DISK, HOST, Tier
from parallax.swap.stores.files import private_file
from parallax.swap.stores.forks import call_after_fork, generation
from parallax.swap.stores.remedies import ENGINE, Remedies
from parallax.swap.stores.slots import SlotMap, StoreSlot

# bytes per system call: large enough for bandwidth, small enough to share the disk
_REQUEST = 8 * 2**20


class Pending(Protocol):
    """The interface of a running transfer."""

    def done(self) -> bool:
        """Whether the transfer has finished. Raises :class:`SwapError` if it failed."""

    def wait(self) -> None:
        """Wait until the transfer's result may be used.

        After a write, the caller may release the source. After a read, work that the caller queues on the device's
        stream may read the target.
        """

    def cancel(self) -> bool:
        """Cancel the transfer if it has not begun; return whether it was cancelled."""

    def seconds(self) -> float:
        """Return the duration of the transfer without its time in a queue; valid once it is done."""


class Store(Protocol):
    """The interface of a store in one offload tier. ``tier`` is the tier's name.

    A slot is the place of one written tensor in the store. ``data`` and ``target`` are one-dimensional uint8 tensors on
    the device. The caller keeps them alive and unchanged until the transfer is done.
    """

    tier: str
    slots: SlotMap

    @property
    def waste_bytes(self) -> int:
        """Bytes of pinned memory allocated in excess of the requested bytes."""

    def write(self, data: Tensor) -> tuple[StoreSlot, Pending]:
        """Begin to copy ``data`` to a new slot; return the slot and the running transfer."""

    def read(self, slot: StoreSlot, target: Tensor) -> Pending:
        """Begin to copy the bytes of ``slot`` into ``target``; return the running transfer."""

    def free(self, slot: StoreSlot) -> None:
        """Free the slot, so that later writes may overwrite its bytes at once."""

    def close(self) -> None:
        """Finish or cancel transfers and release all resources."""


class _EventPending:
    """A transfer between the device and a slot in host memory.

    A slot may be scattered over several pieces of memory. ``copies`` has one event for the copy of each piece. With
    ``to_device``, :meth:`wait` makes the device's stream wait, and not the host.
    """

    def __init__(self, copies: list[Event], *, to_device: bool) -> None:
        self._copies, self._to_device = copies, to_device

    def done(self) -> bool:
        for copy in self._copies:  # noqa: SIM110  called very often: no generator
            if not copy.done():
                return False
        return True

    def wait(self) -> None:
        for copy in self._copies:
            if self._to_device:
                copy.wait_stream()
            else:
                copy.wait_host()

    def cancel(self) -> bool:
        return False

    def seconds(self) -> float:
        total = 0.0
        for copy in self._copies:
            total += copy.seconds()
        return total


class HostStore:
    """A store in host memory, which is pinned for accelerators.

    The memory is one arena of ``capacity`` bytes, allocated at once. With ``slab_bytes``, it is allocated in slabs of
    this size when slots need them. This suits a capacity that may never be used in full.
    """

    def __init__(
        self,
        capacity: int,
        copies: CopyEngine,
        remedies: Remedies = ENGINE,
        *,
        tier: Tier = HOST,
        slab_bytes: int = 0,
    ) -> None:
        self.tier = tier.name
        self.slots = SlotMap(capacity, f"the {tier.name} tier", remedies.when_full(tier))
        self._capacity, self._copies = capacity, copies
        self._slab_bytes = slab_bytes or max(1, capacity)
        self._slabs: list[Arena] = []
        self.after_fork()
        call_after_fork(self)
        if not slab_bytes:
            self._allocate(capacity)

    def after_fork(self) -> None:
        """Replace the lock in a forked child, because another thread of the parent may have held it."""
        self._growing = threading.Lock()

    @property
    def waste_bytes(self) -> int:
        """Bytes of pinned memory allocated so far in excess of the requested bytes."""
        requested = min(self._capacity, len(self._slabs) * self._slab_bytes)
        return sum(slab.allocated_bytes for slab in self._slabs) - requested

    def write(self, data: Tensor) -> tuple[StoreSlot, Pending]:
        """Begin to copy ``data`` to a slot, on the stream for copies to the host."""
        slot = self.slots.allocate(data.numel())
        try:
            self._allocate_slabs(slot)
        except SwapError:
            self.slots.release(slot)
            raise
        copies = [self._copies.copy(part, view) for part, view in self._pairs(slot, data)]
        return slot, _EventPending(copies, to_device=False)

    def read(self, slot: StoreSlot, target: Tensor) -> Pending:
        """Begin to copy a slot to ``target``, on the stream for copies to the device."""
        copies = [self._copies.copy(view, part) for part, view in self._pairs(slot, target)]
        return _EventPending(copies, to_device=True)

    def free(self, slot: StoreSlot) -> None:
        """Free a slot whose transfers have ended."""
        self.slots.release(slot)

    def close(self) -> None:
        """Wait for copies, then release the arenas."""
        self._copies.synchronize()
        for slab in self._slabs:
            slab.close()

    def _allocate_slabs(self, slot: StoreSlot) -> None:
        """Allocate the slabs of a slot that are not allocated yet."""
        if len(self._slabs) * self._slab_bytes < self._capacity:
            self._allocate(max(offset + size for offset, size in slot.parts(0, slot.size)))

    def _allocate(self, end: int) -> None:
        with self._growing:
            while (start := len(self._slabs) * self._slab_bytes) < end:
                size = min(self._slab_bytes, self._capacity - start)
                self._slabs.append(self._copies.arena(size))

    def _pairs(self, slot: StoreSlot, data: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the parts of ``data``, each paired with its memory in a slab. There is nearly always one part."""
        if not slot.stretches:
            slab, begin = divmod(slot.offset, self._slab_bytes)
            if begin + slot.size <= self._slab_bytes:
                return ((data, self._slabs[slab].data[begin : begin + slot.size]),)
        return self._pieces(slot, data)

    def _pieces(self, slot: StoreSlot, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        at = 0
        for offset, size in slot.parts(0, slot.size):
            while size:
                slab, begin = divmod(offset, self._slab_bytes)
                part = min(size, self._slab_bytes - begin)
                yield data[at : at + part], self._slabs[slab].data[begin : begin + part]
                at, offset, size = at + part, offset + part, size - part


class _InlineExecutor:
    """An executor that runs each task on the calling thread."""

    def submit(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        work()
        future.set_result(None)
        return future

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        """No-op: no thread runs."""


class _FilePending:
    """A transfer between a file and memory on a worker thread, including copies from or to the device.

    The task is released as soon as it ends, fails or is cancelled, because it references the tensor. Only the text of
    an error is kept, because a traceback would reference frames and so the tensor. A forked child has no worker
    threads, so it runs unfinished tasks itself.
    """

    def __init__(
        self, pool: ThreadPoolExecutor | _InlineExecutor, work: Callable[[], None]
    ) -> None:
        self._work: Callable[[], None] | None = work
        self._failure = ""
        self._seconds = 0.0
        self._generation = generation()
        self._future: Future[None] = pool.submit(self._run)

    def done(self) -> bool:
        if not self._own_future().done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        try:
            self._own_future().result()
        except CancelledError:
            raise SwapError("the swap tier was closed while this transfer waited") from None
        if self._failure:
            raise SwapError(self._failure)

    def cancel(self) -> bool:
        if self._generation != generation() or not self._future.cancel():
            return False
        self._work = None
        return True

    def seconds(self) -> float:
        return self._seconds

    def _own_future(self) -> Future[None]:
        if self._generation != generation():
            self._generation = generation()
            self._future = _InlineExecutor().submit(
                self._run if self._work is not None else lambda: None
            )
        return self._future

    def _run(self) -> None:
        work = self._work
        assert work is not None
        start = time.perf_counter()
        try:
            work()
        except SwapError as error:
            self._failure = str(error)
        except BaseException:
            self._failure = f"a transfer of swapped data failed:\n{traceback.format_exc()}"
        self._work = None
        self._seconds = time.perf_counter() - start


class DiskStore:
    """A store in one file per rank, written and read by worker threads.

    Reads have separate threads, because training waits for them. A checksum detects data that was read incorrectly. It
    is computed at 30 GB/s on one core, so it costs little compared with the file access.

    The file has mode 0600 in a directory that only its owner can enter. It is never reached through a symbolic link and
    is unlinked while open, so that no file is left over however the process ends.
    """

    def __init__(
        self,
        directory: Path,
        capacity: int,
        copies: CopyEngine,
        *,
        threads: int,
        delay: Callable[[], float] = no_delay,
        remedies: Remedies = ENGINE,
        tier: Tier = DISK,
    ) -> None:
        self.tier = tier.name
        self.slots = SlotMap(
            capacity, f"the {tier.name} tier in {directory}", remedies.when_full(tier)
        )
        self._remedies = remedies
        self._copies, self._delay = copies, delay
        self.directory = directory
        self._file: int | None = private_file(directory, remedies)
        self._staging = copies.file_staging(2 * threads, _REQUEST)
        self.waste_bytes = self._staging.waste_bytes
        self._writers: ThreadPoolExecutor | _InlineExecutor = _pool(
            threads, "parallax-swap-write", copies
        )
        self._readers: ThreadPoolExecutor | _InlineExecutor = _pool(
            threads, "parallax-swap-read", copies
        )
        self._written: dict[StoreSlot, tuple[int, int]] = {}  # slot → its file, and the checksum
        self._inherited: list[int] = []
        self._closed = False
        call_after_fork(self)

    def after_fork(self) -> None:
        """Continue in a forked child, which has no worker threads: read from the parent's file, and write to a new
        file.

        The child can read the parent's data until the parent changes it. Most children only load training data or exit.
        """
        if self._file is not None:
            self._inherited.append(self._file)
        self._file, self._writers, self._readers = None, _InlineExecutor(), _InlineExecutor()

    def write(self, data: Tensor) -> tuple[StoreSlot, Pending]:
        slot, ready = self.slots.allocate(data.numel()), self._copies.mark()
        return slot, _FilePending(self._writers, lambda: self._save(slot, data, ready))

    def read(self, slot: StoreSlot, target: Tensor) -> Pending:
        ready = self._copies.mark()  # earlier work may still use the target's block
        return _FilePending(self._readers, lambda: self._fill(slot, target, ready))

    def free(self, slot: StoreSlot) -> None:
        """Free a slot whose transfers have ended."""
        self._written.pop(slot, None)
        self.slots.release(slot)

    def close(self) -> None:
        """Cancel transfers that have not begun, wait for the others, and close the file."""
        if self._closed:
            return
        self._closed = True
        for pool in (self._writers, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._staging.close()
        for file in [self._file, *self._inherited]:
            if file is not None:
                os.close(file)

    def _save(self, slot: StoreSlot, data: Tensor, ready: Event) -> None:
        time.sleep(self._delay())
        total, at, file = 0, 0, self._own_file()
        for piece in self._staging.to_host(data, ready):
            total += _sum(piece)
            self._each(slot, at, piece, lambda view, at: os.pwrite(file, view, at), "write")
            at += piece.numel()
        self._written[slot] = file, total

    def _fill(self, slot: StoreSlot, target: Tensor, ready: Event) -> None:
        time.sleep(self._delay())
        total = at = 0
        file, expected = self._written.get(slot) or (self._own_file(), None)
        for piece in self._staging.to_device(target, ready):
            self._each(slot, at, piece, lambda view, at: os.preadv(file, [view], at), "read")
            total += _sum(piece)
            at += piece.numel()
        if total != expected:
            raise SwapError(
                f"{format_bytes(slot.size)} at byte {slot.offset} of the swap file in {self.directory} are not what "
                f"was written: check the disk, or {self._remedies.directory} to another"
            )

    def _own_file(self) -> int:
        if self._file is None:
            self._file = private_file(self.directory, self._remedies)
        return self._file

    def _each(
        self,
        slot: StoreSlot,
        at: int,
        piece: Tensor,
        call: Callable[[memoryview, int], int],
        verb: str,
    ) -> None:
        view = memoryview(_array(piece))  # type: ignore[arg-type]
        done = 0
        while done < len(view):
            offset, size = next(slot.parts(at + done, len(view) - done))
            try:
                count = call(view[done : done + size], offset)
            except OSError as error:
                raise SwapError(
                    f"cannot {verb} {format_bytes(slot.size)} of swapped data in {self.directory}: "
                    f"{error.strerror}; {format_bytes(self.slots.used_bytes)} are in use there: "
                    f"free space or {self._remedies.directory}"
                ) from error
            if count == 0:
                missing = format_bytes(slot.size - at - done)
                raise SwapError(
                    f"swap file in {self.directory} ends {missing} too early; something else truncated it"
                )
            done += count


def _pool(threads: int, name: str, copies: CopyEngine) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, name, initializer=copies.bind_thread)


class _Bytes:
    """Exposes a tensor's memory to numpy. ``Tensor.numpy`` would make the tensor's storage non-resizable."""

    def __init__(self, data: Tensor) -> None:
        self.__array_interface__ = {
            "data": (data.data_ptr(), False),
            "shape": (data.numel(),),
            "typestr": "|u1",
            "version": 3,
        }
        self._data = data


def _array(data: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(_Bytes(data))


def _sum(data: Tensor) -> int:
    """Return a checksum of ``data``.

    It detects every single bit flip. It almost surely detects missing data, and the data of another tensor.
    """
    view = _array(data)
    whole = view.size - view.size % 8
    return int(np.add.reduce(view[:whole].view(np.uint64))) + int(
        np.add.reduce(view[whole:], dtype=np.uint64)
    )
