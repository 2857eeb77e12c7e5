"""End the process of a failed rank, and write its exit report.

When one rank fails, every other rank raises an exception of its own, and a launcher sees only exit codes. The user
needs one line. So a failed rank asks its watch (:mod:`parallax.runtime.failure.watch`) whether it may report. If so, it
sends its report to Parallax's launcher, or prints it if another launcher started the rank.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from parallax.common.documents import SMALL_BYTES, read_json
from parallax.common.signals import exit_code
from parallax.common.terminal import print_exception
from parallax.errors import ParallaxError, TransportError, printable
from parallax.runtime.failure.heartbeat import FileHeartbeat, LauncherHeartbeat, NoHeartbeat
from parallax.runtime.failure.refusal import end_process
from parallax.runtime.failure.report import FailureKind, FailureReport
from parallax.runtime.failure.watch import PATIENCE_SECONDS, Watch

# Names the file in which ranks report to their launcher why the run ended.
EXIT_REPORT = "PARALLAX_EXIT_REPORT"
_BROKEN = re.compile(
    r"gloo/|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe|has ended or given up"
)

# RuntimeErrors of torch for tensors of a wrong type or shape.
_TORCH_MISTAKES = re.compile(
    r"same (dtype|type)|dtype but|expected scalar type|expected .* (dtype|type)|[Ff]ound dtype|shapes cannot be "
    r"multiplied|sizes? of tensor|tensor size|size mismatch|match the size|not implemented for '|for input of size|"
    r"expected input|Expected .*(dimension|size|shape|tensor)|out of bounds|does not require grad|in-?place operation|"
    r"Trying to backward through the graph a second time"
)

_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    StopIteration,
    SyntaxError,
    TypeError,
    ValueError,
)


def report_and_exit(error: BaseException, watch: Watch | None = None) -> NoReturn:
    """Report ``error`` and end the process of this rank. Only one rank reports for the whole run.

    An error of a broken connection is only a consequence of another rank's end. The watch soon finds that rank and then
    ends this process. If ``watch`` is None, the rank has no watch yet, and the first failed rank of each host reports.
    """
    # Raised by the model itself, or before there was a watch, which handles Ctrl-C.
    if isinstance(error, KeyboardInterrupt):
        code = exit_code(signal.SIGINT)
        if watch is not None:
            watch.claim(FailureReport(watch.rank, FailureKind.STOPPED, "", "", code=code))
            time.sleep(PATIENCE_SECONDS)
        os._exit(code)
    if follows(error):
        time.sleep(PATIENCE_SECONDS)
    report = failure_of(error, watch)
    if watch is not None:
        watch.claim(report)
        watch.wait()
    if watch is not None or _fails_first():
        if not isinstance(error, ParallaxError) or error.traced:
            # The report has the text of an error of Parallax itself.
            cause = error.__cause__ if isinstance(error, ParallaxError) else None
            print(print_exception(cause or error), end="", file=sys.stderr)
        (send_report if watch is None else watch.say)(report)
    else:
        # If this rank ended first, torchrun would stop the reporting rank.
        time.sleep(PATIENCE_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    end_process(report.code)


def exit_process(code: int) -> NoReturn:
    """End the process of a rank, after it has closed its resources, with exit code ``code``.

    The interpreter is not finalized. Finalization would end library threads that wait for the GIL inside C++ code,
    which occasionally calls abort.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the pipe is closed, or the disk is full
            stream.flush()
    os._exit(code)


def send_report(report: FailureReport) -> None:
    """Report why the run ended, either to Parallax's launcher, which completes and prints the report, or to this rank's
    stderr.

    The text bypasses Python's buffers, because the main thread may hold their locks forever.
    """
    if not report.text:
        return
    file = os.environ.get(EXIT_REPORT)
    if file is not None:
        with contextlib.suppress(OSError):  # the disk is full: report as without a launcher
            Path(file).write_text(json.dumps(report.to_dict()), encoding="utf-8")
            return
    with contextlib.suppress(OSError):
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2,
            f"parallax: {printable(report.text)}\n".encode(),
        )


def heartbeat_for_launcher() -> LauncherHeartbeat:
    """Return this rank's heartbeat file if Parallax's launcher started the rank; otherwise a heartbeat that does
    nothing."""
    file = os.environ.get(EXIT_REPORT)
    return FileHeartbeat(Path(file).parent, int(os.environ["RANK"])) if file else NoHeartbeat()


def read_exit_report(file: Path) -> FailureReport | None:
    """Return the report that a rank has written to ``file``; None if there is no readable report."""
    try:
        return FailureReport.from_dict(read_json(file, SMALL_BYTES))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def follows(error: BaseException) -> bool:
    """Return whether ``error`` is only a consequence of another rank's end."""
    return isinstance(error, RuntimeError | TransportError) and bool(_BROKEN.search(str(error)))


def may_pass(error: BaseException) -> bool:
    """Return whether another attempt may succeed after ``error``, because a disk, a network or a device may be
    available again.

    The result is False for errors that would repeat: Python's exceptions for programming errors, invalid input,
    non-finite numbers, and a call of ``exit``.
    """
    if isinstance(error, ParallaxError):
        return error.may_pass
    if type(error) is RuntimeError and _TORCH_MISTAKES.search(str(error)):
        return False
    return isinstance(error, Exception) and not isinstance(error, _MISTAKES)


def failure_of(error: BaseException, watch: Watch | None) -> FailureReport:
    """Return the report of an exception of this rank."""
    return replace(_failure_of(error, watch), may_pass=may_pass(error))


def _failure_of(error: BaseException, watch: Watch | None) -> FailureReport:
    """Return the report of ``error``. The report names no rank if every rank raises the same error, as for invalid
    input."""
    variable, text = os.environ.get("RANK", "0"), printable(str(error))
    rank = int(variable) if variable.isdecimal() else 0  # an invalid RANK may be the error
    if isinstance(error, ParallaxError) and error.common:
        return FailureReport(rank, FailureKind.RAISED, "", text, code=error.exit_code)
    code = error.exit_code if isinstance(error, ParallaxError) else 1
    cause = text if isinstance(error, ParallaxError) else f"{type(error).__name__}: {text}"
    if watch is None:
        return FailureReport(
            rank, FailureKind.RAISED, f"rank {rank}", f"failed: {cause}", code=code
        )
    return watch.failed(FailureKind.RAISED, cause, code)


def _fails_first() -> bool:
    """Return whether this rank is the first of its host to fail. Later failures are consequences of the first."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return True
    try:
        os.close(os.open(Path(file).parents[1] / "failed", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
