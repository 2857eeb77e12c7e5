"""Evict saved activations from the device to the store."""

from __future__ import annotations

import weakref
from collections import deque

import torch

from parallax.errors import SwapError
from parallax.swap.activations.accounting import MemoryAccounting
from parallax.swap.activations.prefetcher import Prefetcher
from parallax.swap.activations.queues import RecordQueues
from parallax.swap.activations.records import Record, State
from parallax.swap.activations.transfers import Transfers

_LEAD = 8  # once memory is short, 1/8 of the limit is evicted ahead of need, beside computing


class _HeldCopies:
    """Device copies of evicted storages that code outside the swap manager still references.

    Their memory counts as used until it is freed.
    """

    def __init__(self) -> None:
        self._watched: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []

    def add(self, watch: weakref.ref[torch.UntypedStorage], size: int) -> None:
        """Count ``size`` bytes until the storage that ``watch`` references is freed."""
        self._watched.append((watch, size))

    def __len__(self) -> int:
        return len(self._watched)

    def take_freed_bytes(self) -> int:
        """Return the bytes of the device copies that were freed since the last call, because nothing referenced them
        any more."""
        before = sum(size for _, size in self._watched)
        self._watched = [(watch, size) for watch, size in self._watched if watch() is not None]
        return before - sum(size for _, size in self._watched)


class Evictor:
    """Evicts the records (saved storages) of one swap manager. The manager holds its lock during all calls."""

    def __init__(
        self,
        transfers: Transfers,
        accounting: MemoryAccounting,
        queues: RecordQueues,
        prefetcher: Prefetcher,
    ) -> None:
        self._transfers, self._accounting = transfers, accounting
        self._queues, self._prefetcher = queues, prefetcher
        self.writing: deque[Record] = deque()
        self._held = _HeldCopies()
        self.has_evicted = False  # since the manager last reset it

    @property
    def idle(self) -> bool:
        """Whether no write is running and no code outside the swap manager references the device copy of an evicted
        storage."""
        return not (self.writing or self._held)

    def evict(self, record: Record) -> None:
        """Begin to write the bytes of ``record`` to the store. If the write cannot begin, raise its error; the record
        then stays in its queue."""
        self._transfers.write(record)
        self.has_evicted = True
        self._queues.remove(record)
        self.writing.append(record)
        self._queues.mark_evicting(record)
        self._accounting.count_record(record, "moved")
        self._accounting.sample()

    def keep(self, record: Record) -> None:
        """Keep the device copy of a record that is needed again, and cancel its write if that has not begun."""
        record.wanted = True
        self._queues.unmark_evicting(record)
        if self._transfers.cancel_write(record):
            self._queues.mark_loaded(record)

    def evict_kept(self, size: int) -> None:
        """Begin to evict saved storages that were kept on the device, oldest first, until ``size`` more bytes will fit
        when the writes have ended.

        A further eighth of the limit is evicted ahead of need, so that the next save does not wait for a whole write.
        """
        missing = self._accounting.resident_bytes + size - self._accounting.limit_bytes
        while (
            self._queues.kept
            and self._queues.evicting_bytes < missing + self._accounting.limit_bytes // _LEAD
        ):
            try:
                self.evict(next(iter(self._queues.kept)))
            except SwapError:
                if self._queues.evicting_bytes < missing:
                    raise
                return  # the tier is full; eviction ahead of need is optional

    def evict_fresh(self, *, writable: bool) -> bool:
        """Begin to evict one storage that the running operator has saved; return whether there was one.

        The operator may still write into a tensor that it has saved. If the tensor is differentiable, such a write
        changes its version, and autograd raises an error in the backward. For other tensors the write would be missed,
        so they are evicted only if ``writable``.
        """
        record = next(
            (record for record in self._queues.fresh if writable or record.differentiable), None
        )
        if record is None:
            return False
        self.evict(record)
        return True

    def drop_upcoming(self) -> bool:
        """Free the device copy of the storage that is needed last; return whether there was one.

        Candidates are the storages of running backwards that are on the device and have not been used yet. If the store
        does not have its bytes, they are written first.
        """
        if not self._queues.upcoming:
            return False
        record = next(reversed(self._queues.upcoming))
        self._queues.remove(record)
        self._prefetcher.requeue(record)
        if record.slot is None:
            self.evict(record)
            return True
        if record.transfer is not None and record.transfer.cancel():
            record.transfer = None
        self._transfers.wait_for_read(record)
        self.free_copy(record)
        return True

    def drop_used(self) -> bool:
        """Free device copies of storages that have been used, least recently used first, until memory is freed; return
        whether this succeeded.

        If the store does not have the bytes of a storage, its write begins instead, and the result is True.
        """
        while self._queues.used:
            record = next(iter(self._queues.used))
            self._queues.remove(record)
            if record.slot is None:
                self.evict(record)
                return True
            if self.free_copy(record):
                return True
        return False

    def free_copy(self, record: Record) -> bool:
        """Release the device copy of a record; return whether its memory was freed.

        The memory is not freed while code outside the swap manager references the copy.
        """
        self._queues.unmark_evicting(record)
        assert record.storage is not None
        watch = weakref.ref(record.storage)
        record.offload()
        if record.used and watch() is not None:
            self._held.add(watch, record.size)
            return False
        self._accounting.add_resident(-record.size)
        return True

    def finish_writes(self) -> None:
        """Free the device copies of storages whose writes have ended.

        The bytes of copies that code outside the swap manager has released since the last call are also subtracted from
        the bytes on the device.
        """
        if self._held and (freed := self._held.take_freed_bytes()):
            self._accounting.add_resident(-freed)
        while self.writing:
            record = self.writing[0]
            if record.state is State.QUEUED and record.claim() is not None:
                assert record.transfer is not None
                if not record.transfer.done():
                    return
                self._transfers.count(record)
                if record.wanted:
                    self._queues.mark_loaded(record)
                else:
                    self.free_copy(record)
            self.writing.popleft()
