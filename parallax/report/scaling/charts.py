"""Charts of a sweep. A chart is drawn only if the points (runs) of the sweep have the data for it.

Solid lines join the best measured points. Dashed lines are perfect scaling or predictions. Users' texts are escaped,
because matplotlib takes text between two dollars for mathematics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from parallax.common.metrics import larger_is_better
from parallax.common.units import format_bytes
from parallax.errors import printable
from parallax.report.figure import new_figure
from parallax.report.scaling.points import PointResult, Series, SweepResults

COLOURS = ("#2b5c8a", "#c77f1a", "#57a773", "#b03a2e", "#7d5ba6", "#4d4d4d", "#1aa3a3", "#d16ba5")
MARKERS = "osD^vP*X"
MOST_SERIES = 12  # series in a legend, at most
_LONGEST_LABEL = 48
_MOST_LINEAR = 30  # ratio of largest to smallest rate above which the scale is logarithmic
METRIC_FILES = "metric-"  # prefix of the file names
_MOST_NOTES = 24  # points that have their name beside them


@dataclass(frozen=True)
class Chart:
    """A chart of a sweep.

    ``file``                the name of its file
    ``shows``               its caption
    ``needs``               a text about the data that the chart needs, shown if the chart is not drawn
    ``series(results)``     returns the data to draw
    ``draw(axes, series)``  draws these data
    ``from_zero``           whether the y axis, if its scale is linear, starts at zero
    """

    file: str
    title: str
    shows: str
    needs: str
    series: Callable[[SweepResults], list[Series]]
    draw: Callable[[Any, list[Series]], None]
    from_zero: bool = True

    def figure(self, found: list[Series]) -> Any:
        figure = new_figure()
        axes = figure.subplots()
        shown = found[:MOST_SERIES]
        self.draw(axes, shown)
        more = (
            f" (the first {MOST_SERIES} of {len(found)} series)" if len(found) > len(shown) else ""
        )
        axes.set_title(_short(self.title) + more, loc="left", fontsize=17).set_parse_math(False)
        axes.tick_params(labelsize=13)
        axes.grid(alpha=0.25)
        if self.from_zero and axes.get_yscale() == "linear":
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        lines, names = axes.get_legend_handles_labels()
        if lines:
            texts = figure.legend(
                lines, names, loc="outside lower center", ncols=3, fontsize=12, frameon=False
            ).get_texts()
            for text in texts:
                text.set_parse_math(False)
        return figure


def _scales(found: list[Series]) -> list[Series]:
    return [series for series in found if series.scales]


def _batches(results: SweepResults) -> list[Series]:
    return [s for s in results.batches() if len({point.global_batch for point in s.points}) > 1]


def _frontier(results: SweepResults) -> list[Series]:
    found = results.models()
    return found if sum(len(series.points) for series in found) > 1 else []


def _draw_strong(axes: Any, found: list[Series]) -> None:
    most = _draw_gains(axes, found, lambda series, point: series.gain(point).speedup)
    for first in sorted({series.smallest.devices or 1 for series in found}):
        name = "perfect" if first == 1 else f"perfect, from {first} devices"
        axes.plot([first, most], [1, most / first], "--", color="#999999", label=name)
    axes.set_ylabel("times as fast as the smallest of its series", fontsize=14)


def _draw_weak(axes: Any, found: list[Series]) -> None:
    most = _draw_gains(axes, found, lambda series, point: 100 * series.gain(point).efficiency)
    axes.plot([1, most], [100, 100], "--", color="#999999", label="perfect")
    axes.set_ylabel("efficiency, %: rate per device against the smallest's", fontsize=14)


def _draw_gains(
    axes: Any, found: list[Series], value: Callable[[Series, PointResult], float]
) -> int:
    """Draw ``value(series, point)`` over the number of devices, for each point of the series in ``found``. For each
    series, also draw a line through the best point at each number of devices. Return the largest number of devices."""
    notes = sum(len(series.points) for series in found) <= _MOST_NOTES
    counts = {point.devices or 0 for series in found for point in series.points}
    for index, series in enumerate(found):
        places = [(point.devices or 0, value(series, point)) for point in series.points]
        best = {x: max(y for at, y in places if at == x) for x, _ in places}
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        axes.plot(list(best), list(best.values()), color=colour, linewidth=2, zorder=2)
        style = {"color": colour, "marker": marker, "markersize": 9, "linestyle": ""}
        axes.plot(*zip(*places), **style, label=_text(series.label or "measured"), zorder=3)
        for at, (point, place) in enumerate(zip(series.points, places) if notes else ()):
            _note(axes, point.layout, place, at)
    axes.set_xticks(sorted(counts))
    axes.set_xlim(min(counts) - 0.3, max(counts) + 0.7)
    axes.set_xlabel("devices", fontsize=14)
    return max(counts)


def _draw_memory(axes: Any, found: list[Series]) -> None:
    batches = {point.global_batch or 0 for series in found for point in series.points}
    for index, series in enumerate(found):
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        x = [point.global_batch or 0 for point in series.points]
        peaks = [point.peak for point in series.points if point.peak is not None]
        where = ", ".join(filter(None, [series.label, series.points[0].layout]))
        axes.plot(
            x, [p.measured for p in peaks], **style, linewidth=2, markersize=9, label=_text(where)
        )
        axes.plot(x, [p.predicted for p in peaks], **style, linestyle="--")
    axes.plot([], [], "--", color="#666666", label="predicted")
    axes.set_xticks(sorted(batches))
    axes.set_xlabel("rows per step", fontsize=14)
    axes.set_ylabel("peak of the fullest rank", fontsize=14)
    full = [point.peak for series in found for point in series.points if point.peak is not None]
    _count_bytes(axes.yaxis, max(max(peak.measured, peak.predicted) for peak in full))


def _draw_frontier(axes: Any, found: list[Series]) -> None:
    notes = sum(len(series.points) for series in found) <= _MOST_NOTES
    for index, series in enumerate(found):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        places = [
            (point.peak.measured, point.per_second or 0.0)
            for point in series.points
            if point.peak is not None
        ]
        unit = series.points[0].unit
        label = _text(f"{series.label or 'points'} ({unit}/s)")
        axes.scatter(*zip(*places), color=colour, marker=marker, s=90, label=label, zorder=3)
        best = frontier(places)
        axes.plot(*zip(*best), color=colour, linewidth=2, drawstyle="steps-post", zorder=2)
        for at, (point, place) in enumerate(zip(series.points, places) if notes else ()):
            _note(axes, series.point_label(point), place, at)
    rates = [point.per_second or 0.0 for series in found for point in series.points]
    if max(rates) > _MOST_LINEAR * min(rates):
        axes.set_yscale("log")
    most = max(each.peak.measured for series in found for each in series.points if each.peak)
    axes.set_xlim(0, 1.25 * most or 1)  # small models use no block of memory
    axes.set_xlabel("peak of the fullest rank", fontsize=14)
    units = sorted({series.points[0].unit for series in found})
    axes.set_ylabel(f"{' or '.join(units)} per second", fontsize=14)
    _count_bytes(axes.xaxis, most)


def frontier(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front of ``places``, which are pairs (bytes, rate), ordered by bytes. A pair is in the front if
    no other pair has fewer or equal bytes and an equal or higher rate."""
    best: list[tuple[float, float]] = []
    for place in sorted(places, key=lambda each: (each[0], -each[1])):
        if not best or place[1] > best[-1][1]:
            best.append(place)
    return best


