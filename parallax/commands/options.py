"""Code that several commands share: options, paths of plans, and printed and written results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from parallax.common.targets import load_target
from parallax.common.terminal import safe_console
from parallax.common.trust import KEYS, check_named, is_key
from parallax.config.options import folder_of_options, searchpath
from parallax.errors import ConfigError, nearest, printable
from parallax.plan.cluster import Cluster
from parallax.plan.inputs import Inputs, inputs_path
from parallax.plan.plan import Plan
from parallax.plan.schedule import SCHEDULES, named, register_schedule
from parallax.plan.schedule.own import resolve_schedule
from parallax.report.live import newest_run

RUNS = Path("runs")
HOUR = 3600.0


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the positional arguments for settings, ``key=value``."""
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings, such as trainer.steps=200, in Hydra's grammar; docs/configuration.md lists all",
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="a folder of your own options, laid out as configs/: GROUP/OPTION.yaml",
    )


def with_options_of(folder: str, overrides: Sequence[str]) -> list[str]:
    """Return ``overrides`` and, before them, the override that adds ``folder``, a folder of option files, to Hydra's
    search path."""
    return [searchpath(folder_of_options("--config-dir", folder)), *overrides]


def add_class_paths(parser: argparse.ArgumentParser) -> None:
    """Add the option by which the user allows class paths in a file to be imported."""
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="permission to import a class path that the run or plan names, such as model.target=package.module:name; "
        "also for plan.schedule and data.target",
    )


def class_paths_of(parsed: argparse.Namespace) -> dict[str, str]:
    """Return a mapping from setting to class path, for the class paths on the command line."""
    named: dict[str, str] = {}
    for word in parsed.overrides:
        key, _, value = word.partition("=")
        if not is_key(key) or ":" not in value:
            raise ConfigError(
                f"{printable(word)}: the files have the settings; accepted are the class paths that they name, "
                f"{', '.join(KEYS)}=package.module:name"
            )
        named[key] = value
    return named


def trusting(class_paths: Mapping[str, str]) -> Callable[[Path, Mapping[str, str]], None]:
    """Return a function that checks the class paths in a stored configuration (:mod:`parallax.common.trust`).
    ``class_paths``: the class paths on this command line, each of which the file must contain."""

    def check(file: Path, found: Mapping[str, str]) -> None:
        for key, typed in class_paths.items():
            if typed != found.get(key):
                named = f"says {key}={found[key]}" if key in found else f"names no {key}"
                raise ConfigError(
                    f"{key}={printable(typed)}: {printable(f'{file} {named}')}, and the file's settings apply; "
                    "leave it out"
                )
        check_named(file, found, [f"{key}={typed}" for key, typed in class_paths.items()])

    return check


