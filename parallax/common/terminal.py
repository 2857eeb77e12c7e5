"""The doors to the terminal: text of others (names, paths, messages of exceptions) goes through them as it was written,
but for what would steer a terminal or begin a line of its own. Only tracebacks have several lines, and what a table
gives as a :class:`~rich.text.Text`."""

from __future__ import annotations

import io
import logging
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from parallax.errors import printable

OURS = "parallax: "  # how the line begins that says why a run ended


def lines(text: str) -> str:
    """Escape what is not printable but the ends of lines; no line but the first can pass for one of ours."""
    first, *more = text.split("\n")
    return "\n".join([printable(first), *(_indented(printable(line)) for line in more)])


def _indented(line: str) -> str:
    return f"  {line}" if line.startswith(OURS) else line


def print_exception(error: BaseException) -> str:
    """A traceback as Python writes it, escaped."""
    text = "".join(traceback.format_exception(error)).rstrip("\n")
    return lines(text) + "\n"


class SafeConsole(Console):
    """A console that takes no markup and no control characters from what it prints; its own styles stay."""

    def render_str(self, text: str, **given: Any) -> Text:
        """What a line or a cell says, on one line: whoever wants several gives a :class:`~rich.text.Text`."""
        return super().render_str(printable(text), **given)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of text, escaped, and rich's own control segments."""
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.replace("\n", "").isprintable():
                yield segment
            else:
                yield segment._replace(text="\n".join(map(printable, text.split("\n"))))


def print_anything() -> None:
    """Let the output and error streams take any text: what their encoding has no sign for (ASCII, Latin-1) becomes
    ``?``. Tables have lines of ASCII there (rich looks at the encoding)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def safe_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Where tables and lines for people go."""
    return SafeConsole(stderr=stderr, width=width, markup=False, emoji=False)


class SafeFormatter(logging.Formatter):
    """Log records, escaped: one line each, but for the traceback of an exception."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # as logging calls it
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return lines(super().format(record))