def _count_bytes(axis: Any, most: int) -> None:
    """Set the ticks of ``axis``, which ends at ``most`` bytes, to round numbers of bytes."""
    each = 2 ** max(0, math.ceil(math.log2(max(1, most) / 6)))
    ticks = range(0, round(1.25 * most) + each, each)
    axis.set_ticks(ticks, [format_bytes(size) for size in ticks])


def _note(axes: Any, text: str, place: tuple[float, float], index: int) -> None:
    """Write the label ``text`` beside the point at ``place``: above it if ``index`` is even, below it otherwise, so
    that labels of neighbouring points stay readable."""
    note = axes.annotate(
        _text(text),
        place,
        xytext=(8, 7 if index % 2 == 0 else -15),
        textcoords="offset points",
        fontsize=10,
        color="#444444",
    )
    note.set_parse_math(False)


def _text(text: str) -> str:
    """Return a user's text as a label that does not start with an underscore, because matplotlib leaves labels with an
    underscore out of legends."""
    short = _short(text)
    return f" {short}" if short.startswith("_") else short


def _short(text: str) -> str:
    return printable(text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 3]}...")


def metric_charts(results: SweepResults) -> list[Chart]:
    """Return one chart for each swept setting that has several values: the metric over the values of the setting."""
    if not results.metric:
        return []
    found: dict[str, list[str]] = {}
    for point in results.points:
        for key, value in point.swept.items():
            found.setdefault(key, []).append(value)
    keys = [key for key, values in found.items() if len(set(values)) > 1]
    return [_metric_chart(results, key, number) for number, key in enumerate(keys, start=1)]


