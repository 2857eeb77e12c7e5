"""A simulated step as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from parallax.common.units import format_bytes, format_seconds
from parallax.plan.plan import Plan, RankPrediction, StagePrediction

MOST_RANKS = 32


def simulation_table(
    plan: Plan, ranks: Sequence[RankPrediction], stages: Sequence[StagePrediction]
) -> Table:
    """Return a row per rank: its memory, and the seconds by term of the fullest rank of its pipeline rank."""
    terms = list(dict.fromkeys(term for stage in stages for term in stage.seconds))
    shown = [term for term in terms if any(stage.seconds.get(term) for stage in stages)]
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"{len(ranks) - MOST_RANKS} more ranks with --json"
        if len(ranks) > MOST_RANKS
        else None,
        collapse_padding=True,
        pad_edge=False,
        caption_justify="left",
    )
    for heading in ("rank", "stage", "replica", "peak", f"in {plan.tier}", "offloaded", *shown):
        table.add_column(heading, justify="right")
    for rank, found in enumerate(ranks[:MOST_RANKS]):
        pipeline_rank, replica, _ = plan.coordinate(rank)
        table.add_row(
            *map(str, (rank, pipeline_rank, replica)),
            *map(format_bytes, (found.peak_bytes, found.tier_peak_bytes, found.offloaded_bytes)),
            *(format_seconds(stages[pipeline_rank].seconds.get(term, 0.0)) for term in shown),
        )
    return table
