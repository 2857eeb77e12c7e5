"""What the tests of the swap share: a store that obeys the test, copies that lag, managers, tensors to save, and what
equal means."""

from __future__ import annotations

import contextlib
import gc
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from parallax.errors import SwapError
from parallax.machine.device import (
    CpuCopies,
    DoneEvent,
    Event,
    FileStaging,
    StagingRing,
    no_delay,
)
from parallax.machine.pinned import Arena, PlainArena
from parallax.model.saved import Selector
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.stores.slots import SlotMap, StoreSlot
from parallax.swap.stores.store import DiskStore, HostStore, Pending, Store

MIB = 2**20
Make = Callable[..., SwapManager]


def assert_equal(found: Any, expected: Any) -> None:
    """Bit for bit, whatever the nesting."""
    assert type(found) is type(expected)
    if isinstance(found, Tensor):
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected)
    elif isinstance(found, dict):
        assert list(found) == list(expected)
        for key in found:
            assert_equal(found[key], expected[key])
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_equal(one, other)
    else:
        assert found == expected


class LateEvent:
    """The end of a copy on another thread."""

    def __init__(self, future: Future[float]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait_host(self) -> None:
        self._future.result()

    def wait_stream(self, _stream: torch.Stream | None = None) -> None:
        self._future.result()

    def seconds(self) -> float:
        return self._future.result()


class LateCopies:
    """Asynchronous copies, as those of a GPU, in any order. Like them they keep no block
    alive: what was let go of too early has other bytes when it is read, and is a ``stray`` when it is written."""

    def __init__(self, delay: Callable[[], float] = no_delay) -> None:
        self._delay, self._pool = delay, ThreadPoolExecutor(4, thread_name_prefix="late-copies")
        self._running: set[Future[float]] = set()
        self._lock = threading.Lock()
        self.strays = 0

    def arena(self, count: int) -> Arena:
        return PlainArena(count)

    def file_staging(self, buffers: int, piece_bytes: int) -> FileStaging:
        return StagingRing(self, torch.device("cpu"), buffers, min(piece_bytes, 4096))

    def mark(self) -> Event:
        return DoneEvent()

    def copy(self, source: Tensor, target: Tensor, after: Event | None = None) -> Event:
        ends = [
            (weakref.ref(t.untyped_storage()), int(t.storage_offset()), t.size())
            for t in (source, target)
        ]

        def run() -> float:
            time.sleep(self._delay())
            start = time.perf_counter()
            views = [_alive(*end) for end in ends]
            if views[1] is None:
                self.strays += 1
            elif views[0] is None:
                views[1].fill_(0x5A)
            else:
                views[1].copy_(views[0])
            return time.perf_counter() - start

        future = self._pool.submit(run)
        with self._lock:
            self._running = {other for other in self._running if not other.done()} | {future}
        return LateEvent(future)

    def bind_thread(self) -> None:
        """As every thread does."""

    def synchronize(self) -> None:
        with self._lock:
            running = self._running
        for future in running:
            future.result()

    def take_stalls(self) -> list[Any]:
        return []

    def on_own_streams(self) -> LateCopies:
        return self

    def close(self) -> None:
        self._pool.shutdown()


def _alive(
    watch: weakref.ref[torch.UntypedStorage], offset: int, size: torch.Size
) -> Tensor | None:
    storage = watch()
    return (
        None
        if storage is None
        else torch.empty(0, dtype=torch.uint8).set_(storage, offset, size, (1,))
    )


KINDS = ["disk", "host", "late disk", "late host"]


@contextlib.contextmanager
def storing(
    kind: str, folder: Path, capacity: int = 64 * MIB, delay: Callable[[], float] = no_delay
) -> Iterator[tuple[Store, LateCopies | CpuCopies]]:
    """A store of ``kind`` and its copies; late: those of a device that works on its own."""
    copies = LateCopies(delay) if kind.startswith("late") else CpuCopies()
    if kind.endswith("disk"):
        store: Store = DiskStore(folder, capacity, copies, threads=2, delay=delay)
    else:
        store = HostStore(capacity, copies)
    try:
        yield store, copies
    finally:
        store.close()
        if isinstance(copies, LateCopies):
            copies.close()


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """The kernel refuses every write into a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def making(kind: str, folder: Path) -> Iterator[Make]:
    """Makes managers over a store of ``kind``; afterwards each must be empty."""
    made: list[SwapManager] = []
    stores = contextlib.ExitStack()

    def build(limit: int = 64 * MIB, capacity: int = 64 * MIB, **options: Any) -> SwapManager:
        store, _ = stores.enter_context(storing(kind, folder, capacity))
        made.append(SwapManager(store, limit_bytes=limit, **options))
        return made[-1]

    try:
        yield build
        gc.collect()
        for manager in made:
            settle(manager)
            assert (manager.resident_bytes, manager.stored_bytes) == (0, 0)
    finally:
        for manager in made:
            manager.close()
        stores.close()


def settle(manager: SwapManager, seconds: float = 10.0) -> None:
    """Wait until everything has left the device."""
    deadline = time.monotonic() + seconds
    while manager.resident_bytes and time.monotonic() < deadline:
        time.sleep(0.001)


def everything(*held: Tensor) -> Selector:
    return Selector(held, minimum_bytes=1)


class Save(torch.autograd.Function):
    """Saves tensors; its backward looks at what came back."""

    seen: ClassVar[list[tuple[Tensor, ...]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        Save.seen.append(ctx.saved_tensors)
        return (gradient, *[None] * (len(ctx.needs_input_grad) - 1))


def save(manager: SwapManager, *tensors: Tensor, micro: int = 0) -> Tensor:
    """A scalar whose backward unpacks ``tensors`` into ``Save.seen``."""
    with offloading(manager, everything(), micro):
        return Save.apply(torch.zeros((), requires_grad=True), *tensors)


def unpacked(root: Tensor, **options: Any) -> tuple[Tensor, ...]:
    root.backward(**options)
    return Save.seen.pop()


class ManualPending:
    def __init__(self, store: ManualStore, name: str, work: Callable[[], None]) -> None:
        self.store, self.name, self.work = store, name, work
        self.finished = self.cancelled = self.running = False
        self.error: SwapError | None = None

    def finish(self) -> None:
        if not self.finished and not self.cancelled:
            if self.error is None:
                self.work()
            self.work = lambda: None  # as a store must: it holds the tensor
            self.finished = True
            self.store.log.append(self.name)

    def done(self) -> bool:
        if self.finished and self.error is not None:
            raise SwapError(str(self.error))
        return self.finished

    def wait(self) -> None:
        assert not self.cancelled, "waits for what was cancelled"
        self.finish()
        self.done()

    def cancel(self) -> bool:
        if not (self.running or self.finished):
            self.cancelled, self.work = True, lambda: None
        return self.cancelled

    def seconds(self) -> float:
        return 0.0


class ManualStore:
    """A place may be given away only when nothing runs on it; every transfer is checked against that."""

    tier = "manual"
    waste_bytes = 0

    def __init__(self, capacity: int = 2**40) -> None:
        self.slots = SlotMap(capacity, "the manual tier")
        self.places: dict[int, Tensor] = {}
        self.transfers: list[ManualPending] = []
        self.running: dict[int, list[ManualPending]] = {}
        self.log: list[str] = []
        self.bytes_out = self.bytes_in = 0

    def write(self, data: Tensor) -> tuple[StoreSlot, Pending]:
        slot = self.slots.allocate(data.numel())

        def work() -> None:
            self.places[slot.offset] = data.clone()
            self.bytes_out += slot.size

        return slot, self._begin(slot, f"write {slot.size}", work)

    def read(self, slot: StoreSlot, target: Tensor) -> Pending:
        def work() -> None:
            target.copy_(self.places[slot.offset])
            self.bytes_in += slot.size

        return self._begin(slot, f"read {slot.size}", work)

    def free(self, slot: StoreSlot) -> None:
        assert not [t for t in self.running.pop(slot.offset, []) if not (t.finished or t.cancelled)]
        self.places.pop(slot.offset, None)
        self.slots.release(slot)

    def close(self) -> None:
        for transfer in self.transfers:
            if not transfer.cancel():
                transfer.finish()

    def finish(self, count: int) -> None:
        for transfer in [t for t in self.transfers if not (t.finished or t.cancelled)][:count]:
            transfer.finish()
        self.transfers = [t for t in self.transfers if not (t.finished or t.cancelled)]

    def _begin(self, slot: StoreSlot, name: str, work: Callable[[], None]) -> ManualPending:
        assert not [t for t in self.running.get(slot.offset, []) if not (t.finished or t.cancelled)]
        self.transfers.append(ManualPending(self, name, work))
        self.running.setdefault(slot.offset, []).append(self.transfers[-1])
        return self.transfers[-1]
