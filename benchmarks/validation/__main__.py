"""``python -m benchmarks.validation FILE.csv… [--calibrate A.csv --evaluate B.csv] [--json]``

Every file is recognised by its columns, predicted, and printed line by line against what was measured, with the means
at the end. With ``--json`` the last line of the output is one JSON object that has each figure twice: as
``{"vtrain": {"regret_mean": …}}`` and as ``{"vtrain.regret_mean": …}``.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.validation import mist, vtrain, zero_bubble
from benchmarks.validation.table import Row, Table
from parallax.errors import DataError, UserError, printable

CHECKS: dict[str, tuple[frozenset[str], Callable[[Path], Table]]] = {
    "zero_bubble": (zero_bubble.COLUMNS, zero_bubble.check),
    "mist": (mist.COLUMNS, mist.check),
    "vtrain": (vtrain.COLUMNS, vtrain.check),
}
"""Columns by which a file is recognised, and what checks it."""

UNCHECKED: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"partitions", "gpipe_params", "tgpipe_params"}),
        "memory of AmoebaNet-D: the planner needs its blocks, which the table does not give",
    ),
    (
        frozenset({"torchgpipe_x", "gpipe_x"}),
        "speed-up of AmoebaNet-D: the planner needs the seconds of its blocks, which the table does not give",
    ),
)
"""Files that are known, and why they are not checked."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the files; the exit code is 2 where one is not understood."""
    options = _parse(arguments)
    try:
        tables = check_all(options.files, options.calibrate, options.evaluate)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for table in tables.values():
        print("\n".join(report(table)))
    if options.json:
        print(json.dumps(summarise(tables)))
    return 0


def check_all(
    files: Sequence[Path], calibration: Path | None, evaluation: Path | None
) -> dict[str, Table]:
    """The tables by the name of their check. Files that are known not to be checked are named."""
    tables: dict[str, Table] = {}
    for path in files:
        name = recognise(path)
        if name not in CHECKS:
            print(f"{path.name}: not checked ({name})")
            continue
        if name in tables or (name == "vtrain" and calibration):
            raise DataError(f"{path}: a second table of {name}; check one at a time")
        tables[name] = check(path, CHECKS[name][1])
    if calibration and evaluation:
        for path in (calibration, evaluation):
            if recognise(path) != "vtrain":
                raise DataError(
                    f"{path}: --calibrate and --evaluate take files with the columns of vtrain"
                )
        tables["vtrain"] = vtrain.check(calibration, evaluation)
    return tables


def recognise(path: Path) -> str:
    """The name of the check for a file, or the reason why there is none; :class:`DataError` for unknown columns."""
    found = _columns(path)
    for name, (columns, _) in CHECKS.items():
        if columns <= found:
            return name
    for columns, reason in UNCHECKED:
        if columns <= found:
            return reason
    shown = printable(", ".join(sorted(found)))[:200] or "none"
    raise DataError(
        f"{path}: unknown columns ({shown}); known are the columns of {', '.join(CHECKS)}"
    )


def check(path: Path, judge: Callable[[Path], Table]) -> Table:
    """The checked lines of a file; :class:`DataError` where one is not as its columns promise."""
    try:
        return judge(path)
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise DataError(
            f"{path}: a line cannot be read ({type(error).__name__}: {printable(str(error))})"
        ) from error


def _columns(path: Path) -> set[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            names = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {printable(str(error))}") from error
    return {name.strip().lstrip("#").strip() for name in names}


def report(table: Table) -> list[str]:
    """The lines of a table, aligned, and its means."""
    cells = [("", "", "predicted", "measured", "error"), *(_cells(row) for row in table.rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in pairs
        )
        for pairs in (list(enumerate(zip(line, widths))) for line in cells)
    ]
    means = [f"{name} = {value:.4g}" for name, value in table.summary.items()]
    return [f"== {table.name}", *(line.rstrip() for line in lines), *means, ""]


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    error = f"{row.error:+.4f}" if row.share else f"{row.error:+.1%}"
    unit = f" {row.unit}" if row.unit else ""
    return row.case, row.quantity, f"{row.predicted:.5g}{unit}", f"{row.measured:.5g}{unit}", error


def summarise(tables: Mapping[str, Table]) -> dict[str, Any]:
    """The figures of all tables, nested and flat."""
    nested = {name: table.summary for name, table in tables.items()}
    flat = {
        f"{name}.{key}": value
        for name, table in tables.items()
        for key, value in table.summary.items()
    }
    return {**nested, **flat}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validation", description=__doc__.splitlines()[2]
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE.csv",
        help="tables, recognised by their columns",
    )
    parser.add_argument(
        "--calibrate", type=Path, metavar="A.csv", help="vTrain lines to fit the efficiency to"
    )
    parser.add_argument(
        "--evaluate", type=Path, metavar="B.csv", help="vTrain lines to judge it on"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    if bool(options.calibrate) != bool(options.evaluate):
        parser.error("--calibrate and --evaluate belong together")
    if not options.files and not options.calibrate:
        parser.error("give at least one FILE.csv, or --calibrate A.csv --evaluate B.csv")
    return options


if __name__ == "__main__":
    sys.exit(main())
