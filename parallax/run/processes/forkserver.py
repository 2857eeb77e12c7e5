"""A fork server: a process with torch imported, from which the ranks are forked. Importing torch takes seconds, a fork
milliseconds.

::

    parallax train ══ socket ══ fork server ──┬── rank 0       a restart is two forks
                                (torch is     └── rank 1       nothing is imported again
                                imported)

A fork copies only one thread, and cannot copy a device context. So the server only imports and waits: it starts no
thread, computes nothing, queries no accelerator, and imports no user code. It has the environment variables of the
ranks, because libraries read them at import. When the launcher ends, the server and its ranks end too: on Linux the
kernel ends them; on other systems they notice that the socket has been closed.
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

from parallax.common.processes import die_with
from parallax.common.signals import REQUESTS, install_early_handlers

ENDING_SECONDS = 1.5  # for the watches of ranks to end them after one has failed
_CLOSING_SECONDS = 5.0  # for the server and its ranks to end
_ARGUMENTS_START = (
    45  # index of the command line's address among the fields of /proc/PID/stat after the name
)
_CHECK_SECONDS = 1.0  # between two checks of ranks while the server is silent


class ServerLost(Exception):
    """The fork server has ended, which has ended all ranks. ``code``: the exit code of the server."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the fork server ended with {code}")
        self.code = code


