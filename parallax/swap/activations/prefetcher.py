"""Prefetch offloaded records (saved storages) to the device, in the order of use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from parallax.errors import SwapError
from parallax.machine.host import relieve_memory
from parallax.swap.activations.accounting import MemoryAccounting
from parallax.swap.activations.policy import Preferences
from parallax.swap.activations.queues import RecordQueues
from parallax.swap.activations.records import Batch, Record, State
from parallax.swap.activations.transfers import Transfers


class Prefetcher:
    """Begins reads of offloaded records as early as the policy and the limit allow."""

    def __init__(
        self,
        transfers: Transfers,
        accounting: MemoryAccounting,
        preferences: Preferences | None,
        queues: RecordQueues,
    ) -> None:
        self._transfers, self._accounting = transfers, accounting
        self._preferences, self._queues = preferences, queues
        self._batches: list[Batch] = []

    @property
    def has_reads(self) -> bool:
        """Whether any records are queued for prefetching."""
        return bool(self._batches)

    def add(self, batch: Batch) -> None:
        """Queue the offloaded records of ``batch`` behind all queued batches."""
        if batch.waiting:
            # Prefetched records will use all memory up to the limit.
            relieve_memory(coming=self._accounting.limit_bytes - self._accounting.resident_bytes)
            self._batches.append(batch)

    def requeue(self, record: Record) -> None:
        """Queue a record that was dropped from the device. It comes before all other records of its batch."""
        record.batch.waiting.appendleft(record)
        if record.batch not in self._batches:
            self._batches.insert(0, record.batch)

    def remove(self, batch: Batch) -> None:
        """Remove ``batch`` from the queue, because no autograd graph needs its records any more."""
        batch.waiting.clear()
        if batch in self._batches:
            self._batches.remove(batch)

    def clear(self) -> None:
        """Remove all records from the queue."""
        for batch in self._batches:
            batch.waiting.clear()
        self._batches.clear()

    def start_reads(self, evict_kept: Callable[[int], None]) -> None:
        """Begin to read the queued storages that are needed next, as many as the limit and the policy allow.

        If a read does not fit, ``evict_kept(size)`` is called. It evicts storages that were kept on the device, so that
        ``size`` bytes will be free later.
        """
        for batch in self._batches[:]:
            fits = self._start_reads_of(batch, evict_kept)
            if not batch.waiting:
                self._batches.remove(batch)
            if not fits:
                return

    def _start_reads_of(self, batch: Batch, evict_kept: Callable[[int], None]) -> bool:
        """Begin the reads of one micro-batch that the policy allows now; return False if one of them does not fit or
        cannot begin yet."""
        while batch.waiting:
            record = batch.waiting[0]
            alive = record.claim() is not None
            if alive and record.state is State.QUEUED:
                return False
            if alive and record.state is State.STORED:
                needed = record.size
                if self._preferences is not None:
                    if not self._preferences.is_due(record):
                        return True
                    if self._queues.upcoming:
                        needed = self._preferences.group_bytes(record)
                if self._accounting.resident_bytes + needed > self._accounting.limit_bytes:
                    with contextlib.suppress(SwapError):  # the tier is full, so kept records stay
                        evict_kept(needed)
                    return False
                self._transfers.read(record)
                self._queues.append(record, self._queues.upcoming)
            batch.waiting.popleft()
        return True
