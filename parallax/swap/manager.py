"""The swap manager: saved activations leave the device as soon as they are saved, and come back just in time.

Entries are storages, not tensors: views and aliases share one entry, so nothing is copied twice and every stride
comes back as it was. An entry lives exactly as long as autograd keeps what was packed, so a second unpack finds it,
and a graph that never sees its backward leaves nothing behind.

::

                 pack                      written                 fetch / unpack
    (computed) ───────▶ QUEUED on device ───────────▶ STORED below ───────────────▶ LOADED on device ──▶ (freed with the graph)
                            └──── fetch before the write began: cancelled ───────────▲

``limit_bytes`` bounds what entries hold on the device. Where the next one would not fit, the manager first drops what
is already written, then waits for writes (back-pressure), then drops copies fetched too early; and raises
:class:`BudgetExceeded` with the arithmetic when none of these is left.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from parallax.device import CopyEngine
from parallax.errors import BudgetExceeded, check_choice, check_positive
from parallax.swap.store import DiskStore, HostStore, Pending, Slot, Store
from parallax.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class SwapConfig:
    """Where offloaded activations go.

    ``tier``: host (pinned memory; CUDA devices only), disk, none (the planner may not offload), or auto: host
    under CUDA, disk on a CPU. ``directory``: folder for disk tiers; auto is inside the run directory. ``threads``:
    threads that write and read files, per rank. ``minimum_bytes``: smaller tensors are never moved.
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
    """What happened since the last :meth:`SwapManager.take_statistics`; bytes and seconds."""

    bytes_out: int = 0
    bytes_in: int = 0
    bytes_cancelled: int = 0
    stall_seconds: float = 0.0
    high_water: int = 0
    tier_high_water: int = 0


class State(Enum):
    """Where the bytes of an entry are."""

    QUEUED = "on the device, to be written"
    STORED = "in the store"
    LOADED = "on the device, or on the way to it"


class Entry:
    """One storage. Made by :meth:`SwapManager.add`; whoever holds it keeps its bytes recoverable."""

    def __init__(self, manager: SwapManager, tensor: Tensor) -> None:
        self._manager = manager
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self.size, self.device, self.version = self.storage.nbytes(), tensor.device, tensor._version
        self.state = State.QUEUED
        self.transfer: Pending | None = None
        self.slot: Slot | None = None
        self.wanted = self.used = False
        self.watchers: list[weakref.WeakMethod[Callable[[], None]]] = []

    def leave(self) -> None:
        """Let go of the device's copy; whoever watches the storage for changes lets go as well."""
        self.storage = self.transfer = None
        self.state = State.STORED
        for watcher in self.watchers:
            told = watcher()
            if told is not None:
                told()
        self.watchers.clear()

    def __del__(self) -> None:
        # Runs wherever the last reference ends, perhaps inside the manager: only leave word there.
        self._manager.bury(self.transfer, self.slot, self.size if self.storage is not None else 0)


