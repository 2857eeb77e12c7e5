"""The points (runs) of a sweep as a table: on the terminal, as CSV, and on the HTML page."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from parallax.common.units import format_bytes, format_rate, format_seconds
from parallax.errors import printable
from parallax.report.scaling.beside import beside_table
from parallax.report.scaling.points import Gain, PointResult, SweepResults

NONE = "-"
WIDTH = 160  # columns of output that does not go to a terminal, at least
_FORMULAS = ("=", "+", "-", "@")
_UNLIMITED = 10_000  # columns
MOST_RANKS = 4  # ranks whose peaks a cell lists, at most


@dataclass(frozen=True)
class TableCell:
    """The text of a table cell, and the number by which rows are sorted; None if it has no number."""

    text: str
    number: float | None = None


def headings(results: SweepResults) -> list[str]:
    """Return the headings of the columns of :func:`rows`."""
    gains = ["speed-up", "efficiency"] if len(results.points) > 1 else []
    weak = ["weak efficiency"] if _has_weak(results) else []
    return [
        *("point", "devices", "layout", "rows", "step", "predicted", "off by", "rate"),
        *(*gains, *weak, "peak by rank / predicted"),
        *([printable(results.metric)] if results.metric else []),
        "state",
    ]


def rows(results: SweepResults) -> Iterator[list[TableCell]]:
    """Yield the cells of a row for each point."""
    strong, weak = _gains(results, weak=False), _gains(results, weak=True)
    has_weak = _has_weak(results)
    for point in results.points:
        weak_gain = weak.get(point.name)
        yield [
            TableCell(printable(point.name)),
            _count(point.devices),
            TableCell(printable(point.layout) or NONE),
            _count(point.global_batch),
            _seconds(point.step_seconds),
            _seconds(point.predicted_step_seconds),
            TableCell(NONE if point.error is None else f"{point.error:+.0%}", point.error),
            _rate(point),
            *(_gain(strong.get(point.name)) if len(results.points) > 1 else ()),
            *([_share(weak_gain.efficiency if weak_gain else None)] if has_weak else []),
            _peaks(point),
            *([_metric(results.value(point))] if results.metric else []),
            TableCell(printable(point.status)),
        ]


def _gain(gain: Gain | None) -> list[TableCell]:
    """Return the cells of the speed-up and of the efficiency."""
    if gain is None:
        return [TableCell(NONE), _share(None)]
    return [TableCell(f"{gain.speedup:.2f}×", gain.speedup), _share(gain.efficiency)]


def results_table(results: SweepResults) -> RenderableType:
    """Return the table for the terminal. Below the table are the reasons of unfinished points, doubtful speeds, and the
    best point."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in headings(results):
        text = name in ("point", "layout", "state")
        table.add_column(name, justify="left" if text else "right", overflow="fold")
    for row in rows(results):
        table.add_row(*(Text(cell.text) for cell in row))
    reasons = [
        printable(f"{point.name}: {point.reason}") for point in results.points if point.reason
    ]
    doubts = [printable(f"{name}: {why}") for name, why in results.doubts().items()]
    lines = (Text(line) for line in (*reasons, *doubts, *best_line(results)))
    if not results.report.columns:
        return Group(table, *lines)
    numbers = {point.name: point.metrics for point in results.points}
    return Group(table, *lines, beside_table(results.report, numbers))


def print_results(results: SweepResults, console: Console) -> None:
    """Print the table. Output that does not go to a terminal is as wide as the table; a terminal folds its cells."""
    table = results_table(results)
    if not console.is_terminal:
        unlimited = console.options.update(max_width=_UNLIMITED)
        console.width = max(WIDTH, Measurement.get(console, unlimited, table).maximum)
    console.print(table)


