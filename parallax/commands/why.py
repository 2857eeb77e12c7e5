"""``parallax why``: where the seconds of a run's steps went, and which change of its settings would help most."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from parallax.commands.options import (
    add_class_paths,
    add_json,
    add_run,
    class_paths_of,
    console_of,
    print_json,
    read_plan,
    run_directory,
    trusting,
)
from parallax.common.units import format_seconds
from parallax.errors import ConfigError
from parallax.plan.simulation.predict import predict
from parallax.run.diagnosis import Diagnosis, Measured, diagnose
from parallax.run.diagnosis.changes import LEAST, Cause, RequestedSettings
from parallax.run.diagnosis.fitted import fit
from parallax.run.diagnosis.measured import TERMS, UNPLANNED, predicted_terms
from parallax.run.resume import StoredRun

EXAMPLES = """examples:
  parallax why                                          the newest run in runs/
  parallax why deeper                                   where a step's seconds go, and what would help most
  parallax why runs/deeper --json | jq .changes
"""

_SHOWN = 0.0005  # fraction of a step; smaller terms are left out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(parser)
    add_class_paths(parser)
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    console, class_paths = console_of(parsed), class_paths_of(parsed)
    directory = run_directory(parsed.run)
    plan, inputs = read_plan(directory, class_paths)
    config = StoredRun.read(directory, trusting(class_paths)).config
    measured = Measured.read(directory, plan)
    with console.status("simulating"):
        planned = predict(inputs.profile, inputs.cluster, plan)
        if not planned.spans:
            raise ConfigError(
                f"{plan.world_size} ranks with {plan.micro_batches(plan.global_batch)} micro-batches are too many to "
                "simulate every action: parallax explain shows the terms of their prediction"
            )
        found = diagnose(
            fit(measured, inputs.profile, inputs.cluster), RequestedSettings.of(config)
        )
    expected = predicted_terms(planned.spans)
    if parsed.json:
        print_json(_plain(measured, expected, found))
        return 0
    _print(console, measured, expected, found, f"parallax calibrate {shlex.quote(str(directory))}")
    return 0


def _plain(measured: Measured, planned: Mapping[str, float], found: Diagnosis) -> dict[str, Any]:
    return {
        "step_seconds": measured.period,
        "steps": measured.steps,
        "planned_step_seconds": sum(planned.values()),
        "terms": measured.mean,
        "planned_terms": dict(planned),
        "ranks": {str(rank): dict(terms) for rank, terms in measured.terms.items()},
        "cause": found.cause,
        "sentence": found.sentence,
        "costs": found.costs,
        "changes": [
            {**asdict(change), "gain": 1 - change.seconds / measured.period}
            for change in found.changes
        ],
    }


def _print(
    console: Console,
    measured: Measured,
    planned: Mapping[str, float],
    found: Diagnosis,
    calibrate: str,
) -> None:
    console.print(_table(measured, planned))
    whole = not console.is_terminal  # lines of a file are not broken
    console.print(f"cause: {found.cause}: {found.sentence}", highlight=False, soft_wrap=whole)
    for change in found.changes:
        gain = 1 - change.seconds / measured.period
        seconds = format_seconds(change.seconds)
        console.print(
            f"change: {change.text}; predicted: {seconds} a step, {gain:.0%} less",
            highlight=False,
            soft_wrap=whole,
        )
        copied = calibrate if change.cause is Cause.COMPUTE else shlex.join(change.overrides)
        if copied:
            console.print(f"  {copied}", highlight=False, soft_wrap=True)
    if not found.changes:
        console.print(
            f"no change of the settings is predicted to save {LEAST:.0%} or more", highlight=False
        )


def _table(measured: Measured, planned: Mapping[str, float]) -> Table:
    """Return a table of the seconds of a step by category.

    It has three figures for each category: the ``measured`` mean over ranks and steps, the seconds ``planned`` for it,
    and the rank with the most seconds.
    """
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    ranks = f"{len(measured.terms)} ranks, " if len(measured.terms) > 1 else ""
    table.add_column(
        f"a step: mean of {ranks}{measured.steps} step{'s' if measured.steps > 1 else ''}"
    )
    for heading in ("measured", "share", "planned", *(["most"] if ranks else [])):
        table.add_column(heading, justify="right")
    mean, by_rank = measured.mean, measured.terms
    for term in TERMS:
        if max(mean[term], planned[term]) < _SHOWN * measured.period:
            continue
        most = max(by_rank, key=lambda rank: by_rank[rank][term])
        worst = [f"{format_seconds(by_rank[most][term])}, rank {most}"] if ranks else []
        share = f"{mean[term] / measured.period:.0%}"
        expected = "" if term in UNPLANNED else format_seconds(planned[term])
        table.add_row(term, format_seconds(mean[term]), share, expected, *worst)
    total = format_seconds(measured.period), "100%", format_seconds(sum(planned.values()))
    table.add_row("from one step to the next", *total, style="bold")
    return table
