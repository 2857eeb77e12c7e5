"""The swap manager: saved activations leave the device as soon as they are saved, and come back just in time.

Records are of storages, not tensors: views and aliases share one, so nothing is copied twice and every stride
comes back as it was. A record lives exactly as long as autograd keeps the :class:`Entry` that claims it, so a
second unpack finds it, and a graph that never sees its backward leaves nothing behind.

::

                 pack                      written                fetch, unpack
    (computed) ───────▶ QUEUED on device ───────────▶ STORED below ──────────────▶ LOADED ──▶ (freed with
                            └──── fetch before the write began: cancelled ───────────▲         the graph)

``limit_bytes`` bounds what records hold on the device. Where the next one would not fit, the manager first
drops what is already written, then waits for writes (back-pressure), then gives up copies fetched too early,
then those that were used and may be used again (a shared storage, a retained graph); and raises
:class:`BudgetExceeded` with the arithmetic when none of these is left.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parallax.device import CopyEngine
from parallax.errors import BudgetExceeded, SwapError, check_choice, check_positive
from parallax.swap.records import Entry, Record, State
from parallax.swap.store import DiskStore, HostStore, Pending, Store
from parallax.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class SwapConfig:
    """Where offloaded activations go.

    ``tier``: host (pinned memory; CUDA devices only), disk, none (the planner may not offload), or auto: host
    under CUDA, disk on a CPU. ``directory``: folder for disk tiers, of its own; auto is inside the run
    directory. ``threads``: threads per rank that write files, and as many that read. ``minimum_bytes``:
    smaller tensors are never moved.
    """

    tier: str = "auto"
    directory: str = "auto"
    threads: int = 2
    minimum_bytes: int = 65536

    def __post_init__(self) -> None:
        check_choice("swap.tier", self.tier, ["auto", "host", "disk", "none"])
        check_positive("swap.threads", self.threads)
        check_positive("swap.minimum_bytes", self.minimum_bytes, zero=True)

    def open_store(self, tier: str, capacity: int, copies: CopyEngine, directory: Path) -> Store:
        """The store of one rank. ``directory`` is used where the configuration says auto."""
        if tier == "host":
            return HostStore(capacity, copies)
        folder = directory if self.directory == "auto" else Path(self.directory)
        return DiskStore(folder, capacity, copies, threads=self.threads)


@dataclass
class SwapStatistics:
    """What happened since the last :meth:`SwapManager.take_statistics`; bytes and seconds.

    ``bytes_out`` and ``bytes_in`` count transfers that ended, ``bytes_cancelled`` writes that were spared.
    """

    bytes_out: int = 0
    bytes_in: int = 0
    bytes_cancelled: int = 0
    stall_seconds: float = 0.0
    high_water: int = 0
    tier_high_water: int = 0


class SwapManager:
    """Moves the storages of micro-batches between the device and one store."""

    def __init__(self, store: Store, *, limit_bytes: int) -> None:
        self._store, self._limit = store, limit_bytes
        self._lock = threading.RLock()
        self._closed = False
        self._resident = 0
        self._writing: deque[Record] = deque()
        self._fetching: deque[Record] = deque()
        self._unclaimed: deque[Record] = deque()  # filled without the lock, by claims that end
        self._ending: deque[Record] = deque()  # unclaimed, but a transfer still runs
        self._lingering: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []  # given up while in use
        self._early: dict[Record, None] = {}  # loaded and not used yet, in the order of need
        self._used: dict[Record, None] = {}  # loaded and used, the longest ago first
        self._added: dict[int, dict[Record, None]] = {}
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Record]] = {}
        self._statistics = SwapStatistics()
        self.stall_seconds = 0.0

    @property
    def resident_bytes(self) -> int:
        """Bytes that records hold on the device now."""
        with self._lock:
            with contextlib.suppress(SwapError):  # for add, fetch and load to report
                self._reap()
            return self._resident

    @property
    def stored_bytes(self) -> int:
        """Bytes in use in the store now."""
        with self._lock:
            with contextlib.suppress(SwapError):
                self._reap()
            return self._store.slots.used_bytes

    def add(self, tensor: Tensor, micro: int) -> Entry:
        """The entry of a saved tensor's storage; a new one begins to leave at once."""
        with self._lock:
            self._check_open()
            self._reap()
            storage = tensor.untyped_storage()
            known, record = self._known.get(storage.data_ptr(), (None, None))
            if known is not None and record is not None and known() is storage:
                entry = record.claim()
                if entry is not None and record.version == tensor._version:
                    return entry
            self._make_room(storage.nbytes())
            record = Record(tensor, micro)
            entry = Entry(record, self._unclaimed)
            self._grow(record.size)
            self._write(record)
            self._added.setdefault(micro, {})[record] = None
            self._known[record.address] = (weakref.ref(storage), record)
            return entry

    def fetch(self, micro: int) -> None:
        """Begin to bring back what a micro-batch saved, last saved first, as far as the limit allows."""
        with self._lock:
            self._check_open()
            self._reap()
            for record in reversed(self._added.pop(micro, {})):
                if record.state is State.QUEUED:
                    self._spare(record)
                elif record.state is State.STORED:
                    self._fetching.append(record)
            self._pump()

    def load(self, entry: Entry) -> torch.UntypedStorage:
        """The bytes of an entry, on the device and ready for its current stream."""
        with self._lock:
            record = entry.record
            self._reap()
            if record.state is State.QUEUED:
                self._spare(record)
            elif record.state is State.STORED:
                self._check_open()
                self._make_room(record.size)
                self._read(record)
            if record.state is State.LOADED:
                self._arrive(record)
                self._early.pop(record, None)
                self._used.pop(record, None)
                self._used[record] = None
            record.used = True
            assert record.storage is not None
            storage = record.storage
            self._pump()
            return storage

    def take_statistics(self) -> SwapStatistics:
        """What happened since the last call."""
        with self._lock:
            self._reap()
            taken, self._statistics = self._statistics, SwapStatistics(high_water=self._resident)
            taken.tier_high_water = self._store.slots.take_high_water()
            return taken

    def close(self) -> None:
        """End all transfers and give the store back. What is on the device stays usable, the rest is lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._store.close()
            for record in [*self._writing, *self._ending]:
                if record.state is State.QUEUED:
                    record.state, record.transfer = State.LOADED, None
            self._writing.clear()
            self._fetching.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise SwapError("the swap tier is closed: what was offloaded is gone; run backward before Engine.close()")

    def _write(self, record: Record) -> None:
        assert record.storage is not None
        flat = torch.empty(0, dtype=torch.uint8, device=record.device).set_(record.storage)
        record.slot, record.transfer = self._store.write(flat)
        record.state, record.wanted = State.QUEUED, False
        self._writing.append(record)

    def _spare(self, record: Record) -> None:
        """Keep what is needed again before its write began; what is being written stays as well."""
        assert record.transfer is not None
        record.wanted = True
        if not record.transfer.cancel():
            return
        assert record.slot is not None
        self._store.free(record.slot)
        record.slot = record.transfer = None
        record.state = State.LOADED
        (self._used if record.used else self._early)[record] = None
        self._statistics.bytes_cancelled += record.size

    def _read(self, record: Record) -> None:
        assert record.slot is not None
        flat = torch.empty(record.size, dtype=torch.uint8, device=record.device)
        record.transfer = self._store.read(record.slot, flat)
        record.storage, record.state = flat.untyped_storage(), State.LOADED
        self._grow(record.size)

    def _arrive(self, record: Record) -> None:
        """Wait for a read."""
        if record.transfer is not None:
            self._stall(record.transfer)
            record.transfer = None
            self._statistics.bytes_in += record.size

    def _pump(self) -> None:
        """Begin the next reads that fit."""
        while self._fetching:
            record = self._fetching[0]
            alive = record.claim() is not None
            if alive and record.state is State.QUEUED:
                return
            if alive and record.state is State.STORED:
                if self._resident + record.size > self._limit:
                    return
                self._read(record)
                self._early[record] = None
            self._fetching.popleft()

    def _make_room(self, size: int) -> None:
        """Return when ``size`` more bytes fit; the order of the remedies is the module's promise."""
        while self._resident + size > self._limit:
            writing = next((r for r in self._writing if r.state is State.QUEUED), None)
            if self._ending:
                self._end(self._ending[0])
            elif writing is not None and writing.transfer is not None:
                self._stall(writing.transfer)
            elif not self._drop_early() and not self._drop_used():
                raise BudgetExceeded(
                    f"the device may hold {format_bytes(self._limit)} of offloaded activations; "
                    f"{format_bytes(self._resident)} are in use by the running backward and "
                    f"{format_bytes(size)} more are needed: raise cluster.device_memory, lower "
                    "trainer.microbatch, or use more plan.stages"
                )
            self._reap()

    def _end(self, record: Record) -> None:
        """Wait for the transfer of a record that nobody needs any more; whether it failed does not matter."""
        if record.transfer is not None:
            with contextlib.suppress(SwapError):
                self._stall(record.transfer)
                self._count(record)
            record.transfer = None

    def _drop_early(self) -> bool:
        """Give up the record that is needed last of those brought back or spared, and not used yet."""
        if not self._early:
            return False
        record, _ = self._early.popitem()
        self._fetching.appendleft(record)
        if record.slot is None:
            self._write(record)
            return True
        if record.transfer is not None and record.transfer.cancel():
            record.transfer = None
        self._arrive(record)
        self._release(record)
        return True

    def _drop_used(self) -> bool:
        """Give up what was used longest ago. Bytes that someone still works on count until they let go."""
        while self._used:
            record = next(iter(self._used))
            del self._used[record]
            if record.slot is None:
                self._write(record)
                return True
            if self._release(record):
                return True
        return False

    def _release(self, record: Record) -> bool:
        """Let go of the device's copy; whether that made room."""
        assert record.storage is not None
        watch = weakref.ref(record.storage)
        record.leave()
        if record.used and watch() is not None:
            self._lingering.append((watch, record.size))
            return False
        self._resident -= record.size
        return True

    def _reap(self) -> None:
        """Account for what ended since the last call: claims, transfers, uses."""
        while self._unclaimed:
            record = self._unclaimed.popleft()
            self._forget(record)
            self._ending.append(record)
        for _ in range(len(self._ending)):
            record = self._ending.popleft()
            if not self._ended(record):
                self._ending.append(record)
                continue
            if record.storage is not None:
                self._resident -= record.size
                record.leave()
            if record.slot is not None:
                self._store.free(record.slot)
                record.slot = None
        if self._lingering:
            still = [(watch, size) for watch, size in self._lingering if watch() is not None]
            self._resident -= sum(size for _, size in self._lingering) - sum(size for _, size in still)
            self._lingering = still
        while self._writing:
            record = self._writing[0]
            if record.state is State.QUEUED and record.claim() is not None:
                assert record.transfer is not None
                if not record.transfer.done():
                    return
                self._statistics.bytes_out += record.size
                self._written(record)
            self._writing.popleft()

    def _written(self, record: Record) -> None:
        if record.wanted:
            record.state, record.transfer = State.LOADED, None
            (self._used if record.used else self._early)[record] = None
        else:
            self._release(record)

    def _ended(self, record: Record) -> bool:
        """Whether no transfer touches the bytes of an unclaimed record any more."""
        if record.transfer is None:
            return True
        if record.transfer.cancel():
            if record.state is State.QUEUED:
                self._statistics.bytes_cancelled += record.size
            return True
        try:
            if not record.transfer.done():
                return False
        except SwapError:
            return True  # nobody needs them: the next write that is needed will say what is wrong
        self._count(record)
        return True

    def _count(self, record: Record) -> None:
        if record.state is State.QUEUED:
            self._statistics.bytes_out += record.size
        else:
            self._statistics.bytes_in += record.size

    def _forget(self, record: Record) -> None:
        self._early.pop(record, None)
        self._used.pop(record, None)
        if record.micro in self._added:
            self._added[record.micro].pop(record, None)
            if not self._added[record.micro]:
                del self._added[record.micro]
        _, known = self._known.get(record.address, (None, None))
        if known is record:
            del self._known[record.address]

    def _grow(self, size: int) -> None:
        self._resident += size
        self._statistics.high_water = max(self._statistics.high_water, self._resident)

    def _stall(self, transfer: Pending) -> None:
        start = time.perf_counter()
        try:
            transfer.wait()
        finally:
            seconds = time.perf_counter() - start
            self._statistics.stall_seconds += seconds
            self.stall_seconds += seconds
