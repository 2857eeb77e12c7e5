"""Asynchronous replicas that are killed, or asked to end between two meetings: the run resumes and finishes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.commands import (
    MODULE,
    finish,
    prepared,
    rank_of,
    ranks,
    running,
    start,
    temporary,
    wait_for,
)
from tests.faults.killing import kill_at
from tests.results import read_metrics

Called = Callable[..., tuple[int, str, str]]
RULE = ["replicas=asynchronous", "replicas.staleness=2"]


def begun(name: str, *settings: str) -> tuple[Path, subprocess.Popen[str]]:
    """A run that has taken some steps."""
    run = prepared(
        *kill_at(),
        *RULE,
        *settings,
        name=name,
        replicas=(2,),
        plan=lambda plan: replace(plan, staleness=2),
    )
    process = start([*MODULE, "train", "--run-dir", str(run)])
    metrics = run / "metrics.jsonl"
    wait_for(
        lambda: (metrics.exists() and metrics.read_text().count("\n") > 25) or process.poll(),
        "steps",
    )
    return run, process


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_is_killed(here: Path, rank: int) -> None:
    settings = "trainer.steps=600", "trainer.checkpoint_every=20", "trainer.max_restarts=1"
    run, process = begun("killed", *settings)
    next(each for each in ranks(process) if rank_of(each) == rank).kill()
    code, _, err = finish(process)
    assert code == 0, err
    assert f"rank {rank}" in err
    assert "starting again from step-" in err
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["ended"], summary["steps"], summary["restarts"]) == ("steps", 600, 1)
    assert max(map(int, summary["staleness"])) <= 2
    steps = [each["step"] for each in read_metrics(run / "metrics.jsonl") if "loss" in each]
    assert steps == [*range(1, 601)]
    assert running(here) == []
    assert temporary() == []


def losses(run: Path) -> dict[int, tuple[float, float]]:
    """The loss and the gradient norm of each step, which was reported once, in order."""
    metrics = [each for each in read_metrics(run / "metrics.jsonl") if "loss" in each]
    assert [each["step"] for each in metrics] == [*range(1, len(metrics) + 1)]
    return {each["step"]: (each["loss"], each["gradient_norm"]) for each in metrics}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("replicas", "rank", "place", "steps"),
    [
        ((3,), 2, "share", 130),
        ((3,), 1, "gradients", 130),
        ((2, 2), 3, "share", 130),
        ((3,), 2, "gradients", 60),
    ],
    ids=str,
)
def test_the_others_continue_to_the_next_meeting(
    here: Path, called: Called, replicas: tuple[int, ...], rank: int, place: str, steps: int
) -> None:
    """Weights stay as they are, so each update has the loss and the norm of its whole batch, if it has each share
    once."""
    settings = f"trainer.steps={steps}", "trainer.checkpoint_every=0", "optimizer.lr=1e-30"
    run = prepared(
        *kill_at((rank, 30, place)),
        *RULE,
        *settings,
        "trainer.max_restarts=1",
        name="killed",
        replicas=replicas,
        plan=lambda plan: replace(plan, staleness=2),
    )
    code, out, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    meeting = min(steps, 100)
    lost = re.search(rf"step (\d+): rank {rank} .* continue to step {meeting}$", out, re.MULTILINE)
    assert lost, out
    assert int(lost[1]) < meeting
    assert f"rank {rank} " in err
    assert "was killed by SIGKILL" in err
    assert f"the other replicas continued to step {meeting}; starting again from step-" in err
    assert f"starting again from step-{meeting:08d}" in err
    assert len(err.splitlines()) == 1
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["ended"], summary["steps"], summary["restarts"]) == ("steps", steps, 1)
    assert summary["lost_steps"] == 0
    evaluated = [e["step"] for e in read_metrics(run / "metrics.jsonl") if "validation_loss" in e]
    assert evaluated == [steps]
    plain = prepared(*kill_at(), *settings, name="plain", replicas=(1,))
    code, _, err = called("train", "--run-dir", str(plain))
    assert code == 0, err
    found, expected = losses(run), losses(plain)
    assert found.keys() == expected.keys()
    for step, figures in expected.items():
        assert found[step] == pytest.approx(figures, rel=1e-4)
    assert running(here) == []
    assert temporary() == []


@pytest.mark.faults
def test_a_request_to_end_is_heeded_between_meetings(here: Path, called: Called) -> None:
    settings = "trainer.steps=1000000", "trainer.checkpoint_every=0"
    run, process = begun("stopped", *settings)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 0, err
    assert "stopped by SIGTERM after step" in err
    saved = [path.name for path in (run / "checkpoints").glob("step-*")]
    assert len(saved) == 1
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ended"] == "stopped"
    assert saved == [f"step-{summary['steps']:08d}"]
    assert running(here) == []
