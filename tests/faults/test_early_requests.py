"""Requests to end that come while processes still start: kept, or served at once, from their first line on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from parallax.common.signals import stopped_by
from tests.faults.commands import (
    MODULE,
    TORCHRUN,
    finish,
    one_line,
    prepared,
    rank_of,
    ranks,
    running,
    start,
    wait_for,
)
from tests.faults.test_requests_to_end import ENDLESS

SLOW_TORCH = """
import pathlib, sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            pathlib.Path("importing").touch()
            try:
                time.sleep(60)
            except KeyboardInterrupt as error:
                raise ImportError("half of it") from error

sys.meta_path.insert(0, Slow())
"""


def heeds(process: psutil.Process, number: int) -> bool:
    """Whether it has begun to, of which its first line takes care."""
    with contextlib.suppress(OSError, psutil.Error):
        status = Path(f"/proc/{process.pid}/status").read_text()
        (caught,) = (line.split()[1] for line in status.splitlines() if line[:7] == "SigCgt:")
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


# Torch comes late to ranks, so that there is time before.
LATE_TORCH = """
import os, pathlib, sys, time

class Late:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and "LOCAL_RANK" in os.environ:
            sys.meta_path.remove(self)
            pathlib.Path("importing-" + os.environ["RANK"]).touch()
            time.sleep(1)

sys.meta_path.insert(0, Late())
"""


def check_all_end(process: subprocess.Popen[str], here: Path) -> None:
    """Check that all processes end with exit code 0 and one line."""
    code, _, err = finish(process)
    assert code == 0, err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("parallax: ")]
    assert line.startswith("parallax: stopped by SIGUSR1")
    assert running(here) == []


def tell(launcher: psutil.Process, whom: list[int]) -> None:
    for each in launcher.children():
        if rank_of(each) in whom:
            each.send_signal(signal.SIGUSR1)


@pytest.mark.faults
@pytest.mark.parametrize("whom", [[0, 1], [1]], ids=["all", "one"])
def test_ranks_that_still_import_torch(here: Path, whom: list[int]) -> None:
    """A rank holds the request until it has joined the others, and then ends all."""
    (here / "sitecustomize.py").write_text(LATE_TORCH)
    run = prepared(*ENDLESS)
    process = start([*TORCHRUN, "-m", "parallax", "train", "--run-dir", str(run)])
    wait_for(lambda: len([*here.glob("importing-*")]) == 2, "torch")
    tell(psutil.Process(process.pid), whom)
    check_all_end(process, here)


@pytest.mark.faults
@pytest.mark.parametrize("whom", [[0, 1], [1]], ids=["all", "one"])
@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0, 1.5, 2.0, 2.5, 3.5])
def test_ranks_that_are_still_starting(here: Path, seconds: float, whom: list[int]) -> None:
    """The same, signalled at any moment since the first line."""
    run = prepared(*ENDLESS)
    process = start([*TORCHRUN, "-m", "parallax", "train", "--run-dir", str(run)])
    launcher = psutil.Process(process.pid)
    wait_for(
        lambda: (
            len(found := launcher.children()) == 2
            and all(heeds(each, signal.SIGUSR1) for each in found)
        ),
        "first lines",
    )
    time.sleep(seconds)
    tell(launcher, whom)
    check_all_end(process, here)


@pytest.mark.faults
def test_a_rank_whose_neighbour_never_comes(here: Path) -> None:
    """It waits for it in a call in which no handler runs."""
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    process = start([*MODULE, "train", *ENDLESS], **environment, PARALLAX_JOIN_SECONDS="21")
    assert process.stderr is not None
    first = process.stderr.readline()  # once it waits
    assert "waiting for rank 0 of 2" in first
    process.send_signal(signal.SIGUSR1)
    code, _, err = finish(process)
    assert code == 0
    last = err.splitlines()[-1]  # after those of torch
    assert last == "parallax: stopped by SIGUSR1 while it waited for the other ranks"


@pytest.mark.parametrize(
    "launcher", [[str(Path(sys.executable).parent / "parallax")], MODULE], ids=["script", "module"]
)
@pytest.mark.parametrize("rank", [{}, {"TORCHELASTIC_RUN_ID": "ours"}], ids=["alone", "rank"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_is_still_importing_ends_in_one_line(
    here: Path, launcher: list[str], rank: dict[str, str], number: int, code: int
) -> None:
    """What an exception in the middle of an import makes of it is another exception, now and then; and of the ranks
    none speaks."""
    (here / "sitecustomize.py").write_text(SLOW_TORCH)
    process = start([*launcher, "plan"], **rank)
    wait_for((here / "importing").exists, "torch")
    process.send_signal(number)
    assert finish(process) == (code, "", "" if rank else f"parallax: {stopped_by(number)}\n")
    assert list(here.glob("*.yaml")) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 0), (signal.SIGHUP, 129)])
def test_a_launcher_that_is_still_importing_has_nothing_to_save(
    here: Path, number: int, code: int
) -> None:
    (here / "sitecustomize.py").write_text(SLOW_TORCH)
    # Under nohup, the tests and all processes that they start ignore SIGHUP.
    process = start(["env", "--default-signal=HUP", *MODULE, "train", *ENDLESS])
    wait_for((here / "importing").exists, "torch")
    process.send_signal(number)
    assert finish(process) == (code, "", f"parallax: {stopped_by(number)}\n")
    assert not (here / "runs").exists()


SLOW_END = {
    "a thread": """
