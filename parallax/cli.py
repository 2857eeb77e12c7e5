"""The command line of ``parallax``.

Arguments before the first ``key=value`` belong to the command. The ``key=value`` arguments are settings, in the grammar
of Hydra's overrides. Most modules are imported inside :func:`main`, so that Ctrl-C is handled during imports, too.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import gc
import importlib
import keyword
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from parallax import __version__
from parallax.common.signals import (
    ending_at_interrupt,
    exit_code,
    exit_on_request,
    install_early_handlers,
    stopped_by,
    under_torchrun,
)
from parallax.errors import ConfigError, ParallaxError, UserError, nearest, printable

COMMANDS = {
    "train": "plan and train; with -m a sweep of runs; under torchrun, one rank",
    "launch": "train as a Slurm job that saves before its time limit and is queued again",
    "plan": "measure, search, and print the plan; writes plan.yaml",
    "profile": "measure, or derive, the cost of each block; writes profile.json",
    "data": "show the rows that a run reads: how many, what is in them, and how fast they are read",
    "estimate": "print the memory that training a model needs, without any device",
    "simulate": "print, draw or trace the timeline of every rank of a plan",
    "explain": "print the reasons for a plan, its bytes and seconds, and what a run offloaded",
    "top": "show all ranks of a run while it trains: speed, memory, waits",
    "why": "show where the seconds of a run's steps went, and which change would help most",
    "report": "report a sweep or a run: table, CSV, charts, and a page",
    "calibrate": "correct a profile by a run's measurements; the next plan uses it",
    "evaluate": "compute loss and metrics of a run's held-out rows, or of other data",
    "predict": "write the outputs of a run's model for new rows",
    "serve": "answer requests with a run's model over HTTP: the Open Inference Protocol v2",
    "export": "write the weights of a run's last checkpoint in the format of another library",
    "import": "make a run's first checkpoint from given weights",
    "doctor": "print devices, memory, bandwidths, and the problems to expect",
}
"""{command: description}.

Each command is a module of :mod:`parallax.commands`; if its name is a Python keyword, the module's name ends in ``_``.
"""


# In the output, or in any other file or pipe.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 for success, 1 for a failure, 2 for wrong input.

    ``arguments`` None means the arguments of this process.
    """
    code = _main(arguments)
    if arguments is None:
        exit_on_request(code)
    return code


