"""Runs as jobs of a real Slurm: started, requested to end and queued again, moved to another node, as an array."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import yaml

from parallax import cli
from parallax.runtime.checkpoint import list_checkpoints
from tests.distributed.pool import ROOT
from tests.faults.commands import SETTLED, TINY, running
from tests.leaks import lasting
from tests.results import read_metrics
from tests.slurm.cluster import Slurm

pytestmark = pytest.mark.slurm

SECONDS = 240.0  # for any job here; most of it is planning and starting
QUIET = ["trainer.eval_every=0", "trainer.eval_batches=1", "logger=none"]
STEPS = 300
# Plans, and with them sums, are the same in each start.
RUN = [*TINY, *SETTLED, *QUIET, f"trainer.steps={STEPS}", "trainer.checkpoint_every=0"]
TWO = ["--nodes", "2", "--processes-per-node", "1"]


def launched(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The number of the job."""
    capfd.readouterr()
    code = cli.main(["launch", "--slurm", *arguments])
    out, err = capfd.readouterr()
    assert code == 0, err
    found = re.match(r"job (\d+): ", out)
    assert found is not None, out
    return found[1]


def log_of(name: str) -> Path:
    return Path("runs") / name / "slurm.log"


def completed(slurm: Slurm, number: str, name: str) -> Mapping[str, str]:
    job = slurm.wait_for_job(number, log_of(name), SECONDS)
    assert job["JobState"] == "COMPLETED", slurm.logs(log_of(name))
    return job


def losses(name: str) -> list[float]:
    records = read_metrics(Path("runs") / name / "metrics.jsonl")
    return [record["loss"] for record in records if "loss" in record]


def wait_for_step(slurm: Slurm, name: str, step: int) -> None:
    metrics = Path("runs") / name / "metrics.jsonl"

    def reached() -> bool:
        return metrics.exists() and metrics.read_text().count("\n") >= step

    slurm.wait_for(reached, f"step {step} of {name}", SECONDS, log_of(name))


def test_two_nodes_train_the_default_model(slurm: Slurm, capfd: pytest.CaptureFixture[str]) -> None:
    number = launched(capfd, *TWO, "name=main", "trainer.steps=3", *QUIET)
    job = completed(slurm, number, "main")
    assert (job["JobName"], job["NumNodes"], job["Restarts"]) == ("main", "2", "0")
    found = losses("main")
    assert len(found) == 3
    assert found[-1] < found[0]
    text = log_of("main").read_text()
    assert f"job {number}, start 1: runs/main on node[1-2], meeting at 127.0.0.1:" in text
    assert sorted(path.name for path in Path("runs/main").glob("events-rank*")) == [
        "events-rank0.jsonl",
        "events-rank1.jsonl",
    ]


@pytest.fixture(scope="module")
def kept() -> list[float]:
    """For all tests here."""
    return []


@pytest.fixture
def undisturbed(slurm: Slurm, capfd: pytest.CaptureFixture[str], kept: list[float]) -> list[float]:
    """The losses of a run to which nothing happens."""
    if not kept:
        completed(slurm, launched(capfd, *TWO, "name=whole", *RUN), "whole")
        kept += losses("whole")
    assert len(kept) == STEPS
    return kept


@pytest.mark.parametrize("whom", [[], ["--batch"]], ids=["steps", "shell"])
def test_a_run_requested_to_end_saves_and_resumes(
    slurm: Slurm, undisturbed: list[float], capfd: pytest.CaptureFixture[str], whom: list[str]
) -> None:
    """As before a time limit, of which --signal=B: tells the batch shell."""
    number = launched(capfd, *TWO, "name=preempted", *RUN)
    wait_for_step(slurm, "preempted", 2)
    slurm.call("scancel", *whom, "--signal=USR1", number)
    slurm.wait_for(
        lambda: int(slurm.job(number)["Restarts"]) == 1, "a requeue", SECONDS, log_of("preempted")
    )
    (saved,) = list_checkpoints(Path("runs/preempted/checkpoints"))
    step = int(saved.name.removeprefix("step-"))
    assert 0 < step < STEPS
    job = completed(slurm, number, "preempted")
    assert job["Restarts"] == "1"
    assert losses("preempted") == undisturbed
    text = log_of("preempted").read_text()
    assert f"runs/preempted is queued again and resumes from {saved}" in text
    assert f"continuing after step {step} from {saved}" in text


