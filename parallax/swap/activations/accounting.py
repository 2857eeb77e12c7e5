"""Count the bytes that a swap manager holds, and collect statistics of its transfers."""

from __future__ import annotations

import time
from collections import deque

from parallax.common.units import format_bytes
from parallax.errors import BudgetExceeded
from parallax.swap.activations.records import Record
from parallax.swap.statistics import SwapStatistics
from parallax.swap.stores.store import Pending, Store


class MemoryAccounting:
    """The bytes that a swap manager holds on the device and in ``store``, and the statistics of its transfers."""

    def __init__(self, store: Store, limit_bytes: int) -> None:
        self._store, self.limit_bytes = store, limit_bytes
        self.resident_bytes = 0
        self.stall_seconds = 0.0
        self._timed: deque[Pending] = deque()  # counted, with seconds still unknown
        self._now = SwapStatistics()

    def add_resident(self, size: int) -> None:
        self.resident_bytes += size
        now = self._now
        if self.resident_bytes > now.high_water:
            now.high_water = self.resident_bytes
        if now.sample_is_due():
            now.append_sample(
                time.perf_counter(), self.resident_bytes, self._store.slots.used_bytes
            )

    def sample(self) -> None:
        """Record a sample of the bytes on the device and in the store, if :meth:`SwapStatistics.sample_is_due` says
        so."""
        if self._now.sample_is_due():
            self._now.append_sample(
                time.perf_counter(), self.resident_bytes, self._store.slots.used_bytes
            )

    def count_transfer(self, transfer: Pending, size: int, micro: int, *, out: bool) -> None:
        """Add a transfer of ``size`` bytes to the statistics. The transfer has ended, or the device's stream waits for
        it.

        ``micro`` is the micro-batch in whose statistics the transfer is counted. ``out`` is True for a transfer from
        the device to the store.
        """
        self._timed.append(transfer)
        whole, part = self._now, self._now.of_micro(micro)
        if out:
            whole.bytes_out += size
            part.bytes_out += size
        else:
            whole.bytes_in += size
            part.bytes_in += size

    def count_cancelled(self, size: int) -> None:
        self._now.bytes_cancelled += size

    def count_decision(self, reason: str, size: int) -> None:
        """Count a saved tensor of ``size`` bytes under ``reason``, the reason why it was evicted or kept."""
        decisions = self._now.decisions
        tensors, total = decisions.get(reason, (0, 0))
        decisions[reason] = tensors + 1, total + size

    def count_record(self, record: Record, reason: str) -> None:
        """Count the saved storage of ``record`` under ``reason``, the reason why it was evicted or kept, unless it has
        been counted before."""
        if record.uncounted_reason:
            self.count_decision(reason, record.size)
            record.uncounted_reason = ""

    def wait_for(self, transfer: Pending, micro: int) -> None:
        """Wait for ``transfer`` and add the waiting time to the statistics of micro-batch ``micro``."""
        start = time.perf_counter()
        try:
            transfer.wait()
        finally:
            seconds = time.perf_counter() - start
            self._now.stall_seconds += seconds
            self._now.of_micro(micro).stall_seconds += seconds
            self.stall_seconds += seconds

    def time_finished(self) -> None:
        """Add to the statistics the durations of counted transfers that have ended on the device since the
        last call."""
        while self._timed and self._timed[0].done():
            self._now.transfer_seconds += self._timed.popleft().seconds()

    def budget_exceeded(self, size: int) -> BudgetExceeded:
        """Return the error that ``size`` more bytes do not fit and that nothing can be evicted."""
        return BudgetExceeded(
            f"the device may hold {format_bytes(self.limit_bytes)} of offloaded activations; "
            f"{format_bytes(self.resident_bytes)} are in use by the running backward and {format_bytes(size)} more are "
            "needed: raise cluster.device_memory, lower trainer.microbatch, or use more plan.stages",
            needed_bytes=size,
        )

    def take_statistics(self) -> SwapStatistics:
        """Return the statistics since the last call."""
        taken, self._now = self._now, SwapStatistics(high_water=self.resident_bytes)
        taken.tier_high_water = self._store.slots.take_high_water()
        taken.limit_bytes, taken.pinned_waste_bytes = self.limit_bytes, self._store.waste_bytes
        return taken
