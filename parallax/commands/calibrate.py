"""``parallax calibrate``: correct the profile with which a run was planned, by the run's measured times.

The corrected profile is written into the run directory and into the cache of profiles, so the next plan of the same
model on this machine uses it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from parallax.commands.options import (
    RUNS,
    add_class_paths,
    add_json,
    class_paths_of,
    console_of,
    print_json,
    trusting,
)
from parallax.common.units import format_seconds
from parallax.run.feedback import CALIBRATED, correct
from parallax.run.prepare import PreparedRun
from parallax.run.working import working

EXAMPLES = """examples:
  parallax calibrate runs/deeper                        after `parallax train name=deeper`
  parallax calibrate deeper --json
  parallax calibrate theirs model.target=mymodel:build  a run made elsewhere, with its model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run, or its name")
    add_class_paths(parser)
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    console = console_of(parsed)
    directory = parsed.run if parsed.run.is_dir() else RUNS / parsed.run
    with working(console, "calibrating") as work:
        found = PreparedRun.read(directory, trusting(class_paths_of(parsed)))
        work.limit(found.config.trainer)
        corrected = correct(found.directory, found.config, found.plan, work)
    if parsed.json:
        names = (
            "measured_seconds",
            "first_seconds",
            "first_error",
            "second_seconds",
            "second_error",
        )
        print_json(
            {**{name: getattr(corrected, name) for name in names}, "profile": str(corrected.path)}
        )
        return 0
    console.print(
        f"measured: {format_seconds(corrected.measured_seconds)} per step", highlight=False
    )
    for name, seconds, error in (
        ("before", corrected.first_seconds, corrected.first_error),
        ("now", corrected.second_seconds, corrected.second_error),
    ):
        console.print(
            f"predicted {name}: {format_seconds(seconds)} ({error:+.1%})", highlight=False
        )
    console.print(
        f"profile: {found.directory / CALIBRATED}; the next plan of this model uses it",
        soft_wrap=True,
    )
    return 0
