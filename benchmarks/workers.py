"""A separate process for each variant of a step, so that variants do not share heaps, caches or failures.

::

    @contextmanager
    def way(sizes) -> Iterator[tuple[ready, answer]]:      # in the worker: make, yield, clean up
    worker = Worker("plain", way, sizes)                   # in the parent: one per way; they take turns
    worker.ready(), worker.ask("step"), worker.close()
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

TIMEOUT = 600.0

Answer = Callable[[Any], Any]
Way = Callable[..., AbstractContextManager[tuple[Any, Answer]]]
T = TypeVar("T")


class WayFailed(Exception):
    """A worker failed; the message is its reason, in one line, a note its traceback."""


class Worker:
    """The parent's end. ``way`` is a context manager of (what :meth:`ready` gives, the function of messages).

    ``start``: how processes are made. ``forkserver`` imports only once, which saves most of a small way's time; it is
    not for CUDA, which a library may have touched when it was imported.
    """

    def __init__(self, name: str, way: Way, *arguments: Any, start: str = "spawn") -> None:
        self.name = name
        context: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            context.set_forkserver_preload([way.__module__])
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, way, arguments), name=name)
        self._process.start()
        other.close()

    def ready(self, timeout: float = TIMEOUT) -> Any:
        """Wait until the way is made; call it once, before the first :meth:`ask`."""
        return self._answer(timeout)

    def ask(self, message: Any, timeout: float = TIMEOUT) -> Any:
        """The answer to ``message``, anything but None."""
        try:
            self._connection.send(message)
        except OSError:
            raise WayFailed(self._ended()) from None
        return self._answer(timeout)

    def stop(self) -> None:
        """Ask the process to end, and do not wait for it."""
        with contextlib.suppress(OSError):
            self._connection.send(None)

    def close(self, patience: float = 30.0) -> None:
        """End the process: by asking, then by force."""
        self.stop()
        self._process.join(timeout=patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def _answer(self, timeout: float) -> Any:
        if not self._connection.poll(max(0.0, timeout)):
            self._process.kill()
            raise WayFailed(f"no answer within {timeout:.0f} s")
        try:
            done, value = self._connection.recv()
        except (EOFError, OSError):
            raise WayFailed(self._ended()) from None
        if not done:
            failed = WayFailed(value[0])
            failed.add_note(value[1])
            raise failed
        return value

    def _ended(self) -> str:
        self._process.join(timeout=5)
        return f"its process ended with exit code {self._process.exitcode}"


def _serve(connection: Connection, way: Way, arguments: tuple[Any, ...]) -> None:
    try:
        with way(*arguments) as (ready, answer):
            connection.send((True, ready))
            while (message := connection.recv()) is not None:
                connection.send((True, answer(message)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return  # the parent is gone
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send((False, (reason(error), traceback.format_exc())))


def reason(error: BaseException) -> str:
    """An exception in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"


def rotated(runners: list[T], turn: int) -> Iterator[T]:
    """Yield ``runners`` rotated by ``turn``, so that no process always runs after the same one, whose writes may still
    be running."""
    turn %= max(1, len(runners))
    yield from runners[turn:] + runners[:turn]


class Deadline:
    """A time budget for parts and steps."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds, at least zero."""
        return max(0.0, self._end - time.monotonic())

    def over(self) -> bool:
        """Whether no seconds are left."""
        return self.left() == 0.0
