"""Queues of records (saved storages) by state, and a fast path without queues while every record fits."""

from __future__ import annotations

from collections import OrderedDict, deque

from parallax.swap.activations.accounting import MemoryAccounting
from parallax.swap.activations.records import Batch, Claim, Record, State


# next(iter(dict)) is O(deleted entries), so this is an OrderedDict.
class RecordQueue(OrderedDict[Record, None]):
    """An ordered set of records (saved storages).

    A record stores the ``number`` of its queue instead of a reference, which would create a reference cycle.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class RecordQueues:
    """The record queues of one manager. Each record is in at most one of them.

    ``fresh``           saved by an operator that may still run
    ``kept``            to be evicted when memory is short, oldest first
    ``preferred``       kept by the policy and evicted after ``kept``, oldest first
    ``upcoming``        on the device again and not used yet, in the order of use
    ``used``            on the device again and used, least recently used first
    ``evicting_bytes``  the number of bytes that running writes will free on the device (not a queue)
    """

    def __init__(self) -> None:
        self._all = tuple(RecordQueue(number) for number in range(5))
        self.fresh, self.kept, self.preferred, self.upcoming, self.used = self._all
        self.evicting_bytes = 0

    def append(self, record: Record, queue: RecordQueue) -> None:
        """Move ``record`` to the end of ``queue``."""
        if record.queue is not None:
            self._all[record.queue].pop(record, None)
        record.queue = queue.number
        queue[record] = None

    def remove(self, record: Record) -> None:
        if record.queue is not None:
            self._all[record.queue].pop(record, None)
            record.queue = None

    def mark_evicting(self, record: Record) -> None:
        """Add the bytes of ``record`` to the bytes that running writes will free."""
        self.evicting_bytes += 0 if record.evicting else record.size
        record.evicting = True

    def unmark_evicting(self, record: Record) -> None:
        """Undo :meth:`mark_evicting`, because the record stays on the device or its bytes have been freed."""
        if record.evicting:
            record.evicting = False
            self.evicting_bytes -= record.size

    def mark_loaded(self, record: Record) -> None:
        """Append a record that is on the device to ``used`` if it has been used, otherwise to ``upcoming``."""
        record.state, record.transfer = State.LOADED, None
        self.append(record, self.used if record.used else self.upcoming)

    def forget(self, record: Record) -> None:
        """Remove a record that no autograd graph needs any more from its queue and from the evicting bytes."""
        if record.evicting:
            self.unmark_evicting(record)
        if record.queue is not None:
            self._all[record.queue].pop(record, None)
            record.queue = None


class FastPath:
    """Bookkeeping for the time in which every record fits: it counts bytes only and maintains no queues.

    Queues cost more time than all other work for a saved tensor, and a step that evicts nothing never reads them. So
    the queues are filled only when memory is short for the first time. Their order is then the same as if each record
    had been queued when it was saved.

    The manager owns ``records``, which maps the serial number (clock) of each living record to the record, and
    ``known``, which maps the address of a storage to its record. The manager holds its lock during all calls.
    """

    def __init__(
        self,
        accounting: MemoryAccounting,
        records: dict[int, Record],
        known: dict[int, Record],
        unclaimed: deque[Claim],
    ) -> None:
        self._accounting, self._records, self._known = accounting, records, known
        self._unclaimed = unclaimed
        self.active = False

    def fits(self, size: int) -> bool:
        """Whether the fast path is active and ``size`` more bytes fit into the limit."""
        return (
            self.active and self._accounting.resident_bytes + size <= self._accounting.limit_bytes
        )

    def save_again(self, record: Record, before: int | None, operation: int | None) -> None:
        """Note that the operator ``operation`` has saved the storage of ``record`` again.

        Storages of a running operator must not be evicted. So if ``before``, the operator before ``operation``, was the
        latest to save this storage, the record is now attributed to ``operation``. Otherwise nothing changes.
        """
        if _saved_by(record, before):
            record.operation = operation
            self._records[record.clock] = self._records.pop(
                record.clock
            )  # moved to the end of the order

    def fill_queues(self, queues: RecordQueues, operation: int | None) -> None:
        """Put every record that an autograd graph needs into a queue, and end the fast path.

        The records that ``operation`` saved go to the queue ``fresh``, because this operator may still run. In a
        running backward, the records saved last are expected to be used first.
        """
        alive = [record for record in self._records.values() if record.claim() is not None]
        for record in alive:
            queues.append(record, queues.fresh if _saved_by(record, operation) else queues.kept)
        for record in sorted(alive, key=lambda record: record.clock):
            record.batch.claims[record.ordinal] = record.claim
        for record in sorted(alive, key=lambda record: (record.used, -record.clock)):
            if record.batch.prefetching:
                queues.mark_loaded(record)
        self.active = False

    def collect_ended(self, batches: dict[int, Batch]) -> None:
        """Free the records that no autograd graph needs any more.

        When no record is left, also clear ``batches``, the micro-batches that may still save records.
        """
        if not self._unclaimed:
            return
        freed = 0
        try:
            while self._unclaimed:
                record = self._records.pop(self._unclaimed.popleft().clock)
                freed += record.size
                self._accounting.count_record(record, record.uncounted_reason)
                if self._known.get(record.address) is record:
                    del self._known[record.address]
                record.free()
        finally:
            self._accounting.add_resident(-freed)
        if not self._records:
            batches.clear()


def _saved_by(record: Record, operation: int | None) -> bool:
    """Whether ``operation``, which may still run, was the latest operator to save the storage of ``record``."""
    return operation is not None and record.operation == operation