def with_schedule(plan: Plan, file: Path, class_paths: dict[str, str]) -> Plan:
    """Return ``plan``, which was read from ``file``, with its schedule looked up by name.

    If the schedule is a user's function, it is imported. Raises :class:`ConfigError` unless ``class_paths``, the class
    paths on the command line, contain the function (:mod:`parallax.common.trust`).
    """
    key, typed, name = "plan.schedule", class_paths.get("plan.schedule", ""), plan.schedule.name
    if name in SCHEDULES or ":" in name:
        if typed not in ("", name):
            raise ConfigError(
                f"{key}={printable(typed)}: the schedule of {printable(str(file))} is {name}"
            )
        if name not in SCHEDULES:
            check_named(file, {key: name}, [f"{key}={typed}"])
        return replace(plan, schedule=resolve_schedule(name).with_group(plan.schedule.group))
    # A name given by parallax.register_schedule does not identify the function.
    if not typed:
        raise ConfigError(
            f"{printable(str(file))} has the schedule {name}, which is not registered here: add "
            f"{key}=package.module:function, its function"
        )
    register_schedule(name, load_target(key, typed))
    return replace(plan, schedule=named(name))


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the switch to JSON output."""
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def add_checkpoint(parser: argparse.ArgumentParser, weights: Sequence[str] = ()) -> None:
    """Add the options that choose a checkpoint of a run. ``weights``: also add the option that chooses one of these
    kinds of weights."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--best",
        action="store_true",
        help="the checkpoint with the best checkpoint.metric, or else validation loss; by default the last",
    )
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of step N")
    if weights:
        parser.add_argument(
            "--weights",
            choices=weights,
            help="trained: the weights of the step; ema: their averages; by default those that the run validates with",
        )


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a plan file."""
    parser.add_argument(
        "plan",
        type=Path,
        metavar="PLAN",
        help="a plan file, or the directory of a run, or its name",
    )


def console_of(parsed: argparse.Namespace) -> Console:
    """Return the console for text that people read. The console writes to stderr if stdout is used for JSON. If the
    output is a file, tables may be wider than a terminal."""
    return safe_console(stderr=parsed.json)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument for a run; by default the newest run."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="the name or directory of a run (default: the newest)"
    )


def run_directory(named: str | None) -> Path:
    """Return the directory of a run. ``named``: the name or the directory of the run; None: the newest run."""
    if named is None:
        if (newest := newest_run(RUNS)) is None:
            raise ConfigError(f"there is no run in {RUNS}/: name one, or start one in this folder")
        return newest
    for path in (RUNS / named, Path(named)):
        with suppress(OSError, ValueError):
            if path.is_dir():
                return path
    raise ConfigError(f"{_no_run(named)}, and it is no directory")


def _no_run(name: str) -> str:
    """Return the message that no run is called ``name``, with the most similar name of a run."""
    with suppress(OSError):
        found = [each.name for each in RUNS.iterdir() if each.is_dir()]
        return (
            f"{printable(name)}: no run has this name in {RUNS}/{printable(nearest(name, found))}"
        )
    return f"{printable(name)}: no run has this name in {RUNS}/"


def print_json(data: Any) -> None:
    """Print ``data`` as one line of JSON."""
    print(json.dumps(data))


def price_per_hour(cluster: Cluster) -> float:
    """Return the price per hour of all devices of the cluster; 0 if prices are unknown."""
    return sum(device.price_per_hour for device in cluster.devices)


def plan_file(path: Path) -> Path:
    """Return the plan file for ``path``, which is a plan file, a run directory or the name of a run."""
    try:
        if path.is_dir():
            return path / "plan.yaml"
        if path.exists():
            return path
        if (RUNS / path).is_dir():
            return RUNS / path / "plan.yaml"
        alone = len(path.parts) == 1 and not path.suffix
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{printable(str(path))[:100]}: no plan can be there ({printable(str(error))[-100:]})"
        ) from error
    if alone:
        raise ConfigError(f"{_no_run(path.name)}, and no plan file")
    return path


def read_plan(path: Path, class_paths: dict[str, str]) -> tuple[Plan, Inputs]:
    """Return the plan at ``path`` (a plan file, a run directory or the name of a run), with its schedule imported, and
    the :class:`Inputs` from which it was made. ``class_paths``: the class paths on the command line. Raises
    :class:`ConfigError` if the schedule is a user's function that ``class_paths`` does not contain."""
    file = plan_file(path)
    plan, inputs = Plan.load(file), Inputs.load(inputs_path(file))
    inputs.check(plan)
    return with_schedule(plan, file, class_paths), inputs


def check_writable(option: str, path: Path) -> None:
    """Raise :class:`ConfigError`, which names the command-line option ``option``, if ``path`` cannot be written. Call
    this function before work whose result is written there."""
    if path.is_dir() or not path.parent.is_dir():
        reason = (
            "it is a folder" if path.is_dir() else f"{printable(str(path.parent))} is no folder"
        )
        raise ConfigError(f"{option} {printable(str(path))}: cannot be written ({reason})")


@contextmanager
def writing(option: str, path: Path) -> Iterator[Path]:
    """Yield ``path`` for writing. An OSError in the context becomes a :class:`ConfigError` that names ``option``."""
    check_writable(option, path)
    try:
        yield path
    except OSError as error:
        raise ConfigError(
            f"{option} {printable(str(path))}: cannot be written ({error.strerror})"
        ) from error
