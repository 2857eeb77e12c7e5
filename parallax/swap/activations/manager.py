"""The swap manager: offloads saved activations when they are saved or when memory is short, and prefetches them.

A record stands for one storage, not one tensor. Views and aliases share a storage, so no byte is copied twice and every
stride is restored. The saved tensor in autograd's graph holds an :class:`Entry`, which keeps the record alive. So a
second backward finds the record, and a graph that is freed without a backward frees its records.

::

                 pack                      written                fetch, unpack
    (computed) ───────▶ QUEUED on device ───────────▶ STORED (offloaded) ────────▶ LOADED ──▶ (freed with
        │                  ▲ └──── fetch before the write began: cancelled ──────────▲ ▲       the graph)
        └─────▶ KEPT ──────┘ memory is short                                           │
                  └──────────────────────── fetch, unpack ─────────────────────────────┘

``limit_bytes`` bounds the bytes of records on the device. If a new record does not fit, the manager takes the first of
these steps that frees memory:

1. Free device copies whose writes have ended.
2. Evict kept records, oldest first.
3. Wait for writes (back-pressure).
4. Evict records that the policy prefers to keep.
5. Drop records that were prefetched and not used yet.
6. Drop records that were used and may be used again (a shared storage, a retained graph).

If no step frees memory, the manager raises :class:`~parallax.errors.BudgetExceeded` with the arithmetic.
:class:`~parallax.swap.activations.policy.Policy` decides which records are kept and how early they are prefetched.

A caller that knows which micro-batch runs its backward next calls ``fetch`` to prefetch the micro-batch's records.
Otherwise the first use of one of these records prefetches the remaining ones.

If the policy evicts only when memory is short, :class:`~parallax.swap.activations.queues.FastPath` skips the record
queues until then.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

import torch
from torch import Tensor

from parallax.errors import SwapError
from parallax.machine.host import relieve_memory
from parallax.swap.activations.accounting import MemoryAccounting
from parallax.swap.activations.evictor import Evictor
from parallax.swap.activations.policy import Policy
from parallax.swap.activations.prefetcher import Prefetcher
from parallax.swap.activations.queues import FastPath, RecordQueues
from parallax.swap.activations.records import Batch, Claim, Entry, Record, State, tier_closed
from parallax.swap.activations.transfers import SwapStream, Transfers, check_sum, store_sum
from parallax.swap.statistics import SwapStatistics
from parallax.swap.stores.forks import call_after_fork
from parallax.swap.stores.store import Store

_DEFAULT_POLICY = Policy()
_FITS = "kept within the limit"


class SwapManager:
    """Moves the storages of saved activations between the device and one store."""

    def __init__(
        self,
        store: Store,
        *,
        limit_bytes: int,
        policy: Policy = _DEFAULT_POLICY,
        verify: bool = False,
    ) -> None:
        self._store, self._accounting = store, MemoryAccounting(store, limit_bytes)
        self._policy, self._preferences, self._verify = policy, policy.preferences(), verify
        self.swap_stream = SwapStream()
        self._transfers = Transfers(store, self._accounting)
        self.after_fork()
        call_after_fork(self)
        self.closed = False
        self._clock = self._uses = 0
        self._unclaimed: deque[Claim] = (
            deque()
        )  # claims append themselves as they end, without the lock
        self._draining: deque[Record] = deque()  # unclaimed, with a transfer under way
        self._queues = RecordQueues()
        self._operation: int | None = (
            None  # sequence number of the operator that saves now, in its thread
        )
        self._open: dict[int, Batch] = {}  # micro-batches before their backward
        self._prefetcher = Prefetcher(
            self._transfers, self._accounting, self._preferences, self._queues
        )
        self._evictor = Evictor(self._transfers, self._accounting, self._queues, self._prefetcher)
        self._records: dict[int, Record] = {}  # living records by clock
        self._known: dict[int, Record] = {}  # the same records by address
        self._may_use_fast_path = self._preferences is None and not policy.eager and not verify
        self._fast_path = FastPath(self._accounting, self._records, self._known, self._unclaimed)
        self._fast_path.active = self._may_use_fast_path

    def after_fork(self) -> None:
        """Replace the lock in a forked child, because another thread of the parent may have held it."""
        self._lock = threading.RLock()

    @property
    def stall_seconds(self) -> float:
        """Seconds that threads have waited for transfers since the manager was made."""
        return self._accounting.stall_seconds

    @property
    def limit_bytes(self) -> int:
        """The most bytes of saved storages on the device.

        If the limit is lowered below the bytes on the device, storages are evicted at the next save.
        """
        return self._accounting.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, size: int) -> None:
        self._accounting.limit_bytes = size

    @property
    def record_count(self) -> int:
        """Number of storages that autograd graphs have saved and not freed yet."""
        return len(self._records)

    @property
    def empty(self) -> bool:
        """Whether no autograd graph needs any saved storage."""
        return len(self._records) <= len(self._unclaimed)

    @property
    def resident_bytes(self) -> int:
        """Bytes of saved storages that are on the device now."""
        with self._lock:
            with contextlib.suppress(SwapError):  # save, fetch and load report it
                self._collect_ended()
            return self._accounting.resident_bytes

    def all_written(self) -> bool:
        """Whether no saved storage is on the device. Raises :class:`SwapError` if a write failed."""
        with self._lock:
            self._collect_ended()
            return self._accounting.resident_bytes == 0

    @property
    def resident_bytes_at_most(self) -> int:
        """Upper bound of :attr:`resident_bytes` that is cheaper to read.

        It may still count records whose write has ended.
        """
        return self._accounting.resident_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the store that are in use now."""
        with self._lock:
            with contextlib.suppress(SwapError):
                self._collect_ended()
            return self._store.slots.used_bytes

    def save(
        self, tensor: Tensor, micro: int, operation: int | None = None
    ) -> tuple[Entry, Tensor | None]:
        """Make the storage of a saved tensor recoverable, and return an entry. The storage is recoverable while the
        entry lives.

        If the storage has no record yet, or was changed in place since its record was created, a record is created,
        which is evicted or kept as the policy decides. The second result is then the record's detached copy of
        ``tensor``, which shares its memory. Otherwise it is None.

        ``micro`` is the micro-batch. ``operation`` identifies the operator that saves. Some operators write into
        tensors that they have saved (the noise of ``rrelu``, running statistics). So as long as memory suffices, an
        operator's records are not evicted before the next operator saves or :meth:`settle` is called.
        """
        with self._lock:
            if self.closed:
                raise tier_closed()
            self._collect_ended()
            storage = tensor.untyped_storage()
            known = self._known.get(storage.data_ptr())
            if known is not None and known.origin() is not storage:
                known = None
            if operation is None or operation != self._operation:
                if not self._fast_path.active:
                    self._begin_operation(known)
                elif known is not None:
                    self._fast_path.save_again(known, self._operation, operation)
                self._operation = operation
            if known is not None:
                claim = known.claim()
                if claim is not None and known.version == tensor._version:
                    self._accounting.count_decision("shares memory with another", 0)
                    return claim, None
            size = storage.nbytes()
            if not self._fast_path.fits(size):
                if self._fast_path.active:
                    self._fast_path.fill_queues(self._queues, self._operation)
                self._free_bytes_for(size, micro)
            self._clock += 1
            batch = self._open.get(micro)
            if batch is None:
                batch = self._open[micro] = Batch(micro)
            record = Record(tensor, storage, batch, self._clock, operation)
            entry = Entry(record, self._unclaimed)
            self._accounting.add_resident(size)
            self._records[record.clock] = record
            if self._fast_path.active:
                batch.saved += 1
                record.uncounted_reason = _FITS
            else:
                self._queue_new(record)
            self._known[record.address] = record
            relieve_memory(size)
            return entry, record.alias

    def _queue_new(self, record: Record) -> None:
        if self._verify:
            store_sum(record)
        record.batch.append(record)
        if record.operation is None:
            self._decide(record)
        else:
            self._queues.append(record, self._queues.fresh)

    def _begin_operation(self, known: Record | None) -> None:
        """Make the records that the previous operator saved evictable, because a new operator saves now.

        ``known`` is the record of the storage that the new operator saves, or None. If the previous operator saved this
        storage too, its record is not made evictable.
        """
        if known is not None and known in self._queues.fresh:
            self._queues.remove(known)
            self._settle()
            self._queues.append(known, self._queues.fresh)
        else:
            self._settle()

    def settle(self) -> None:
        """Allow the eviction of all saved storages.

        The caller guarantees that no operator that saved one of these storages is still running.
        """
        with self._lock:
            if self._queues.fresh and not self.closed:
                self._settle()
            self._operation = None

    def fetch(self, micro: int) -> None:
        """Begin to prefetch the saved storages of micro-batch ``micro``, in reverse order of saving, as far as the
        limit allows."""
        with self._lock:
            if self.closed:
                raise tier_closed()
            self._collect_ended()
            self._settle()
            if micro in self._open:
                self._begin_backward(self._open[micro])
            self._prefetcher.start_reads(self._evictor.evict_kept)

    def load(self, entry: Entry) -> torch.UntypedStorage:
        """Return the storage of ``entry``, on the device and ready for the device's current stream."""
        with self._lock:
            record = entry.record
            self._collect_ended()
            if not self._fast_path.active:
                if record.state is not State.LOADED:
                    self._reload(record)
                if record.state is State.LOADED:
                    if record.transfer is not None:
                        self._transfers.wait_for_read(record)
                    self._queues.append(record, self._queues.used)
                check_sum(record)
            self._mark_used(record)
            storage, size = record.storage, record.size
            assert storage is not None
            if self._prefetcher.has_reads and not self.closed:
                self._prefetcher.start_reads(self._evictor.evict_kept)
            relieve_memory(size)
            origin = record.origin()
            if origin is storage or origin is None or origin.nbytes() != size:
                return storage
            return origin

    def _reload(self, record: Record) -> None:
        """Read a record back to the device if it is offloaded. If it is still on the device, make sure that it stays
        there.
        """
        if record.state is State.KEPT:
            record.state = State.LOADED
        elif record.state is State.QUEUED:
            self._evictor.keep(record)
        else:
            if self.closed:
                raise tier_closed()
            self._free_bytes_for(record.size, record.batch.micro)
            self._transfers.read(record)

    def count_kept(self, reason: str, size: int) -> None:
        """Count a saved tensor of ``size`` bytes that is not passed to :meth:`save`, under ``reason``."""
        with self._lock:
            self._accounting.count_decision(reason, size)
        relieve_memory(size)

    def take_statistics(self) -> SwapStatistics:
        """Return the statistics since the last call."""
        with self._lock:
            self._collect_ended()
            return self._accounting.take_statistics()

    def close(self) -> None:
        """End all transfers and close the store. Saved storages on the device stay usable; offloaded ones are lost."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._store.close()
            for record in [*self._evictor.writing, *self._draining]:
                if record.state is State.QUEUED:
                    record.state, record.transfer = State.LOADED, None
            self._evictor.writing.clear()
            self._prefetcher.clear()

    def _settle(self) -> None:
        """Decide for each record of the operator that has ended: keep it on the device, or begin to evict it.

        If a write raises an error, the remaining records are handled by the next call.
        """
        fresh = self._queues.fresh
        while fresh:
            self._decide(next(iter(fresh)))

    def _decide(self, record: Record) -> None:
        """Keep a new record or begin to evict it."""
        if self._preferences is not None and self._preferences.keeps(record):
            self._queues.append(record, self._queues.preferred)
            record.uncounted_reason = "kept by policy"
        elif not self._policy.eager:
            self._queues.append(record, self._queues.kept)
            record.uncounted_reason = _FITS
        else:
            self._evictor.evict(record)

    def _mark_used(self, record: Record) -> None:
        """Note a use of ``record``.

        The first use in a micro-batch begins to prefetch the micro-batch's other records.
        """
        if not record.used:
            self._accounting.count_record(record, record.uncounted_reason)
            if self._preferences is not None:
                self._preferences.note_use(record, self._clock)
        self._uses += 1
        record.used = self._uses
        if not record.batch.prefetching and not self.closed:
            self._begin_backward(record.batch)

    def _begin_backward(self, batch: Batch) -> None:
        """Begin to prefetch the records of a micro-batch.

        Records that are saved under the same micro-batch number from now on belong to a new :class:`Batch`.
        """
        batch.prefetching = True
        if self._open.get(batch.micro) is batch:
            del self._open[batch.micro]
        for record in batch.records_last_first():
            if record.state is State.KEPT:
                self._queues.mark_loaded(record)
            elif record.state is State.QUEUED:
                self._evictor.keep(record)
            elif record.state is State.STORED:
                batch.waiting.append(record)
        self._prefetcher.add(batch)

    def _free_bytes_for(self, size: int, micro: int) -> None:
        """Free memory until ``size`` more bytes fit within the limit, by the steps that the module docstring lists.
        Waits are counted for micro-batch ``micro``."""
        while self._accounting.resident_bytes + size > self._accounting.limit_bytes:
            if self._draining:
                self._transfers.wait_ignoring_errors(self._draining[0], micro)
                self._collect_ended()
                continue
            self._evictor.evict_kept(size)
            writing = next((r for r in self._evictor.writing if r.state is State.QUEUED), None)
            if writing is not None and writing.transfer is not None:
                self._accounting.wait_for(writing.transfer, micro)
            elif self._queues.preferred:
                self._evictor.evict(next(iter(self._queues.preferred)))
            elif not (
                self._evictor.evict_fresh(writable=False)
                or self._evictor.drop_upcoming()
                or self._evictor.drop_used()
                or self._evictor.evict_fresh(writable=True)
            ):
                raise self._accounting.budget_exceeded(size)
            self._collect_ended()

    def _collect_ended(self) -> None:
        """Free the records that no autograd graph needs any more, and count the transfers that have ended since the
        last call."""
        if self._fast_path.active:
            self._fast_path.collect_ended(self._open)
            return
        ended = bool(self._unclaimed)
        while self._unclaimed:
            record = self._records.pop(self._unclaimed.popleft().clock)
            self._accounting.count_record(record, record.uncounted_reason)
            self._forget(record)
            if record.transfer is None and not self._draining:
                self._release(record)
            else:
                self._draining.append(record)
        if self._draining:
            for _ in range(len(self._draining)):
                record = self._draining.popleft()
                if self._transfers.is_finished(record):
                    self._release(record)
                else:
                    self._draining.append(record)
        self._evictor.finish_writes()
        self._accounting.time_finished()
        if ended and self._evictor.idle and not (self._records or self._draining):
            self._fast_path.active = self._may_use_fast_path and not self._evictor.has_evicted
            self._evictor.has_evicted = False

    def _release(self, record: Record) -> None:
        """Free the bytes of a record that no graph needs and no transfer uses."""
        if record.slot is not None:
            self._transfers.free_slot(record)
        if record.storage is not None:
            record.free()
            self._accounting.add_resident(-record.size)

    def _forget(self, record: Record) -> None:
        self._queues.forget(record)
        batch = record.batch
        batch.claims.pop(record.ordinal, None)
        if not batch.claims:
            if self._preferences is not None:
                self._preferences.learn(batch)
            if self._open.get(batch.micro) is batch:
                del self._open[batch.micro]
            self._prefetcher.remove(batch)
        if self._known.get(record.address) is record:
            del self._known[record.address]
