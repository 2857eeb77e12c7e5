"""``parallax plan``: the best plan, why it is the best, and plans for other machines or batches."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from parallax.commands.options import (
    HOUR,
    add_json,
    add_overrides,
    check_writable,
    console_of,
    price_per_hour,
    print_json,
    writing,
)
from parallax.commands.plan.rates import compose_rated, rate_report
from parallax.commands.plan.what_if import what_if
from parallax.common.trust import remember
from parallax.errors import ConfigError
from parallax.plan.analytic.efficiency import explain_figures
from parallax.plan.branches import explain_branches
from parallax.plan.explained import explain_choice
from parallax.plan.inputs import Inputs, inputs_path
from parallax.plan.plan import Plan
from parallax.report import memory_table, placement_table, plan_table, tell_noise
from parallax.report.recipe import print_recipe
from parallax.run.job import plan_run, read_profile
from parallax.run.working import working

if TYPE_CHECKING:
    from parallax.run.planning import Planned

EXAMPLES = """examples:
  parallax plan                                         what `parallax train` would do here
  parallax plan cluster.devices=4
  parallax plan cluster.device_memory=80MiB --json | jq .prediction
  parallax plan plan.activations=recompute --output recompute.yaml
  parallax plan --profile profile.json                  with blocks measured before
  parallax plan model=transformer model.layers=96 model.hidden=12288 model.heads=96 \\
      precision=mixed_bf16 cluster=dgx_a100 cluster.nodes=16 trainer.global_batch=1536
  parallax plan cluster=dgx_h100 cluster.price_per_hour=2.5 --what-if nodes=1,2,4 trainer.global_batch=256,512
  parallax plan task=inference                          forwards alone: latency and rows per second
  parallax plan task=inference serve.requests_per_second=200 serve.p99=50ms   is one server enough, and how many are?
  parallax plan --diff plan.yaml recompute.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_json(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("plan.yaml"),
        help="where to write it (default: plan.yaml)",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="a profile of the model, instead of measuring it",
    )
    parser.add_argument(
        "--what-if",
        nargs="+",
        metavar="key=a,b",
        help="plan every combination of these values and compare; devices and nodes are short for cluster.*",
    )
    parser.add_argument(
        "--diff",
        nargs=2,
        type=Path,
        metavar="PLAN",
        help="print the differences between two plan files",
    )
    add_overrides(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    console = console_of(parsed)
    if parsed.diff is not None:
        return _diff(parsed, console)
    if parsed.what_if is not None:
        return what_if(parsed, console)
    check_writable("--output", parsed.output)
    with working(console, "planning") as work:
        config = compose_rated(parsed.overrides)
        work.limit(config.trainer)
        profile = read_profile(config, parsed.profile) if parsed.profile is not None else None
        planned = plan_run(config, Path.cwd(), work, profile=profile)
        lines, data = rate_report(config, planned, work)
    with writing("--output", parsed.output) as path:
        planned.plan.save(path)
        Inputs(planned.profile, planned.cluster).save(inputs_path(path))
    name = planned.plan.schedule.name
    if ":" in name:
        remember(parsed.output.parent, {"plan.schedule": name})
    if parsed.json:
        print_json({**_plain(planned.plan), **data})
        return 0
    _show(console, planned)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if planned.plan.task.trains:
        steps = config.trainer.steps
        print_recipe(console, config.optimizer, config.schedule, planned.groups, steps)
    console.print(f"plan: {parsed.output}", soft_wrap=True)
    return 0


def _plain(plan: Plan) -> dict[str, Any]:
    found = {**plan.to_dict(), "hash": plan.hash()}
    return found if plan.task.trains else {**found, "rows_per_second": plan.rows_per_second}


def _show(console: Console, planned: Planned) -> None:
    plan = planned.plan
    tell_noise(console, planned.profile)
    console.print(plan_table(plan, planned.profile))
    if len(planned.cluster.nodes) > 1:
        console.print(placement_table(plan, planned.cluster))
    if plan.prediction.stages:
        console.print(memory_table(plan))
    remarks = [*planned.remarks, *explain_figures(planned.profile)]
    branches = explain_branches(plan, planned.profile, planned.cluster.local)
    for line in filter(None, (*remarks, *explain_choice(plan), branches)):
        console.print(line, highlight=False, markup=False)
    if hourly := price_per_hour(planned.cluster):
        step = hourly * plan.prediction.step_seconds / HOUR
        each = "step" if plan.task.trains else "batch"
        console.print(f"cost: {step:.4g} per {each}, {hourly:.4g} per hour", highlight=False)


def _diff(parsed: argparse.Namespace, console: Console) -> int:
    if parsed.overrides or parsed.what_if is not None or parsed.profile is not None:
        raise ConfigError(
            "--diff compares two plan files and nothing else: leave out settings and other options"
        )
    first, second = (Plan.load(path) for path in parsed.diff)
    lines = first.diff(second)
    if parsed.json:
        print_json({"equal": not lines, "differences": lines})
        return 0
    for line in lines or ["the plans are equal"]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 0
