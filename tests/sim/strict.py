"""Real stores that check their callers against the contract, whatever the timing.

That a transfer is mostly over before its place is used again hides a wait that is missing, and a disk is mostly faster
than the code that should wait for it. This store checks the waits: a slot may be read only after the caller has waited
for its write, and freed only after the caller has waited for, or stopped, all its transfers. Importing this registers
the tiers ``strict host`` and ``strict disk``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from parallax.errors import SwapError
from parallax.plan.tier import DISK, HOST
from parallax.swap.stores.slots import StoreSlot
from parallax.swap.stores.store import Pending, Store
from parallax.swap.stores.tiers import StoreRequest, open_disk, open_host, register_tier

STRICT_HOST, STRICT_DISK = replace(HOST, name="strict host"), replace(DISK, name="strict disk")


class _Transfer:
    """A transfer, and whether anybody knows that it is over."""

    def __init__(self, inner: Pending, size: int) -> None:
        self._inner, self.size = inner, size
        self.known = False

    def done(self) -> bool:
        try:
            over = self._inner.done()
        except SwapError:
            self.known = True
            raise
        self.known |= over
        return over

    def wait(self) -> None:
        # For a read up only the stream waits: enough where the device writes there next. Where the host does, without
        # having waited itself, the write is reported like any write of the host (:mod:`tests.sim.host_writes`).
        self.known = True
        self._inner.wait()

    def cancel(self) -> bool:
        stopped = self._inner.cancel()
        self.known |= stopped
        return stopped

    def seconds(self) -> float:
        return self._inner.seconds()

    def runs(self) -> bool:
        """Return whether it has ended, without counting as a wait."""
        with contextlib.suppress(SwapError):
            return not self._inner.done()
        return False


class StrictStore:
    """``inner``, and how it is used. ``most_behind_bytes``: the most bytes of host memory whose writes no caller had
    waited for at one time; they are held until somebody does."""

    def __init__(self, inner: Store) -> None:
        self._inner, self.tier, self.slots = inner, inner.tier, inner.slots
        self.waste_bytes = inner.waste_bytes
        self.most_behind_bytes = 0
        self._writes: dict[StoreSlot, _Transfer] = {}
        self._reads: dict[StoreSlot, list[_Transfer]] = {}
        self._behind: list[_Transfer] = []

    def write(self, data: Tensor) -> tuple[StoreSlot, Pending]:
        slot, pending = self._inner.write(data)
        requested = self._writes[slot] = _Transfer(pending, data.nbytes)
        self._reads[slot] = []
        if data.is_cpu:
            self._behind = [*(each for each in self._behind if not each.known), requested]
            held = sum(each.size for each in self._behind)
            self.most_behind_bytes = max(self.most_behind_bytes, held)
        return slot, requested

    def read(self, slot: StoreSlot, target: Tensor) -> Pending:
        if not self._writes[slot].known:
            raise AssertionError(f"{slot} is read without a wait for its write")
        requested = _Transfer(self._inner.read(slot, target), target.nbytes)
        self._reads[slot].append(requested)
        return requested

    def free(self, slot: StoreSlot) -> None:
        if not self._writes[slot].known:
            raise AssertionError(f"{slot} is freed without a wait for its write")
        if not all(read.known for read in self._reads[slot]):
            raise AssertionError(f"{slot} is freed without a wait for a read of it")
        del self._writes[slot], self._reads[slot]
        self._inner.free(slot)

    def close(self) -> None:
        self._inner.close()

    def let_end(self) -> None:
        """Return when no write runs, without counting as a wait."""
        while any(each.runs() for each in [*self._writes.values()]):
            time.sleep(1e-4)


def _strictly(open_store: Callable[[StoreRequest], Store]) -> Callable[[StoreRequest], Store]:
    return lambda request: StrictStore(open_store(request))


register_tier(STRICT_HOST, _strictly(open_host))
register_tier(STRICT_DISK, _strictly(open_disk))
