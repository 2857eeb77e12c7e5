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

Where nothing has to leave before room is needed, no books are kept until it is
(:class:`~parallax.swap.activations.plenty.Plenty`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

import torch
from torch import Tensor

from parallax.errors import SwapError
from parallax.machine.host import relieve_memory
from parallax.swap.activations.books import Books
from parallax.swap.activations.checks import Checks, NoChecks, SumChecks
from parallax.swap.activations.home import Home
from parallax.swap.activations.leaving import Leaving
from parallax.swap.activations.plenty import Plenty
from parallax.swap.activations.policy import NoPreferences, Policy
from parallax.swap.activations.records import Batch, Claim, Entry, Record, State, tier_closed
from parallax.swap.activations.returning import Returning
from parallax.swap.activations.transfers import Transfers
from parallax.swap.statistics import Ledger, SwapStatistics
from parallax.swap.stores.forks import mind_forks
from parallax.swap.stores.store import Store

_DEFAULT_POLICY = Policy()
_FITTED = "kept while there was room"


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
        self._unclaimed: deque[Claim] = deque()  # filled without the lock, by claims that end
        self._ending: deque[Record] = deque()  # unclaimed, but a transfer still runs
        self._books = Books()
        self._operation: int | None = None  # that operator's place among those of its thread
        self._open: dict[int, Batch] = {}  # micro-batch → what it saves now
        self._returning = Returning(self._transfers, self._ledger, self._preferences, self._books)
        self._leaving = Leaving(self._transfers, self._ledger, self._books, self._returning)
        self._records: dict[int, Record] = {}  # those that are alive, by their clocks
        self._known: dict[int, Record] = {}
        indifferent = isinstance(self._preferences, NoPreferences)
        self._can_do_without_books = indifferent and not policy.eager and not verify
        self._plenty = Plenty(self._ledger, self._records, self._known, self._unclaimed)
        self._plenty.now = self._can_do_without_books

    def forked(self) -> None:
        """Another thread may have held the lock."""
        self._lock = threading.RLock()

    @property
    def stall_seconds(self) -> float:
        """How long anyone has waited for transfers since the manager was made."""
        return self._ledger.stall_seconds

    @property
    def limit_bytes(self) -> int:
        """What records may hold on the device. Where they hold more after a change, they leave when room is needed."""
        return self._ledger.limit

    @limit_bytes.setter
    def limit_bytes(self, size: int) -> None:
        self._ledger.limit = size

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
                if not self._plenty.now:
                    self._turn_to(known)
                elif known is not None:
                    self._plenty.save_again(known, self._operation, operation)
                self._operation = operation
            if known is not None:
                claim = known.claim()
                if claim is not None and known.version == tensor._version:
                    self._ledger.decide("shares memory with another", 0)
                    return claim, None
            size = storage.nbytes()
            if not self._plenty.fits(size):
                if self._plenty.now:
                    self._plenty.book(self._books, self._operation)
                self._make_room(size, micro)
            self._clock += 1
            batch = self._open.get(micro)
            if batch is None:
                batch = self._open[micro] = Batch(micro)
            record = Record(tensor, storage, batch, self._clock, operation)
            entry = Entry(record, self._unclaimed)
            self._ledger.resize(size)
            self._records[record.clock] = record
            if self._plenty.now:
                batch.saved += 1
                record.undecided = _FITTED
            else:
                self._enter(record)
            self._known[record.address] = record
            relieve_memory(size)
            return entry, record.alias

    def _enter(self, record: Record) -> None:
        """A new record is in the books from now on."""
        self._checks.saved(record)
        record.batch.enter(record)
        if record.operation is None:
            self._place(record)
        else:
            self._books.put(record, self._books.fresh)

    def _turn_to(self, known: Record | None) -> None:
        """Another operator saves, so what the one before it saved may leave; ``known`` not, if both saved it."""
        if known is not None and known in self._books.fresh:
            self._books.take(known)
            self._settle()
            self._books.put(known, self._books.fresh)
        else:
            self._settle()

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
            self._returning.pump(self._leaving.let_go)

    def load(self, entry: Entry) -> torch.UntypedStorage:
        """The bytes of an entry, on the device and ready for its current stream."""
        with self._lock:
            record = entry.record
            self._reap()
            if not self._plenty.now:
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
            if self._returning.waits and not self.closed:
                self._returning.pump(self._leaving.let_go)
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
            self._leaving.spare(record)
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
            for record in [*self._leaving.writing, *self._ending]:
                if record.state is State.QUEUED:
                    record.state, record.transfer = State.LOADED, None
            self._leaving.writing.clear()
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
            self._leaving.write(record)

    def _use(self, record: Record) -> None:
        """A record is handed out: for the first time, perhaps, and as the first of its micro-batch."""
        if not record.used:
            self._ledger.decide_about(record, record.undecided)
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
                self._leaving.spare(record)
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
            self._leaving.let_go(size)
            writing = next((r for r in self._leaving.writing if r.state is State.QUEUED), None)
            if writing is not None and writing.transfer is not None:
                self._ledger.stall(writing.transfer, micro)
            elif self._books.preferred:
                self._leaving.write(next(iter(self._books.preferred)))
            elif not (
                self._leaving.leave_fresh(silent=False)
                or self._leaving.drop_early()
                or self._leaving.drop_used()
                or self._leaving.leave_fresh(silent=True)
            ):
                raise self._ledger.exceeded(size)
            self._reap()

    def _reap(self) -> None:
        """Account for what ended since the last call: claims, transfers, uses."""
        if self._plenty.now:
            self._plenty.count_ended(self._open)
            return
        ended = bool(self._unclaimed)
        while self._unclaimed:
            record = self._records.pop(self._unclaimed.popleft().clock)
            self._ledger.decide_about(record, record.undecided)
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
        self._leaving.count_left()
        self._ledger.measure()
        if ended and self._leaving.idle and not (self._records or self._ending):
            self._plenty.now = self._can_do_without_books and not self._leaving.moved
            self._leaving.moved = False

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
