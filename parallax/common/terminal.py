"""Print untrusted text (names, paths, messages of exceptions) to the terminal safely.

Characters that would control the terminal or start a new line are escaped. Only tracebacks, and tables with
:class:`~rich.text.Text`, have several lines.
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
    """Return ``text`` with unprintable characters escaped, except line ends.

    A line after the first that begins like a message of Parallax is indented, so that the text cannot imitate a
    message.
    """
    first, *more = text.split("\n")
    return "\n".join([printable(first), *(_indented(printable(line)) for line in more)])


def _indented(line: str) -> str:
    return f"  {line}" if line.startswith(OURS) else line


def print_exception(error: BaseException) -> str:
    """Return Python's traceback of ``error``, escaped."""
    text = "".join(traceback.format_exception(error)).rstrip("\n")
    return lines(text) + "\n"


class SafeConsole(Console):
    """A rich console that escapes control characters and ignores markup in printed text. Its own styles still work."""

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
    """Make the output and error streams print ``?`` for characters that their encoding (ASCII, Latin-1) lacks.

    Tables then use ASCII lines, because rich checks the encoding.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def safe_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that escapes the text in tables and lines.

    ``width`` None means the width of the terminal, or :data:`FILE_WIDTH` columns if the output goes elsewhere.
    """
    console = SafeConsole(stderr=stderr, width=width, markup=False, emoji=False)
    if width is None and not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


class SafeFormatter(logging.Formatter):
    """Formats log records as escaped text of one line each, except tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging defines this name
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return lines(super().format(record))
