"""The process from which ranks are forked: what it must not do before, and what it hands on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from parallax.run.processes import forkserver
from parallax.run.processes.forkserver import ForkServer, ServerLost

# A process that has asked for a device, or started a thread, cannot be forked any more.
WARMS_UP = """
import os, sys
import torch

def refuse(*arguments, **named):
    raise AssertionError("a device was requested")

for name in ("is_available", "device_count", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
torch.accelerator.current_accelerator = torch.accelerator.is_available = refuse
from parallax.run.processes.forkserver import warm_up
warm_up(sys.argv[1:])
print(len(os.listdir("/proc/self/task")), [name for name in sys.argv[1:] if name not in sys.modules])
"""


@pytest.mark.slow
def test_a_server_starts_no_thread_and_asks_for_no_device() -> None:
    command = [sys.executable, "-c", WARMS_UP, "tensorboard.summary", "no_such_library"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stderr == ""
    assert found.stdout == "1 ['no_such_library']\n"


CHECK_SECONDS = 0.02  # between two checks of ranks by the launcher

# A server with one rank that waits. It imports nothing of Parallax, whose launcher is what the test is of.
WITH_A_RANK = """
import json, os, signal, socket, sys

channel = socket.socket(fileno=int(sys.argv[1]))
channel.recv(1 << 16)
pid = os.fork()
if not pid:
    signal.pause()
channel.sendall(json.dumps({"rank": 0, "pid": pid}).encode() + b"\\n")
os.waitpid(pid, 0)
channel.recv(1 << 16)
"""


def server_of(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **added: str) -> ForkServer:
    """A server that runs ``code``, and has forked its rank."""
    monkeypatch.setattr(forkserver, "_CHECK_SECONDS", CHECK_SECONDS)
    monkeypatch.setattr(forkserver, "__name__", "another_server")
    (folder / "another_server.py").write_text(code)
    return ForkServer(folder, {"PYTHONPATH": str(folder), **added})


def fork_one(server: ForkServer) -> None:
    server.fork([{}])
    while not server.has_ranks:
        server._receive_next(1.0)


def test_a_server_that_was_stopped_is_ended_when_a_rank_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would send no report, and the launcher would wait for ever."""
    with server_of(WITH_A_RANK, tmp_path, monkeypatch) as server:
        fork_one(server)
        pid = server._process.pid
        os.kill(pid, signal.SIGSTOP)
        os.kill(server._pids[0], signal.SIGKILL)
        wakes = threading.Timer(20.0, lambda: os.kill(pid, signal.SIGCONT))
        wakes.start()
        try:
            with pytest.raises(ServerLost) as lost:
                server.wait()
        finally:
            wakes.cancel()
            wakes.join()
    assert lost.value.code == -signal.SIGKILL


# A rank is over, and its server learns of it late, as while threads of the rank are on their way out.
LATE = """
import json, os, pathlib, socket, sys, time

channel = socket.socket(fileno=int(sys.argv[1]))
channel.recv(1 << 16)
pid = os.fork()
if not pid:
    os._exit(0)
channel.sendall(json.dumps({"rank": 0, "pid": pid}).encode() + b"\\n")
while not pathlib.Path(os.environ["CHECKED"]).exists():
    time.sleep(0.01)
os.waitpid(pid, 0)
channel.sendall(json.dumps({"rank": 0, "code": 0}).encode() + b"\\n")
channel.recv(1 << 16)
"""


def test_a_server_that_is_late_is_not_taken_for_one_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, is_stopped, checks = tmp_path / "checked", forkserver._is_stopped, []

    def counted(pid: int) -> bool:
        checks.append(pid)
        if len(checks) == 3:
            checked.touch()
        return is_stopped(pid)

    monkeypatch.setattr(forkserver, "_is_stopped", counted)
    with server_of(LATE, tmp_path, monkeypatch, CHECKED=str(checked)) as server:
        fork_one(server)
        checks.clear()
        assert server.wait() == {0: 0}
