"""One frame of ``parallax top``: the ranks of a run as a table that fits into the terminal.

Columns without a figure are hidden. If the remaining columns are too wide, memory is shown as a percentage and the step
only in the heading. If the columns are still too wide, the least important columns are left out, and the last line
names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.text import Text

from parallax.common.units import format_bytes, format_seconds
from parallax.errors import printable
from parallax.report.live import LiveRun, RunState
from parallax.report.ranks import RankSnapshot

SORTS = {"m": "memory", "s": "stall", "r": "rank"}
_KEYS = "keys: m by memory, s by stall, r by rank, q quit"
_SPARKS = "▁▂▃▄▅▆▇█"
_FULL, _LOST = 0.9, 0.1  # shares that are marked: of a budget, and of a step spent waiting
_COLOURS = {
    RunState.TRAINING: "green",
    RunState.STARTING: "cyan",
    RunState.FAILING: "bold red",
    RunState.DEAD: "bold red",
}
_SHORT_ACTIONS = {
    "receive_activation": "recv act",
    "receive_gradient": "recv grad",
    "send_activation": "send act",
    "send_gradient": "send grad",
    "backward_weight": "weights",
}


@dataclass(frozen=True)
class _Column:
    """A column of the table.

    ``cell(rank)``    returns the text for a rank
    ``importance``    the least important columns are left out first
    ``marked(rank)``  returns whether the text is red
    ``left``          whether the text is aligned to the left
    """

    heading: str
    cell: Callable[[RankSnapshot], str]
    importance: int
    marked: Callable[[RankSnapshot], bool] = lambda rank: False
    left: bool = False


def frame(
    run: LiveRun, width: int, height: int, sort: str = "rank", *, keys: bool = True
) -> RenderableType:
    """Return the frame for a terminal of ``width`` × ``height`` characters. ``sort``: the order of the ranks, one of
    :data:`SORTS`. ``keys``: whether the last line lists the keys that the user can press."""
    head = _head(run, width)
    ranks = sorted(run.ranks, key=_order(sort))
    columns, hidden = _fitting(run, width)
    fit = max(1, height - len(head) - 3)
    shown = ranks if len(ranks) <= fit + 1 else ranks[:fit]
    rows = _rows(run, columns, shown) if ranks else []
    more = [f"{len(ranks) - len(shown)} more ranks"] if len(shown) < len(ranks) else []
    foot = [*more, *([f"too narrow for: {', '.join(hidden)}"] if hidden else [])]
    foot += [_KEYS] if keys else []
    end = [Text("; ".join(foot), style="dim", no_wrap=True, overflow="ellipsis")] if foot else []
    return Group(*head, *rows, *end)


def _head(run: LiveRun, width: int) -> list[Text]:
    colour = _COLOURS.get(run.state, "bold")
    first = Text(no_wrap=True, overflow="ellipsis")
    first.append(f"{printable(str(run.directory))}  ", style="bold")
    first.append(printable(run.message), style=colour)
    if run.steps:
        first.append(f"  step {run.step} of {run.steps}")
    if run.seconds_left is not None:
        first.append(f"  {_clock(run.seconds_left)} left")
    speed = [
        *([f"{_count(run.rows_per_second)} rows/s"] if run.rows_per_second else []),
        *([f"{_count(run.tokens_per_second)} tokens/s"] if run.tokens_per_second else []),
        *([f"MFU {_percent(run.utilization)}"] if run.utilization else []),
    ]
    seconds = max((rank.step_seconds or 0.0 for rank in run.ranks), default=0.0)
    speed += [f"{format_seconds(seconds)} a step"] if seconds else []
    lines = [first, Text("  ".join(speed), no_wrap=True, overflow="ellipsis")] if speed else [first]
    if run.losses:
        words = f"loss {run.losses[-1]:.4f}  "
        spark = sparkline(run.losses, max(8, min(width - len(words), 100)))
        lines.append(Text(words).append(spark, style="cyan"))
    return [*lines, Text("")]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return ``values`` as at most ``width`` bars. If there are more than ``width`` values, each bar is the mean of
    several values."""
    count = min(width, len(values))
    bounds = [len(values) * place // count for place in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def _order(sort: str) -> Callable[[RankSnapshot], tuple[float, int]]:
    def key(rank: RankSnapshot) -> tuple[float, int]:
        if sort == "memory":
            return -(_share(rank.device_bytes, rank.device_budget_bytes) or 0.0), rank.rank
        return (-(rank.stall_share or 0.0) if sort == "stall" else 0.0), rank.rank

    return key


# ------------------------------------------------------------------------------------------- columns


def _fitting(run: LiveRun, width: int) -> tuple[list[_Column], list[str]]:
    """Return the columns that fit into ``width``, and the headings of those that are left out."""
    for level in range(3):
        columns = _known(run, _columns(run, level))
        if _width(run, columns) <= width:
            return columns, []
    hidden: list[str] = []
    while _width(run, columns) > width and len(columns) > 1:
        least = min(columns, key=lambda column: column.importance)
        hidden.append(least.heading)
        columns.remove(least)
    return columns, hidden


def _columns(run: LiveRun, level: int) -> list[_Column]:
    """Return all columns. ``level`` is from 0 (the widest columns) to 2 (the narrowest ones)."""
    steps = [rank.step for rank in run.ranks]
    apart = max(steps, default=0) > min(steps, default=0) + 1  # a difference of one step is normal
    unit = "/s" if level == 0 else ""
    return [
        _Column("rank", lambda rank: str(rank.rank), 100),
        _Column("stage", lambda rank: str(rank.stage), 90),
        _Column("replica" if level == 0 else "rep", lambda rank: str(rank.replica), 80),
        _Column("doing", lambda rank: _doing(run, rank, level), 95, run.is_stale, left=True),
        _Column("step", lambda rank: str(rank.step) if apart or level < 2 else "", 50),
        _Column("rows/s", lambda rank: _count(rank.rows_per_second), 60),
        _Column(
            "tokens/s" if level == 0 else "tok/s", lambda rank: _count(rank.tokens_per_second), 55
        ),
        _Column("MFU", lambda rank: _percent(rank.utilization), 70, _above_all),
        _memory("device memory" if level == 0 else "device", "device", level, 85),
        _memory("host memory" if level == 0 else "host", "host", level, 45),
        _Column("swap", lambda rank: _moved(rank.swap_bytes_per_second, unit), 65),
        _Column("stall", lambda rank: _percent(rank.stall_share), 75, _waits("stall_share")),
        _Column("input", lambda rank: _percent(rank.input_share), 74, _waits("input_share")),
        _Column("°C", lambda rank: _rounded(rank.temperature), 40),
        _Column("W", lambda rank: _rounded(rank.power_watts), 35),
    ]


def _known(run: LiveRun, columns: Sequence[_Column]) -> list[_Column]:
    """Return the columns that have a text for at least one rank."""
    return [column for column in columns if any(map(column.cell, run.ranks))]


def _width(run: LiveRun, columns: Sequence[_Column]) -> int:
    return sum(_widths(run, columns)) + max(0, len(columns) - 1)


def _widths(run: LiveRun, columns: Sequence[_Column]) -> list[int]:
    return [
        max([len(column.heading), *(len(column.cell(rank)) for rank in run.ranks)])
        for column in columns
    ]


def _rows(run: LiveRun, columns: Sequence[_Column], ranks: Sequence[RankSnapshot]) -> list[Text]:
    """Return the heading, and a line for each rank in ``ranks``. Widths are computed over all ranks of the run, so that
    sorting moves no column."""
    widths = _widths(run, columns)

    def line(texts: Sequence[str], styles: Sequence[str]) -> Text:
        found = Text(no_wrap=True, overflow="crop")
        for place, (column, width) in enumerate(zip(columns, widths)):
            text = texts[place].ljust(width) if column.left else texts[place].rjust(width)
            found.append(f"{' ' if place else ''}{text}", style=styles[place])
        return found

    heading = line([column.heading for column in columns], ["bold"] * len(columns))
    return [heading] + [
        line(
            [column.cell(rank) for column in columns],
            ["red" if column.marked(rank) else "" for column in columns],
        )
        for rank in ranks
    ]


def _doing(run: LiveRun, rank: RankSnapshot, level: int) -> str:
    """Return a text about the present activity of a rank: its action and micro-batch, or its phase; or that it has
    ended, or when it last wrote its status. ``level``: how short the text must be, from 0 (longest) to 2."""
    if rank.ended:
        return "ended"
    if run.is_stale(rank):
        ago = format_seconds(run.age(rank))
        return f"last seen {ago} ago" if level == 0 else f"seen -{ago}"
    kind, _, micro = rank.doing.partition(" of micro-batch ")
    text = f"{kind if level == 0 else _SHORT_ACTIONS.get(kind, kind)} {micro}".strip()
    most = (24, 20, 12)[level]
    return printable(text if len(text) <= most else f"{text[: most - 1]}…")


def _memory(heading: str, place: str, level: int, importance: int) -> _Column:
    def parts(rank: RankSnapshot) -> tuple[int | None, int | None]:
        return getattr(rank, f"{place}_bytes"), getattr(rank, f"{place}_budget_bytes")

    def cell(rank: RankSnapshot) -> str:
        used, budget = parts(rank)
        share = _share(used, budget)
        if used is None or budget is None or share is None:
            return ""
        if level == 0:
            return f"{format_bytes(used)} of {format_bytes(budget)} ({share:.0%})"
        return f"{_size(used)} {share:.0%}" if level == 1 else f"{_size(used)}/{_size(budget)}"

    return _Column(heading, cell, importance, lambda rank: (_share(*parts(rank)) or 0.0) > _FULL)


def _waits(name: str) -> Callable[[RankSnapshot], bool]:
    return lambda rank: (getattr(rank, name) or 0.0) > _LOST


def _above_all(rank: RankSnapshot) -> bool:
    """Return whether the utilization is above 100%, which shows that the assumed peak is too low."""
    return (rank.utilization or 0.0) > 1.0


# -------------------------------------------------------------------------------------------- figures


def _share(used: float | None, budget: float | None) -> float | None:
    return used / budget if used is not None and budget else None


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}" + ("!" if share > 1 else "")


def _rounded(number: float | None) -> str:
    return "" if number is None else f"{number:.0f}"


def _count(number: float | None) -> str:
    """Return a number with at most three digits and, from a thousand, one of the letters k, M and G; empty if
    unknown."""
    if number is None:
        return ""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return (
                f"{number / size:.3g}{letter}"
                if number < 999.5 * size
                else f"{number / size:.0f}{letter}"
            )
    return f"{number:.3g}"


def _size(count: float) -> str:
    """Return ``count`` bytes in a few characters: 6.1G."""
    number, unit = format_bytes(count).split()
    short = f"{float(number):.0f}" if float(number) >= 10 else number
    return short + unit[0]


def _moved(rate: float | None, unit: str) -> str:
    return "" if rate is None else f"{rate / 1e9:.2f}G{unit}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
