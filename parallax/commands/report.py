"""``parallax report``: the results of a sweep or a run as a table, CSV, charts and a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from parallax.common.terminal import safe_console
from parallax.errors import ConfigError, printable
from parallax.report.scaling import print_results, write_report
from parallax.run.sweep.results import find_folder, read_results

EXAMPLES = """examples:
  parallax report scaling                               the sweep in runs/scaling: runs/scaling/report/report.html
  parallax report rates --metric validation_accuracy     the best point by a number of summary.json or metrics.jsonl
  parallax report runs/deeper                           one run, as a sweep of one point
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "results",
        type=Path,
        metavar="SWEEP",
        help="the name or the directory of a sweep, or of a run",
    )
    parser.add_argument(
        "--metric",
        default="",
        metavar="NAME",
        help="the metric that is shown and by which the best point is chosen: a number of the runs' summary.json, or a "
        "column of their metrics.jsonl (its last value); default: checkpoint.metric",
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    console = safe_console()
    folder = find_folder(parsed.results)
    results = read_results(folder, parsed.metric)
    if not results.points:
        raise ConfigError(f"{folder} has no points yet: run the sweep first")
    print_results(results, console)
    try:
        with console.status("drawing"):
            written = write_report(results, folder / "report")
    except OSError as error:
        where = printable(str(error.filename or folder / "report"))
        raise ConfigError(f"cannot write {where}: {error.strerror}; make it writable") from error
    several = len(results.points) > 1  # one point has nothing to be compared with
    for name, reason in written.missing.items() if several else ():
        console.print(f"not drawn, {name}: it needs {reason}", highlight=False, soft_wrap=True)
    console.print(f"results: {written.page}", highlight=False, markup=False, soft_wrap=True)
    return 0
