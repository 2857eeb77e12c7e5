"""Work that several cores share, with the same results whatever their number.

A task is a method of one object that answers by its arguments and what it has learned: caches may differ between
processes, answers may not. The processes are forks, which have the object as it was; they ignore Ctrl-C, which the
parent turns into an exception, and end with it whatever ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

_PR_SET_PDEATHSIG = 1  # prctl.h
_Answer = TypeVar("_Answer")
_task: Callable[..., Any] | None = None  # what this process was forked to do


class Workers(Generic[_Answer]):
    """Runs ``task`` for many arguments on up to ``cores`` processes, which start with the first :meth:`map` of more
    than one. Close it, or use it as a context."""

    def __init__(self, task: Callable[..., _Answer], cores: int) -> None:
        self._task, self._cores = task, cores if hasattr(os, "fork") else 1
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers[_Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def map(self, arguments: Sequence[Iterable[Any]]) -> Iterator[_Answer]:
        """The answers in order."""
        if self._cores < 2 or len(arguments) < 2:
            yield from (self._task(*each) for each in arguments)
            return
        if self._pool is None:
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(
                self._cores, context, initializer=_begin, initargs=(self._task, os.getpid())
            )
        try:
            yield from [future.result() for future in [self._pool.submit(_run, tuple(each)) for each in arguments]]
        except BrokenProcessPool:  # one was killed, for want of memory perhaps: the answers are the same from here
            self.close()
            self._cores = 1
            yield from self.map(arguments)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _begin(task: Callable[..., Any], parent: int) -> None:
    global _task
    _task = task
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run(arguments: tuple[Any, ...]) -> Any:
    assert _task is not None
    return _task(*arguments)
