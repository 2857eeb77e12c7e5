"""SIGTERM, Ctrl-C, SIGHUP, SIGUSR1: all ranks end after the same step, with a checkpoint of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from parallax import cli, config
from parallax.runtime.checkpoint import list_checkpoints
from tests.faults.commands import (
    ENDLESS,
    LONG,
    MODULE,
    ON_ONE_RANK_AND_ON_TWO,
    TORCHRUN,
    check_same_weights,
    finish,
    one_line,
    prepared,
    ranks,
    running,
    start,
    stepping,
    temporary,
    wait_for,
)
from tests.results import read_metrics

# Asks its own process to end, once, when something is called for the n-th time.
ASKING = """
import os, pathlib, signal, time, torch
from torch import nn
from parallax import TensorRows

def ask(where):
    if os.environ.get("RANK", "") == "1" and os.environ.get("ASK") == where and not pathlib.Path("requested").exists():
        pathlib.Path("requested").touch()
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)  # until it is heard

class Rows:
    taken = 0
    def batch(self, rows):
        self.taken += 1
        return self.validation(-1, rows)
    def validation(self, index, rows):
        ask(f"evaluation {index}")
        return TensorRows(torch.zeros(rows, 4, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
    def state_dict(self):
        if self.taken == 2:
            ask("checkpoint")
        return {}
    def load_state_dict(self, state):
        pass

class Slow(nn.Module):
    calls = 0
    def forward(self, x):
        if self.training:
            ask(f"step {self.calls // 2}")
            self.calls += 1
        return x.clone()

def build():
    if "RANK" in os.environ:
        ask("building")
    return nn.Sequential(nn.Embedding(8, 8), nn.Flatten(), nn.Linear(32, 8), Slow())
"""


SCRIPT = [sys.executable, "-c", "import sys; from parallax.cli import main; sys.exit(main())"]


def last_step(run: Path) -> int:
    """Of the metrics; there is a checkpoint of it, and no other."""
    step = int(read_metrics(run / "metrics.jsonl")[-1]["step"])
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == [f"step-{step:08d}"]
    return step


@pytest.mark.parametrize(
    ("number", "code", "to", "replicas"),
    [
        # The quick test of a step's requests is in tests/distributed/test_stop.py, of the lock in test_resume.py.
        pytest.param(signal.SIGTERM, 0, "launcher", (1,), marks=pytest.mark.faults),
        # As under torchrun, both ranks are signalled at once.
        pytest.param(signal.SIGINT, 130, "all", (1, 1), marks=pytest.mark.faults),
        # As rank 1 asks in an evaluation.
        pytest.param(signal.SIGTERM, 0, "rank", (1, 1), marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, 0, "launcher", (1, 1), marks=pytest.mark.faults),
        pytest.param(signal.SIGHUP, 129, "launcher", (1, 1), marks=pytest.mark.thorough),
        pytest.param(signal.SIGUSR1, 0, "launcher", (1, 1), marks=pytest.mark.faults),
        pytest.param(signal.SIGUSR1, 0, "all", (1, 1), marks=pytest.mark.faults),
    ],
)
def test_a_request_is_served_after_the_step(
    here: Path,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
    to: str,
    replicas: tuple[int, ...],
) -> None:
    """Until then no other process can train in its directory."""
    run = prepared(*ENDLESS, replicas=replicas)
    process = stepping(run)
    for command in (["train", "name=run"], ["train", "--run-dir", str(run)]):
        assert cli.main(command) == 2
        held = f"runs/run is being trained by process {process.pid} on"
        assert held in one_line(capfd.readouterr().err)
    assert cli.main(["explain", str(run)]) == 0  # a command that only reads need not wait
    requested = {
        "launcher": [process],
        "rank": ranks(process)[1:],
        "all": [process, *ranks(process)],
    }[to]
    for each in requested:
        os.kill(each.pid, number)
    is_served(here, run, process, number, code)


def is_served(
    here: Path, run: Path, process: subprocess.Popen[str], number: signal.Signals, code: int
) -> int:
    """The step after which the process ended on request."""
    settings = config.load((run / "config.yaml").read_text())
    found, out, err = finish(process)
    assert found == code, err
    step = last_step(run)
    assert one_line(err) == (
        f"parallax: stopped by {number.name} after step {step} of {settings.trainer.steps}, which is saved; "
        f"`parallax train name={settings.name}` continues"
    )
    assert out.splitlines()[-1].startswith(f"step {step}: checkpoint ")
    assert running(here) == []
    assert temporary() == []
    return step


@pytest.mark.thorough  # as a run that is resumed after its end, in test_runs.py
def test_a_stopped_run_resumes_bit_for_bit(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    settings = [*LONG, "trainer.steps=60", "schedule.final=1", "trainer.eval_every=0"]
    whole, interrupted = prepared(*settings, name="whole"), prepared(*settings, name="interrupted")
    process = stepping(interrupted)
    process.send_signal(signal.SIGTERM)
    assert is_served(here, interrupted, process, signal.SIGTERM, 0) < 60
    for run in (interrupted, whole):
        assert called("train", "--run-dir", str(run))[0] == 0
    check_same_weights(interrupted, whole)
    losses = [
        [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
        for run in (whole, interrupted)
    ]
    assert losses[0] == losses[1]


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_under_torchrun(here: Path, number: signal.Signals) -> None:
    """Ranks that Slurm has signalled beforehand end with code 0, so nothing is restarted."""
    run = prepared(*ENDLESS)
    process = stepping(run, *TORCHRUN, "-m", "parallax")
    for child in psutil.Process(process.pid).children():
        child.send_signal(number)
    code, _, err = finish(process)
    assert code == 0
    (line,) = [line for line in err.splitlines() if line.startswith("parallax: ")]
    assert line == (
        f"parallax: stopped by {number.name} after step {last_step(run)} of 1000000, which is saved; the same "
        "command with name=run continues"
    )
    assert running(here) == []


OWN = [
    "model=custom",
    "model.target=asking:build",
    "+model.kwargs={}",
    "data=custom",
    "data.target=asking:Rows",
]
OWN += [
    "trainer.global_batch=4",
    "trainer.microbatch=2",
    "logger=none",
    "trainer.steps=6",
]
OWN += ["trainer.checkpoint_every=2", "trainer.eval_every=2", "trainer.eval_batches=2"]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("where", "ends"),
    [
        ("building", r"stopped by SIGUSR1 .*"),
        ("step 0", r"stopped by SIGUSR1 after step 1 of 6, which is saved"),
        ("step 1", r"stopped by SIGUSR1 after step 2 of 6, which is saved"),
        ("evaluation 1", r"stopped by SIGUSR1 after step 2 of 6, which is saved"),
        ("checkpoint", r"stopped by SIGUSR1 after step 2 of 6, which is saved"),
    ],
)
def test_whatever_the_run_is_doing(
    here: Path,
    called: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    ends: str,
) -> None:
    (here / "asking.py").write_text(ASKING)
    run = prepared(*OWN)
    monkeypatch.setenv("ASK", where)
    code, out, err = called("train", "--run-dir", str(run))
    assert code == 0
    assert re.fullmatch(f"parallax: {ends}; `parallax train name=run` continues", one_line(err)), (
        err
    )
    assert ("validation loss" in out) == (where == "checkpoint")
    if where == "evaluation 1":  # resumes as from a checkpoint
        return
    code, out, err = called("train", "--run-dir", str(run))
    assert (code, err) == (0, "")
    assert ("continuing after step" in out) == (where != "building")


@pytest.mark.faults
def test_what_has_nothing_to_save_has_not_ended_well(
    here: Path, called: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "asking.py").write_text(ASKING.replace("SIGUSR1", "SIGTERM"))
    run = prepared(*OWN)
    monkeypatch.setenv("ASK", "building")
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 143
    ends = r"parallax: stopped by SIGTERM .*; `parallax train name=run` continues"
    assert re.fullmatch(ends, one_line(err))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGUSR1, 1),  # 0 means that the command is complete
        (signal.SIGTERM, 143),
    ],
)
def test_what_cannot_be_saved_in_time_ends_without(
    here: Path,
    called: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    """The requester then kills it without a message."""
    asking = ASKING.replace("SIGUSR1", number.name).replace("time.sleep(0.3)", "time.sleep(60)")
    (here / "asking.py").write_text(asking)
    run = prepared(*OWN, "trainer.grace_seconds=1")
    monkeypatch.setenv("ASK", "step 0")
    found, _, err = called("train", "--run-dir", str(run))
    assert found == code
    assert re.fullmatch(
        rf"parallax: stopped by {number.name}, but nothing could be saved within 1 s \(trainer.grace_seconds\): "
        r"rank [01] \(stage [01], replica 0\) is still in .* of micro-batch 0, step 0; the steps after the last "
        r"checkpoint are lost, the same run continues from there",
        one_line(err),
    ), err
    assert list_checkpoints(run / "checkpoints") == []
    assert running(here) == []
    assert temporary() == []


@pytest.mark.faults
@ON_ONE_RANK_AND_ON_TWO
def test_a_second_ctrl_c_ends_at_once(here: Path, replicas: tuple[int, ...]) -> None:
    slow = 'pathlib.Path("in a step").touch() if "RANK" in os.environ else None; time.sleep(5)'
    (here / "asking.py").write_text(ASKING.replace('ask(f"step {self.calls // 2}")', slow))
    run = prepared(*OWN, "trainer.steps=1000", replicas=replicas)
    process = start([*MODULE, "train", "--run-dir", str(run)])
    wait_for((here / "in a step").exists, "a step")
    process.send_signal(signal.SIGINT)
    time.sleep(0.8)  # sooner, it is the same one
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "stopped by SIGINT at once: the steps after the last checkpoint are lost" in one_line(
        err
    )
    assert list_checkpoints(run / "checkpoints") == []
    assert running(here) == []
    assert temporary() == []


@pytest.mark.slow
def test_planning_ends_in_one_line(here: Path) -> None:
    (here / "asking.py").write_text(
        "import pathlib, time\ndef build():\n pathlib.Path('here').touch(); time.sleep(60)"
    )
    process = start([*MODULE, "train", *OWN, "cluster.devices=2"])
    wait_for(lambda: (here / "here").exists(), "planning")
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert (code, one_line(err)) == (143, "parallax: stopped by SIGTERM")
    assert not (here / "runs").exists()
    assert temporary() == []


@pytest.mark.thorough
def test_a_terminal_that_goes_is_none_under_nohup(here: Path) -> None:
    run = prepared(*LONG, "trainer.steps=40", "trainer.checkpoint_every=0")
    process = stepping(run, "nohup", *MODULE)
    process.send_signal(signal.SIGHUP)
    code, _, err = finish(process)
    assert code == 0, err
