"""Statistics of a swap manager: bytes, seconds, and the reasons why tensors were evicted or kept."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

_MOST_SAMPLES = 2000
_HELD = ("high_water", "tier_high_water", "limit_bytes", "pinned_waste_bytes")


@dataclass
class MicroStatistics:
    """Transfers of one micro-batch, and the seconds that training waited for them or for memory."""

    bytes_out: int = 0
    bytes_in: int = 0
    stall_seconds: float = 0.0


@dataclass
class SwapStatistics:
    """Statistics in bytes and seconds since the last
    :meth:`~parallax.swap.activations.manager.SwapManager.take_statistics`.

    ``bytes_out``           bytes of finished transfers to the store
    ``bytes_in``            bytes of finished transfers from the store
    ``bytes_cancelled``     bytes of cancelled writes
    ``stall_seconds``       time that the training thread waited for transfers, including their time in the queue
    ``high_water``          peak of the bytes on the device
    ``tier_high_water``     peak of the bytes in the store
    ``transfer_seconds``    sum of the durations of all transfers
    ``limit_bytes``         the manager's limit of bytes on the device
    ``pinned_waste_bytes``  memory that the store allocated beyond the requested bytes
    ``micro``               statistics of each micro-batch
    ``samples``             (seconds of ``time.perf_counter``, bytes on the device, bytes in the store) at every change,
                            thinned to at most 2,000
    ``decisions``           for each reason for evicting or keeping tensors: (number of tensors, bytes)
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
        """Fraction of the transfer time during which training did not wait; 1 if nothing was transferred."""
        if self.transfer_seconds <= 0:
            return 1.0
        return min(1.0, max(0.0, 1 - self.stall_seconds / self.transfer_seconds))

    def columns(self) -> dict[str, float]:
        """Return the statistics of this rank as named numbers for the report of a step."""
        return {
            "stall_seconds": self.stall_seconds,
            "transfer_seconds": self.transfer_seconds,
            "offloaded_bytes": self.bytes_out,
            "fetched_bytes": self.bytes_in,
            "swap_limit_bytes": self.limit_bytes,
        }

    def of_micro(self, micro: int) -> MicroStatistics:
        """Return the statistics of one micro-batch."""
        found = self.micro.get(micro)
        if found is None:
            found = self.micro[micro] = MicroStatistics()
        return found

    def add(self, new: SwapStatistics) -> None:
        """Merge ``new``, the statistics of a later period. Counts and seconds are added; of peaks and limits the larger
        is kept."""
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
            sums = self.of_micro(micro)
            for name in [each.name for each in fields(part)]:
                setattr(sums, name, getattr(sums, name) + getattr(part, name))
        for sample in new.samples:
            self.sample(*sample)

    def sample_is_due(self) -> bool:
        """Return whether to record a sample now. The caller calls this at each change of the held bytes.

        Every ``_every``-th change is recorded. The interval doubles when there are too many samples.
        """
        self._skipped += 1
        return self._skipped >= self._every

    def sample(self, seconds: float, device_bytes: int, tier_bytes: int) -> None:
        if self.sample_is_due():
            self.append_sample(seconds, device_bytes, tier_bytes)

    def append_sample(self, seconds: float, device_bytes: int, tier_bytes: int) -> None:
        """Append a sample: time, bytes on the device, bytes in the store."""
        self._skipped = 0
        self.samples.append((seconds, device_bytes, tier_bytes))
        if len(self.samples) >= _MOST_SAMPLES:
            del self.samples[1::2]  # the last one, too
            self._skipped = self._every
            self._every *= 2
