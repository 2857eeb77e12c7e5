"""Print untrusted text (names, paths, messages of exceptions) to the terminal safely.

Characters that would control the terminal or start a new line are escaped. Only tracebacks, and tables that contain
:class:`~rich.text.Text`, are printed in several lines.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from parallax.errors import printable

FILE_WIDTH = 120  # columns of output that does not go to a terminal
OURS = "parallax: "  # prefix of the line with the reason why a run ended
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
_SHORTENED = (
    "(frames of Parallax and of libraries are left out; PARALLAX_TRACEBACK=full shows them)"
)


def lines(text: str) -> str:
    """Return ``text`` with unprintable characters escaped, except line ends.

    A line after the first is indented if it begins like a message of Parallax, so that the text cannot imitate a
    message.
    """
    first, *more = text.split("\n")
    return "\n".join([printable(first), *(_indented(printable(line)) for line in more)])


def _indented(line: str) -> str:
    return f"  {line}" if line.startswith(OURS) else line


def print_exception(error: BaseException) -> str:
    """Return Python's traceback of ``error`` as escaped text.

    If the user's code raised the error, only the frames of that code and the last frame are included. The environment
    variable ``PARALLAX_TRACEBACK=full`` includes all frames.
    """
    trace = traceback.TracebackException.from_exception(error)
    short = os.environ.get("PARALLAX_TRACEBACK") != "full" and _shorten(trace, set())
    text = lines("".join(trace.format()).rstrip("\n"))
    return f"{_SHORTENED}\n{text}\n" if short else f"{text}\n"


def _shorten(trace: traceback.TracebackException | None, seen: set[int]) -> bool:
    """Keep only the frames of the user's code in ``trace`` and in its causes, as :func:`_frames_of_user` selects them.

    Return whether any frame was removed. ``seen``: ids of exceptions that were shortened before.
    """
    if trace is None or id(trace) in seen:
        return False
    seen.add(id(trace))
    before = [_shorten(each, seen) for each in (trace.__cause__, trace.__context__)]
    kept = _frames_of_user(trace.stack)
    shorter = len(kept) < len(trace.stack)
    trace.stack = traceback.StackSummary.from_list(kept)
    return shorter or any(before)


def _frames_of_user(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code and the last frame.

    All frames are returned if Parallax itself raised the exception, or if Parallax called no code of the user.
    """
    ours = [frame.filename.startswith(_OURS) for frame in frames]
    below = ours.index(True) if True in ours else len(frames)
    users = [frame for frame in frames[below:] if _is_users(frame.filename)]
    if not users or ours[-1]:
        return frames
    return users if frames[-1] is users[-1] else [*users, frames[-1]]


def _is_users(file: str) -> bool:
    return not (
        file.startswith((_OURS, _PYTHON, "<frozen"))
        or {"site-packages", "dist-packages"} & set(Path(file).parts)
    )


class SafeConsole(Console):
    """A rich console that escapes control characters in printed text and does not interpret markup in it."""

    def render_str(self, text: str, **given: Any) -> Text:
        """Return ``text`` escaped, on one line. Pass a :class:`~rich.text.Text` to print several lines."""
        return super().render_str(printable(text), **given)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield rich's segments with escaped text. Control segments, which rich itself created, are unchanged."""
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.replace("\n", "").isprintable():
                yield segment
            else:
                yield segment._replace(text="\n".join(map(printable, text.split("\n"))))


def accept_any_text() -> None:
    """Make stdout and stderr print ``?`` for characters that their encoding (such as ASCII or Latin-1) lacks.

    Tables then use ASCII lines, because rich checks the encoding.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def safe_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that escapes printed text.

    ``width`` None means the width of the terminal, or :data:`FILE_WIDTH` columns if the output is not a terminal.
    """
    console = SafeConsole(stderr=stderr, width=width, markup=False, emoji=False)
    if width is None and not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


class SafeFormatter(logging.Formatter):
    """Formats each log record as one line of escaped text. A traceback follows in further lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging defines this name
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return lines(super().format(record))
