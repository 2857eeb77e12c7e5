"""A rank that fails, dies or hangs in the middle of a step: all ranks are gone at once, and one line says why."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.faults.commands import (
    MODULE,
    finish,
    prepared,
    rank_of,
    running,
    start,
    temporary,
    wait_for,
)
from tests.faults.failing import fail_at

ALL_GONE_SECONDS = 20.0  # usually one; a busy machine is slower, and torch would wait for minutes
SETTINGS = [
    "trainer.steps=1000",
    "trainer.eval_every=0",
    "trainer.checkpoint_every=0",
    "data.max_bytes=64KiB",
    "logger=none",
]
STEP = 2  # of the fault


def torchrun(ranks: int, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        *more,
        *MODULE[1:],
    ]


def seconds_until_gone(folder: Path, ended: Callable[[], bool]) -> float:
    """From the fault until no rank was left; what launchers do afterwards, until they have ``ended``, is theirs."""
    fault = folder / "fault"
    wait_for(lambda: fault.exists() or ended(), "the fault")
    assert fault.exists(), "the run ended before its fault"
    wait_for(lambda: not ranks(folder), "the end of the ranks")
    return time.time() - fault.stat().st_mtime


@dataclass(frozen=True)
class Ended:
    """The end of launchers: exit codes, messages, and the seconds for which ranks lived after the fault."""

    codes: list[int]
    err: str
    seconds: float


Train = Callable[[Path], Ended]


@pytest.fixture
def train(here: Path, called: Callable[..., tuple[int, str, str]]) -> Train:
    """A run whose launcher is this process; another thread looks at its ranks."""

    def run(directory: Path) -> Ended:
        ended = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            seconds = thread.submit(seconds_until_gone, here, ended.is_set)
            try:
                code, _, err = called("train", "--run-dir", str(directory))
            finally:
                ended.set()
        return Ended([code], err, seconds.result())

    return run


def ranks(folder: Path) -> list[psutil.Process]:
    """Rank processes, of any launcher, that work in ``folder``."""
    return [process for process in running(folder) if rank_of(process) is not None]


def training(fault: str, rank: str, *overrides: str, action: str = "forward") -> Path:
    return prepared(*fail_at(int(rank), STEP, action, fault), *SETTINGS, *overrides)


def the_line(err: str) -> str:
    (line,) = [
        line
        for line in err.splitlines()
        if "parallax: " in line and not line.startswith(("W1", "E1"))
    ]
    assert line.startswith("parallax: ")
    return line


RAISED = (
    r"rank {rank} \(stage {rank}, replica 0\) failed in {action} of micro-batch 0, step 2: "
    r"ValueError: boom\\n\\x1b\[31m"
)
SEEN = "last seen in forward of micro-batch 0, step 2"
AGAIN = "run again to (continue from the last checkpoint|start from the beginning: there is no .*)"
KILLED = rf"rank {{rank}} \(stage {{rank}}, replica 0\) was killed by {{signal}}( \(.*\?\))?, {SEEN}; {AGAIN}"
ENDED = rf"rank {{rank}} \(stage {{rank}}, replica 0\) ended without a report, {SEEN}"


@pytest.mark.parametrize(
    ("fault", "rank", "action", "expected"),
    [
        pytest.param("raises", "0", "forward", RAISED, marks=pytest.mark.thorough),
        pytest.param("raises", "0", "backward", RAISED, marks=pytest.mark.thorough),
        pytest.param("raises", "1", "backward", RAISED, marks=pytest.mark.faults),
        pytest.param("raises", "1", "forward", RAISED, marks=pytest.mark.thorough),
        pytest.param("crashes", "1", "forward", KILLED, marks=pytest.mark.slow),
        pytest.param("is_killed", "0", "forward", KILLED, marks=pytest.mark.thorough),
    ],
)
def test_one_host(
    here: Path, train: Train, fault: str, rank: str, action: str, expected: str
) -> None:
    ended = train(training(fault, rank, action=action))
    err = ended.err
    print(f"{fault} on rank {rank}: all ranks gone after {ended.seconds:.2f} s")
    assert ended.seconds < ALL_GONE_SECONDS
    assert ended.codes == [1]
    signalled = "SIGSEGV" if fault == "crashes" else "SIGKILL"
    assert re.fullmatch(
        "parallax: " + expected.format(rank=rank, action=action, signal=signalled), the_line(err)
    ), err
    assert err.count("Traceback") == (fault == "raises")
    assert ("failing.py" in err) == (fault in ("raises", "crashes"))
    assert not [line for line in err.splitlines() if line.startswith(("W1", "E1", "[W", "[E"))]
    assert ("Fatal Python error: Segmentation fault" in err) == (fault == "crashes")
    assert running(here) == []
    assert temporary() == []


def two_agents(here: Path, run: Path) -> Ended:
    """Two torchruns, as on two hosts: neither agent knows of the other's rank before the rendezvous times out."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launchers = []
    for node in (0, 1):
        command = torchrun(
            1,
            "--nnodes=2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=watched",
            f"--rdzv-conf=is_host={1 - node}",
            f"--node-rank={node}",
        )
        command.insert(command.index("-m", 3), "--local-addr=127.0.0.1")
        command += ["train", "--run-dir", str(run)]
        launchers.append(start(command))
    seconds = seconds_until_gone(here, lambda: launchers[0].poll() is not None)
    ended = [finish(launcher) for launcher in launchers]
    return Ended([code for code, _, _ in ended], "".join(err for _, _, err in ended), seconds)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "rank", "expected"),
    [
        pytest.param("raises", "1", RAISED, marks=pytest.mark.thorough),
        ("is_killed", "0", ENDED),
        pytest.param("is_killed", "1", ENDED, marks=pytest.mark.thorough),
    ],
)
def test_two_agents(here: Path, fault: str, rank: str, expected: str) -> None:
    ended = two_agents(here, training(fault, rank))
    print(f"{fault} on rank {rank}, two agents: all ranks gone after {ended.seconds:.2f} s")
    assert ended.seconds < ALL_GONE_SECONDS
    assert all(code != 0 for code in ended.codes)
    line = the_line(ended.err)
    assert re.fullmatch("parallax: " + expected.format(rank=rank, action="forward"), line), line
    assert running(here) == []


