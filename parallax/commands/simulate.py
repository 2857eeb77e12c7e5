"""``parallax simulate``: run a plan's lists of actions with predicted costs, and show the timeline of every rank."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.table import Table

from parallax.commands.options import (
    add_class_paths,
    add_json,
    add_plan,
    class_paths_of,
    console_of,
    plan_file,
    print_json,
    read_plan,
    writing,
)
from parallax.common.events import Span
from parallax.common.units import format_bytes, format_seconds, plural
from parallax.errors import PlanError
from parallax.plan.plan import Plan, RankPrediction, StagePrediction
from parallax.plan.simulation.predict import Forecast, predict
from parallax.report import chrome_trace, timeline_png
from parallax.run.feedback import check_spans, measured_spans, typical_step

MOST_RANKS = 32  # ranks in the table, at most

EXAMPLES = """examples:
  parallax simulate plan.yaml                           the actions of every rank in a step, and their times
  parallax simulate plan.yaml --trace trace.json        for https://ui.perfetto.dev or chrome://tracing
  parallax simulate plan.yaml --png timeline.png
  parallax simulate runs/deeper --png timeline.png      beside the run's measurements
  parallax simulate theirs.yaml plan.schedule=own_schedule:halved   the schedule of somebody else's plan
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_plan(parser)
    add_class_paths(parser)
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the timeline as a Chrome trace (Perfetto)"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline")
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    console = console_of(parsed)
    plan, inputs = read_plan(parsed.plan, class_paths_of(parsed))
    with console.status(f"simulating {plural(plan.world_size, 'rank')}"):
        forecast = predict(inputs.profile, inputs.cluster, plan)
    if parsed.trace is not None:
        with writing("--trace", parsed.trace) as path:
            path.write_text(json.dumps(chrome_trace(_spans(forecast, plan))), encoding="utf-8")
    if parsed.png is not None:
        directory = plan_file(parsed.plan).parent
        measured = measured_spans(directory, plan.world_size)
        check_spans(measured, directory, plan)
        with writing("--png", parsed.png) as path, console.status("drawing"):
            timeline_png(_spans(forecast, plan), typical_step(measured), path)
    if parsed.json:
        print_json(
            {"hash": plan.hash(), **{k: v for k, v in asdict(forecast).items() if k != "spans"}}
        )
        return 0
    console.print(simulation_table(plan, forecast.ranks, forecast.stages))
    console.print(
        f"step {format_seconds(forecast.step_seconds)}, bubble {forecast.bubble:.1%}",
        highlight=False,
    )
    return 0


def _spans(forecast: Forecast, plan: Plan) -> list[Span]:
    """Return the span (start and end) of every action. Raises :class:`PlanError` for a plan that is too large to
    simulate action by action."""
    if not forecast.spans:
        raise PlanError(
            f"{plan.world_size} ranks with {plan.micro_batches(plan.global_batch)} micro-batches are timed without "
            "simulating every action, so there is no timeline: leave out --trace and --png, or plan for fewer devices"
        )
    return list(forecast.spans)


def simulation_table(
    plan: Plan, ranks: Sequence[RankPrediction], stages: Sequence[StagePrediction]
) -> Table:
    """Return a table with a row for each rank: its memory, and its seconds by category, from the predictions ``ranks``
    and ``stages``. For each pipeline rank, seconds are predicted only for the replica that uses the most memory, and
    are shown in the rows of all replicas."""
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
