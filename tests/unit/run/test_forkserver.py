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

# Whoever asks for a device, or starts a thread, cannot be forked any more.
WARMS_UP = """
import os, sys
import torch

def refuse(*arguments, **named):
    raise AssertionError("a device was asked for")

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


LOOK_SECONDS = 0.2


def test_a_server_that_was_stopped_is_ended_when_a_rank_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would send no report, and the launcher would wait for ever."""
    monkeypatch.setattr(forkserver, "_CHECK_SECONDS", LOOK_SECONDS)
    waits = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
    waits |= {"TORCHELASTIC_RUN_ID": "ours", "PARALLAX_RENDEZVOUS": str(tmp_path / "ranks")}
    with ForkServer(tmp_path / "run", {"OMP_NUM_THREADS": "1"}) as server:
        server.fork([waits])
        while not server.has_ranks:
            server._receive_next(LOOK_SECONDS)
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
import json, os, socket, sys, time

channel = socket.socket(fileno=int(sys.argv[1]))
channel.recv(1 << 16)
pid = os.fork()
if not pid:
    os._exit(0)
channel.sendall(json.dumps({"rank": 0, "pid": pid}).encode() + b"\\n")
time.sleep(2)
os.waitpid(pid, 0)
channel.sendall(json.dumps({"rank": 0, "code": 0}).encode() + b"\\n")
channel.recv(1 << 16)
"""


def test_a_server_that_is_late_is_not_taken_for_one_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "_CHECK_SECONDS", LOOK_SECONDS)
    monkeypatch.setattr(forkserver, "__name__", "late_server")
    (tmp_path / "late_server.py").write_text(LATE)
    with ForkServer(tmp_path, {"PYTHONPATH": str(tmp_path)}) as server:
        server.fork([{}])
        assert server.wait() == {0: 0}