def _metric_chart(results: SweepResults, key: str, number: int) -> Chart:
    better = "highest" if larger_is_better(results.metric) else "lowest"

    def series(results: SweepResults) -> list[Series]:
        found = results.by_key(key)
        points = tuple(point for each in found for point in each.points)
        if len(found) > MOST_SERIES:  # in a random search, no two points differ in one setting only
            found = [Series({}, points)]
        return found if len(points) > 1 else []

    def draw(axes: Any, found: list[Series]) -> None:
        _draw_metric(axes, found, results, key)

    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", key)[:_LONGEST_LABEL]
    return Chart(
        f"{METRIC_FILES}{number}-{slug}",
        f"{results.metric} by {key}",
        f"The metric of points that differ in {key}; lines join points whose other settings are equal, and the star is "
        f"the {better} of the sweep.",
        f"at least two points that record {results.metric}",
        series,
        draw,
        from_zero=False,
    )


def _draw_metric(axes: Any, found: list[Series], results: SweepResults, key: str) -> None:
    values = list(dict.fromkeys(point.swept[key] for series in found for point in series.points))
    places = _numbers(values)
    for index, series in enumerate(found):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        dots = [(places[p.swept[key]], results.value(p)) for p in series.points]
        dots.sort(key=lambda dot: dot[0])
        rest = " ".join(f"{k}={v}" for k, v in series.common.items() if k != key)
        others = {tuple((k, v) for k, v in p.swept.items() if k != key) for p in series.points}
        style = {"color": colour, "marker": marker, "markersize": 9, "zorder": 3}
        label = {"label": _text(rest)} if rest else {}
        axes.plot(*zip(*dots), **style, **label, linewidth=2 if len(others) == 1 else 0)
    best = results.best
    if best is not None and key in best.swept and best.swept[key] in places:
        star = {"color": "none", "markeredgecolor": "#222222", "markersize": 20, "marker": "*"}
        axes.plot([places[best.swept[key]]], [results.value(best)], **star, zorder=4)
    axes.set_xlabel(_text(key), fontsize=14).set_parse_math(False)
    axes.set_ylabel(_text(results.metric), fontsize=14).set_parse_math(False)
    if any(_number(value) is None for value in values):
        axes.set_xticks(list(places.values()))
        for text in axes.set_xticklabels([_text(value) for value in places]):
            text.set_parse_math(False)
    elif min(places.values()) > 0 and max(places.values()) > _MOST_LINEAR * min(places.values()):
        axes.set_xscale("log")


def _numbers(values: Sequence[str]) -> dict[str, float]:
    """Return the position of each value on an axis: the value itself if all values are numbers, otherwise its index."""
    found = {value: _number(value) for value in values}
    if any(number is None for number in found.values()):
        return {value: float(index) for index, value in enumerate(values)}
    return {value: number for value, number in found.items() if number is not None}


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


CHARTS = (
    Chart(
        "strong-scaling",
        "Strong scaling",
        "The same work by more devices: how many times as fast as the smallest of its series.",
        "points of the same work on different numbers of devices, as cluster.devices=1,2,4 gives",
        lambda results: _scales(results.strong()),
        _draw_strong,
    ),
    Chart(
        "weak-scaling",
        "Weak scaling",
        "As many rows per device on more devices: the share of each device's speed that is kept.",
        "points with the same rows per step and device on different numbers of devices, as cluster.devices=1,2 "
        "trainer.global_batch=8,16 gives",
        lambda results: _scales(results.weak()),
        _draw_weak,
    ),
    Chart(
        "memory-by-batch",
        "Memory against batch",
        "Peak bytes of the fullest rank, measured and predicted, as the batch grows.",
        "points that differ in their batch alone, as trainer.global_batch=8,16,32 gives",
        _batches,
        _draw_memory,
    ),
    Chart(
        "frontier",
        "Frontier: rate against peak memory",
        "Each point's rate over its fullest rank's peak; the line joins those that no other beats in both.",
        "at least two points that have measured their rate and their memory",
        _frontier,
        _draw_frontier,
    ),
)
