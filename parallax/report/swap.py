"""Report the swap of a run: bytes moved, waits of training, and why tensors were moved or kept.

In ``summary.json``, the entry of a rank has means over all steps, and details of the last step by micro-batch. Each
rank also writes how its memory changed during the last step (:mod:`parallax.report.occupancy`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parallax.common.units import format_bytes, format_seconds
from parallax.swap.statistics import SwapStatistics

MOST_ROWS = 40
_SUMMED = ("bytes_out", "bytes_in", "bytes_cancelled", "stall_seconds", "transfer_seconds")
_LARGEST = ("high_water", "tier_high_water", "limit_bytes", "pinned_waste_bytes")

Row = Mapping[str, Any]
"""The entry of a rank in ``summary.json``."""


def swaps(statistics: SwapStatistics) -> bool:
    """Return whether a stage with these ``statistics`` of a step offloaded anything, or saved activations that it could
    have offloaded."""
    return (
        bool(statistics.decisions)
        or statistics.limit_bytes + statistics.bytes_out + statistics.bytes_in > 0
    )


class SwapRecord:
    """The swap statistics of one rank over a run: sums and peaks of all steps, and details of the last step."""

    def __init__(self) -> None:
        self._total = SwapStatistics()
        self._last = SwapStatistics()
        self._steps = 0

    def add(self, statistics: SwapStatistics) -> None:
        for name in _SUMMED:
            setattr(self._total, name, getattr(self._total, name) + getattr(statistics, name))
        for name in _LARGEST:
            setattr(self._total, name, max(getattr(self._total, name), getattr(statistics, name)))
        self._last = statistics
        self._steps += 1

    def summary(self) -> dict[str, Any] | None:
        """Return the rank's entry for ``summary.json``; None if its stage does not swap."""
        if not (swaps(self._total) or swaps(self._last)):
            return None
        total, last = self._total, self._last
        means = {f"{name}_per_step": getattr(total, name) / self._steps for name in _SUMMED}
        peaks = {
            "device_high_water_bytes": total.high_water,
            "limit_bytes": total.limit_bytes,
            "tier_high_water_bytes": total.tier_high_water,
            "pinned_waste_bytes": total.pinned_waste_bytes,
        }
        last_step = {
            "bytes_out": last.bytes_out,
            "bytes_in": last.bytes_in,
            "stall_seconds": last.stall_seconds,
            "overlap": last.overlap,
            "micro_batches": [
                {"micro": micro, **asdict(found)} for micro, found in sorted(last.micro.items())
            ],
            "decisions": {
                reason: {"tensors": tensors, "bytes": size}
                for reason, (tensors, size) in last.decisions.items()
            },
        }
        return {**means, "overlap": total.overlap, **peaks, "last_step": last_step}


def swapped_ranks(summary: Mapping[str, Any]) -> list[Row]:
    """Return the entries in ``summary.json`` of the ranks whose stage swapped."""
    return [rank for rank in summary.get("ranks") or [] if rank.get("swap")]


def swap_tables(ranks: Sequence[Row]) -> RenderableType:
    """Return three tables. The first has the means and peaks of each rank. The others have only the rank of each stage
    that waited longest: its last step by micro-batch, and why its tensors were moved or kept."""
    shown = worst_of_stages(ranks)
    return Group(_rank_table(ranks), _micro_table(shown), _decision_table(shown))


def worst_of_stages(ranks: Sequence[Row]) -> list[Row]:
    """Return, for each stage, the entry of the rank that waited longest for swapped data in the last step."""
    worst: dict[int, Row] = {}
    for rank in ranks:
        best = worst.setdefault(rank["stage"], rank)
        if _stalled(rank) > _stalled(best):
            worst[rank["stage"]] = rank
    return [worst[stage] for stage in sorted(worst)]


def _stalled(rank: Row) -> float:
    return float(rank["swap"]["last_step"]["stall_seconds"])


def _rank_table(ranks: Sequence[Row]) -> Table:
    """Return a table of means and peaks by rank. If the offload tier of a rank allocated memory that it did not use,
    the table has a column for it."""
    headings = ["rank", "stage", "out", "in", "stalled", "over-\nlapped", "limit", "filled", "tier"]
    tier_keys = ["tier_high_water_bytes"]
    if any(rank["swap"]["pinned_waste_bytes"] for rank in ranks):
        headings.append("tier\nwaste")
        tier_keys.append("pinned_waste_bytes")
    rows = []
    for rank in ranks:
        found = rank["swap"]
        limit = found["limit_bytes"]
        rows.append(
            (
                *(str(rank[key]) for key in ("rank", "stage")),
                *(format_bytes(found[key]) for key in ("bytes_out_per_step", "bytes_in_per_step")),
                format_seconds(found["stall_seconds_per_step"]),
                f"{found['overlap']:.0%}",
                format_bytes(limit),
                f"{found['device_high_water_bytes'] / limit:.0%}" if limit else "",
                *(format_bytes(found[key]) for key in tier_keys),
            )
        )
    return _filled(_table("swap, mean step and largest bytes", *headings), rows)


def _micro_table(ranks: Sequence[Row]) -> Table:
    """Return a table of the last step of each of ``ranks``, with a row for each micro-batch and one for the whole step.

    Only the row of the whole step has the overlap of copies with compute, because micro-batches share copy threads.
    """
    title = "last step, of each stage the rank that stalled most"
    return _filled(
        _table(title, "stage", "rank", "micro-batch", "out", "in", "stalled", "over-\nlapped"),
        [row for rank in ranks for row in _micro_rows(rank)],
    )


def _micro_rows(rank: Row) -> Iterator[tuple[str, ...]]:
    last, where = rank["swap"]["last_step"], (str(rank["stage"]), str(rank["rank"]))
    for found in last["micro_batches"]:
        yield *where, str(found["micro"]), *_moved(found), ""
    yield *where, "all", *_moved(last), f"{last['overlap']:.0%}"


def _moved(found: Mapping[str, Any]) -> tuple[str, str, str]:
    return (
        format_bytes(found["bytes_out"]),
        format_bytes(found["bytes_in"]),
        format_seconds(found["stall_seconds"]),
    )


def _decision_table(ranks: Sequence[Row]) -> Table:
    """Return a table of the saved tensors of the last step, with a row for each of ``ranks`` and each reason why
    tensors were moved or kept: the number of these tensors and their bytes. The reasons of a rank are ordered by bytes,
    largest first."""
    table = _table(
        "saved tensors of the last step", "stage", "rank", "decision", "tensors", "bytes"
    )
    table.columns[2].justify = "left"
    rows = []
    for rank in ranks:
        decisions = rank["swap"]["last_step"]["decisions"]
        for reason, found in sorted(decisions.items(), key=lambda item: -item[1]["bytes"]):
            where = (str(rank["stage"]), str(rank["rank"]))
            rows.append((*where, reason, f"{found['tensors']:,}", format_bytes(found["bytes"])))
    return _filled(table, rows)


def _table(title: str, *headings: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
    )
    for heading in headings:
        table.add_column(Text(heading), justify="right")
    return table


def _filled(table: Table, rows: Sequence[tuple[str, ...]]) -> Table:
    for row in rows[:MOST_ROWS]:
        table.add_row(*row)
    if len(rows) > MOST_ROWS:
        table.caption = f"{len(rows) - MOST_ROWS} more rows with --json"
    return table
