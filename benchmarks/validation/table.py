"""What every table of published measurements is turned into: rows of predicted against measured, and their means."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: the configuration it belongs to, what it is, and both values in ``unit``. A share (a bubble rate)
    is evaluated by the difference, everything else by the relative error."""

    case: str
    quantity: str
    predicted: float
    measured: float
    unit: str = ""
    share: bool = False

    @property
    def error(self) -> float:
        """Above zero where the prediction is too high."""
        difference = self.predicted - self.measured
        return difference if self.share else difference / self.measured


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of one kind of file; ``summary`` has the figures that ``--json`` prints."""

    name: str
    rows: tuple[Row, ...]
    summary: dict[str, float] = field(default_factory=dict)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file by column; names without a leading ``#`` and spaces."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        names = [name.strip().lstrip("#").strip() for name in next(reader)]
        return [dict(zip(names, (value.strip() for value in row))) for row in reader if row]