def test_a_job_signalled_before_it_trains_is_not_queued_again(
    slurm: Slurm, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its time is too short, and would be again. Ranks that are only starting hear it when it is repeated."""
    Path("slow.py").write_text("import time\n\ndef build():\n    time.sleep(120)\n")
    settings = ["model=custom", "model.target=slow:build", "trainer.steps=3"]
    number = launched(capfd, *TWO, "name=early", *settings)
    log = log_of("early")

    def started() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # what goes while it is looked at
            return sum("torch.distributed.run" in p.cmdline() for p in running(Path.cwd())) == 2
        return False

    slurm.wait_for(started, "torchrun on both nodes", SECONDS, log)
    slurm.call("scancel", "--batch", "--signal=USR1", number)
    job = slurm.wait_for_job(number, log, 60)
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0")
    assert "runs/early was requested to end before its first step" in log.read_text()


def test_a_node_that_is_lost_is_replaced(
    slurm: Slurm, undisturbed: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    """The ranks got no signal: the run resumes from its last checkpoint."""
    number = launched(capfd, *TWO, "name=moved", *RUN, "trainer.checkpoint_every=20")
    wait_for_step(slurm, "moved", 25)
    assert slurm.job(number)["NodeList"] == "node[1-2]"
    slurm.lose_node("node2")
    try:
        slurm.call("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=lost")
        job = completed(slurm, number, "moved")
    finally:
        for left in Path(tempfile.gettempdir()).glob("parallax.*"):
            shutil.rmtree(left)  # on the lost node's own disk
        with lasting():
            slurm.return_node("node2")
    assert (job["Restarts"], job["NodeList"]) == ("1", "node[1,3]")
    found = losses("moved")
    assert found[-1] == undisturbed[-1]
    assert re.search(r"continuing after step \d+ from runs/moved", log_of("moved").read_text())


def test_an_array_trains_each_point(slurm: Slurm, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--nodes", "1", "--processes-per-node", "1", "--array", "seed=1,2,3"]
    settings = [*TINY, *QUIET, "trainer.steps=3", "plan=single"]
    number = launched(capfd, *arguments, "name=point", *settings)
    for index in range(3):
        completed(slurm, f"{number}_{index}", f"point-{index}")
    assert len({tuple(losses(f"point-{index}")) for index in range(3)}) == 3


def test_the_script_for_doing_it_by_hand(slurm: Slurm) -> None:
    script = str(ROOT / "launch" / "slurm.sbatch")
    settings = ["name=hand", *TINY, *SETTLED, *QUIET, "trainer.steps=3"]
    Path("runs/hand").mkdir(parents=True)
    number = slurm.call(
        *("sbatch", "--parsable", "--nodes=2", "--mem=0", f"--output={log_of('hand')}"),
        *(script, *settings),
        PYTHON=sys.executable,
    ).strip()
    completed(slurm, number, "hand")
    assert len(losses("hand")) == 3


def test_what_slurm_refuses_ends_in_one_line(
    slurm: Slurm, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", "--slurm", *TWO, "--sbatch=--partition=nosuch", *RUN]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("parallax: --slurm: sbatch refuses ")
    assert "invalid partition specified: nosuch" in line


def test_a_cluster_to_plan_for_is_what_slurm_has(
    slurm: Slurm, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--write-cluster", "ours.yaml"]) == 0
    out, _ = capfd.readouterr()
    assert out == (
        "Slurm: 2 node(s) of 8 × h100, 1.9 TiB of memory\nSlurm: 3 node(s) of 2 × l4, 3.9 GiB of memory\n"
    )
    found = yaml.safe_load(Path("ours.yaml").read_text())
    assert found["device"] == ["h100", "l4"]
    assert (found["nodes"], found["devices_per_node"]) == ([2, 3], [8, 2])


def test_a_job_has_the_devices_it_requests(slurm: Slurm, capfd: pytest.CaptureFixture[str]) -> None:
    """And the script by hand a rank for each."""
    number = launched(
        capfd, "--nodes", "2", "--gpus-per-node", "1", "name=gpus", *RUN, "trainer.steps=3"
    )
    job = completed(slurm, number, "gpus")
    assert job["TresPerNode"].endswith("gpu:1")
    script = str(ROOT / "launch" / "slurm.sbatch")
    Path("runs/hand").mkdir(parents=True)
    number = slurm.call(
        *("sbatch", "--parsable", "--nodes=1", "--gpus-per-node=2", "--mem=0"),
        *(f"--output={log_of('hand')}", script, "name=hand", *RUN, "trainer.steps=3"),
        PYTHON=sys.executable,
    ).strip()
    completed(slurm, number, "hand")
    assert losses("gpus") == losses("hand")


def test_a_job_that_is_cancelled_saves_too(slurm: Slurm, capfd: pytest.CaptureFixture[str]) -> None:
    number = launched(capfd, *TWO, "name=gone", *RUN, "trainer.steps=1000000")
    wait_for_step(slurm, "gone", 2)
    slurm.call("scancel", number)
    job = slurm.wait_for_job(number, log_of("gone"), SECONDS)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")

    def saved() -> bool:
        return len(list_checkpoints(Path("runs/gone/checkpoints"))) == 1

    slurm.wait_for(saved, "a checkpoint", SECONDS, log_of("gone"))


def test_a_sweep_as_jobs_of_submitit(slurm: Slurm) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    settings = [*TINY, *SETTLED, *QUIET, "trainer.steps=3", "seed=1,2", "name=s"]
    command = [sys.executable, "-m", "parallax", "train", "-m", "hydra/launcher=submitit_slurm"]
    out = slurm.call(*command, "hydra.launcher.timeout_min=10", *settings, seconds=SECONDS)
    for number in (1, 2):
        assert f"point {number} of 2 done after" in out, slurm.logs()
        assert len(losses(f"s/seed-{number}")) == 3
    jobs = slurm.call("squeue", "--noheader", "--states=all", "--format=%T %j")
    assert [line.split()[0] for line in jobs.splitlines()].count("COMPLETED") >= 1