class ForkServer:
    """The launcher's side of the fork server.

    ``environment``  the environment variables of all ranks
    ``directory``    the run directory
    ``libraries``    modules that the server imports in addition to Parallax
    ``command``      the arguments of each rank, by default those of training
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        libraries: Sequence[str] = (),
        command: Sequence[str] = (),
    ) -> None:
        self._channel, theirs = socket.socketpair()
        self._lines, self.lost = _Lines(self._channel), False
        self._living, self._pids, self._codes = set[int](), dict[int, int](), dict[int, int]()
        arguments = [*command] or ["train", "--run-dir", str(directory)]
        server = ["-m", __name__, str(theirs.fileno()), str(os.getpid()), str(directory)]
        server += [json.dumps(arguments), *libraries]
        with theirs, _blocked():
            self._process = subprocess.Popen(
                [sys.executable, *server],
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
            )

    @property
    def has_ranks(self) -> bool:
        """Whether any rank is alive, according to the server's messages so far."""
        return bool(self._pids)

    def fork(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start one rank for each of ``environments``, in the order of rank numbers."""
        self._codes, self._living = {}, set(range(len(environments)))
        for rank, added in enumerate(environments):
            self._lines.send({"fork": rank, "of": len(environments), "environment": dict(added)})

    def wait(
        self,
        given_up: Callable[[], bool] = lambda: False,
        ending_seconds: float = ENDING_SECONDS,
        outlived: Callable[[int], bool] = lambda rank: False,
    ) -> dict[int, int]:
        """Wait until all ranks have ended. Return a mapping from rank to exit code, in the order in which the ranks
        ended. When one rank has failed, the others should end by themselves, unless ``outlived(rank)``. Ranks that have
        not ended ``ending_seconds`` after the failure are killed, and omitted from the result. ``given_up()`` is called
        about every second. When it returns True, all ranks are killed, and the killed ranks are omitted. Raises
        :class:`ServerLost` if the fork server has ended."""
        deadline, over = float("inf"), False
        while self._living and time.monotonic() < deadline and not over:
            self._receive_next(min(deadline - time.monotonic(), _CHECK_SECONDS))
            failed = any(code and not outlived(rank) for rank, code in self._codes.items())
            deadline = min(deadline, time.monotonic() + ending_seconds) if failed else float("inf")
            over = given_up()
        codes = dict(self._codes)
        if over and _is_stopped(self._process.pid):
            self.kill()  # kills its ranks, too
        self.signal(signal.SIGKILL)
        while self._living:
            self._receive_next(_CHECK_SECONDS)
        return codes

    def signal(self, number: int) -> None:
        """Send a signal to every living rank."""
        self._lines.send({"signal": number})

    def kill(self) -> None:
        """Kill the server, which also ends all ranks."""
        self._process.kill()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._pids and self._living:  # the server still imports
            self.kill()
        self._channel.close()
        try:
            self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def _receive_next(self, patience_seconds: float) -> None:
        """Receive the next messages of the server, but wait at most ``patience_seconds``. A server that a signal has
        stopped sends no messages, not even about ranks that have ended. If a rank has ended, this method kills such a
        server."""
        if not select.select([self._channel], [], [], max(0.0, patience_seconds))[0]:
            silent = patience_seconds == _CHECK_SECONDS and _is_stopped(self._process.pid)
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
    """Return whether a signal has stopped the process. A server that is not stopped may still be silent about an ended
    rank, because some threads of the rank have not exited yet."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended but its parent has not reaped it."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


class _Lines:
    """Messages over a socket, one line of JSON each."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._half = channel, b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Errors are ignored, because :meth:`receive` detects that the peer has ended."""
        with contextlib.suppress(OSError):
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the received messages. Raises ConnectionError if the peer has closed the connection."""
        part = self._channel.recv(1 << 16)
        if not part:
            raise ConnectionError("the peer has closed the connection")
        *lines, self._half = (self._half + part).split(b"\n")
        return list(map(json.loads, lines))


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """A context in which new processes block the signals that request an end, such as SIGTERM. A terminal sends SIGINT
    to all processes, but the server must ignore it. The server's ranks unblock these signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- the server's side


class _Server:
    """Forks ranks on request, and reports their exit codes to the launcher."""

    def __init__(self, channel: socket.socket, directory: str, command: list[str]) -> None:
        self._channel, self._directory, self._lines = channel, directory, _Lines(channel)
        self._command = command
        self._pid, self._ranks = os.getpid(), dict[int, int]()  # ranks by process
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Handle requests. This method returns only in a forked process."""
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
        except ConnectionError:  # the launcher has ended
            self._signal(signal.SIGKILL)
            for pid in self._ranks:
                os.waitpid(pid, 0)
            os._exit(0)

    def _signal(self, number: int) -> None:
        for pid in self._ranks:
            os.kill(pid, number)  # the pid is valid, if only of a zombie: no other process reaps it

    def _reap(self) -> None:
        for pid, rank in list(self._ranks.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._ranks[pid]
                self._lines.send({"rank": rank, "code": os.waitstatus_to_exitcode(status)})

    def _forked(self, rank: int) -> bool:
        """Fork; return whether this is the new process."""
        sys.stdout.flush()  # otherwise each rank would print an import's output again
        try:
            with warnings.catch_warnings():
                # Python 3.12 counts the sleeping threads of numpy's BLAS, and warns about forks.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            line = f"parallax: cannot start rank {rank}: {error.strerror} (ulimit -u, pids.max)"
            os.write(2, f"{line}\n".encode())
            os._exit(1)
        if pid:
            self._ranks[pid] = rank
            self._lines.send({"rank": rank, "pid": pid})
        return pid == 0

    def _become(self, message: Mapping[str, Any]) -> None:
        """Make this forked process equal to one that was started with the rank's command line, except that its modules
        are already imported."""
        die_with(self._pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._channel, self._woken, self._wake):
            end.close()
        os.environ.update(message["environment"])
        show_as(f"parallax rank {message['fork']} of {message['of']}: {self._directory}")
        sys.argv[1:] = self._command
        install_early_handlers()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


def show_as(text: str) -> None:
    """Set the command line of this process, which `ps` shows, to ``text``, cut to the length of the original command
    line; Linux only."""
    with contextlib.suppress(OSError, ValueError):
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = map(int, stat[_ARGUMENTS_START : _ARGUMENTS_START + 2])
        if end - start > 1:
            ctypes.memmove(
                start, text.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start
            )


def warm_up(libraries: Sequence[str] = ()) -> None:
    """Import the modules of a rank, and exclude them from later garbage collections. Errors in ``libraries`` are
    ignored, because the ranks will report them."""
    gc.disable()
    importlib.import_module("parallax.commands.train")
    for name in libraries:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()


def main() -> None:
    """Run the server. In each forked process, run a rank instead, like ``python -m parallax COMMAND``."""
    channel, parent, directory, command, *libraries = sys.argv[1:]
    die_with(int(parent))
    server = _Server(socket.socket(fileno=int(channel)), directory, json.loads(command))
    warm_up(libraries)
    show_as(f"parallax fork server: {directory}")
    server.serve()
    runpy.run_module("parallax", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
