"""Run a sweep: all points are checked before the first one starts, finished points are skipped, and a failed point does
not end the others.

The same command with the same name continues the sweep: an interrupted point resumes from its checkpoint, like any run.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from parallax.common.documents import leaves, plain_yaml
from parallax.common.files import replace_text
from parallax.common.lock import is_locked, locked
from parallax.common.signals import Stopped, exit_code, handling_requests, interrupt, stopped_by
from parallax.common.units import plural
from parallax.config import RunConfig, compose
from parallax.config.multirun import Multirun, plain
from parallax.errors import ConfigError, UserError, printable
from parallax.report.scaling import print_results
from parallax.run.job import built_model, local_cluster
from parallax.run.prepare import RUNS, free_name
from parallax.run.resume import STORED, read_stored, settings
from parallax.run.sweep.job import PointJob, SweepProgress
from parallax.run.sweep.points import (
    SWEEP,
    Point,
    PointOutcome,
    PointStatus,
    is_complete,
    outcomes,
    summary_of,
)
from parallax.run.sweep.results import read_results

_POLL_SECONDS = 1.0  # between two reads of the points' results
_SHOWN = 6  # points that the last line lists


def sweep(overrides: Sequence[str], console: Console) -> int:
    """Run the points that ``overrides`` define; return the exit code. If a point is invalid, raise :class:`ConfigError`
    before anything is started or written."""
    with handling_requests(interrupt):
        with console.status("reading the points"):
            multirun = Multirun.read(overrides)
            name = multirun.name if multirun.name != "auto" else free_name()
            folder = RUNS / name
            _check_folder(folder)
            points = _points(multirun)
            done = [point for point in points if _check_point(point, name, multirun)]
            left = [point for point in points if point not in done]
            multirun.check([_launched(point, multirun) for point in left])
        with locked(folder):
            _write(folder, overrides, points, done)
            so_far = f", {len(done)} of them done" if done else ""
            of = (
                f"{plural(len(points), 'point')}{so_far}"
                if points
                else "its sweeper finds the points"
            )
            console.print(f"sweep {name}: {of}", highlight=False, markup=False)
            try:
                if left or multirun.points is None:
                    _launch(multirun, folder, points, left)
            except Stopped as stopped:
                return _say_stopped(stopped.number, folder, multirun)
    return _print_results(folder, points, console)


def _launch(
    multirun: Multirun, folder: Path, points: Sequence[Point], left: Sequence[Point]
) -> None:
    """Run the points ``left``, those of ``points`` that are not done yet, and show their progress."""
    job = PointJob(
        sweep=folder.name,
        alike=multirun.alike,
        numbers={point.name: point.number for point in points},
        added=tuple(multirun.options.overrides),
        process=os.getpid(),
        progress=SweepProgress(len(points), len(left), quiet=not multirun.in_turn),
    )
    with _watching(folder, left, multirun, SweepProgress(len(points), len(left))):
        multirun.launch(folder, job, [_launched(point, multirun) for point in left])


def _launched(point: Point, multirun: Multirun) -> tuple[str, ...]:
    """Return a point's overrides in Hydra's syntax."""
    return (multirun.points or ())[point.number - 1]


def _check_folder(folder: Path) -> None:
    if (folder / STORED).exists():
        raise ConfigError(f"{folder} is a run, not a sweep: choose another name")


def _points(multirun: Multirun) -> list[Point]:
    """Return all points of Hydra's basic sweeper. Other sweepers choose points during the sweep. For them, return an
    empty list, and check only the settings that all points share."""
    if multirun.points is None:
        plain_overrides = [plain(word) for word in multirun.overrides]
        compose(
            [
                *multirun.options.overrides,
                *(w for w in plain_overrides if w.lstrip("~").partition("=")[0] in multirun.alike),
            ]
        )
    known = multirun.points or ()
    return [
        Point.of(number, [plain(word) for word in overrides], multirun.alike)
        for number, overrides in enumerate(known, start=1)
    ]


def _check_point(point: Point, sweep_name: str, multirun: Multirun) -> bool:
    """Return whether ``point`` of the sweep ``sweep_name`` is already done with its present settings. Raises
    :class:`ConfigError` if the settings are invalid."""
    overrides = [*multirun.options.overrides, *point.overrides, f"name={sweep_name}/{point.name}"]
    try:
        config = settings(overrides, RUNS).config
        local_cluster(config)
        built_model(config)
        config.trainer.check_steps()
    except UserError as error:
        which = f" (point {point.number}: {point.label})" if len(multirun.points or ()) > 1 else ""
        raise ConfigError(f"{error}{which}") from None
    return _is_done(RUNS / sweep_name / point.name, config)


def _is_done(directory: Path, config: RunConfig) -> bool:
    if not (directory / STORED).exists() or is_locked(directory):
        return False
    stored = leaves(plain_yaml(read_stored(directory)))
    return stored == leaves(asdict(config)) and is_complete(summary_of(directory))


def _write(
    folder: Path, overrides: Sequence[str], points: Sequence[Point], done: Sequence[Point]
) -> None:
    """Write the overrides of the sweep, and the outcomes of points that a killed process had no time to write."""
    for point in done:
        outcome = PointOutcome.load(folder / point.name)
        if outcome is None or outcome.status is not PointStatus.DONE:
            PointOutcome(point, PointStatus.DONE).save(folder / point.name)
    tree = {"overrides": list(overrides), "points": [point.name for point in points]}
    replace_text(folder / SWEEP, json.dumps(tree, indent=1))


@contextmanager
def _watching(
    folder: Path, left: Sequence[Point], multirun: Multirun, progress: SweepProgress
) -> Iterator[None]:
    """A context in which a thread prints the start and the outcome of each of the points ``left``, if a launcher runs
    the points in other processes. The thread reads the outcomes from the files in ``folder``, the folder of the
    sweep."""
    if multirun.in_turn:
        yield
        return
    ended, names = threading.Event(), {point.name for point in left}
    before = outcomes(folder)

    def poll() -> None:
        while True:
            last = ended.wait(_POLL_SECONDS)
            for name, outcome in outcomes(folder).items():
                if before.get(name) == outcome or (names and name not in names):
                    continue
                before[name] = outcome
                if outcome.status is PointStatus.RUNNING:
                    progress.begins(outcome.point, folder / name)
                else:
                    progress.ends(outcome, folder / name)
            if last:
                return

    thread = threading.Thread(target=poll, name="parallax-sweep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _say_stopped(number: int, folder: Path, multirun: Multirun) -> int:
    """Print how to continue a sweep that signal ``number`` ended; return the exit code."""
    found = outcomes(folder)
    done = sum(outcome.status is PointStatus.DONE for outcome in found.values())
    many = f"{done} of {len(multirun.points)}" if multirun.points else f"{done}"
    last = next((each for each in found.values() if each.status is PointStatus.STOPPED), None)
    where = f", in {last.point.name}: {_without_command(last.reason)}" if last is not None else ""
    if not multirun.in_turn:
        where = "; points that were submitted continue by themselves"
    print(
        f"parallax: {stopped_by(number)} after {many} points{printable(where)}; the same command with "
        f"name={folder.name} resumes the sweep",
        file=sys.stderr,
    )
    return exit_code(number)


def _without_command(reason: str) -> str:
    """Return a run's last message without the command that resumes only that run."""
    return re.sub(r"^stopped by SIG\w+ ", "", reason.partition("; `parallax train")[0])


def _print_results(folder: Path, points: Sequence[Point], console: Console) -> int:
    """Print the table of results and the unfinished points; return the exit code."""
    results = read_results(folder)
    print_results(results, console)
    console.print(
        f"`parallax report {folder.name}` draws it as charts and as a page",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    found = outcomes(folder)
    names = [point.name for point in points] or list(found)
    missing = [name for name in names if not _ended_well(found.get(name), folder / name)]
    if not missing:
        return 0
    listed = "; ".join(
        f"{name} ({_unfinished_reason(found.get(name), folder / name)})"
        for name in missing[:_SHOWN]
    )
    more = f"; and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    print(
        f"parallax: {len(missing)} of {len(names)} points are not done: {printable(listed)}{more}",
        file=sys.stderr,
    )
    return 1


def _ended_well(outcome: PointOutcome | None, directory: Path) -> bool:
    return outcome is not None and outcome.status is PointStatus.DONE and not is_locked(directory)


def _unfinished_reason(outcome: PointOutcome | None, directory: Path) -> str:
    if is_locked(directory):
        return "another process trains it still"
    if outcome is None:
        return "it was not run"
    if outcome.status is PointStatus.RUNNING:
        return "its process has gone"
    return outcome.reason
