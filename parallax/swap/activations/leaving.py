"""Records on their way below the device, and what gives up its place there for others."""

from __future__ import annotations

import weakref
from collections import deque

from parallax.errors import SwapError
from parallax.swap.activations.books import Books, Lingering
from parallax.swap.activations.records import Record, State
from parallax.swap.activations.returning import Returning
from parallax.swap.activations.transfers import Transfers
from parallax.swap.statistics import Ledger

_LEAD = 8  # once room is needed, this part of the limit leaves ahead of need, beside the computing


class Leaving:
    """Of one manager, which calls this with its lock held."""

    def __init__(
        self, transfers: Transfers, ledger: Ledger, books: Books, returning: Returning
    ) -> None:
        self._transfers, self._ledger = transfers, ledger
        self._books, self._returning = books, returning
        self.writing: deque[Record] = deque()
        self._lingering = Lingering()
        self.moved = False  # something has, since whoever asks has set it

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, and nothing that was given up is still at work."""
        return not (self.writing or self._lingering)

    def write(self, record: Record) -> None:
        """Begin to write; where that fails, the record stays in its book."""
        self._transfers.write(record)
        self.moved = True
        self._books.take(record)
        self.writing.append(record)
        self._books.leave(record)
        self._ledger.decide_about(record, "moved")
        self._ledger.sample()

    def spare(self, record: Record) -> None:
        """Keep what is needed again before its write began; what is being written stays as well."""
        record.wanted = True
        self._books.stop_leaving(record)
        if self._transfers.take_back(record):
            self._books.stay(record)

    def let_go(self, size: int) -> None:
        """Let the oldest of what was kept leave, until ``size`` more bytes will fit and some beyond, so that the next
        who needs room does not wait for a write from its beginning."""
        missing = self._ledger.resident + size - self._ledger.limit
        while self._books.kept and self._books.leaving < missing + self._ledger.limit // _LEAD:
            try:
                self.write(next(iter(self._books.kept)))
            except SwapError:
                if self._books.leaving < missing:
                    raise
                return  # the tier is full, but the lead is no more than a wish

    def leave_fresh(self, *, silent: bool) -> bool:
        """Let something leave that the running operator has saved. ``silent``: what the operator may yet write into
        without a word; another change counts as one, and autograd refuses it."""
        record = next(
            (record for record in self._books.fresh if silent or record.differentiable), None
        )
        if record is None:
            return False
        self.write(record)
        return True

    def drop_early(self) -> bool:
        """Give up the record that is needed last of those brought back or spared, and not used yet."""
        if not self._books.early:
            return False
        record = next(reversed(self._books.early))
        self._books.take(record)
        self._returning.again(record)
        if record.slot is None:
            self.write(record)
            return True
        if record.transfer is not None and record.transfer.cancel():
            record.transfer = None
        self._transfers.arrive(record)
        self.release(record)
        return True

    def drop_used(self) -> bool:
        """Give up what was used longest ago. Bytes that someone still works on count until they let go."""
        while self._books.used:
            record = next(iter(self._books.used))
            self._books.take(record)
            if record.slot is None:
                self.write(record)
                return True
            if self.release(record):
                return True
        return False

    def release(self, record: Record) -> bool:
        """Let go of the device's copy; whether that made room."""
        self._books.stop_leaving(record)
        assert record.storage is not None
        watch = weakref.ref(record.storage)
        record.leave()
        if record.used and watch() is not None:
            self._lingering.add(watch, record.size)
            return False
        self._ledger.resize(-record.size)
        return True

    def count_left(self) -> None:
        """Account for writes that have ended, and for what was given up and is let go of now."""
        if self._lingering and (gone := self._lingering.gone()):
            self._ledger.resize(-gone)
        while self.writing:
            record = self.writing[0]
            if record.state is State.QUEUED and record.claim() is not None:
                assert record.transfer is not None
                if not record.transfer.done():
                    return
                self._transfers.count(record)
                if record.wanted:
                    self._books.stay(record)
                else:
                    self.release(record)
            self.writing.popleft()
