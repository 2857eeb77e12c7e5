"""The way of one record's bytes to the store and back: what begins, what is waited for, what is counted of it."""

from __future__ import annotations

import contextlib

from parallax.errors import SwapError
from parallax.swap.activations.checks import Checks
from parallax.swap.activations.records import Record, State, bytes_of, new_bytes
from parallax.swap.statistics import Ledger
from parallax.swap.stores.store import Store


class Transfers:
    """Those of one manager, which calls this with its lock held."""

    def __init__(self, store: Store, ledger: Ledger, checks: Checks) -> None:
        self._store, self._ledger, self._checks = store, ledger, checks

    def write(self, record: Record) -> None:
        assert record.storage is not None
        flat = bytes_of(record.storage, record.device)
        record.slot, record.transfer = self._store.write(flat)
        record.state, record.wanted = State.QUEUED, False

    def take_back(self, record: Record) -> bool:
        """Whether a write was stopped before it began; its place is free then."""
        assert record.slot is not None
        assert record.transfer is not None
        if not record.transfer.cancel():
            return False
        self.free(record)
        record.transfer = None
        self._ledger.cancelled(record.size)
        return True

    def read(self, record: Record) -> None:
        """Begin to read into new memory."""
        assert record.slot is not None
        flat = new_bytes(record.size, record.device)
        self._checks.reading(flat)
        record.transfer = self._store.read(record.slot, flat)
        record.storage, record.state, record.returned = flat.untyped_storage(), State.LOADED, True
        self._ledger.resize(record.size)

    def arrive(self, record: Record) -> None:
        if record.transfer is not None:
            self._ledger.stall(record.transfer, record.batch.micro)
            self.count(record)
            record.transfer = None

    def end(self, record: Record, micro: int) -> None:
        """Wait for the transfer of a record that nobody needs any more; whether it failed does not matter."""
        if record.transfer is not None:
            with contextlib.suppress(SwapError):
                self._ledger.stall(record.transfer, micro)
                self.count(record)
            record.transfer = None

    def ended(self, record: Record) -> bool:
        """Whether no transfer touches the bytes of an unclaimed record any more."""
        if record.transfer is None:
            return True
        if record.transfer.cancel():
            if record.state is State.QUEUED:
                self._ledger.cancelled(record.size)
            return True
        try:
            if not record.transfer.done():
                return False
        except SwapError:
            return True  # nobody needs them: the next write that is needed will say what is wrong
        self.count(record)
        return True

    def count(self, record: Record) -> None:
        """A transfer has ended, or is waited for by the device's stream."""
        assert record.transfer is not None
        out = record.state is State.QUEUED
        self._ledger.count(record.transfer, record.size, record.batch.micro, out=out)

    def free(self, record: Record) -> None:
        """Give the place in the store back, if there is one."""
        if record.slot is not None:
            self._store.free(record.slot)
            record.slot = None
