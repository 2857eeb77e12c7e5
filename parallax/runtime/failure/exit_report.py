"""How a rank leaves a run that failed, and its last words.

Every rank that is left behind has an exception of its own, and a launcher sees nothing but exit codes. Whoever trains
wants one line: so a rank that failed asks the watch whether it is the one to speak, and tells its launcher, where that
one is ours, instead of the terminal.
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
from parallax.runtime.failure.heartbeat import FileHeartbeat, Heartbeat, NoHeartbeat
from parallax.runtime.failure.refusal import end
from parallax.runtime.failure.report import FailureKind, FailureReport
from parallax.runtime.failure.watch import PATIENCE_SECONDS, Watch

# Names the file in which ranks tell their launcher why the run ended.
EXIT_REPORT = "PARALLAX_EXIT_REPORT"
_BROKEN = re.compile(
    r"gloo/|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe|has ended or given up"
)

# What torch raises as a RuntimeError for tensors of a wrong type or shape.
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


def leave(error: BaseException, watch: Watch | None = None) -> NoReturn:
    """One rank's exception ends the run: say where and why, once, and go.

    A connection that broke is no cause: whoever broke it is known to the others soon, and this process ends meanwhile.
    Before there is a watch, the first rank of a host speaks for the host.
    """
    # Of the model's own, or before there was a watch, which heeds Ctrl-C.
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
    if watch is not None or _speaks_first():
        if not isinstance(error, ParallaxError):
            print(print_exception(error), end="", file=sys.stderr)
        (say if watch is None else watch.say)(report)
    else:
        # Torchrun would stop the one that speaks, if another left first.
        time.sleep(PATIENCE_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    end(report.code)


def depart(code: int) -> NoReturn:
    """End the process of a rank that has closed what it had open.

    Threads of libraries may still wait for Python's lock; an interpreter that takes itself apart ends them inside of
    C++, which calls that an abort, now and then.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more, or its disk is full
            stream.flush()
    os._exit(code)


def say(report: FailureReport) -> None:
    """Why the run ended: to the launcher, which knows more and says it; otherwise to whoever reads this rank's errors.

    Written past Python's buffers: the main thread may hold their locks for ever.
    """
    if not report.text:
        return
    file = os.environ.get(EXIT_REPORT)
    if file is not None:
        with contextlib.suppress(OSError):  # no room for them: then as without a launcher
            Path(file).write_text(json.dumps(report.to_dict()), encoding="utf-8")
            return
    with contextlib.suppress(OSError):
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2,
            f"parallax: {printable(report.text)}\n".encode(),
        )


def heartbeat_for_launcher() -> Heartbeat:
    """This rank's, beside the file of last words, where the launcher is ours."""
    file = os.environ.get(EXIT_REPORT)
    return FileHeartbeat(Path(file).parent, int(os.environ["RANK"])) if file else NoHeartbeat()


def read_exit_report(words: Path) -> FailureReport | None:
    """What the ranks told; None where none was able to."""
    try:
        return FailureReport.from_dict(read_json(words, SMALL_BYTES))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def follows(error: BaseException) -> bool:
    """Whether an exception only says that another rank has gone."""
    return isinstance(error, RuntimeError | TransportError) and bool(_BROKEN.search(str(error)))


def may_pass(error: BaseException) -> bool:
    """Whether another attempt may well go on after ``error``: a disk or a network may be back, a device answer again.
    What Python raises for mistakes in programs comes again, and so do wrong input, wrong numbers, and a program's wish
    to exit."""
    if isinstance(error, ParallaxError):
        return error.may_pass
    if type(error) is RuntimeError and _TORCH_MISTAKES.search(str(error)):
        return False
    return isinstance(error, Exception) and not isinstance(error, _MISTAKES)


def failure_of(error: BaseException, watch: Watch | None) -> FailureReport:
    """What is said of an exception."""
    return replace(_failure_of(error, watch), may_pass=may_pass(error))


def _failure_of(error: BaseException, watch: Watch | None) -> FailureReport:
    """Wrong input, for one, is the same for every rank: no one is named."""
    said, text = os.environ.get("RANK", "0"), printable(str(error))
    rank = int(said) if said.isdecimal() else 0  # what else it says may be the error
    if isinstance(error, ParallaxError) and error.common:
        return FailureReport(rank, FailureKind.RAISED, "", text, code=error.exit_code)
    code = error.exit_code if isinstance(error, ParallaxError) else 1
    cause = text if isinstance(error, ParallaxError) else f"{type(error).__name__}: {text}"
    if watch is None:
        return FailureReport(
            rank, FailureKind.RAISED, f"rank {rank}", f"failed: {cause}", code=code
        )
    return watch.failed(FailureKind.RAISED, cause, code)


def _speaks_first() -> bool:
    """Whether this is the first rank of its host to fail: what others could say follows from it."""
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