class SwapManager:
    """Moves entries of micro-batches between the device and one store."""

    def __init__(self, store: Store, *, limit_bytes: int) -> None:
        self._store, self._limit = store, limit_bytes
        self._lock = threading.RLock()
        self._resident = 0
        self._writing: deque[weakref.ref[Entry]] = deque()
        self._fetching: deque[weakref.ref[Entry]] = deque()
        self._early: deque[weakref.ref[Entry]] = deque()
        self._added: dict[int, list[weakref.ref[Entry]]] = {}
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], weakref.ref[Entry]]] = {}
        self._buried: deque[tuple[Pending | None, Slot | None, int]] = deque()
        self._closing: deque[tuple[Pending | None, Slot | None, int]] = deque()
        self._statistics = SwapStatistics()
        self.stall_seconds = 0.0

    @property
    def resident_bytes(self) -> int:
        """Bytes that entries hold on the device now."""
        with self._lock:
            self._reap()
            return self._resident

    @property
    def stored_bytes(self) -> int:
        """Bytes in use in the store now."""
        with self._lock:
            self._reap()
            return self._store.slots.used_bytes

    def add(self, tensor: Tensor, micro: int) -> Entry:
        """The entry of a saved tensor's storage; a new one begins to leave at once."""
        with self._lock:
            self._reap()
            storage = tensor.untyped_storage()
            known = self._known.get(storage.data_ptr())
            if known is not None and known[0]() is storage:
                entry = known[1]()
                if entry is not None and entry.version == tensor._version:
                    return entry
            self._make_room(storage.nbytes())
            entry = Entry(self, tensor)
            self._grow(entry.size)
            self._write(entry)
            reference = weakref.ref(entry)
            self._added.setdefault(micro, []).append(reference)
            self._known[storage.data_ptr()] = (weakref.ref(storage), reference)
            return entry

    def fetch(self, micro: int) -> None:
        """Begin to bring back what a micro-batch saved, last saved first, as far as the limit allows."""
        with self._lock:
            self._reap()
            for reference in reversed(self._added.pop(micro, [])):
                entry = reference()
                if entry is None or entry.state is State.LOADED:
                    continue
                if entry.state is State.QUEUED:
                    self._keep(entry)
                else:
                    self._fetching.append(reference)
            self._pump()

    def load(self, entry: Entry) -> torch.UntypedStorage:
        """The bytes of an entry, on the device and ready for its current stream."""
        with self._lock:
            self._reap()
            if entry.storage is None:
                self._make_room(entry.size)
                self._read(entry)
            if entry.state is State.LOADED and entry.transfer is not None:
                self._stall(entry.transfer)
                entry.transfer = None
            entry.used = entry.wanted = True
            self._pump()
            assert entry.storage is not None
            return entry.storage

    def take_statistics(self) -> SwapStatistics:
        """What happened since the last call."""
        with self._lock:
            self._reap()
            self._known = {address: pair for address, pair in self._known.items() if pair[1]() is not None}
            self._early = deque(r for r in self._early if r() is not None)
            taken, self._statistics = self._statistics, SwapStatistics(high_water=self._resident)
            taken.tier_high_water = self._store.slots.high_water
            return taken

    def bury(self, transfer: Pending | None, slot: Slot | None, resident: int) -> None:
        """An entry is gone: its place and its bytes are free once its transfer has ended."""
        self._buried.append((transfer, slot, resident))

    def close(self) -> None:
        """End all transfers and give the store back."""
        self._store.close()

    def _write(self, entry: Entry) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=entry.device).set_(entry.storage)
        entry.slot, entry.transfer = self._store.write(flat)
        entry.state = State.QUEUED
        self._writing.append(weakref.ref(entry))
        self._statistics.bytes_out += entry.size

    def _keep(self, entry: Entry) -> None:
        """Spare an entry that is needed again before its write began; one being written stays as well."""
        assert entry.transfer is not None
        if not entry.transfer.cancel():
            entry.wanted = True
            return
        assert entry.slot is not None
        self._store.free(entry.slot)
        entry.slot = entry.transfer = None
        entry.state = State.LOADED
        self._early.append(weakref.ref(entry))
        self._statistics.bytes_out -= entry.size
        self._statistics.bytes_cancelled += entry.size

    def _read(self, entry: Entry) -> None:
        assert entry.slot is not None
        flat = torch.empty(entry.size, dtype=torch.uint8, device=entry.device)
        entry.transfer = self._store.read(entry.slot, flat)
        entry.storage, entry.state = flat.untyped_storage(), State.LOADED
        self._grow(entry.size)
        self._statistics.bytes_in += entry.size

    def _pump(self) -> None:
        """Begin the next reads that fit."""
        while self._fetching:
            entry = self._fetching[0]()
            if entry is not None and entry.state is State.QUEUED:
                return
            if entry is not None and entry.state is State.STORED:
                if self._resident + entry.size > self._limit:
                    return
                self._read(entry)
                self._early.append(self._fetching[0])
            self._fetching.popleft()

    def _make_room(self, size: int) -> None:
        """Return when ``size`` more bytes fit; the order of the remedies is the class's promise."""
        while self._resident + size > self._limit:
            writing = next((e for e in (r() for r in self._writing) if e and e.state is State.QUEUED), None)
            if writing is not None and writing.transfer is not None:
                self._stall(writing.transfer)
                self._reap()
            elif self._closing and self._closing[0][0] is not None:
                self._stall(self._closing[0][0])
                self._reap()
            elif not self._drop_early():
                raise BudgetExceeded(
                    f"the device may hold {format_bytes(self._limit)} of offloaded activations; "
                    f"{format_bytes(self._resident)} are in use by the running backward and "
                    f"{format_bytes(size)} more are needed: raise cluster.device_memory, lower trainer.microbatch, "
                    "or use more plan.stages"
                )

    def _drop_early(self) -> bool:
        """Give up the entry that is needed last of those brought back or spared, and not used yet."""
        while self._early:
            reference = self._early.pop()
            entry = reference()
            if entry is None or entry.used or entry.state is not State.LOADED:
                continue
            if entry.slot is None:
                self._write(entry)
            else:
                if entry.transfer is not None:
                    self._stall(entry.transfer)
                self._release(entry)
            self._fetching.appendleft(reference)
            return True
        return False

    def _release(self, entry: Entry) -> None:
        entry.leave()
        self._resident -= entry.size

    def _reap(self) -> None:
        """Account for what ended since the last call: writes, and entries that nobody holds any more."""
        while self._buried:
            self._closing.append(self._buried.popleft())
        for _ in range(len(self._closing)):
            transfer, slot, resident = self._closing.popleft()
            if transfer is not None and not transfer.cancel() and not transfer.done():
                self._closing.append((transfer, slot, resident))
                continue
            self._resident -= resident
            if slot is not None:
                self._store.free(slot)
        while self._writing:
            entry = self._writing[0]()
            if entry is not None and entry.state is State.QUEUED:
                assert entry.transfer is not None
                if not entry.transfer.done():
                    return
                if entry.wanted:
                    entry.state, entry.transfer = State.LOADED, None
                    self._early.append(self._writing[0])
                else:
                    self._release(entry)
            self._writing.popleft()

    def _grow(self, size: int) -> None:
        self._resident += size
        self._statistics.high_water = max(self._statistics.high_water, self._resident)

    def _stall(self, transfer: Pending) -> None:
        start = time.perf_counter()
        transfer.wait()
        seconds = time.perf_counter() - start
        self._statistics.stall_seconds += seconds
        self.stall_seconds += seconds
