"""Points of a sweep beside each other: which belong to one series, and how much faster more devices are.

A series is points that do the same work with different numbers of devices, however these share it:

    strong    the same rows per step:                speed-up S(n) = rate(n) / rate(n0),  efficiency S(n) · n0 / n
    weak      the same rows per step and device:     efficiency = rate(n) / rate(n0) · n0 / n

Of a series the point with the fewest devices, n0, is 1; of several such points the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class RankPeak:
    """Bytes on a rank's device at its peak."""

    measured: int
    predicted: int


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """One point. ``swept``: its settings that differ from others'. ``workload``: all its settings that say what work
    a step is; ``model``: those of model and data. ``layout``: its stages and replicas in words. ``per_second``: of
    ``unit``. ``seconds``: how long its whole run took. What is not known, as of a point that has failed, is None."""

    name: str
    number: int = 0
    swept: Mapping[str, str] = field(default_factory=dict)
    status: str
    reason: str = ""
    seconds: float | None = None
    workload: Hashable = ()
    model: Hashable = ()
    unit: str = "rows"
    global_batch: int | None = None
    devices: int | None = None
    layout: str = ""
    step_seconds: float | None = None
    predicted_step_seconds: float | None = None
    per_second: float | None = None
    validation_loss: float | None = None
    peaks: tuple[RankPeak, ...] = ()

    @property
    def timed(self) -> bool:
        """Whether its rate, devices and rows are known, so that it can stand in a series."""
        return bool(self.per_second and self.devices and self.global_batch)

    @property
    def error(self) -> float | None:
        """The prediction's, as a fraction of what was measured."""
        if not self.step_seconds or self.predicted_step_seconds is None:
            return None
        return self.predicted_step_seconds / self.step_seconds - 1

    @property
    def peak(self) -> RankPeak | None:
        return max(self.peaks, key=lambda rank: rank.measured, default=None)


@dataclass(frozen=True)
class Gain:
    """A point against the smallest of its series: as often the rate, and as a share of what its devices could do."""

    speedup: float
    efficiency: float


@dataclass(frozen=True)
class Series:
    """Points of one series by devices, the smallest first. ``common``: what is swept and the same in all of them."""

    common: Mapping[str, str]
    points: tuple[PointResult, ...]

    @property
    def label(self) -> str:
        """What its points have in common, in words; nothing where that is no setting of its own."""
        return " ".join(f"{key}={value}" for key, value in self.common.items())

    def words(self, point: PointResult) -> str:
        """What is one of its points' own, in words."""
        own = {key: value for key, value in point.swept.items() if key not in self.common}
        return " ".join(f"{k.rpartition('.')[2]}={v}" for k, v in own.items()) or point.layout

    @property
    def smallest(self) -> PointResult:
        """The one that the others are compared with."""
        fewest = min(point.devices or 0 for point in self.points)
        return max(
            (point for point in self.points if point.devices == fewest),
            key=lambda point: point.per_second or 0.0,
        )

    @property
    def scales(self) -> bool:
        """Whether it has points of several numbers of devices."""
        return len({point.devices for point in self.points}) > 1

    def gain(self, point: PointResult) -> Gain:
        """Of one of its points."""
        first = self.smallest
        speedup = (point.per_second or 0.0) / (first.per_second or 1.0)
        return Gain(speedup, speedup * (first.devices or 1) / (point.devices or 1))


@dataclass(frozen=True)
class SweepResults:
    """A sweep's points. ``command``: what was typed, empty for a single run."""

    name: str
    command: str
    points: tuple[PointResult, ...]

    @property
    def timed(self) -> list[PointResult]:
        """Those that have measured their speed."""
        return [point for point in self.points if point.timed]

    def strong(self) -> list[Series]:
        """The same work, by more devices."""
        return _series(self.timed, lambda p: (p.workload, p.unit, p.global_batch))

    def weak(self) -> list[Series]:
        """More work, by as many more devices."""

        def share(point: PointResult) -> Fraction:
            return Fraction(point.global_batch or 0, point.devices or 1)

        return _series(self.timed, lambda p: (p.workload, p.unit, share(p)))

    def batches(self) -> list[Series]:
        """The same devices in the same roles, with more rows."""
        full = [point for point in self.timed if point.peak is not None]
        return _series(full, lambda p: (p.workload, p.devices, p.layout))

    def models(self) -> list[Series]:
        """The same model and data, in whatever way it is trained."""
        full = [point for point in self.timed if point.peak is not None]
        return _series(full, lambda p: (p.model, p.unit))


def _series(points: Iterable[PointResult], key: Callable[[PointResult], Hashable]) -> list[Series]:
    """Points of one ``key`` each, in the order of their first."""
    found: dict[Hashable, list[PointResult]] = {}
    for point in points:
        found.setdefault(key(point), []).append(point)
    return [Series(_common(each), tuple(sorted(each, key=_size))) for each in found.values()]


def _size(point: PointResult) -> tuple[int, int, int]:
    return point.devices or 0, point.global_batch or 0, point.number


def _common(points: Sequence[PointResult]) -> dict[str, str]:
    """What is swept and the same in all of ``points``."""
    same = dict(points[0].swept)
    for point in points:
        same = {key: value for key, value in same.items() if point.swept.get(key) == value}
    return same
