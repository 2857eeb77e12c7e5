"""Handle the signals that request the end of a run.

There are four: SIGTERM, SIGINT (Ctrl-C), SIGHUP (the terminal was closed) and SIGUSR1 (Slurm's warning,
``--signal=USR1@60``). A training run saves its state before it ends; any other process ends at once.
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
# signals within this time are one request: launchers forward a signal right after the original
SAME_SECONDS = 0.5

Handler = Callable[[int, FrameType | None], object]


class Stopped(KeyboardInterrupt):
    """Raised when signal ``number`` requests the end of the process.

    It is a KeyboardInterrupt, so ``except Exception`` does not catch it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(stopped_by(number))
        self.number = number


def stopped_by(number: int) -> str:
    """Return the beginning of the message that reports an end by signal ``number``."""
    return f"stopped by {signal.Signals(number).name}"


def exit_code(number: int, *, saved: bool = False) -> int:
    """Return the exit code of a process that ends because of signal ``number``.

    The code is 0 for SIGUSR1, and for SIGTERM if the state was ``saved``. Otherwise it is 128 + ``number``, as in a
    shell.
    """
    done = number == signal.SIGUSR1 or (saved and number == signal.SIGTERM)
    return 0 if done else 128 + number


@contextlib.contextmanager
def handling_requests(handler: Handler, *others: int) -> Iterator[None]:
    """A context in which ``handler`` is called on the main thread for each signal that requests an end.

    ``others`` are further signals to handle. On other threads the context is a no-op.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (*handled_signals(), *others)}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each if each is not None else signal.SIG_DFL)


def handled_signals() -> list[signal.Signals]:
    """Return the signals that request the end of this process: :data:`REQUESTS`, without SIGHUP under ``nohup``."""
    return [n for n in REQUESTS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


@contextlib.contextmanager
def ending_at_interrupt() -> Iterator[None]:
    """A context for imports, in which Ctrl-C ends the process at once, with the usual message and exit code.

    Raising an exception in the middle of an import instead may leave a module incomplete, or another exception may
    replace it. During imports nothing needs to be saved yet.
    """
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
    if not under_torchrun():  # the launcher prints the message
        os.write(2, f"parallax: {stopped_by(number)}\n".encode())
    os._exit(exit_code(number))


def exit_on_request(code: int) -> None:
    """From now on, end the process at once with exit code ``code`` if a signal requests its end.

    Call this when all work is done. Python's shutdown takes a moment, and otherwise a signal would interrupt it with a
    traceback. In the last part of the shutdown Python runs no signal handlers; the signals are ignored then.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for number in handled_signals():
        signal.signal(number, lambda *_: os._exit(code))


def _ignore_requests() -> None:
    """From now on, ignore signals that request the end.

    During shutdown Python removes its handlers before it tears down modules, so a signal would kill the process.
    """
    for number in handled_signals():
        signal.signal(number, signal.SIG_IGN)


