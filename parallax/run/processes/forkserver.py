"""A warm process from which the ranks of a run are forked: importing torch takes seconds, a fork takes milliseconds.

::

    parallax train ══ socket ══ fork server ──┬── rank 0       a restart is two forks
                                (torch is     └── rank 1       nothing is imported again
                                imported)

A fork copies one thread, and no device that is in use. So the server imports and waits, and nothing else: it starts no
thread, computes nothing, asks no accelerator anything, and imports no code of the user's. Its variables are those of
the ranks, which libraries read when they are imported. When the launcher goes, the server goes, and the ranks with it:
the kernel sees to that on Linux, elsewhere the end of the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from parallax.common.signals import REQUESTS, install_early_handlers

ENDING_SECONDS = (
    1.5  # that ranks have to end by themselves when one has failed: the watch sees to it
)
_CLOSING_SECONDS = 5.0  # for the server to end, with all that it has forked
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_ARGUMENTS_START = (
    45  # of /proc/PID/stat's fields after the name: where a process's command line lies
)
_LOOK_SECONDS = 1.0  # between two looks at ranks of which the server says nothing


class ServerLost(Exception):
    """The fork server has ended, and all ranks with it; ``code`` is its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the fork server ended with {code}")
        self.code = code


class ForkServer:
    """The launcher's side. ``environment`` is that of all ranks, ``directory`` the run's; ``libraries`` are imported
    beside Parallax's own."""

    def __init__(
        self, directory: Path, environment: Mapping[str, str], libraries: Sequence[str] = ()
    ) -> None:
        self._channel, theirs = socket.socketpair()
        self._lines, self.lost = _Lines(self._channel), False
        self._living, self._pids, self._codes = set[int](), dict[int, int](), dict[int, int]()
        command = ["-m", __name__, str(theirs.fileno()), str(os.getpid()), str(directory)]
        command += libraries
        with theirs, _blocked():
            self._process = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
            )

    @property
    def has_ranks(self) -> bool:
        """Whether any of them lives, as far as is known here."""
        return bool(self._pids)

    def fork(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start a rank with each of ``environments``; their numbers are their places in it."""
        self._codes, self._living = {}, set(range(len(environments)))
        for rank, added in enumerate(environments):
            self._lines.send({"fork": rank, "of": len(environments), "environment": dict(added)})

    def wait(self, given_up: Callable[[], bool] = lambda: False) -> dict[int, int]:
        """Wait for the end of all ranks; exit codes by rank, in the order in which they came. When one has failed the
        others are to end by themselves; those that have not after ``ENDING_SECONDS`` are killed, and left out, and so
        are all as soon as they are ``given_up``, which is asked every second or so. Raises :class:`ServerLost`."""
        deadline, over = float("inf"), False
        while self._living and time.monotonic() < deadline and not over:
            self._hear(min(deadline - time.monotonic(), _LOOK_SECONDS))
            if any(self._codes.values()):
                deadline = min(deadline, time.monotonic() + ENDING_SECONDS)
            over = given_up()
        codes = dict(self._codes)
        if over and _is_stopped(self._process.pid):
            self.kill()  # with them
        self.signal(signal.SIGKILL)
        while self._living:
            self._hear(_LOOK_SECONDS)
        return codes

    def signal(self, number: int) -> None:
        """Send a signal to every rank that lives."""
        self._lines.send({"signal": number})

    def kill(self) -> None:
        """End the server, and with it all ranks, whatever they are doing."""
        self._process.kill()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._pids and self._living:  # it still imports
            self.kill()
        self._channel.close()
        try:
            self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def _hear(self, patience_seconds: float) -> None:
        """What the server has to say next. One that is stopped tells nothing, not even that its ranks have ended."""
        if not select.select([self._channel], [], [], max(0.0, patience_seconds))[0]:
            silent = patience_seconds == _LOOK_SECONDS and _is_stopped(self._process.pid)
            if silent and any(map(_has_ended, self._pids.values())):
                self.kill()
            return
        try:
            messages = self._lines.receive()
        except ConnectionError:
            self._living, self._pids, self.lost = set(), {}, True
            raise ServerLost(self._process.wait()) from None
        for message in messages:
            rank = message["rank"]
            if "pid" in message:
                self._pids[rank] = message["pid"]
            else:
                self._codes[rank] = message["code"]
                self._living.discard(rank)
                del self._pids[rank]


def _is_stopped(pid: int) -> bool:
    """Whether somebody stopped a process. One that is not may be silent about a rank that has ended for as long as
    threads of that are on their way out."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _has_ended(pid: int) -> bool:
    """Whether a process waits for its parent to take note of its end."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


class _Lines:
    """Messages over a socket, a line of JSON each."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._half = channel, b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send it; that the other end has gone is read, not noticed here."""
        with contextlib.suppress(OSError):
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """What has come; ConnectionError where the other end has gone."""
        part = self._channel.recv(1 << 16)
        if not part:
            raise ConnectionError("the other end has gone")
        *lines, self._half = (self._half + part).split(b"\n")
        return list(map(json.loads, lines))


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Processes started inside never see a request to end: a terminal sends those to all, but to the server they mean
    nothing. Its ranks let them in."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- the server's side


class _Server:
    """Forks what it is told to, and tells how it ended."""

    def __init__(self, channel: socket.socket, directory: str) -> None:
        self._channel, self._directory, self._lines = channel, directory, _Lines(channel)
        self._pid, self._ranks = os.getpid(), dict[int, int]()  # ranks by process
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Returns in each process that is forked; in the server never."""
        while True:
            ready, _, _ = select.select([self._channel, self._woken], [], [])
            if self._woken in ready:
                self._woken.recv(1 << 16)
                self._reap()
            for message in self._receive() if self._channel in ready else ():
                if "signal" in message:
                    self._signal(message["signal"])
                elif self._forked(message["fork"]):
                    self._become(message)
                    return

    def _receive(self) -> list[dict[str, Any]]:
        try:
            return self._lines.receive()
        except ConnectionError:  # the launcher has gone
            self._signal(signal.SIGKILL)
            for pid in self._ranks:
                os.waitpid(pid, 0)
            os._exit(0)

    def _signal(self, number: int) -> None:
        for pid in self._ranks:
            os.kill(pid, number)  # it is there, if only as a zombie: nobody else reaps it

    def _reap(self) -> None:
        for pid, rank in list(self._ranks.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._ranks[pid]
                self._lines.send({"rank": rank, "code": os.waitstatus_to_exitcode(status)})

    def _forked(self, rank: int) -> bool:
        """Whether this is the new process."""
        sys.stdout.flush()  # or each rank says again what an import has printed
        try:
            with warnings.catch_warnings():
                # Python 3.12 counts the sleeping threads of numpy's BLAS, which minds forks.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            told = f"parallax: cannot start rank {rank}: {error.strerror} (ulimit -u, pids.max)"
            os.write(2, f"{told}\n".encode())
            os._exit(1)
        if pid:
            self._ranks[pid] = rank
            self._lines.send({"rank": rank, "pid": pid})
        return pid == 0

    def _become(self, message: Mapping[str, Any]) -> None:
        """Be as a process that was just started with this command line, but for what is imported already."""
        die_with(self._pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._channel, self._woken, self._wake):
            end.close()
        os.environ.update(message["environment"])
        show_as(f"parallax rank {message['fork']} of {message['of']}: {self._directory}")
        sys.argv[1:] = ["train", "--run-dir", self._directory]
        install_early_handlers()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


def die_with(parent: int) -> None:
    """Let the kernel end this process when ``parent``, which started it, ends; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:  # it was faster
            os._exit(1)


def show_as(text: str) -> None:
    """What `ps` shows of this process, as far as its command line was long enough; Linux alone can."""
    with contextlib.suppress(OSError, ValueError):
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = map(int, stat[_ARGUMENTS_START : _ARGUMENTS_START + 2])
        if end - start > 1:
            ctypes.memmove(
                start, text.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start
            )


def warm_up(libraries: Sequence[str] = ()) -> None:
    """Import what a rank imports, which is not looked through for garbage again. What of ``libraries`` cannot be
    imported the ranks say."""
    gc.disable()
    importlib.import_module("parallax.commands.train")
    for name in libraries:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()


def main() -> None:
    """The server, and each of the ranks that come out of it: from then on one is ``python -m parallax train``."""
    channel, parent, directory, *libraries = sys.argv[1:]
    die_with(int(parent))
    server = _Server(socket.socket(fileno=int(channel)), directory)
    warm_up(libraries)
    show_as(f"parallax fork server: {directory}")
    server.serve()
    runpy.run_module("parallax", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
