"""``parallax explain``: the reasons for a plan, its bytes and seconds by category, and the swap statistics of a run."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from parallax.commands.options import (
    add_class_paths,
    add_json,
    add_plan,
    class_paths_of,
    console_of,
    plan_file,
    print_json,
    with_schedule,
    writing,
)
from parallax.common.documents import DOCUMENT_BYTES, read_json
from parallax.errors import ConfigError, printable
from parallax.plan.analytic.efficiency import explain_figures
from parallax.plan.explained import explain
from parallax.plan.inputs import Inputs, inputs_path
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.report import memory_table, occupancy_png, swap_tables
from parallax.report.occupancy import Occupancy
from parallax.report.swap import swapped_ranks, worst_of_stages

EXAMPLES = """examples:
  parallax explain plan.yaml                            a plan that `parallax plan` wrote
  parallax explain runs/deeper                          also what the run offloaded, its stalls, what stayed and why
  parallax explain runs/deeper --png swap.png           bytes on the device and in the tier over its last step
  parallax explain runs/deeper --json | jq .swap
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_plan(parser)
    add_class_paths(parser)
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="draw the bytes on the device and in the tier over the last step",
    )
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    console, plan = console_of(parsed), Plan.load(plan_file(parsed.plan))
    if class_paths := class_paths_of(parsed):  # otherwise the schedule itself is not needed
        plan = with_schedule(plan, plan_file(parsed.plan), class_paths)
    lines = explain(plan, explain_figures(_profile_of(plan_file(parsed.plan))))
    directory = plan_file(parsed.plan).parent
    ranks, reason = _swapped(directory)
    rows, tables = _swap_rows(ranks, directory)
    if parsed.png is not None:
        if not ranks:
            raise ConfigError(f"--png draws what a run swapped: {reason}")
        steps = [Occupancy.load(directory, rank["rank"]) for rank in worst_of_stages(ranks)]
        with writing("--png", parsed.png) as path, console.status("drawing"):
            occupancy_png(steps, path)
    if parsed.json:
        print_json(
            {
                "hash": plan.hash(),
                "lines": lines,
                "stages": [asdict(stage) for stage in plan.prediction.stages],
                "swap": rows,
            }
        )
        return 0
    for line in lines:
        console.print(line, highlight=False, markup=False)
    if plan.prediction.stages:
        console.print(memory_table(plan))
    if tables is not None:
        console.print(tables)
    elif plan_file(parsed.plan) != parsed.plan:
        console.print(f"swap: {reason}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _profile_of(path: Path) -> ModelProfile | None:
    """Return the profile from which the plan at ``path`` was made; None if it is not stored beside the plan."""
    beside = inputs_path(path)
    return Inputs.load(beside).profile if beside.is_file() else None


def _swap_rows(ranks: list[Any], directory: Path) -> tuple[list[Any], RenderableType | None]:
    """Return the swap statistics of the ranks as JSON and as a table."""
    try:
        rows = [{key: rank[key] for key in ("rank", "stage", "replica", "swap")} for rank in ranks]
        return rows, swap_tables(ranks) if ranks else None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _damaged(directory / "summary.json", error) from error


def _damaged(path: Path, error: Exception) -> ConfigError:
    reason = f"{type(error).__name__}: {printable(str(error))[:200]}"
    return ConfigError(
        f"cannot read {printable(str(path))} ({reason}): train again to write it anew"
    )


def _swapped(directory: Path) -> tuple[list[Any], str]:
    """Return the entries of ranks whose stage swapped, from a run's summary. If there are none, return an empty list
    and the reason."""
    path = directory / "summary.json"
    if not path.is_file():
        return [], f"there is no {path}, which a run writes at its end"
    try:
        summary = read_json(path, DOCUMENT_BYTES)
        ranks = swapped_ranks(summary)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise _damaged(path, error) from error
    return ranks, "the plan offloads nothing"
