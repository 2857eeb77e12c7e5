"""What a swap manager did: bytes, seconds, and why tensors left or stayed."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, fields
from typing import Protocol

from parallax.common.units import format_bytes
from parallax.errors import BudgetExceeded
from parallax.swap.stores.store import Pending, Store

_MOST_SAMPLES = 2000
_HELD = ("high_water", "tier_high_water", "limit_bytes", "pinned_waste_bytes")


@dataclass
class MicroStatistics:
    """One micro-batch: transfers of what it saved, and how long it waited for them or for room."""

    bytes_out: int = 0
    bytes_in: int = 0
    stall_seconds: float = 0.0


@dataclass
class SwapStatistics:
    """What happened since the last :meth:`~parallax.swap.activations.manager.SwapManager.take_statistics`; bytes and
    seconds.

    ``bytes_out`` and ``bytes_in`` count transfers that ended, ``bytes_cancelled`` writes that were spared.
    ``transfer_seconds`` is the sum of what each transfer took, ``stall_seconds`` the part of it (and of waiting in
    its queue) during which the training thread could not go on. ``limit_bytes`` is the manager's budget,
    ``pinned_waste_bytes`` what the tier allocated beyond what was asked. ``samples`` are (seconds of
    ``time.perf_counter``, bytes on the device, bytes in the tier) at every change, thinned to at most 2,000.
    ``decisions`` counts saved tensors: reason → (tensors, bytes).
    """

    bytes_out: int = 0
    bytes_in: int = 0
    bytes_cancelled: int = 0
    stall_seconds: float = 0.0
    high_water: int = 0
    tier_high_water: int = 0
    transfer_seconds: float = 0.0
    limit_bytes: int = 0
    pinned_waste_bytes: int = 0
    micro: dict[int, MicroStatistics] = field(default_factory=dict)
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    decisions: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._every, self._skipped = 1, 0

    @property
    def overlap(self) -> float:
        """The share of the transfers' time that nobody waited for; 1 where nothing was transferred."""
        if self.transfer_seconds <= 0:
            return 1.0
        return min(1.0, max(0.0, 1 - self.stall_seconds / self.transfer_seconds))

    def columns(self) -> dict[str, float]:
        """The numbers of this rank that a step's report is made of."""
        return {
            "stall_seconds": self.stall_seconds,
            "transfer_seconds": self.transfer_seconds,
            "offloaded_bytes": self.bytes_out,
            "fetched_bytes": self.bytes_in,
            "swap_limit_bytes": self.limit_bytes,
        }

    def of(self, micro: int) -> MicroStatistics:
        """The part of one micro-batch."""
        found = self.micro.get(micro)
        if found is None:
            found = self.micro[micro] = MicroStatistics()
        return found

    def add(self, new: SwapStatistics) -> None:
        """Of what came after: sums of what adds up, the most of what is held."""
        for name in [each.name for each in fields(new)]:
            value = getattr(new, name)
            if name in _HELD:
                setattr(self, name, max(getattr(self, name), value))
            elif isinstance(value, int | float):
                setattr(self, name, getattr(self, name) + value)
        for reason, (tensors, size) in new.decisions.items():
            before = self.decisions.get(reason, (0, 0))
            self.decisions[reason] = (before[0] + tensors, before[1] + size)
        for micro, part in new.micro.items():
            sums = self.of(micro)
            for name in [each.name for each in fields(part)]:
                setattr(sums, name, getattr(sums, name) + getattr(part, name))
        for sample in new.samples:
            self.sample(*sample)

    def wants_sample(self) -> bool:
        """Whether a change is to be kept: one out of ``_every``, which doubles whenever the samples are too many."""
        self._skipped += 1
        return self._skipped >= self._every

    def sample(self, seconds: float, device_bytes: int, tier_bytes: int) -> None:
        if self.wants_sample():
            self.keep(seconds, device_bytes, tier_bytes)

    def keep(self, seconds: float, device_bytes: int, tier_bytes: int) -> None:
        """A change that is wanted."""
        self._skipped = 0
        self.samples.append((seconds, device_bytes, tier_bytes))
        if len(self.samples) >= _MOST_SAMPLES:
            del self.samples[1::2]  # the last one, too
            self._skipped = self._every
            self._every *= 2


class Undecided(Protocol):
    """What the ledger is told of a record: its bytes, and why it stays, until that is counted."""

    size: int
    undecided: str


class Ledger:
    """The running account of a manager over ``store``: bytes on the device, and what the statistics will say."""

    def __init__(self, store: Store, limit_bytes: int) -> None:
        self._store, self.limit = store, limit_bytes
        self.resident = 0
        self.stall_seconds = 0.0
        self._timed: deque[Pending] = deque()  # counted; how long they took is not known yet
        self._now = SwapStatistics()

    def resize(self, size: int) -> None:
        """So many bytes more on the device."""
        self.resident += size
        now = self._now
        if self.resident > now.high_water:
            now.high_water = self.resident
        if now.wants_sample():
            now.keep(time.perf_counter(), self.resident, self._store.slots.used_bytes)

    def sample(self) -> None:
        """Something changed below the device."""
        if self._now.wants_sample():
            self._now.keep(time.perf_counter(), self.resident, self._store.slots.used_bytes)

    def count(self, transfer: Pending, size: int, micro: int, *, out: bool) -> None:
        """A transfer has ended, or the device's stream waits for it."""
        self._timed.append(transfer)
        whole, part = self._now, self._now.of(micro)
        if out:
            whole.bytes_out += size
            part.bytes_out += size
        else:
            whole.bytes_in += size
            part.bytes_in += size

    def cancelled(self, size: int) -> None:
        self._now.bytes_cancelled += size

    def decide(self, reason: str, size: int) -> None:
        """A saved tensor left or stayed."""
        decisions = self._now.decisions
        tensors, total = decisions.get(reason, (0, 0))
        decisions[reason] = tensors + 1, total + size

    def decide_about(self, record: Undecided, reason: str) -> None:
        """The same of a record of which it is known now what became of it, and was not before."""
        if record.undecided:
            self.decide(reason, record.size)
            record.undecided = ""

    def stall(self, transfer: Pending, micro: int) -> None:
        """Wait, and count how long."""
        start = time.perf_counter()
        try:
            transfer.wait()
        finally:
            seconds = time.perf_counter() - start
            self._now.stall_seconds += seconds
            self._now.of(micro).stall_seconds += seconds
            self.stall_seconds += seconds

    def measure(self) -> None:
        """Count the time of transfers that have ended on the device, too."""
        while self._timed and self._timed[0].done():
            self._now.transfer_seconds += self._timed.popleft().seconds()

    def exceeded(self, size: int) -> BudgetExceeded:
        """What is to be raised where ``size`` bytes are needed and nothing more can leave."""
        return BudgetExceeded(
            f"the device may hold {format_bytes(self.limit)} of offloaded activations; "
            f"{format_bytes(self.resident)} are in use by the running backward and {format_bytes(size)} more are "
            "needed: raise cluster.device_memory, lower trainer.microbatch, or use more plan.stages",
            needed_bytes=size,
        )

    def take(self) -> SwapStatistics:
        """What happened since the last call."""
        taken, self._now = self._now, SwapStatistics(high_water=self.resident)
        taken.tier_high_water = self._store.slots.take_high_water()
        taken.limit_bytes, taken.pinned_waste_bytes = self.limit, self._store.waste_bytes
        return taken
