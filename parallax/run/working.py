"""Run long work of a command: show its current phase, end it on Ctrl-C, and end it if it hangs.

Before there are ranks, the command itself runs the user's code: factories of the model and of the rows, and a forward
of each block. This code may hang, or be inside a call that handles no signal. So a watchdog thread checks the main
thread, with the same time limits as for ranks::

    main thread       building the model ── model.target ── sleeps ...
    watchdog thread   checks for signs of life each second ──────────> a signal: the main thread raises and cleans up;
                                                                       if it does not, the watchdog reports and ends it

Under torchrun, a rank's :class:`~parallax.runtime.failure.watch.Watch` does this instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console

from parallax.common.signals import (
    Handler,
    Requests,
    exit_code,
    handled_signals,
    stopped_by,
    under_torchrun,
)
from parallax.common.terminal import safe_console
from parallax.errors import HangError, ParallaxError, printable
from parallax.runtime.failure.life import Life, where
from parallax.runtime.failure.report import remedy
from parallax.train.loop import TrainerConfig

_CHECK_SECONDS = 1.0  # between two checks for signs of life
_PAUSE_SECONDS = 5.0  # after a longer gap this process itself was stopped
_HANDLE_SECONDS = 2.0  # for the main thread to handle a signal
_TURNS_PER_SECOND = 4  # of the spinner: too few to count as a sign of life
_LINE_SECONDS = 30.0  # between two lines about the phase, where there is no terminal
_CLEANUP_SECONDS = 10.0  # for the main thread to clean up after a hang


class LongWork:
    """The current phase of a command. Call the object with the name of the next phase to enter it."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.phase: tuple[str] = ("",)  # a new object for each phase, even if the name repeats
        self.seconds = self.phase_seconds = 0.0
        self._show = show

    def __call__(self, text: str) -> None:
        self.phase = (text,)
        self._show(text)

    def limit(self, trainer: TrainerConfig) -> None:
        """Set the time limits after which the work counts as hanging: ``watchdog_seconds`` without a sign of life, and
        ``phase_seconds`` in one phase; 0 sets no limit."""
        self.seconds, self.phase_seconds = trainer.watchdog_seconds, trainer.phase_seconds


@contextlib.contextmanager
def working(console: Console, what: str) -> Iterator[LongWork]:
    """Show and watch long work such as "planning" or "profiling". If it hangs, raise :class:`ParallaxError` with the
    phase, the limit, and the line of the user's code."""
    with console.status(what, refresh_per_second=_TURNS_PER_SECOND) as status:
        work = LongWork(status.update if console.is_terminal else _SparseLines(what))
        work.limit(TrainerConfig())  # defaults, until the run's configuration is known
        work.phase = (what,)
        if under_torchrun() or threading.current_thread() is not threading.main_thread():
            yield work
            return
        watchdog = _Watchdog(what, work)
        try:
            watchdog.start()
            yield work
        finally:
            watchdog.holding = (
                True  # set here, since a signal could interrupt close() before its first line
            )
            watchdog.close()


class _SparseLines:
    """Prints the phases of ``what`` as lines on stderr, at most one line every 30 s. It is used if the output is no
    terminal."""

    def __init__(self, what: str) -> None:
        self._what, self._console = what, safe_console(stderr=True)
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._last >= _LINE_SECONDS:
            self._last = time.monotonic()
            self._console.print(f"{self._what}: {text}", highlight=False, soft_wrap=True)


