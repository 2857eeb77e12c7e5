"""Sweeps as commands: what is refused before anything starts, what one failure ends, how they stop and resume."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from parallax import cli
from parallax.common.lock import locked
from parallax.run.sweep.points import Point, PointOutcome, PointStatus
from tests.browser import opened
from tests.distributed.pool import ROOT
from tests.faults.commands import MODULE, TINY, call, finish, one_line, running, start, wait_for
from tests.unit.test_report_scaling import check_charts

ONE = [
    *TINY,
    "plan=single",
    "cluster.devices=1",
    "logger=none",
    "trainer.microbatch=2",
]
EXAMPLE = ["--config-dir", str(ROOT / "examples" / "scaling"), "experiment=scaling"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-m", "trainer.stepz=1,2"], "(did you mean 'steps'?)"),
        (["-m", "trainer.steps=1,two"], "trainer.steps=two: accepted is a whole number"),
        (["-m", "trainer.steps=3", "model=gpt,mlpp"], "(did you mean 'mlp'?)"),
        (
            ["-m", "trainer.steps=3", "model=gpt,mlp", "model.heads=2"],
            "model.heads=2: unknown key; model=mlp accepts",
        ),
        (["-m", "trainer.steps=3", "cluster=local,dgx_a100"], "it is a cluster to plan for"),
        (["-m", "trainer.steps=3", "model=gpt,transformer"], "it has sizes but no code"),
        (["-m", "seed=1,2", "hydra/launcher=submitit"], "hydra/launcher=submitit: "),
        (["-m", "seed=1", "--config-dir", "nowhere"], "--config-dir nowhere: "),
        (["-m", "--run-dir", "x"], "leave out -m"),
        (["-m", "--cfg", "job"], "only one of them"),
        (["--resolve"], "go with --cfg job"),
        (["--cfg", "jobs"], "argument --cfg/-c"),
        (["seed=1,2"], "`parallax train -m` runs one for each"),
        (["name=a/b", "trainer.steps=3"], "runs/a is no sweep"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_starts_nothing(
    here: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert cli.main(["train", *arguments]) == 2
    assert expected in one_line(capfd.readouterr().err)
    assert list(here.iterdir()) == []


def test_a_wrong_point_is_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "-m", "trainer.steps=3", "seed=1,2", "model.heads=5,7"]) == 2
    assert "seed=1 model.heads=7)" in one_line(capfd.readouterr().err)


@pytest.mark.thorough  # CI trains six points, and more, by `make test-sweeps`
def test_a_failing_point_ends_nothing_but_itself(
    called: Callable[..., tuple[int, str, str]], here: Path
) -> None:
    (here / "mine" / "limit").mkdir(parents=True)
    for name, memory in (("small", "1MiB"), ("large", "auto")):
        text = f"# @package _global_\ncluster: {{device_memory: {memory}}}\n"
        (here / "mine" / "limit" / f"{name}.yaml").write_text(text)
    short = ["trainer.steps=3", "trainer.eval_every=0", "trainer.checkpoint_every=0"]
    command = ["train", "-m", "-cd", "mine", *ONE, *short, "limit=small,large", "name=s"]
    code, out, err = called(*command)
    assert code == 1
    assert one_line(err).startswith("parallax: 1 of 2 points are not done: limit-small (")
    assert "point 1 of 2: limit=small" in out
    assert "point 1 of 2 failed after" in out
    assert "1 left, about" in out
    assert "point 2 of 2 done after" in out
    done = here / "runs" / "s" / "limit-large"
    assert json.loads((done / "summary.json").read_text())["steps"] == 3
    log = (done / "output.log").read_text()

    code, out, err = called(*command, "limit=choice(large)")  # again: what is done is done
    assert (code, err) == (0, "")
    assert "1 point, 1 of them done" in out
    assert "point 1 of 1" not in out
    assert (done / "output.log").read_text() == log

    code, out, err = called("report", "s")
    assert (code, err) == (0, "")
    assert "limit-small: " in out
    assert "not drawn, Strong scaling: it needs" in out
    report = here / "runs" / "s" / "report"
    rows = list(csv.DictReader((report / "points.csv").open()))
    assert [(row["limit"], row["status"]) for row in rows] == [("small", "failed"), ("large", "done")]  # fmt: skip
    assert "MiB" in rows[0]["reason"]
    assert float(rows[1]["step_seconds"]) > 0
    assert "plan=single" in (report / "report.html").read_text()
    for arguments in (["explain", "s/limit-large"], ["report", "runs/s/limit-large"]):
        assert called(*arguments)[0] == 0
    assert (done / "report" / "report.html").is_file()
    code, _, err = called("train", "name=s", "trainer.steps=3")
    assert code == 2
    assert "runs/s is a sweep; add -m" in one_line(err)
    code, _, err = called("train", "-m", "name=s/limit-large")
    assert code == 2


def test_a_run_is_no_sweep(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "runs" / "old").mkdir(parents=True)
    (here / "runs" / "old" / "config.yaml").write_text("name: old\n")
    assert cli.main(["train", "-m", *ONE, "seed=1,2", "name=old"]) == 2
    assert "runs/old is a run, not a sweep" in one_line(capfd.readouterr().err)


def test_points_that_another_command_trains_are_left_alone(
    called: Callable[..., tuple[int, str, str]], here: Path
) -> None:
    point = Point.of(1, ["seed=1"], frozenset())
    folder = here / "runs" / "s" / point.name
    with locked(folder):
        running_elsewhere = PointOutcome(point, PointStatus.RUNNING)
        running_elsewhere.save(folder)
        code, out, err = called("train", "-m", *ONE, "seed=choice(1)", "name=s")
        assert code == 1
        assert "point 1 of 1 is being trained by another process" in out
        assert "another process trains it still" in one_line(err)
        assert PointOutcome.load(folder) == running_elsewhere


LONG = [*ONE, "trainer.steps=150", "trainer.checkpoint_every=10", "trainer.eval_every=0"]
SWEEP = ["train", "-m", *LONG, "seed=1,2", "name=s"]


def interrupted(here: Path, number: int) -> tuple[int, str, str]:
    """A sweep that gets a signal in its second point, which has saved."""
    shutil.copytree(here / "runs" / "s" / "seed-1", here / "before")
    process = start([*MODULE, *SWEEP])
    second = here / "runs" / "s" / "seed-2"
    saved = (second / "checkpoints").glob
    wait_for(lambda: any(saved("step-*")) or process.poll() is not None, "a checkpoint")
    for each in psutil.Process(process.pid).children():
        each.send_signal(signal.SIGUSR2)  # as a batch system does, to all processes of a job
    process.send_signal(number)
    return finish(process)


@pytest.fixture
def half(here: Path) -> Path:
    """A sweep whose first point is done."""
    assert call(*SWEEP[:-2], "seed=choice(1)", "name=s")[0] == 0
    return here


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=str)
def test_a_sweep_that_is_interrupted_resumes(half: Path, number: int) -> None:
    code, _, err = interrupted(half, number)
    assert code == (0 if number == signal.SIGUSR1 else 128 + number)
    line = one_line(err)
    name = signal.Signals(number).name
    assert line.startswith(
        f"parallax: stopped by {name} after 1 of 2 points, in seed-2: after step"
    )
    assert line.endswith("the same command with name=s resumes the sweep")
    assert not running(half)
    code, out, err = call(*SWEEP)
    assert (code, err) == (0, "")
    assert "2 points, 1 of them done" in out
    log = (half / "runs" / "s" / "seed-2" / "output.log").read_text()
    assert "continuing after step" in log
    assert json.loads((half / "runs" / "s" / "seed-2" / "summary.json").read_text())["steps"] == 150
    assert (half / "before" / "output.log").read_text() == (
        half / "runs" / "s" / "seed-1" / "output.log"
    ).read_text()


@pytest.mark.thorough
def test_a_sweep_that_is_killed_leaves_no_process_and_resumes(half: Path) -> None:
    interrupted(half, signal.SIGKILL)
    wait_for(lambda: not running(half), "the point to save and end")
    log = (half / "runs" / "s" / "seed-2" / "output.log").read_text()
    assert "which is saved" in log
    assert call(*SWEEP)[0] == 0


@pytest.mark.thorough
def test_ctrl_c_twice_does_not_wait(here: Path) -> None:
    endless = ["trainer.steps=100000", "trainer.checkpoint_every=0"]
    process = start([*MODULE, *SWEEP[:-2], *endless, "seed=1,2", "name=s"])
    log = here / "runs" / "s" / "seed-1" / "output.log"
    wait_for(lambda: log.is_file() and "\nstep " in log.read_text(), "the first step")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.6)
    code, _, err = finish(process)
    assert code == 130
    assert "after 0 of 2 points" in one_line(err)
    wait_for(lambda: not running(here), "its processes to end")


@pytest.mark.thorough
def test_points_as_jobs_of_submitit(here: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="extra slurm")
    command = ["train", "-m", *ONE, "seed=1,2", "name=s", "hydra/launcher=submitit_local"]
    code, out, err = call(*command)
    assert (code, err) == (0, "")
    for number in (1, 2):
        assert f"point {number} of 2: seed={number}" in out
        assert f"point {number} of 2 done after" in out
    assert list((here / "runs" / "s" / ".submitit").iterdir())
    jobs = len(list((here / "runs" / "s" / ".submitit").iterdir()))
    assert call(*command)[0] == 0
    assert len(list((here / "runs" / "s" / ".submitit").iterdir())) == jobs, (
        "none is submitted again"
    )
    assert not running(here)


@pytest.mark.thorough
def test_two_models_by_one_process_two_stages_and_two_replicas(here: Path) -> None:
    process = start([*MODULE, "train", "-m", *EXAMPLE, "name=six"])
    out, err = process.communicate(timeout=480)
    assert (process.returncode, err) == (0, "")
    assert out.count(" done after ") == 6
    assert call("report", "six")[0] == 0
    report = here / "runs" / "six" / "report"
    rows = list(csv.DictReader((report / "points.csv").open()))
    assert [row["layout"] for row in rows] == 2 * ["1 process", "2 stages", "2 replicas"]
    assert all(float(row["speedup"]) > 0 for row in rows)
    with opened(report / "report.html", here.parent / "profile") as page:
        assert page.troubles == []
        check_charts(page, 4)  # two of scaling, and the loss over each of two swept settings
