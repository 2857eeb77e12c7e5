"""A progress bar for reading data before training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import DownloadColumn, Progress, ProgressColumn, Task
from rich.text import Text

_SHOWN_AFTER_SECONDS = 1.0


class _RateColumn(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.4g} {self._unit}/s" if task.speed else "")


@contextlib.contextmanager
def progress(
    title: str, total: int | None, *, quiet: bool, in_bytes: bool = False, rate: str = ""
) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a progress bar, which appears after a second. ``total``: the final count; None if
    unknown. ``in_bytes``: whether the bar counts bytes. ``rate``: the unit of the speed to show, if any."""
    columns = [*Progress.get_default_columns(), *([DownloadColumn()] if in_bytes else [])]
    columns += [_RateColumn(rate)] if rate else []
    bar = Progress(*columns, console=Console(stderr=True), disable=quiet)
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
