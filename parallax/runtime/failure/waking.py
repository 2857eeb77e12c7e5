"""How the watch's thread wakes up: by a byte of the main thread, or of Python's own handler of signals."""

from __future__ import annotations

import contextlib
import signal
import socket

from parallax.common.signals import early_request, handled_signals


class WakeUp:
    """A socket that becomes readable when there is something to look at: ``read()`` gives the numbers of the signals
    that came meanwhile. The main thread's handlers do nothing while it is there: it may be waiting in a call, where no
    handler runs."""

    def __init__(self) -> None:
        self.socket, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, lambda *_: None) for number in handled_signals()
        }
        if number := early_request():  # while this process imported, or met the others
            self._wake.send(bytes([number]))

    def rouse(self) -> None:
        """Wake it up, without waiting."""
        with contextlib.suppress(BlockingIOError):  # it is awake
            self._wake.send(b"\0")

    def read(self) -> list[int]:
        found = self.socket.recv(64)
        return [number for number in self._handlers if number in found]

    def forget(self) -> None:
        """A forked child minds its signals again, and none of them comes here."""
        self._restore(-1)
        self._close()

    def close(self) -> None:
        """Everything is as before it was made."""
        self._restore(self._before)
        self._close()

    def _restore(self, wakeup: int) -> None:
        signal.set_wakeup_fd(wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _close(self) -> None:
        for end in (self.socket, self._wake):
            end.close()
