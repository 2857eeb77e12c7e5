"""What several commands have in common: options, where a plan's file is, how results are printed and written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from parallax.errors import ConfigError, printable
from parallax.plan.cluster import Cluster
from parallax.plan.inputs import Inputs, inputs_path
from parallax.plan.plan import Plan

RUNS = Path("runs")
HOUR = 3600.0
FILE_WIDTH = 120  # columns of what is not printed to a terminal


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Settings as ``key=value``."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings in Hydra's override grammar")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The switch to output for programs."""
    parser.add_argument("--json", action="store_true", help="print it for programs, as one line of JSON")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The plan file that a command is about."""
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan file, or the directory of a run")


def console_of(parsed: argparse.Namespace) -> Console:
    """Where people read: beside the output where that is for programs; tables in a file have room."""
    console = Console(stderr=parsed.json)
    return console if console.is_terminal else Console(stderr=parsed.json, width=FILE_WIDTH)


def print_json(data: Any) -> None:
    """One line."""
    print(json.dumps(data))


def price_per_hour(cluster: Cluster) -> float:
    """What all devices cost; 0 where no price was given."""
    return sum(device.price_per_hour for device in cluster.devices)


def plan_file(path: Path) -> Path:
    """The plan file that ``path`` means: itself, or that of a run's directory."""
    return path / "plan.yaml" if path.is_dir() else path


def read_plan(path: Path) -> tuple[Plan, Inputs]:
    """A plan with what it was made from."""
    file = plan_file(path)
    plan, inputs = Plan.load(file), Inputs.load(inputs_path(file))
    inputs.check(plan)
    return plan, inputs


@contextmanager
def writing(option: str, path: Path) -> Iterator[Path]:
    """A file that cannot be written is the user's mistake, named by the option that asked for it."""
    try:
        yield path
    except OSError as error:
        raise ConfigError(f"{option} {printable(str(path))}: cannot be written ({error.strerror})") from error
