"""The line that starts several hosts: what it refuses, and two of it on this host, which train one run."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from parallax.runtime.checkpoint import list_checkpoints
from tests.distributed.pool import ROOT
from tests.faults.commands import (
    SETTLED,
    TINY,
    finish,
    one_line,
    running,
    start,
    temporary,
    wait_for,
)
from tests.results import read_metrics

LINE = str(ROOT / "launch" / "torchrun.sh")
SETTINGS = ["name=two", *TINY, *SETTLED, "trainer.eval_every=0", "logger=none"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["10.0.0.1:29400", "2"], "usage: torchrun.sh HEAD:PORT NODES PROCESSES key=value ..."),
        (["10.0.0.1:29400", "0", "1"], "torchrun.sh: 0: accepted are whole numbers from 1"),
        (["10.0.0.1:29400", "2", "eight"], "torchrun.sh: eight: accepted are whole numbers from 1"),
        (["10.0.0.1", "2", "1"], "parallax: 10.0.0.1: accepted is HOST:PORT"),
    ],
)
def test_a_wrong_line_ends_in_one(here: Path, arguments: list[str], message: str) -> None:
    code, out, err = finish(start([LINE, *arguments], PYTHON=sys.executable))
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(message)


def two(*settings: str) -> list[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [LINE, f"127.0.0.1:{port}", "2", "1", *SETTINGS, *settings]
    return [start(line, PYTHON=sys.executable) for _ in range(2)]


@pytest.mark.thorough
def test_the_same_line_twice_trains_one_run(here: Path) -> None:
    ended = [finish(each) for each in two("trainer.steps=3")]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [record["step"] for record in read_metrics(here / "runs/two/metrics.jsonl")][:3] == [
        1,
        2,
        3,
    ]
    assert len(list((here / "runs/two").glob("events-rank*"))) == 2
    assert temporary() == []


@pytest.mark.thorough
def test_a_signal_to_the_script_reaches_its_ranks(here: Path) -> None:
    """SIGUSR1, of which torchrun itself would die."""
    lines = two("trainer.steps=1000000", "trainer.checkpoint_every=0")
    metrics = here / "runs/two/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, "steps")
    lines[1].send_signal(signal.SIGUSR1)
    ended = [finish(each) for each in lines]
    assert [code for code, _, _ in ended] == [0, 0], ended
    stderr_lines = "".join(err for _, _, err in ended).splitlines(keepends=True)
    message = one_line("".join(word for word in stderr_lines if word.startswith("parallax: ")))
    assert message.startswith("parallax: stopped by SIGUSR1 after step ")
    assert len(list_checkpoints(here / "runs/two/checkpoints")) == 1
    assert running(here) == []
    assert temporary() == []
