"""Saved storages while all of them fit: they are counted, and nothing else is decided about them.

A training step in which nothing has to move asks no book of the manager's, and to keep them takes longer than all else
that is done for a saved tensor. So they are written when room is needed for the first time, and say then what they
would say if they always had been kept.
"""

from __future__ import annotations

from collections import deque

from parallax.swap.activations.books import Books
from parallax.swap.activations.records import Batch, Claim, Record
from parallax.swap.statistics import Ledger


class Plenty:
    """Of one manager, whose ``records``, those that are alive by their clocks, and ``known``, by their addresses, stand
    in no book ``now``; it calls this with its lock held."""

    def __init__(
        self,
        ledger: Ledger,
        records: dict[int, Record],
        known: dict[int, Record],
        unclaimed: deque[Claim],
    ) -> None:
        self._ledger, self._records, self._known = ledger, records, known
        self._unclaimed = unclaimed
        self.now = False

    def fits(self, size: int) -> bool:
        """Whether ``size`` more bytes need no room to be made."""
        return self.now and self._ledger.resident + size <= self._ledger.limit

    def save_again(self, record: Record, before: int | None, operation: int | None) -> None:
        """``operation`` saves what ``before`` has saved: it is as fresh as what else is saved now."""
        if _saved_by(record, before):
            record.operation = operation
            self._records[record.clock] = self._records.pop(record.clock)  # the last again

    def book(self, books: Books, operation: int | None) -> None:
        """Write the books, in the order in which they would have been; of several micro-batches that began to come
        back, those saved last are needed first. ``operation`` may still run."""
        alive = [record for record in self._records.values() if record.claim() is not None]
        for record in alive:
            books.put(record, books.fresh if _saved_by(record, operation) else books.kept)
        for record in sorted(alive, key=lambda record: record.clock):
            record.batch.claims[record.ordinal] = record.claim
        for record in sorted(alive, key=lambda record: (record.used, -record.clock)):
            if record.batch.begun:
                books.stay(record)
        self.now = False

    def count_ended(self, batches: dict[int, Batch]) -> None:
        """Forget what nobody claims any more; of the open ``batches`` all, once nothing of them is alive."""
        if not self._unclaimed:
            return
        gone = 0
        try:
            while self._unclaimed:
                record = self._records.pop(self._unclaimed.popleft().clock)
                gone += record.size
                self._ledger.decide_about(record, record.undecided)
                if self._known.get(record.address) is record:
                    del self._known[record.address]
                record.end()
        finally:
            self._ledger.resize(-gone)
        if not self._records:
            batches.clear()


def _saved_by(record: Record, operation: int | None) -> bool:
    """Whether that operator, which may still run, was the last to save it."""
    return operation is not None and record.operation == operation
