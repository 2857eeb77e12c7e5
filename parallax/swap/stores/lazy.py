"""A store that costs nothing until something moves, in a process that somebody may interrupt and go on with."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from parallax.common.signals import uninterrupted
from parallax.swap.stores.forks import call_after_fork
from parallax.swap.stores.slots import SlotMap, StoreSlot
from parallax.swap.stores.store import Pending, Store


class LazyStore:
    """A store that is opened by the first write: where nothing moves there is no file, no thread, no pinned memory."""

    def __init__(self, tier: str, open_store: Callable[[], Store]) -> None:
        self.tier, self.slots = tier, SlotMap(0, "the unopened tier")
        self._open: Callable[[], Store] | None = open_store
        self._store: Store | None = None
        self.after_fork()
        call_after_fork(self)

    def after_fork(self) -> None:
        """Another thread may have held the lock."""
        self._lock = threading.Lock()

    @property
    def waste_bytes(self) -> int:
        return self._store.waste_bytes if self._store is not None else 0

    @uninterrupted()
    def write(self, data: Tensor) -> tuple[StoreSlot, Pending]:
        """Open first where that is needed."""
        with self._lock:
            if self._open is not None:
                self._store, self._open = self._open(), None
                self.slots = self._store.slots
        assert self._store is not None
        return self._store.write(data)

    @uninterrupted()
    def read(self, slot: StoreSlot, target: Tensor) -> Pending:
        assert self._store is not None
        return self._store.read(slot, target)

    @uninterrupted()
    def free(self, slot: StoreSlot) -> None:
        assert self._store is not None
        self._store.free(slot)

    @uninterrupted()
    def close(self) -> None:
        with self._lock:
            self._open = None
            if self._store is not None:
                self._store.close()