def _main(arguments: Sequence[str] | None) -> int:
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        install_early_handlers()
    try:
        with ending_at_interrupt(), _no_collection(own_process=arguments is None):
            from parallax.common.terminal import SafeFormatter, accept_any_text

            accept_any_text()
            parsed = _parse(typed)
            parsed.own_process = arguments is None
    except UserError as error:
        print(f"parallax: {printable(str(error))}", file=sys.stderr)
        return _refused(error.exit_code) if arguments is None else error.exit_code
    logging.basicConfig(format="%(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(SafeFormatter("%(message)s"))
    # Others' remarks (fonts, imports) are not the user's.
    logging.getLogger("parallax").setLevel(logging.INFO)
    try:
        code: int = parsed.call(parsed)
        if sys.stdout is not None:  # None: the caller has closed it
            sys.stdout.flush()  # here, where a full disk can still be reported
        return code
    except BaseException as error:  # also SystemExit, if a user's function calls exit()
        # rich makes SystemExit of a broken pipe.
        pipe = error.__context__ if isinstance(error, SystemExit) else None
        return _report_error(pipe if isinstance(pipe, BrokenPipeError) else error)


def _report_error(error: BaseException) -> int:
    """Print the reason why the command failed, and return the exit code. Under torchrun, end the process instead."""
    if under_torchrun():
        from parallax.runtime.failure.exit_report import report_and_exit

        report_and_exit(error)
    if isinstance(error, KeyboardInterrupt):
        number = getattr(error, "number", signal.SIGINT)
        print(f"parallax: {stopped_by(number)}", file=sys.stderr)
        return exit_code(number)
    # A file of the user's, not a mistake of ours.
    if isinstance(error, OSError) and error.filename is not None:
        print(f"parallax: {printable(str(error.filename))}: {error.strerror}", file=sys.stderr)
        return UserError.exit_code
    if (
        isinstance(error, OSError)
        and error.errno in _NO_SPACE
        and (_give_up_output() or _printed(error))
    ):
        print(f"parallax: cannot write the output: {error.strerror}", file=sys.stderr)
        return ParallaxError.exit_code
    if not isinstance(error, ParallaxError):
        from parallax.common.terminal import print_exception

        print(print_exception(error), end="", file=sys.stderr)
        return 1
    print(f"parallax: {printable(str(error))}", file=sys.stderr)
    return error.exit_code


def _refused(code: int) -> int:
    """Return ``code``, the exit code of wrong input.

    Under torchrun, end this process instead, in a way that torchrun does not answer with a restart: the restart would
    fail again.
    """
    if under_torchrun():
        from parallax.runtime.failure.refusal import end_process

        end_process(code)
    return code


@contextlib.contextmanager
def _no_collection(*, own_process: bool) -> Iterator[None]:
    """A context for imports in which the garbage collector is off.

    Collections would take a fifth of the import time and free almost nothing. With ``own_process``, later collections
    also skip all objects that exist at the end of the context.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if own_process and not gc.get_freeze_count():  # a forked rank's are frozen
            gc.freeze()
            atexit.register(gc.unfreeze)  # otherwise frozen objects would not be finalized
        if enabled:
            gc.enable()


def _give_up_output() -> bool:
    """Return whether writing to stdout fails.

    If it does, redirect stdout to the null device, so that the flush at exit cannot fail again.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return True
    return False


def _printed(error: OSError) -> bool:
    """Return whether ``error`` was raised by a print call of Parallax or rich."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    ours = module.startswith("parallax.") and "print" in trace.tb_frame.f_code.co_names
    return module == "rich.console" or ours


class _Parser(argparse.ArgumentParser):
    """A parser that raises :class:`ConfigError` instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{printable(message)}; `{self.prog} --help` shows what is accepted")


_MEANT = {"resume": "train", "run": "train", "fit": "train", "status": "top"}


def _parse(typed: list[str]) -> argparse.Namespace:
    """Return the parsed arguments. A setting (``key=value``) may stand anywhere, also after an option."""
    if typed and not typed[0].startswith("-") and typed[0] not in COMMANDS:
        hint = nearest(_MEANT.get(typed[0], typed[0]), COMMANDS)
        accepted = ", ".join(COMMANDS)
        raise ConfigError(f"{printable(typed[0])}: unknown command; accepted are {accepted}{hint}")
    chosen = next((word for word in typed if word in COMMANDS), None)
    parser = _parser(chosen)
    parsed, left = parser.parse_known_args(typed)
    settings = [word for word in left if "=" in word and not word.startswith("-")]
    if len(settings) < len(left) or (left and not hasattr(parsed, "overrides")):
        parser.prog = f"{parser.prog} {chosen}"
        parser.error(f"unrecognized arguments: {' '.join(left)}{_as_setting(left)}")
    if settings:
        parsed.overrides = [*parsed.overrides, *settings]
    if getattr(parsed, "config_dir", None) is not None:
        from parallax.commands.options import with_options_of

        parsed.overrides = with_options_of(parsed.config_dir, parsed.overrides)
    return parsed


def _as_setting(left: list[str]) -> str:
    """Return a hint that names the Parallax setting for an option of another trainer, such as ``--batch-size``.

    ``left``: the arguments that the command does not know. Only the first option among them is looked up. The hint is
    "" if Parallax has no such setting.
    """
    option = next((word for word in left if word.startswith("--")), "").partition("=")[0]
    if not option:
        return ""
    from parallax.config import elsewhere

    return elsewhere(option.lstrip("-").replace("-", "_"))


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """Return the argument parser of all commands, with the options of the ``chosen`` command.

    Only the module of that command is imported.
    """
    parser = _Parser(
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
            from parallax.machine.preflight.start import check_process

            check_process()
            module = importlib.import_module(
                f"parallax.commands.{name}{'_' * keyword.iskeyword(name)}"
            )
            command.epilog = module.EXAMPLES
            command.set_defaults(call=module.run)
            module.add_arguments(command)
    return parser
