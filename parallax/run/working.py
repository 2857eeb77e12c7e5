"""A command that works for a while: what it does is said, Ctrl-C ends it, and a hang ends it as it ends a rank.

Before there are ranks, the user's own code runs here: factories of the model and of the rows, a forward of each block.
It may wait for ever, or be inside of a call that heeds no signal. So a thread looks on, with the limits of the ranks::

    main thread     building the model ── model.target ── sleeps ...
    this thread     looks for signs of life each second ──────────> a signal: the main thread raises, and tidies up;
                                                                    where it does not, the line, and the process ends

Under torchrun a rank's :class:`~parallax.runtime.failure.watch.Watch` does all that.
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
from parallax.errors import HangError, ParallaxError, printable
from parallax.runtime.failure.life import Life, where
from parallax.runtime.failure.report import remedy
from parallax.train.loop import TrainerConfig

_LOOK_SECONDS = 1.0  # between two looks for signs of life
_PAUSE_SECONDS = 5.0  # without a look: this process itself was stopped
_HEED_SECONDS = 2.0  # that the main thread has to heed a signal, which it does at once, but for calls that heed none
_TURNS_PER_SECOND = 4  # of the sign that it goes on, which must not look like one of life
_TIDY_SECONDS = 10.0  # that it has to tidy up after a hang


class LongWork:
    """What a command is doing; called with a text, it does that from now on."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.phase: tuple[str] = ("",)  # a new object for each, however often it comes
        self.seconds = self.phase_seconds = 0.0
        self._show = show

    def __call__(self, text: str) -> None:
        self.phase = (text,)
        self._show(text)

    def limit(self, trainer: TrainerConfig) -> None:
        """More than ``watchdog_seconds`` without a sign of life, and more than ``phase_seconds`` in one phase, are a
        hang; 0 sets no limit."""
        self.seconds, self.phase_seconds = trainer.watchdog_seconds, trainer.phase_seconds


@contextlib.contextmanager
def working(console: Console, what: str) -> Iterator[LongWork]:
    """Work that takes a while: "planning", "profiling". Raises :class:`ParallaxError` where it hangs, with what it
    does, the limit, and the line of the user's code."""
    with console.status(what, refresh_per_second=_TURNS_PER_SECOND) as status:
        work = LongWork(status.update)
        work.limit(TrainerConfig())  # until the run says otherwise
        work.phase = (what,)
        if under_torchrun() or threading.current_thread() is not threading.main_thread():
            yield work
            return
        onlooker = _Onlooker(what, work)
        try:
            onlooker.start()
            yield work
        finally:
            onlooker.holding = True  # here: a call could be interrupted before its first line
            onlooker.close()


class _Onlooker:
    """The thread that looks on. Handlers of signals stay those of the caller, to which each is passed on: while it
    starts and closes at the end of that, for half of either would end a process that goes on."""

    def __init__(self, what: str, work: LongWork) -> None:
        self._what, self._work = what, work
        self._requests, self._complaint = Requests(), ""
        self._deadline, self._last_words, self._code = float("inf"), "", ParallaxError.exit_code
        self._answered = self._closing = False
        self.holding, self._held = True, list[int]()
        self._handlers: dict[int, Handler] = {
            n: each for n in handled_signals() if callable(each := signal.getsignal(n))
        }
        self._wakeup: int | None = None  # of before, once it is replaced
        self._thread = threading.Thread(target=self._run, name="parallax-onlooker", daemon=True)
        self._woken, self._wake = socket.socketpair()

    def start(self) -> None:
        """Look on, and answer signals. Whatever it raises, :meth:`close` puts back what there was."""
        self._wake.setblocking(False)
        for number in self._handlers:
            signal.signal(number, self._answer)
        self._wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        self.holding = False
        self._answer_held()

    def close(self) -> None:
        """The work is done, or has failed."""
        self._closing = True
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
        if self._thread.ident is not None:
            with contextlib.suppress(BlockingIOError):  # it is awake
                self._wake.send(b"\0")
            self._thread.join()
        self._woken.close()
        self._wake.close()
        try:
            # The last that is held.
            for number in sorted(self._handlers, key=lambda each: each == signal.SIGINT):
                signal.signal(number, self._handlers[number])
        finally:
            self.holding = False
        self._answer_held()

    def _answer(self, number: int, frame: FrameType | None) -> None:
        """On the main thread, as soon as it heeds signals: there is no need to end the process over its head."""
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
            ready, _, _ = select.select([self._woken], [], [], _LOOK_SECONDS)
            if ready:
                self._heed(self._woken.recv(64))
            now = time.monotonic()
            if now > self._deadline:
                self._press(now)
            if now - looked < _LOOK_SECONDS:
                continue
            alive, gap, looked = life.shows(), now - looked, now
            if self._work.phase is not phase or gap > _PAUSE_SECONDS:
                begun, idle, phase = now, 0.0, self._work.phase
            idle = 0.0 if alive else idle + gap
            if not self._complaint:
                self._judge(phase[0], idle, now - begun)

    def _press(self, now: float) -> None:
        """The main thread has had its time: to answer, and after a hang, which it may go on with, to tidy up."""
        if not self._answered or (self._complaint and now > self._deadline + _TIDY_SECONDS):
            self._end()

    def _heed(self, signals: bytes) -> None:
        """A request to end is answered by the main thread; a second Ctrl-C ends the process whatever that does."""
        for number in self._handlers:
            if number not in signals or self._complaint:
                continue
            if not self._requests.first:
                self._last_words, self._code = stopped_by(number), exit_code(number)
                self._deadline = time.monotonic() + _HEED_SECONDS
            self._requests.add(number)
            if self._requests.impatient:
                self._end()

    def _judge(self, phase: str, idle: float, seconds: float) -> None:
        work, late = self._work, 0.0
        if work.phase_seconds and seconds > work.phase_seconds:
            late = work.phase_seconds
        elif not work.seconds or idle <= work.seconds:
            return
        doing = f": {phase}" if phase != self._what else ""
        how = f"for {seconds:.0f} s" if late else f"{idle:.0f} s without a sign of life"
        self._last_words = (
            f"{self._what} hangs{doing}, {how}; {remedy(work.seconds, late)}; it is in {where()}"
        )
        self._code = ParallaxError.exit_code
        if not self._handlers:
            self._end()
        self._answered, self._complaint = False, self._last_words
        self._deadline = time.monotonic() + _HEED_SECONDS
        signal.pthread_kill(threading.main_thread().ident or 0, next(iter(self._handlers)))

    def _end(self) -> None:
        """Written past Python's buffers: the main thread may hold their locks for ever."""
        os.write(2, f"parallax: {printable(self._last_words)}\n".encode())
        os._exit(self._code)
