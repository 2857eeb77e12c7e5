"""Points (runs) of a sweep: series of comparable points, and the speed-up with more devices.

The points of a series do the same work on different numbers of devices, under any plan:

::

    strong    the same rows per step:                speed-up S(n) = rate(n) / rate(n0),  efficiency S(n) · n0 / n
    weak      the same rows per step and device:     efficiency = rate(n) / rate(n0) · n0 / n

The points of a series are compared with its point with the fewest devices, n0, which has speed-up 1. If several points
have n0 devices, the fastest of them is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isfinite

from parallax.common.metrics import larger_is_better
from parallax.report.scaling.beside import ReportConfig

_TOLERANCE = 0.02  # tolerated excess of an efficiency: medians of two runs differ by about as much


@dataclass(frozen=True)
class RankPeak:
    """The measured and the predicted peak of a rank's device memory, in bytes."""

    measured: int
    predicted: int


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """The result of one point of a sweep. Unknown values, such as the speed of a failed point, are None.

    ``swept``       the settings that differ between points
    ``workload``    the settings that define the work of a step
    ``model``       the settings of model and data
    ``layout``      stages and replicas, as text
    ``per_second``  the speed, in ``unit`` per second
    ``seconds``     duration of the whole run
    ``metrics``     name → number in the run's summary, and the requested metric
    """

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
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def settings(self) -> str:
        """Return the swept settings as a user would type them."""
        return " ".join(f"{key}={value}" for key, value in self.swept.items())

    @property
    def timed(self) -> bool:
        """Whether speed, devices and rows are known, so that the point can be part of a series."""
        return bool(self.per_second and self.devices and self.global_batch)

    @property
    def error(self) -> float | None:
        """Return the error of the predicted step time, as a fraction of the measured step time."""
        if not self.step_seconds or self.predicted_step_seconds is None:
            return None
        return self.predicted_step_seconds / self.step_seconds - 1

    @property
    def peak(self) -> RankPeak | None:
        return max(self.peaks, key=lambda rank: rank.measured, default=None)


@dataclass(frozen=True)
class Gain:
    """The speed-up of a point over :attr:`Series.smallest`, and the efficiency: the speed-up divided by the ratio of
    their numbers of devices."""

    speedup: float
    efficiency: float


@dataclass(frozen=True)
class Series:
    """The points of one series, ordered by number of devices. ``common``: the swept settings with equal values in all
    of these points."""

    common: Mapping[str, str]
    points: tuple[PointResult, ...]

    @property
    def label(self) -> str:
        """Return the common settings of the points as text; empty if there are none."""
        return " ".join(f"{key}={value}" for key, value in self.common.items())

    def point_label(self, point: PointResult) -> str:
        """Return the swept settings in which ``point`` differs from other points of the series, as text. If there are
        none, return its stages and replicas."""
        own = {key: value for key, value in point.swept.items() if key not in self.common}
        return " ".join(f"{k.rpartition('.')[2]}={v}" for k, v in own.items()) or point.layout

    @property
    def smallest(self) -> PointResult:
        """Return the point with which all points of the series are compared: the fastest of the points with the fewest
        devices."""
        fewest = min(point.devices or 0 for point in self.points)
        return max(
            (point for point in self.points if point.devices == fewest),
            key=lambda point: point.per_second or 0.0,
        )

    @property
    def scales(self) -> bool:
        """Whether the points have different numbers of devices."""
        return len({point.devices for point in self.points}) > 1

    def gain(self, point: PointResult) -> Gain:
        """Return the speed-up and efficiency of ``point``, which is in the series."""
        first = self.smallest
        speedup = (point.per_second or 0.0) / (first.per_second or 1.0)
        return Gain(speedup, speedup * (first.devices or 1) / (point.devices or 1))

    def doubt(self, point: PointResult) -> str:
        """Return a message if the speed of ``point`` is doubtful, because it is higher than the devices of ``point``
        can reach; otherwise ""."""
        first, gain = self.smallest, self.gain(point)
        if gain.efficiency <= 1 + _TOLERANCE or first.devices == point.devices:
            return ""
        devices = f"{first.devices} device{'s' if first.devices != 1 else ''}"
        return (
            f"{gain.speedup:.2f} times the rate of {devices} is more than {point.devices} devices can give: compare "
            "medians of longer runs; caches or swapping differ"
        )


@dataclass(frozen=True)
class SweepResults:
    """The results of a sweep. ``command``: the command of the sweep; empty for a single run. ``metric``: the name of
    the metric by which points are compared; empty if no point has one. ``report``: figures for a second table."""

    name: str
    command: str
    points: tuple[PointResult, ...]
    metric: str = ""
    report: ReportConfig = field(default_factory=ReportConfig)

    def value(self, point: PointResult) -> float | None:
        """Return the metric of ``point``; None if it is unknown."""
        return point.metrics.get(self.metric)

    @property
    def best(self) -> PointResult | None:
        """Return the point with the best finite metric. Among points with equal metrics, return the first."""
        known = [(p, v) for p in self.points if (v := self.value(p)) is not None and isfinite(v)]
        if not known:
            return None
        sign = -1 if larger_is_better(self.metric) else 1
        return min(known, key=lambda pair: sign * pair[1])[0]

    def by_key(self, key: str) -> list[Series]:
        """Return the points that have a metric and the swept setting ``key`` as series. The points of a series differ
        only in this setting."""
        known = [p for p in self.points if key in p.swept and self.value(p) is not None]
        return _series(known, lambda p: tuple(item for item in p.swept.items() if item[0] != key))

    def doubts(self) -> dict[str, str]:
        """Return a mapping from the name of each point with a doubtful speed to the reason why it is doubtful."""
        found: dict[str, str] = {}
        for series in (*self.strong(), *self.weak()):
            for point in series.points:
                if why := series.doubt(point):
                    found.setdefault(point.name, why)
        return found

    @property
    def timed(self) -> list[PointResult]:
        """Return the points with a measured speed."""
        return [point for point in self.points if point.timed]

    def strong(self) -> list[Series]:
        """Return series of points with equal work per step, for strong scaling."""
        return _series(self.timed, lambda p: (p.workload, p.unit, p.global_batch))

    def weak(self) -> list[Series]:
        """Return series of points with equal rows per device, for weak scaling."""

        def share(point: PointResult) -> Fraction:
            return Fraction(point.global_batch or 0, point.devices or 1)

        return _series(self.timed, lambda p: (p.workload, p.unit, share(p)))

    def batches(self) -> list[Series]:
        """Return series of points with equally many devices, stages and replicas; their rows per step may differ. Only
        points with a measured speed and peak memory are included."""
        full = [point for point in self.timed if point.peak is not None]
        return _series(full, lambda p: (p.workload, p.devices, p.layout))

    def models(self) -> list[Series]:
        """Return series of points with equal settings of model and data; their other settings may differ. Only points
        with a measured speed and peak memory are included."""
        full = [point for point in self.timed if point.peak is not None]
        return _series(full, lambda p: (p.model, p.unit))


def _series(points: Iterable[PointResult], key: Callable[[PointResult], Hashable]) -> list[Series]:
    """Return ``points`` as series. The points of a series have equal ``key(point)``. Series are in the order of their
    first points."""
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
