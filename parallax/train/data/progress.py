"""Progress of work that takes long: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import DownloadColumn, Progress, ProgressColumn, Task
from rich.text import Text

from parallax.common.units import format_bytes

_SHOWN_AFTER_SECONDS = 1.0
_LINE_SECONDS = 10.0  # between two lines where there is no terminal


class _RateColumn(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.4g} {self._unit}/s" if task.speed else "")


class _ProgressLines:
    """Prints a line about the progress from time to time."""

    def __init__(self, console: Console, title: str, total: int | None, *, in_bytes: bool) -> None:
        self._console, self._title, self._total = console, title, total
        self._named = format_bytes if in_bytes else str
        self._done, self._printed_at = 0, time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._printed_at < _LINE_SECONDS:
            return
        self._printed_at = time.monotonic()
        of = f" of {self._named(self._total)}" if self._total else ""
        share = f" ({self._done / self._total:.0%})" if self._total else ""
        line = f"{self._title}: {self._named(self._done)}{of}{share}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def progress(
    title: str, total: int | None, *, quiet: bool, in_bytes: bool = False, rate: str = ""
) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a progress bar with this ``title``, which appears after a second. ``total``: the
    final count; None if unknown. ``in_bytes``: whether the bar counts bytes. ``rate``: the unit of the speed to show,
    if any. If stderr is no terminal, a line is printed there every ten seconds instead."""
    console = Console(stderr=True)
    if not quiet and not console.is_terminal:
        yield _ProgressLines(console, title, total, in_bytes=in_bytes).advance
        return
    columns = [*Progress.get_default_columns(), *([DownloadColumn()] if in_bytes else [])]
    columns += [_RateColumn(rate)] if rate else []
    bar = Progress(*columns, console=console, disable=quiet)
    task, begun = bar.add_task(title, total=total), time.monotonic()

    def advance(count: int) -> None:
        bar.update(task, advance=count)
        if not bar.live.is_started and time.monotonic() - begun > _SHOWN_AFTER_SECONDS:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:  # rich prints an empty line for a bar that nobody has seen
            bar.stop()
