"""Signals that ask a run to end, and what is made of them.

A batch system, a terminal and a person have four ways to say the same: SIGTERM, SIGINT (Ctrl-C), SIGHUP (the terminal
has gone) and SIGUSR1 (Slurm's warning, ``--signal=USR1@60``). A run that trains saves what it has and ends; anything
else just ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
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


def exit_code(number: int, *, saved: bool = False) -> int:
    """Of a process that ends because of signal ``number``: as a shell has it, and 0 where all that was asked for is
    done: SIGUSR1 asks for an end, SIGTERM for one that loses nothing (``saved``)."""
    done = number == signal.SIGUSR1 or (saved and number == signal.SIGTERM)
    return 0 if done else 128 + number


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
    if not on_main or before not in (signal.default_int_handler, _end):
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    if not under_torchrun():  # whoever started the ranks speaks
        os.write(2, f"parallax: {stopped_by(number)}\n".encode())
    os._exit(exit_code(number))


def heed_to_the_end(code: int) -> None:
    """Called when the work of a process is done, which ends with ``code``: whoever asks it to end now gets that at
    once. Python's way down takes a moment, and tells on many lines in what it was interrupted; its last part, in which
    no handler runs any more, comes to its end."""
    if threading.current_thread() is not threading.main_thread():
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for number in heeded():
        signal.signal(number, lambda *_: os._exit(code))


def _heed_no_more() -> None:
    """Python takes its handlers away before it takes down modules: a request would be the process's death by it."""
    for number in heeded():
        signal.signal(number, signal.SIG_IGN)


def heed_from_the_start() -> None:
    """Called in the first line of a process: what Python makes of a request to end that comes while it imports is its
    death by that signal, which a launcher takes for a failure.

    ::

        python -m parallax ── imports torch ── meets the other ranks ── watches ── trains
          a rank of torchrun   keeps SIGUSR1 and SIGHUP until ────────> all ranks end together, with the code of such
          any other process    ends at once, in one line, with the same code; so does a rank at SIGTERM

    Torchrun sends SIGTERM where all is over anyway. Ctrl-C ends any process at once until :func:`ending_at_once` is
    over.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # whose process it is
    if any(signal.getsignal(number) is _early for number in REQUESTS):
        return
    for number in heeded():
        before = signal.getsignal(number)
        # Who starts ranks may ignore what they heed.
        if before is signal.SIG_DFL or (before is signal.SIG_IGN and under_torchrun()):
            signal.signal(number, _early)
        elif before is signal.default_int_handler:
            signal.signal(number, _end)
    os.register_at_fork(after_in_child=_forget)
    # Behind those of all that is imported from here on, which can be ended.
    atexit.register(_heed_no_more)


def _forget() -> None:
    """A forked child dies by these signals, as its parent expects who sends them."""
    for number in REQUESTS:
        if signal.getsignal(number) is _early:
            signal.signal(number, signal.SIG_DFL)


class _EarlyHandler:
    """Keeps the first request of a rank until it is :meth:`taken`."""

    def __init__(self) -> None:
        self.first, self._keeps = 0, True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._keeps and under_torchrun() and number != signal.SIGTERM:
            self.first = self.first or number
        else:
            _end(number, frame)

    def taken(self) -> int:
        self._keeps, found, self.first = False, self.first, 0
        return found


_early = _EarlyHandler()


def early_request() -> int:
    """The signal that came since :func:`heed_from_the_start`; 0 where none has. Whoever asks heeds those to come."""
    return _early.taken()


@contextlib.contextmanager
def ending_after(seconds: float, end: Callable[[int], object]) -> Iterator[None]:
    """A request that came early, or comes while inside, calls ``end`` with its number after so many ``seconds``, at
    SIGTERM at once, from another thread, where the block still runs then. For blocks that wait in calls in which no
    handler runs; what need not be waited for is kept."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    if _early.first:
        wake.send(bytes([_early.first]))

    def look_on() -> None:
        asked, deadline = 0, float("inf")
        while time.monotonic() < deadline:
            left = None if not asked else max(0.0, deadline - time.monotonic())
            if not select.select([woken], [], [], left)[0]:
                break
            if not (found := woken.recv(64)):
                return
            for number in REQUESTS:
                if number in found and (not asked or number == signal.SIGTERM):
                    asked = number
                    deadline = time.monotonic() + (0 if number == signal.SIGTERM else seconds)
        end(asked)

    thread = threading.Thread(target=look_on, name="parallax-asked", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        wake.close()
        thread.join()
        woken.close()


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
