"""Points of a sweep: series of comparable points, and their speed-up with more devices.

A series has points that do the same work with different numbers of devices, however these share it:

::

    strong    the same rows per step:                speed-up S(n) = rate(n) / rate(n0),  efficiency S(n) · n0 / n
    weak      the same rows per step and device:     efficiency = rate(n) / rate(n0) · n0 / n

The point of a series with the fewest devices, n0, has speed-up 1; of several such points the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class RankPeak:
    """The peak bytes on a rank's device."""

    measured: int
    predicted: int


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """The result of one point. ``swept``: its settings that differ between points. ``workload``: all settings that
    define the work of a step; ``model``: those of model and data. ``layout``: its stages and replicas as text.
    ``per_second``: of ``unit``. ``seconds``: of its whole run. Unknown values, as of failed points, are None."""

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
        """Whether rate, devices and rows are known, so that the point can be part of a series."""
        return bool(self.per_second and self.devices and self.global_batch)

    @property
    def error(self) -> float | None:
        """Return the error of the prediction as a fraction of the measured seconds."""
        if not self.step_seconds or self.predicted_step_seconds is None:
            return None
        return self.predicted_step_seconds / self.step_seconds - 1

    @property
    def peak(self) -> RankPeak | None:
        return max(self.peaks, key=lambda rank: rank.measured, default=None)


@dataclass(frozen=True)
class Gain:
    """The speed-up of a point over the smallest of its series, and its efficiency."""

    speedup: float
    efficiency: float


@dataclass(frozen=True)
class Series:
    """Points of one series by number of devices. ``common``: swept settings that are equal in all of them."""

    common: Mapping[str, str]
    points: tuple[PointResult, ...]

    @property
    def label(self) -> str:
        """Return the common settings of the points as text; empty without swept settings."""
        return " ".join(f"{key}={value}" for key, value in self.common.items())

    def point_label(self, point: PointResult) -> str:
        """Return the settings of one of its points that others lack, as text."""
        own = {key: value for key, value in point.swept.items() if key not in self.common}
        return " ".join(f"{k.rpartition('.')[2]}={v}" for k, v in own.items()) or point.layout

    @property
    def smallest(self) -> PointResult:
        """Return the point that the others are compared with."""
        fewest = min(point.devices or 0 for point in self.points)
        return max(
            (point for point in self.points if point.devices == fewest),
            key=lambda point: point.per_second or 0.0,
        )

    @property
    def scales(self) -> bool:
        """Whether there are points of several numbers of devices."""
        return len({point.devices for point in self.points}) > 1

    def gain(self, point: PointResult) -> Gain:
        """Return the gain of one of its points."""
        first = self.smallest
        speedup = (point.per_second or 0.0) / (first.per_second or 1.0)
        return Gain(speedup, speedup * (first.devices or 1) / (point.devices or 1))


@dataclass(frozen=True)
class SweepResults:
    """The points of a sweep. ``command``: the command of the sweep; empty for a single run."""

    name: str
    command: str
    points: tuple[PointResult, ...]

    @property
    def timed(self) -> list[PointResult]:
        """Return the points with a measured speed."""
        return [point for point in self.points if point.timed]

    def strong(self) -> list[Series]:
        """Return series of the same work on more devices."""
        return _series(self.timed, lambda p: (p.workload, p.unit, p.global_batch))

    def weak(self) -> list[Series]:
        """Return series with work in proportion to the devices."""

        def share(point: PointResult) -> Fraction:
            return Fraction(point.global_batch or 0, point.devices or 1)

        return _series(self.timed, lambda p: (p.workload, p.unit, share(p)))

    def batches(self) -> list[Series]:
        """Return series of the same layout with more rows."""
        full = [point for point in self.timed if point.peak is not None]
        return _series(full, lambda p: (p.workload, p.devices, p.layout))

    def models(self) -> list[Series]:
        """Return series of the same model and data, trained in any way."""
        full = [point for point in self.timed if point.peak is not None]
        return _series(full, lambda p: (p.model, p.unit))


def _series(points: Iterable[PointResult], key: Callable[[PointResult], Hashable]) -> list[Series]:
    """Return the points by ``key``, in the order of their first points."""
    found: dict[Hashable, list[PointResult]] = {}
    for point in points:
        found.setdefault(key(point), []).append(point)
    return [Series(_common(each), tuple(sorted(each, key=_size))) for each in found.values()]


def _size(point: PointResult) -> tuple[int, int, int]:
    return point.devices or 0, point.global_batch or 0, point.number


def _common(points: Sequence[PointResult]) -> dict[str, str]:
    """Return the swept settings that are equal in all ``points``."""
    same = dict(points[0].swept)
    for point in points:
        same = {key: value for key, value in same.items() if point.swept.get(key) == value}
    return same