SLEEPS = r"has been in forward of micro-batch 0, step 2, for \d+ s.*; the limit is 3 s .*stacks-rank{rank}.txt"
STOPPED = (
    r"has not answered for \d+ s \(stopped, or its host is gone\), last seen in forward of micro-batch 0, step 2 "
    r"while rank \d waits in receive_\w+ of micro-batch 0, step 2; the limit is 3 s.*"
)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "rank", "agents", "expected"),
    [
        ("sleeps", "0", 1, SLEEPS),
        pytest.param("sleeps", "1", 2, SLEEPS, marks=pytest.mark.thorough),
        pytest.param("is_stopped", "0", 2, STOPPED, marks=pytest.mark.thorough),
        pytest.param("is_stopped", "1", 1, STOPPED, marks=pytest.mark.thorough),
    ],
)
def test_a_hang(
    here: Path, train: Train, fault: str, rank: str, agents: int, expected: str
) -> None:
    run = training(fault, rank, "trainer.watchdog_seconds=3")
    ended = train(run) if agents == 1 else two_agents(here, run)
    print(f"{fault} on rank {rank}: all ranks gone after {ended.seconds:.2f} s of a limit of 3 s")
    assert ended.seconds < 3 + ALL_GONE_SECONDS
    assert all(code == 1 for code in ended.codes)
    line = the_line(ended.err)
    who = rf"parallax: rank {rank} \(stage {rank}, replica 0\) "
    assert re.fullmatch(who + expected.format(rank=rank), line), line
    if fault == "sleeps":
        assert "in sleeps" in (run / f"stacks-rank{rank}.txt").read_text()
    assert running(here) == []


@pytest.mark.thorough  # two thirds of its 20 s it sleeps
def test_all_stopped_and_continued_is_no_hang(here: Path) -> None:
    """The whole job sleeps for longer than the limit, as with Ctrl-Z: no rank is at fault. A rank that sleeps
    alone is named."""
    run = training("raises", "2", "trainer.watchdog_seconds=3")  # there is no such rank
    launcher = start([*MODULE, "train", "--run-dir", str(run)])
    metrics = run / "metrics.jsonl"
    wait_for(
        lambda: (metrics.exists() and metrics.stat().st_size > 0) or launcher.poll() is not None,
        "a step",
    )
    stopped = ranks(here)
    for process in stopped:
        process.suspend()
    time.sleep(5)
    for process in stopped:
        process.resume()
    size = metrics.stat().st_size
    wait_for(
        lambda: metrics.stat().st_size > size + 2000 or launcher.poll() is not None, "more steps"
    )
    assert launcher.poll() is None, launcher.communicate()
    (rank,) = (process for process in ranks(here) if rank_of(process) == 1)
    rank.suspend()
    code, _, err = finish(launcher)
    assert code == 1
    assert re.fullmatch(
        r"parallax: rank 1 \(stage 1, replica 0\) has not answered for \d+ s \(stopped, or its host is gone\).*; "
        "the limit is 3 s.*",
        the_line(err),
    ), err
    assert running(here) == []
