"""The command line: words before ``key=value`` belong to the command, the rest is Hydra's override grammar."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from parallax import __version__
from parallax.errors import ParallaxError, UserError, printable

COMMANDS = {
    "train": "plan and train; under torchrun, one rank of it",
    "plan": "measure, search, and print the plan; writes plan.yaml",
    "profile": "measure, or derive, what each block costs; writes profile.json",
    "estimate": "memory that training a model needs, without any device",
    "simulate": "what every rank of a plan does when; draws and traces it",
    "explain": "why a plan looks as it does, where its bytes and seconds go, and what a run's swap did",
    "calibrate": "correct a profile by what a run measured; the next plan uses it",
    "doctor": "devices, memory, bandwidths, and what will go wrong",
}
"""Commands and what they do; each is a module of :mod:`parallax.commands`."""

PATIENCE_SECONDS = 1.5
_BROKEN = re.compile(r"gloo/|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, call, exit code: 0 well, 1 failed, 2 wrong input."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    parsed = _parser(next((word for word in typed if word in COMMANDS), None)).parse_args(typed)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("parallax").setLevel(logging.INFO)  # others' remarks (fonts, imports) are not the user's
    try:
        code: int = parsed.call(parsed)
        return code
    except (Exception, KeyboardInterrupt) as error:
        from parallax.launch import under_torchrun  # most commands do without, until they fail

        if under_torchrun():
            _leave(error)
        if isinstance(error, KeyboardInterrupt):
            return 130
        if not isinstance(error, ParallaxError):
            raise
        print(f"parallax: {error}", file=sys.stderr)
        return error.exit_code


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser with the options of the ``chosen`` command, the only one whose module is imported."""
    parser = argparse.ArgumentParser(
        prog="parallax",
        description="Train PyTorch models that are too large for their devices.",
        epilog="`parallax COMMAND --help` shows examples. Settings are key=value; configs/ lists the groups.",
    )
    parser.add_argument("--version", action="version", version=f"parallax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            module = importlib.import_module(f"parallax.commands.{name}")
            command.epilog = module.EXAMPLES
            command.set_defaults(call=module.run)
            module.add_arguments(command)
    return parser


def _leave(error: BaseException) -> NoReturn:
    """One rank's exception ends the run: say where and why, and go at once, so that torchrun stops the others.

    A connection that broke is no cause: whoever broke it says more, and torchrun stops this rank meanwhile. It would
    stop the one that speaks, too, if another left first.
    """
    from parallax.launch import speaks_first

    if isinstance(error, KeyboardInterrupt):
        os._exit(130)
    if isinstance(error, RuntimeError) and _BROKEN.search(str(error)):
        time.sleep(PATIENCE_SECONDS)
    if speaks_first():
        text = printable(str(error))
        if not isinstance(error, ParallaxError):
            traceback.print_exception(error)
            text = f"{type(error).__name__}: {text}"
        if not isinstance(error, UserError):
            where = [f"rank {os.environ.get('RANK', '?')}", *getattr(error, "__notes__", [])]
            text = f"{printable(', '.join(where))}: {text}"
        print(f"parallax: {text}", file=sys.stderr)
    else:
        time.sleep(PATIENCE_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code if isinstance(error, ParallaxError) else 1)
