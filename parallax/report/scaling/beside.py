"""The second table of ``parallax report``: selected figures of a run or of a sweep's points, and published figures for
comparison."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from parallax.common.units import format_seconds
from parallax.errors import ConfigError, printable

NAME = "name"
_FIGURE = re.compile(r"([\w./@-]+?)(?: ([*/]) ([0-9.]+))?")
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Figures that ``parallax report`` shows in a second table.

    ``columns``: heading → figure, for each column of the table. A figure is a number in the run's ``summary.json``
    (GROUP.NAME for a number in a group), or the last value of a column in the run's ``metrics.jsonl``. It may be
    multiplied or divided by a number, as in ``wall_seconds / 2``. ``published``: rows of published figures, shown below
    the rows of the runs. Each row is a mapping from headings to texts; the text for ``name`` is the source of the
    figures.
    """

    columns: dict[str, str] = field(default_factory=dict)
    published: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for heading, text in self.columns.items():
            if not isinstance(text, str) or not _FIGURE.fullmatch(text):
                raise ConfigError(
                    f"report.columns: {printable(heading)}={printable(str(text))}: accepted is a name in summary.json, "
                    "such as wall_seconds, or NAME / NUMBER"
                )
        for row in self.published:
            unknown = set(row) - {NAME, *self.columns} if isinstance(row, Mapping) else {str(row)}
            if unknown:
                raise ConfigError(
                    f"report.published: {printable(', '.join(map(str, sorted(unknown))))}: accepted are mappings with "
                    f"the keys {', '.join((NAME, *self.columns))}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all numbers in ``columns``."""
        return tuple(_parts(text)[0] for text in self.columns.values())


def beside_table(config: ReportConfig, points: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table of ``config``. ``points``: name of each point → its numbers."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("", overflow="fold")
    for heading in config.columns:
        table.add_column(printable(heading), justify="right")
    for name, numbers in points.items():
        cells = (_cell(text, numbers) for text in config.columns.values())
        table.add_row(*map(Text, (printable(name), *cells)))
    for row in config.published:
        cells = (str(row.get(heading, "-")) for heading in config.columns)
        table.add_row(*(Text(printable(cell)) for cell in (str(row.get(NAME, "")), *cells)))
    return table


def _parts(text: str) -> tuple[str, float]:
    """Return the name in ``text``, a figure such as ``wall_seconds / 2``, and the factor by which the number of this
    name is multiplied."""
    found = _FIGURE.fullmatch(text)
    assert found is not None
    name, operation, number = found.groups()
    factor = float(number or 1)
    return name, 1 / factor if operation == "/" else factor


def _cell(text: str, numbers: Mapping[str, float]) -> str:
    name, factor = _parts(text)
    if name not in numbers:
        return "-"
    value = numbers[name] * factor
    if name.endswith("_bytes"):
        return f"{value / _MIB:,.2f} MiB"
    return format_seconds(value) if "seconds" in name else f"{value:.10g}"
