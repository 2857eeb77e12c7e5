"""A function in a process of its own, for what changes settings of a whole process, or may hang or kill it.

The process is forked from a server that has imported torch: a start costs milliseconds instead of seconds. It ends
without the interpreter's own end; what that does is a matter for ``subprocess``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.leaks import lasting

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])
_END_SECONDS = 10.0


def alone(function: Callable[..., Any], *args: Any, seconds: float = 160.0) -> Any:
    """``function(*args)`` in a process of its own; its result. Its exception is an ``AssertionError`` here, and so is
    its end without an answer, or no answer within ``seconds``."""
    mine, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_answer, args=(theirs, function, args))
    begin(process)
    theirs.close()
    try:
        assert mine.poll(seconds), f"{function.__name__}: no answer within {seconds:.0f} s"
        answer = mine.recv()
    except EOFError:
        process.join(_END_SECONDS)
        raise AssertionError(
            f"{function.__name__}: ended without an answer, with exit code {process.exitcode}"
        ) from None
    finally:
        process.kill()
        process.join(_END_SECONDS)
        process.close()
        mine.close()
    failure, found = answer
    assert not failure, failure
    return found


def begin(process: Any) -> None:
    """Start a process, and before the first of them the server. They work where no test looks for leftovers."""
    with lasting(), contextlib.chdir(ROOT):
        process.start()


def _answer(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        connection.send(("", function(*args)))
    except BaseException:
        connection.send((traceback.format_exc(), None))
