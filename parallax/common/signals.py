"""Signals that ask a run to end, and what is made of them.

A batch system, a terminal and a person have four ways to say the same: SIGTERM, SIGINT (Ctrl-C), SIGHUP (the terminal
has gone) and SIGUSR1 (Slurm's warning, ``--signal=USR1@60``). A run that trains saves what it has and ends; anything
else just ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# Within which signals are one request: whoever passes them on sends a second one at once.
SAME_SECONDS = 0.5

Handler = Callable[[int, FrameType | None], object]


class Stopped(KeyboardInterrupt):
    """A process was asked to end by signal ``number``. Like its parent it is no error, and passes handlers of these."""

    def __init__(self, number: int) -> None:
        super().__init__(stopped_by(number))
        self.number = number


def stopped_by(number: int) -> str:
    """How the message about it begins."""
    return f"stopped by {signal.Signals(number).name}"


def exit_code(number: int) -> int:
    """Of a process that ends because of signal ``number``: as a shell has it; SIGUSR1 asked for nothing else than what
    was done."""
    return 0 if number == signal.SIGUSR1 else 128 + number


@contextlib.contextmanager
def heeding(handler: Handler, *others: int) -> Iterator[None]:
    """Call ``handler`` for each request, and for ``others``, while inside, on the main thread; on any other thread
    nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (*heeded(), *others)}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each if each is not None else signal.SIG_DFL)


def heeded() -> list[signal.Signals]:
    """The requests that are meant for this process: under ``nohup`` a terminal that goes is none."""
    return [n for n in REQUESTS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C while inside ends the process, with its line: for imports, which may go on without what an exception in
    their middle has left out, or fail with another. There is nothing to put in order yet."""
    before = signal.getsignal(signal.SIGINT)
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    if not under_torchrun():  # whoever started the ranks speaks
        os.write(2, f"parallax: {stopped_by(number)}\n".encode())
    os._exit(exit_code(number))


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return (
        "TORCHELASTIC_RUN_ID" in os.environ
        or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    )


def interrupt(number: int, frame: FrameType | None = None) -> None:
    """A handler that raises :class:`Stopped`."""
    del frame
    raise Stopped(number)


class _KeptHandler:
    """A handler that keeps an interrupt for later; one of an impatient person is taken at once."""

    def __init__(self, before: Handler) -> None:
        self.before, self.requests = before, Requests()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.requests.add(number)
        if self.requests.impatient:
            self.before(number, frame)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C comes at the end of the block, not in the middle of books that would stay half written. Whoever presses it
    again does not want to wait, and does not; two at once are one. On other threads than the main one none arrives."""
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(before) or isinstance(before, _KeptHandler):
        yield
        return
    keep = _KeptHandler(before)
    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if keep.requests.first:
            before(signal.SIGINT, None)


class Requests:
    """Requests so far: the ``first`` signal counts, what follows at once is the same request, and a second Ctrl-C is
    ``impatient``: the process is to end whatever it is doing."""

    def __init__(self) -> None:
        self.first, self.impatient = 0, False
        self._when = 0.0

    @property
    def seconds(self) -> float:
        """Since the first; 0 where there is none."""
        return time.monotonic() - self._when if self.first else 0.0

    def add(self, number: int) -> None:
        """Take note of a signal."""
        now = time.monotonic()
        if not self.first:
            self.first, self._when = number, now
        elif number == signal.SIGINT and now - self._when > SAME_SECONDS:
            self.impatient = True