import pathlib, threading, time

def end():
    threading.main_thread().join()
    pathlib.Path("ending").touch()
    time.sleep(60)

threading.Thread(target=end).start()
""",
    "its modules": """
import pathlib, time

class Slow:
    def __del__(self, touch=pathlib.Path("ending").touch, sleep=time.sleep):
        touch()
        sleep(3)

slow = Slow()
""",
}


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("what", SLOW_END)
def test_what_has_ended_already_says_no_more(here: Path, number: int, what: str) -> None:
    """A second Ctrl-C, while Python waits for threads, and while it takes down what it has imported: no handler runs
    any more then."""
    (here / "sitecustomize.py").write_text(SLOW_END[what])
    process = start([*MODULE, "plan", "trainer.stepz=3"])
    wait_for((here / "ending").exists, "the end")
    process.send_signal(number)
    code, out, err = finish(process)
    assert (code, out) == (2, "")
    assert "trainer.stepz" in one_line(err)


@pytest.mark.faults
@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("begun", ["server", "ranks"])
def test_ctrl_c_while_ranks_start(here: Path, begun: str, seconds: float) -> None:
    """A terminal sends it to all processes: processes that it ends are not started again."""
    run = prepared(*ENDLESS, "trainer.max_restarts=3")
    process = start(["setsid", *MODULE, "train", "--run-dir", str(run)])
    launcher = psutil.Process(process.pid)
    if begun == "server":
        wait_for(launcher.children, "the process that starts the ranks")
    else:
        wait_for(lambda: len(ranks(process)) == 2, "ranks")
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert one_line(err).startswith("parallax: stopped by SIGINT")
    assert "restart" not in err
    assert running(here) == []


AT_ONCE = """
import os, signal

before = signal.pthread_sigmask

def mask(how, numbers):
    found = before(how, numbers)
    if how == signal.SIG_UNBLOCK and os.environ.get("RANK") == "0":
        os.killpg(0, signal.SIGINT)
    return found

signal.pthread_sigmask = mask
"""


@pytest.mark.faults
def test_ctrl_c_as_soon_as_a_forked_rank_hears(here: Path) -> None:
    (here / "sitecustomize.py").write_text(AT_ONCE)
    run = prepared(*ENDLESS)
    process = start(["setsid", *MODULE, "train", "--run-dir", str(run)])
    code, _, err = finish(process)
    assert code == 130, err
    assert one_line(err).startswith("parallax: stopped by SIGINT")
    assert running(here) == []