class _Watchdog:
    """The watchdog thread. It replaces the caller's signal handlers, and passes each signal on to them. Signals are
    held back while the watchdog starts or closes, because a signal could end the process while only some handlers are
    installed."""

    def __init__(self, what: str, work: LongWork) -> None:
        self._what, self._work = what, work
        self._requests, self._complaint = Requests(), ""
        self._deadline, self._report, self._code = float("inf"), "", ParallaxError.exit_code
        self._answered = self._closing = False
        self.holding, self._held = True, list[int]()
        self._handlers: dict[int, Handler] = {
            n: each for n in handled_signals() if callable(each := signal.getsignal(n))
        }
        self._wakeup: int | None = None  # the previous wake-up descriptor, once it is replaced
        self._thread = threading.Thread(target=self._run, name="parallax-watchdog", daemon=True)
        self._woken, self._wake = socket.socketpair()

    def start(self) -> None:
        """Start to watch and to handle signals. If this method raises an exception, call :meth:`close`, which restores
        the previous handlers."""
        self._wake.setblocking(False)
        for number in self._handlers:
            signal.signal(number, self._answer)
        self._wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        self.holding = False
        self._answer_held()

    def close(self) -> None:
        """Stop watching and restore the previous handlers."""
        self._closing = True
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
        if self._thread.ident is not None:
            with contextlib.suppress(BlockingIOError):  # a full buffer wakes it anyway
                self._wake.send(b"\0")
            self._thread.join()
        self._woken.close()
        self._wake.close()
        try:
            # SIGINT is restored last, since its default handler raises.
            for number in sorted(self._handlers, key=lambda each: each == signal.SIGINT):
                signal.signal(number, self._handlers[number])
        finally:
            self.holding = False
        self._answer_held()

    def _answer(self, number: int, frame: FrameType | None) -> None:
        """Handle signal ``number`` on the main thread: raise :class:`HangError` if the watchdog has found a hang,
        otherwise call the caller's handler. While signals are held back, only record the signal. The watchdog then
        knows that the main thread has reacted, and need not end the process for that."""
        self._answered = True
        if self.holding:
            self._held.append(number)
            return
        if self._complaint:
            raise HangError(self._complaint)
        self._handlers[number](number, frame)

    def _answer_held(self) -> None:
        while self._held:
            self._answer(self._held.pop(), None)

    # ---- the thread

    def _run(self) -> None:
        life, looked = Life(), time.monotonic()
        begun, idle, phase = looked, 0.0, self._work.phase
        while not self._closing:
            ready, _, _ = select.select([self._woken], [], [], _CHECK_SECONDS)
            if ready:
                self._handle(self._woken.recv(64))
            now = time.monotonic()
            if now > self._deadline:
                self._enforce_deadline(now)
            if now - looked < _CHECK_SECONDS:
                continue
            alive, gap, looked = life.shows(), now - looked, now
            if self._work.phase is not phase or gap > _PAUSE_SECONDS:
                begun, idle, phase = now, 0.0, self._work.phase
            idle = 0.0 if alive else idle + gap
            if not self._complaint:
                self._check_hang(phase[0], idle, now - begun)

    def _enforce_deadline(self, now: float) -> None:
        """End the process if the main thread has not handled a signal in time, or has not cleaned up in time after a
        hang."""
        if not self._answered or (self._complaint and now > self._deadline + _CLEANUP_SECONDS):
            self._end()

    def _handle(self, signals: bytes) -> None:
        """Start the deadline for a request to end, which the main thread handles. A second Ctrl-C ends the process at
        once."""
        for number in self._handlers:
            if number not in signals or self._complaint:
                continue
            if not self._requests.first:
                self._report, self._code = stopped_by(number), exit_code(number)
                self._deadline = time.monotonic() + _HANDLE_SECONDS
            self._requests.add(number)
            if self._requests.impatient:
                self._end()

    def _check_hang(self, phase: str, idle: float, seconds: float) -> None:
        work, late = self._work, 0.0
        if work.phase_seconds and seconds > work.phase_seconds:
            late = work.phase_seconds
        elif not work.seconds or idle <= work.seconds:
            return
        doing = f": {phase}" if phase != self._what else ""
        how = f"for {seconds:.0f} s" if late else f"{idle:.0f} s without a sign of life"
        self._report = (
            f"{self._what} hangs{doing}, {how}; {remedy(work.seconds, late)}; it is in {where()}"
        )
        self._code = ParallaxError.exit_code
        if not self._handlers:
            self._end()
        self._answered, self._complaint = False, self._report
        self._deadline = time.monotonic() + _HANDLE_SECONDS
        signal.pthread_kill(threading.main_thread().ident or 0, next(iter(self._handlers)))

    def _end(self) -> None:
        """Print the report and end the process. The text bypasses Python's buffers, because the main thread may hold
        their locks forever."""
        os.write(2, f"parallax: {printable(self._report)}\n".encode())
        os._exit(self._code)
