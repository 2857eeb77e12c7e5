"""Wake the watchdog thread when a signal arrives, or when the main thread asks for it."""

from __future__ import annotations

import contextlib
import signal
import socket

from parallax.common.signals import early_request, handled_signals


class WakeUp:
    """A socket that becomes readable when a signal arrives or the main thread writes to it. ``read()`` returns the
    numbers of the signals received since the last call. The installed signal handlers do nothing, because Python cannot
    run them while the main thread is inside a C call."""

    def __init__(self) -> None:
        self.socket, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, lambda *_: None) for number in handled_signals()
        }
        if number := early_request():  # during imports, or before the ranks had connected
            self._wake.send(bytes([number]))

    def rouse(self) -> None:
        """Wake the watchdog thread, without waiting for it."""
        with contextlib.suppress(BlockingIOError):  # a full buffer wakes it anyway
            self._wake.send(b"\0")

    def read(self) -> list[int]:
        found = self.socket.recv(64)
        return [number for number in self._handlers if number in found]

    def forget(self) -> None:
        """Restore the signal handlers in a forked child, which has no watchdog thread."""
        self._restore(-1)
        self._close()

    def close(self) -> None:
        """Restore the previous handlers and close the sockets."""
        self._restore(self._before)
        self._close()

    def _restore(self, wakeup: int) -> None:
        signal.set_wakeup_fd(wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _close(self) -> None:
        for end in (self.socket, self._wake):
            end.close()
