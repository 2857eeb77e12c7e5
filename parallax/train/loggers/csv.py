"""Write ``metrics.csv`` in the run directory, with a column for each figure, and a row for each step and each
evaluation."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from parallax.train.loggers.destination import LoggedRun, Point

Row = dict[str, str | float]


def load() -> None:
    """No-op: this logger needs only Python's standard library."""


def open_run(run: LoggedRun, id: str, *, new: bool, last: int) -> CsvTable:
    """Return the table of ``run`` with the rows up to step ``last``."""
    del id, new
    return CsvTable(run.directory / "metrics.csv", last)


class CsvTable:
    """A table to which rows are appended. The file is rewritten only if a figure needs a new column."""

    replaces = True
    held = None

    def __init__(self, path: Path, last: int) -> None:
        self._path, self._columns = path, ["step"]
        rows = [row for row in _rows(path) if _step(row) is not None]
        self._rewrite([row for row in rows if (_step(row) or 0) <= last])

    def write(self, points: Sequence[Point]) -> None:
        rows: list[Row] = [{"step": step, **figures} for step, figures in points]
        if any(row.keys() - set(self._columns) for row in rows):
            self._rewrite([*_rows(self._path), *rows])
            return
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerows(rows)

    def close(self, *, failed: bool) -> None:
        """No-op: the file is complete after each write."""

    def _rewrite(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self._columns = list(dict.fromkeys([*self._columns, *(key for row in rows for key in row)]))
        partial = self._path.with_suffix(".partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(self._path)


def _rows(path: Path) -> list[Row]:
    """Return the complete rows of a table."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [
                row for row in csv.DictReader(file) if None not in row and None not in row.values()
            ]
    except FileNotFoundError:
        return []


def _step(row: Row) -> int | None:
    step = str(row.get("step", ""))
    return int(step) if step.isdecimal() else None