def install_early_handlers() -> None:
    """Install signal handlers that are used until the process can save its state. Call this first in the process.

    Without them, a signal during imports kills the process, which a launcher takes for a failure. The picture shows
    what a signal does in each phase of a start::

        python -m parallax ── imports torch ── joins the other ranks ── watches ── trains
          a rank of torchrun   keeps SIGUSR1 and SIGHUP until ────────> all ranks end together, with the exit code
          any other process    ends at once, in one line, with the same code; so does a rank at SIGTERM

    Torchrun sends SIGTERM only when the run is over. Ctrl-C ends any process at once until :func:`ending_at_interrupt`
    exits.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # the main thread handles signals
    if any(signal.getsignal(number) is _early for number in REQUESTS):
        return
    for number in handled_signals():
        before = signal.getsignal(number)
        # A launcher may ignore signals that its ranks handle.
        if before is signal.SIG_DFL or (before is signal.SIG_IGN and under_torchrun()):
            signal.signal(number, _early)
        elif before is signal.default_int_handler:
            signal.signal(number, _end)
    os.register_at_fork(after_in_child=_forget)
    # Runs after the exit handlers of all modules imported later, which can still be interrupted.
    atexit.register(_ignore_requests)


def _forget() -> None:
    """Restore the default handlers in a forked child, so that signals kill the child, as the parent process expects."""
    for number in REQUESTS:
        if signal.getsignal(number) is _early:
            signal.signal(number, signal.SIG_DFL)


class _EarlyHandler:
    """The handler for signals that request the end before training has begun.

    In a rank of torchrun, the handler stores the first signal until :meth:`take_first`, except SIGTERM. In any other
    process, for SIGTERM, and after :meth:`take_first`, a signal ends the process.
    """

    def __init__(self) -> None:
        self.first, self._keeps = 0, True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._keeps and under_torchrun() and number != signal.SIGTERM:
            self.first = self.first or number
        else:
            _end(number, frame)

    def take_first(self) -> int:
        self._keeps, found, self.first = False, self.first, 0
        return found


_early = _EarlyHandler()


def early_request() -> int:
    """Return the number of the first signal stored since :func:`install_early_handlers`, or 0.

    After this call, signals are not stored any more.
    """
    return _early.take_first()


@contextlib.contextmanager
def ending_after_request(seconds: float, end: Callable[[int], object]) -> Iterator[None]:
    """A context that limits how long its block may run after a signal requests the end of the process.

    The block may wait in a call during which Python runs no signal handler. So another thread watches for signals: it
    calls ``end(number)`` if the block still runs ``seconds`` after signal ``number``. After SIGTERM it calls ``end``
    immediately. Signals that were received before the block count, too.
    """
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    if _early.first:
        wake.send(bytes([_early.first]))

    def watch() -> None:
        received, deadline = 0, float("inf")
        while time.monotonic() < deadline:
            left = None if not received else max(0.0, deadline - time.monotonic())
            if not select.select([woken], [], [], left)[0]:
                break
            if not (found := woken.recv(64)):
                return
            for number in REQUESTS:
                if number in found and (not received or number == signal.SIGTERM):
                    received = number
                    deadline = time.monotonic() + (0 if number == signal.SIGTERM else seconds)
        end(received)

    thread = threading.Thread(target=watch, name="parallax-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        wake.close()
        thread.join()
        woken.close()


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return (
        "TORCHELASTIC_RUN_ID" in os.environ
        or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    )


def interrupt(number: int, frame: FrameType | None = None) -> None:
    """A signal handler that raises :class:`Stopped`."""
    del frame
    raise Stopped(number)


class _KeptHandler:
    """A signal handler that postpones the first Ctrl-C, and calls the handler ``before`` at once for a second one."""

    def __init__(self, before: Handler) -> None:
        self.before, self.requests = before, Requests()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.requests.add(number)
        if self.requests.impatient:
            self.before(number, frame)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A context that postpones Ctrl-C until its end, so that no data structure is left half updated.

    A second Ctrl-C interrupts the block immediately. But a second one within half a second of the first is ignored,
    because launchers forward a signal right after the original. On other threads the context is a no-op, because Python
    handles signals on the main thread only.
    """
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
    """Records the signals that request the end.

    ``first`` is the number of the first signal, or 0. ``impatient`` is True after a second Ctrl-C, which means that the
    process must end at once. A Ctrl-C within half a second of the first signal does not count as the second.
    """

    def __init__(self) -> None:
        self.first, self.impatient = 0, False
        self._when = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the first request; 0 if there is none."""
        return time.monotonic() - self._when if self.first else 0.0

    def add(self, number: int) -> None:
        now = time.monotonic()
        if not self.first:
            self.first, self._when = number, now
        elif number == signal.SIGINT and now - self._when > SAME_SECONDS:
            self.impatient = True
