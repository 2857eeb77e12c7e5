"""``parallax top``: a live view of all ranks of a run, from the files in its directory."""

from __future__ import annotations

import argparse
import contextlib
import select
import sys
import termios
import tty
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from parallax.commands.options import add_json, add_run, console_of, print_json, run_directory
from parallax.errors import ConfigError
from parallax.report.live import read_live
from parallax.report.top import SORTS, frame

EXAMPLES = """examples:
  parallax top                                          the newest run in runs/; q quits
  parallax top deeper                                   a run by its name or directory, also while it plans
  ssh -t login2 'cd project && parallax top deeper'     from anywhere that sees the directory
  parallax top deeper --once                            one frame
  parallax top deeper --once --json | jq '.ranks[].mfu'
"""

_REFRESH_SECONDS = 1.0
_LINES = 1000  # lines of a frame that does not go to a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(parser)
    parser.add_argument("--once", action="store_true", help="print one frame")
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    directory, console = run_directory(parsed.run), console_of(parsed)
    if parsed.json:
        if not parsed.once:
            raise ConfigError("--json prints one state: add --once")
        print_json(read_live(directory).to_dict())
        return 0
    if parsed.once or not console.is_terminal or not sys.stdin.isatty():
        height = console.height if console.is_terminal else _LINES
        console.print(frame(read_live(directory), console.width, height, keys=False))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _watch(directory, console)
    return 0


def _watch(directory: Path, console: Console) -> None:
    """Show the run until the user presses q."""
    sort = "rank"
    with _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view = frame(read_live(directory), console.width, console.height, sort)
            live.update(view, refresh=True)
            ready, _, _ = select.select([sys.stdin], [], [], _REFRESH_SECONDS)
            key = sys.stdin.read(1) if ready else None
            if key in ("q", ""):  # also the end of the input
                return
            sort = SORTS.get(key or "", sort)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """A context in which single keys can be read from the terminal."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
