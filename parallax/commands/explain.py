"""``parallax explain``: why a plan looks as it does, and where its bytes and seconds go."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from parallax.commands.options import add_json, add_plan, console_of, plan_file, print_json
from parallax.plan.plan import Plan
from parallax.report import memory_table

EXAMPLES = """examples:
  parallax explain plan.yaml                            a plan that `parallax plan` wrote
  parallax explain runs/deeper --json | jq .stages
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    add_plan(parser)
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Print it; the exit code."""
    console, plan = console_of(parsed), Plan.load(plan_file(parsed.plan))
    if parsed.json:
        print_json(
            {
                "hash": plan.hash(),
                "lines": plan.explain(),
                "stages": [asdict(stage) for stage in plan.prediction.stages],
            }
        )
        return 0
    for line in plan.explain():
        console.print(line, highlight=False, markup=False)
    if plan.prediction.stages:
        console.print(memory_table(plan))
    return 0
