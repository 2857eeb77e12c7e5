"""Micro-batches on their way back to the device, in the order of need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from parallax.errors import SwapError
from parallax.machine.host import relieve_memory
from parallax.swap.activations.books import Books
from parallax.swap.activations.policy import NoPreferences, Preferences
from parallax.swap.activations.records import Batch, Record, State
from parallax.swap.activations.transfers import Transfers
from parallax.swap.statistics import Ledger


class Returning:
    """Begins to read what is needed next, as early as policy and limit allow."""

    def __init__(
        self,
        transfers: Transfers,
        ledger: Ledger,
        preferences: Preferences | NoPreferences,
        books: Books,
    ) -> None:
        self._transfers, self._ledger = transfers, ledger
        self._preferences, self._books = preferences, books
        self._batches: list[Batch] = []

    @property
    def waits(self) -> bool:
        """Whether there is anything to begin."""
        return bool(self._batches)

    def add(self, batch: Batch) -> None:
        """What waits of ``batch`` comes after what comes already."""
        if batch.waiting:
            # What comes back fills the room.
            relieve_memory(coming=self._ledger.limit - self._ledger.resident)
            self._batches.append(batch)

    def again(self, record: Record) -> None:
        """``record`` was given up, and is needed before whatever else waits."""
        record.batch.waiting.appendleft(record)
        if record.batch not in self._batches:
            self._batches.insert(0, record.batch)

    def forget(self, batch: Batch) -> None:
        """Nobody needs ``batch`` any more."""
        batch.waiting.clear()
        if batch in self._batches:
            self._batches.remove(batch)

    def clear(self) -> None:
        """Nothing comes back any more."""
        for batch in self._batches:
            batch.waiting.clear()
        self._batches.clear()

    def pump(self, let_go: Callable[[int], None]) -> None:
        """Begin the next reads that fit. ``let_go`` asks what was kept to leave for so many bytes."""
        for batch in self._batches[:]:
            fits = self._bring_back(batch, let_go)
            if not batch.waiting:
                self._batches.remove(batch)
            if not fits:
                return

    def _bring_back(self, batch: Batch, let_go: Callable[[int], None]) -> bool:
        """Begin to read what is due of one micro-batch; whether there was room for all of that."""
        while batch.waiting:
            record = batch.waiting[0]
            alive = record.claim() is not None
            if alive and record.state is State.QUEUED:
                return False
            if alive and record.state is State.STORED:
                if not self._preferences.due(record):
                    return True
                needed = self._preferences.group_bytes(record) if self._books.early else record.size
                if self._ledger.resident + needed > self._ledger.limit:
                    with contextlib.suppress(SwapError):  # a full tier: what was kept stays
                        let_go(needed)
                    return False
                self._transfers.read(record)
                self._books.put(record, self._books.early)
            batch.waiting.popleft()
        return True
