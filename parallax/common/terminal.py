"""Print to the terminal with untrusted text (names, paths, messages of exceptions) escaped.

Text is printed as written, except that characters that would control the terminal or start a new line are escaped. Only
tracebacks, and tables with :class:`~rich.text.Text`, have several lines.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from parallax.errors import printable

FILE_WIDTH = 120  # columns of output that does not go to a terminal
OURS = "parallax: "  # prefix of the line with the reason why a run ended


def lines(text: str) -> str:
    """Return ``text`` with unprintable characters except line ends escaped. Later lines that begin like a message of
    Parallax are indented, so that foreign text cannot imitate one."""
    first, *more = text.split("\n")
    return "\n".join([printable(first), *(_indented(printable(line)) for line in more)])


def _indented(line: str) -> str:
    return f"  {line}" if line.startswith(OURS) else line


def print_exception(error: BaseException) -> str:
    """Return Python's traceback of ``error``, escaped."""
    text = "".join(traceback.format_exception(error)).rstrip("\n")
    return lines(text) + "\n"


class SafeConsole(Console):
    """A console that escapes control characters in printed text and ignores markup in it; its own styles still work."""

    def render_str(self, text: str, **given: Any) -> Text:
        """Return text on one line, escaped; pass a :class:`~rich.text.Text` for several lines."""
        return super().render_str(printable(text), **given)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of escaped text, and rich's own control segments unchanged."""
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.replace("\n", "").isprintable():
                yield segment
            else:
                yield segment._replace(text="\n".join(map(printable, text.split("\n"))))


def accept_any_text() -> None:
    """Make the output and error streams accept any text: characters outside their encoding (ASCII, Latin-1) become
    ``?``. Tables use ASCII lines there (rich checks the encoding)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def safe_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that escapes the text in tables and lines. ``width``: None for that of the terminal, or
    :data:`FILE_WIDTH` columns if the output goes elsewhere."""
    console = SafeConsole(stderr=stderr, width=width, markup=False, emoji=False)
    if width is None and not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


class SafeFormatter(logging.Formatter):
    """Formats escaped log records, one line each except tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging defines this name
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return lines(super().format(record))
