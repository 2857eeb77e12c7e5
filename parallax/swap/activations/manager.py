"""The swap manager: saved activations leave the device early or when room is needed, and come back just in time.

Records are of storages, not tensors: views and aliases share one, so nothing is copied twice and every stride
comes back as it was. A record lives exactly as long as autograd keeps the :class:`Entry` that claims it, so a
second unpack finds it, and a graph that never sees its backward leaves nothing behind.

::

                 pack                      written                fetch, unpack
    (computed) ───────▶ QUEUED on device ───────────▶ STORED below ──────────────▶ LOADED ──▶ (freed with
        │                  ▲ └──── fetch before the write began: cancelled ──────────▲ ▲       the graph)
        └─────▶ KEPT ──────┘ room is needed                                            │
                  └──────────────────────── fetch, unpack ─────────────────────────────┘

``limit_bytes`` bounds what records hold on the device. Where the next one would not fit, the manager first
drops what is already written, then lets the oldest of what was kept leave, then waits for writes (back-pressure),
then gives up what stayed by preference, copies fetched too early, and those that were used and may be used again
(a shared storage, a retained graph); and raises :class:`~parallax.errors.BudgetExceeded` with the arithmetic when
none of these is left. :class:`~parallax.swap.activations.policy.Policy` says what is kept, what stays by preference
and how early it comes back.

Whoever knows the next micro-batch calls ``fetch``; otherwise the first use of what a micro-batch saved does.

Where nothing has to leave before room is needed, no books are kept until it is: what certainly fits is counted, and
no more. Where room was needed they are kept until a step has shown that it is needed no longer.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from parallax.errors import SwapError
from parallax.machine.host import relieve_memory
from parallax.swap.activations.books import Books, Lingering
from parallax.swap.activations.checks import Checks, NoChecks, SumChecks
from parallax.swap.activations.home import Home
from parallax.swap.activations.policy import NoPreferences, Policy
from parallax.swap.activations.records import Batch, Claim, Entry, Record, State, tier_closed
from parallax.swap.activations.returning import Returning
from parallax.swap.activations.transfers import Transfers
from parallax.swap.statistics import Ledger, SwapStatistics
from parallax.swap.stores.forks import mind_forks
from parallax.swap.stores.store import Store

_DEFAULT_POLICY = Policy()
_FITTED = "kept while there was room"
_LEAD = 8  # once room is needed, this part of the limit leaves ahead of need, beside the computing


class SwapManager:
    """Moves the storages of micro-batches between the device and one store."""

    def __init__(
        self,
        store: Store,
        *,
        limit_bytes: int,
        policy: Policy = _DEFAULT_POLICY,
        verify: bool = False,
    ) -> None:
        self._store, self._ledger = store, Ledger(store, limit_bytes)
        self._policy, self._preferences = policy, policy.preferences()
        self._checks: Checks = SumChecks() if verify else NoChecks()
        self.home = Home()
        self._transfers = Transfers(store, self._ledger, self._checks)
        self.forked()
        mind_forks(self)
        self.closed = False  # nothing is taken any more
        self._clock = self._uses = 0
        self._writing: deque[Record] = deque()
        self._unclaimed: deque[Claim] = deque()  # filled without the lock, by claims that end
        self._ending: deque[Record] = deque()  # unclaimed, but a transfer still runs
        self._lingering, self._books = Lingering(), Books()
        self._operation: int | None = None  # that operator's place among those of its thread
        self._open: dict[int, Batch] = {}  # micro-batch → what it saves now
        self._returning = Returning(self._transfers, self._ledger, self._preferences, self._books)
        self._records: dict[int, Record] = {}  # those that are alive, by their clocks
        self._known: dict[int, Record] = {}
        indifferent = isinstance(self._preferences, NoPreferences)
        self._can_do_without_books = indifferent and not policy.eager and not verify
        self._booked = not self._can_do_without_books
        self._moved = False  # something has, since no graph was alive

    def forked(self) -> None:
        """Another thread may have held the lock."""
        self._lock = threading.RLock()

    @property
    def stall_seconds(self) -> float:
        """How long anyone has waited for transfers since the manager was made."""
        return self._ledger.stall_seconds

    @property
    def saved(self) -> int:
        """How many storages of living graphs it knows."""
        return len(self._records)

    @property
    def empty(self) -> bool:
        """Whether no graph is alive that holds a claim."""
        return len(self._records) <= len(self._unclaimed)

    @property
    def resident_bytes(self) -> int:
        """Bytes that records hold on the device now."""
        with self._lock:
            with contextlib.suppress(SwapError):  # for add, fetch and load to report
                self._reap()
            return self._ledger.resident

    @property
    def resident_at_most(self) -> int:
        """The same and what has ended since the manager looked last, for who asks often."""
        return self._ledger.resident

    @property
    def stored_bytes(self) -> int:
        """Bytes in use in the store now."""
        with self._lock:
            with contextlib.suppress(SwapError):
                self._reap()
            return self._store.slots.used_bytes

    def add(self, tensor: Tensor, micro: int, operation: int | None = None) -> Entry:
        """The entry of a saved tensor's storage; a new one begins to leave, or is kept, as the policy says."""
        return self.save(tensor, micro, operation)[0]

    def save(
        self, tensor: Tensor, micro: int, operation: int | None
    ) -> tuple[Entry, Tensor | None]:
        """The same, and the record's alias if it is one of ``tensor``, whose storage nobody had saved.
        ``operation``: which operator saves it. Some write into what they have saved already (the noise of ``rrelu``,
        running statistics), so while there is room nothing leaves before another operator saves, or :meth:`settle`."""
        with self._lock:
            if self.closed:
                raise tier_closed()
            self._reap()
            storage = tensor.untyped_storage()
            known = self._known.get(storage.data_ptr())
            if known is not None and known.origin() is not storage:
                known = None
            if operation is None or operation != self._operation:
                if self._booked or known is not None:
                    self._turn_to(known, operation)
                self._operation = operation
            if known is not None:
                claim = known.claim()
                if claim is not None and known.version == tensor._version:
                    self._ledger.decide("shares memory with another", 0)
                    return claim, None
            size = storage.nbytes()
            if self._booked or self._ledger.resident + size > self._ledger.limit:
                self._book()
                self._make_room(size, micro)
            self._clock += 1
            batch = self._open.get(micro)
            if batch is None:
                batch = self._open[micro] = Batch(micro)
            record = Record(tensor, storage, batch, self._clock, operation)
            entry = Entry(record, self._unclaimed)
            self._ledger.resize(size)
            self._records[record.clock] = record
            if self._booked:
                self._checks.saved(record)
                batch.enter(record)
                if operation is None:
                    self._place(record)
                else:
                    self._books.put(record, self._books.fresh)
            else:
                batch.saved += 1
                record.undecided = _FITTED
            self._known[record.address] = record
            relieve_memory(size)
            return entry, record.alias

    def _turn_to(self, known: Record | None, operation: int | None) -> None:
        """Another operator saves, so what the one before it saved may leave; ``known`` not, if both saved it."""
        if not self._booked:
            if known is not None and self._runs(known):
                known.operation = operation
                self._records[known.clock] = self._records.pop(known.clock)  # the last again
        elif known is not None and known in self._books.fresh:
            self._books.take(known)
            self._settle()
            self._books.put(known, self._books.fresh)
        else:
            self._settle()

    def _runs(self, record: Record) -> bool:
        """Whether the operator that saved it last may still run."""
        return record.operation is not None and record.operation == self._operation

    def _book(self) -> None:
        """Room may be needed: the books say of each record where it stands, as if they always had (but for the order in
        which several micro-batches began to come back)."""
        if self._booked:
            return
        alive = [record for record in self._records.values() if record.claim() is not None]
        for record in alive:
            runs = self._runs(record)
            self._books.put(record, self._books.fresh if runs else self._books.kept)
        for record in sorted(alive, key=lambda record: record.clock):
            record.batch.claims[record.ordinal] = record.claim
        for record in sorted(alive, key=lambda record: (record.used, -record.clock)):
            if record.batch.begun:
                self._books.stay(record)
        self._booked = True

    def settle(self) -> None:
        """No operator runs that saved anything: what it saved may leave."""
        with self._lock:
            if self._books.fresh and not self.closed:
                self._settle()
            self._operation = None

    def fetch(self, micro: int) -> None:
        """Begin to bring back what a micro-batch saved, last saved first, as far as the limit allows."""
        with self._lock:
            if self.closed:
                raise tier_closed()
            self._reap()
            self._settle()
            if micro in self._open:
                self._begin(self._open[micro])
            self._returning.pump(self._let_go)

    def load(self, entry: Entry) -> torch.UntypedStorage:
        """The bytes of an entry, on the device and ready for its current stream."""
        with self._lock:
            record = entry.record
            self._reap()
            if self._booked:
                if record.state is not State.LOADED:
                    self._bring(record)
                if record.state is State.LOADED:
                    if record.transfer is not None:
                        self._transfers.arrive(record)
                    self._books.put(record, self._books.used)
                self._checks.returned(record)
            self._use(record)
            storage, size = record.storage, record.size
            assert storage is not None
            if self._booked and self._returning.waits and not self.closed:
                self._returning.pump(self._let_go)
            relieve_memory(size)
            origin = record.origin()
            if origin is storage or origin is None or origin.nbytes() != size:
                return storage
            return origin

    def _bring(self, record: Record) -> None:
        """What has left, or may leave, is needed now."""
        if record.state is State.KEPT:
            record.state = State.LOADED
        elif record.state is State.QUEUED:
            self._spare(record)
        else:
            if self.closed:
                raise tier_closed()
            self._make_room(record.size, record.batch.micro)
            self._transfers.read(record)

    def decide(self, reason: str, size: int) -> None:
        """Count a saved tensor that is not given to :meth:`add`, and why."""
        with self._lock:
            self._ledger.decide(reason, size)
        relieve_memory(size)

    def take_statistics(self) -> SwapStatistics:
        """What happened since the last call."""
        with self._lock:
            self._reap()
            return self._ledger.take()

    def close(self) -> None:
        """End all transfers and give the store back. What is on the device stays usable, the rest is lost."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._store.close()
            for record in [*self._writing, *self._ending]:
                if record.state is State.QUEUED:
                    record.state, record.transfer = State.LOADED, None
            self._writing.clear()
            self._returning.clear()

    def _settle(self) -> None:
        """Decide about what was fresh. Where a write fails, the rest stays fresh for the next who asks."""
        fresh = self._books.fresh
        while fresh:
            self._place(next(iter(fresh)))

    def _place(self, record: Record) -> None:
        """Decide about a new record."""
        if self._preferences.stays(record):
            self._books.put(record, self._books.preferred)
            record.undecided = "kept by policy"
        elif not self._policy.eager:
            self._books.put(record, self._books.kept)
            record.undecided = _FITTED
        else:
            self._write(record)

    def _write(self, record: Record) -> None:
        """Begin to write; where that fails, the record stays in its book."""
        self._transfers.write(record)
        self._moved = True
        self._books.take(record)
        self._writing.append(record)
        self._books.leave(record)
        self._decide(record, "moved")
        self._ledger.sample()

    def _spare(self, record: Record) -> None:
        """Keep what is needed again before its write began; what is being written stays as well."""
        record.wanted = True
        self._books.stop_leaving(record)
        if self._transfers.take_back(record):
            self._books.stay(record)

    def _decide(self, record: Record, reason: str) -> None:
        """Count a record of which it is known now what became of it, and was not before."""
        if record.undecided:
            self._ledger.decide(reason, record.size)
            record.undecided = ""

    def _use(self, record: Record) -> None:
        """A record is handed out: for the first time, perhaps, and as the first of its micro-batch."""
        if not record.used:
            if record.undecided:
                self._decide(record, record.undecided)
            self._preferences.used(record, self._clock)
        self._uses += 1
        record.used = self._uses
        if not record.batch.begun and not self.closed:
            self._begin(record.batch)

    def _begin(self, batch: Batch) -> None:
        """From now on a micro-batch comes back; what it saves later is another."""
        batch.begun = True
        if self._open.get(batch.micro) is batch:
            del self._open[batch.micro]
        for record in batch.last_first():
            if record.state is State.KEPT:
                self._books.stay(record)
            elif record.state is State.QUEUED:
                self._spare(record)
            elif record.state is State.STORED:
                batch.waiting.append(record)
        self._returning.add(batch)

    def _make_room(self, size: int, micro: int) -> None:
        """Return when ``size`` more bytes fit; the order of the remedies is the module's promise."""
        while self._ledger.resident + size > self._ledger.limit:
            if self._ending:
                self._transfers.end(self._ending[0], micro)
                self._reap()
                continue
            self._let_go(size)
            writing = next((r for r in self._writing if r.state is State.QUEUED), None)
            if writing is not None and writing.transfer is not None:
                self._ledger.stall(writing.transfer, micro)
            elif self._books.preferred:
                self._write(next(iter(self._books.preferred)))
            elif not (
                self._leave_fresh(silent=False)
                or self._drop_early()
                or self._drop_used()
                or self._leave_fresh(silent=True)
            ):
                raise self._ledger.exceeded(size)
            self._reap()

    def _let_go(self, size: int) -> None:
        """Let the oldest of what was kept leave, until ``size`` more bytes will fit and some beyond, so that the next
        who needs room does not wait for a write from its beginning."""
        missing = self._ledger.resident + size - self._ledger.limit
        while self._books.kept and self._books.leaving < missing + self._ledger.limit // _LEAD:
            try:
                self._write(next(iter(self._books.kept)))
            except SwapError:
                if self._books.leaving < missing:
                    raise
                return  # the tier is full, but the lead is no more than a wish

    def _leave_fresh(self, *, silent: bool) -> bool:
        """Let something leave that the running operator has saved. ``silent``: what the operator may yet write into
        without a word; another change counts as one, and autograd refuses it."""
        record = next(
            (record for record in self._books.fresh if silent or record.differentiable), None
        )
        if record is None:
            return False
        self._write(record)
        return True

    def _drop_early(self) -> bool:
        """Give up the record that is needed last of those brought back or spared, and not used yet."""
        if not self._books.early:
            return False
        record = next(reversed(self._books.early))
        self._books.take(record)
        self._returning.again(record)
        if record.slot is None:
            self._write(record)
            return True
        if record.transfer is not None and record.transfer.cancel():
            record.transfer = None
        self._transfers.arrive(record)
        self._release(record)
        return True

    def _drop_used(self) -> bool:
        """Give up what was used longest ago. Bytes that someone still works on count until they let go."""
        while self._books.used:
            record = next(iter(self._books.used))
            self._books.take(record)
            if record.slot is None:
                self._write(record)
                return True
            if self._release(record):
                return True
        return False

    def _release(self, record: Record) -> bool:
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

    def _reap(self) -> None:
        """Account for what ended since the last call: claims, transfers, uses."""
        if not self._booked:
            if self._unclaimed:
                self._count_ended()
            return
        ended = bool(self._unclaimed)
        while self._unclaimed:
            record = self._records.pop(self._unclaimed.popleft().clock)
            if record.undecided:
                self._decide(record, record.undecided)
            self._forget(record)
            if record.transfer is None and not self._ending:
                self._end(record)
            else:
                self._ending.append(record)
        if self._ending:
            for _ in range(len(self._ending)):
                record = self._ending.popleft()
                if self._transfers.ended(record):
                    self._end(record)
                else:
                    self._ending.append(record)
        if self._lingering and (gone := self._lingering.gone()):
            self._ledger.resize(-gone)
        while self._writing:
            record = self._writing[0]
            if record.state is State.QUEUED and record.claim() is not None:
                assert record.transfer is not None
                if not record.transfer.done():
                    break
                self._transfers.count(record)
                if record.wanted:
                    self._books.stay(record)
                else:
                    self._release(record)
            self._writing.popleft()
        self._ledger.measure()
        if ended and not (self._records or self._writing or self._ending or self._lingering):
            self._booked = self._moved or not self._can_do_without_books
            self._moved = False

    def _count_ended(self) -> None:
        """Of what there are no books."""
        gone = 0
        try:
            while self._unclaimed:
                record = self._records.pop(self._unclaimed.popleft().clock)
                gone += record.size
                if record.undecided:
                    self._decide(record, record.undecided)
                if self._known.get(record.address) is record:
                    del self._known[record.address]
                record.end()
        finally:
            self._ledger.resize(-gone)
        if not self._records:
            self._open.clear()

    def _end(self, record: Record) -> None:
        """No transfer touches its bytes any more, and nobody claims them."""
        if record.slot is not None:
            self._transfers.free(record)
        if record.storage is not None:
            record.end()
            self._ledger.resize(-record.size)

    def _forget(self, record: Record) -> None:
        self._books.drop(record)
        batch = record.batch
        batch.claims.pop(record.ordinal, None)
        if not batch.claims:
            self._preferences.learn(batch)
            if self._open.get(batch.micro) is batch:
                del self._open[batch.micro]
            self._returning.forget(batch)
        if self._known.get(record.address) is record:
            del self._known[record.address]