def best_line(results: SweepResults) -> list[str]:
    """Return a list with one line about the best point and its settings. The list is empty if no point has a metric, or
    if there is only one point."""
    best = results.best
    if best is None or len(results.points) < 2:
        return []
    value = results.value(best)
    text = (
        f"best {results.metric}: {value:.5g}, {best.name}: {best.settings or 'no setting differs'}"
    )
    return [printable(text)]


def results_csv(results: SweepResults) -> str:
    """Return the table as CSV: a line for each point, with unknown values empty, and bytes and seconds as plain
    numbers."""
    keys = list(dict.fromkeys(key for point in results.points for key in point.swept))
    strong, weak = _gains(results, weak=False), _gains(results, weak=True)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    metric = [results.metric] if results.metric not in ("", "validation_loss") else []
    writer.writerow(
        [
            *("point", "status", "reason", *map(_plain, keys), "devices", "layout"),
            "rows_per_step",
            *("step_seconds", "predicted_step_seconds", "per_second", "unit"),
            *("speedup", "efficiency", "weak_efficiency", "measured_peak_bytes"),
            *("predicted_peak_bytes", "validation_loss", "run_seconds"),
            *(f"metric {_plain(name)}" for name in metric),
        ]
    )
    for point in results.points:
        gain, weak_gain = strong.get(point.name), weak.get(point.name)
        writer.writerow(
            [
                *map(_plain, (point.name, point.status, point.reason)),
                *(_plain(point.swept.get(key, "")) for key in keys),
                *(point.devices, _plain(point.layout), point.global_batch, point.step_seconds),
                *(point.predicted_step_seconds, point.per_second, _plain(point.unit)),
                *((gain.speedup, gain.efficiency) if gain else (None, None)),
                weak_gain.efficiency if weak_gain else None,
                " ".join(str(rank.measured) for rank in point.peaks),
                " ".join(str(rank.predicted) for rank in point.peaks),
                *(point.validation_loss, point.seconds),
                *(results.value(point) for _ in metric),
            ]
        )
    return out.getvalue()


def _plain(text: str) -> str:
    """Return ``text`` in a form that spreadsheets do not evaluate as a formula, because a formula could read files or
    run programs. Numbers are unchanged."""
    text = printable(text)
    with contextlib.suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.startswith(_FORMULAS) else text


def _gains(results: SweepResults, *, weak: bool) -> dict[str, Gain]:
    """Return a mapping from the name of a point to its speed-up and efficiency, under weak scaling if ``weak`` is set,
    otherwise under strong scaling. Points in a series with only one number of devices are left out."""
    found = results.weak() if weak else results.strong()
    return {point.name: each.gain(point) for each in found if each.scales for point in each.points}


def _has_weak(results: SweepResults) -> bool:
    return any(each.scales for each in results.weak())


def _count(count: int | None) -> TableCell:
    return TableCell(NONE if count is None else str(count), count)


def _seconds(seconds: float | None) -> TableCell:
    return TableCell(NONE if seconds is None else format_seconds(seconds), seconds)


def _metric(value: float | None) -> TableCell:
    return TableCell(NONE if value is None else f"{value:.5g}", value)


def _share(share: float | None) -> TableCell:
    return TableCell(NONE if share is None else f"{share:.0%}", share)


def _rate(point: PointResult) -> TableCell:
    text = NONE if point.per_second is None else f"{format_rate(point.per_second)} {point.unit}/s"
    return TableCell(text, point.per_second)


def _peaks(point: PointResult) -> TableCell:
    """Return a cell with the peak memory of every rank or, if there are more than ``MOST_RANKS`` ranks, of the fullest
    rank only."""
    if point.peak is None:
        return TableCell(NONE)
    shown = point.peaks[:MOST_RANKS] if len(point.peaks) <= MOST_RANKS else (point.peak,)
    text = "\n".join(f"{format_bytes(r.measured)} / {format_bytes(r.predicted)}" for r in shown)
    if len(shown) < len(point.peaks):
        text = f"{text}\nfullest of {len(point.peaks)}"
    return TableCell(text, point.peak.measured)
