"""The batch script: what it asks for, and what it does at the end of a run, with stand-ins for Slurm's commands. That
Slurm itself takes it is tested in tests/slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

from parallax import cli
from parallax.run.slurm.job import BODY, SlurmJob
from tests.distributed.pool import ROOT

SHELLCHECK = Path(sysconfig.get_path("scripts")) / "shellcheck"
LAUNCH = sorted((ROOT / "launch").iterdir())
NODES = ["--nodes", "2", "--gpus-per-node", "8"]

# What each stand-in does is in a file of its name; it notes how it was called.
STAND_IN = """#!/usr/bin/env bash
echo "${0##*/} $*" >> "$CALLS"
case "${0##*/} $*" in
    "scontrol show hostnames"*) printf 'n1\\nn2\\n' ;;
    "scontrol --oneliner show node n1") echo "NodeName=n1 NodeAddr=10.0.0.1 NodeHostName=n1 Port=1" ;;
    srun*) eval "$ON_SRUN" ;;
esac
"""


def script(*points: list[str], **given: object) -> str:
    usual = {"name": "run", "settings": ["model.layers=2", "data.path=a b"], "nodes": 2}
    job = SlurmJob(processes=8, points=points, **{**usual, **given})
    return job.script(Path("/home/of some one"), Path("runs"))


def options_of(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: path.name)
@pytest.mark.skipif(not SHELLCHECK.exists(), reason="shellcheck comes with the dev extra")
def test_shellcheck_finds_nothing(path: Path) -> None:
    found = subprocess.run(
        [SHELLCHECK, "--norc", path], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout
    assert os.access(path, os.X_OK) == (path.suffix == ".sh")


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="shellcheck comes with the dev extra")
@pytest.mark.parametrize(
    "points", [[], [["seed=1"], ["seed=2", "name=it's"]]], ids=["one", "array"]
)
def test_shellcheck_finds_nothing_in_what_is_written(points: list[list[str]]) -> None:
    found = subprocess.run(
        [SHELLCHECK, "--norc", "-"],
        input=script(*points),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout


def test_the_script_by_hand_ends_as_what_is_written() -> None:
    assert (ROOT / "launch" / "slurm.sbatch").read_text().endswith(f"\n\n{BODY.read_text()}")


def test_the_options_of_the_batch_script() -> None:
    found = options_of(script(gpus=8, time="1-0", grace_seconds=90.5, options=["--partition=gpu"]))
    assert found == [
        "--job-name=run",
        "--chdir='/home/of some one'",
        "--output=runs/run/slurm.log",
        "--open-mode=append",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--time=1-0",
        "--signal=B:USR1@121",
        "--exclusive",
        "--mem=0",
        "--requeue",
        "--partition=gpu",
    ]
    shared = options_of(script(["seed=1"], ["seed=2"], cpus=16))
    assert "--cpus-per-task=16" in shared
    assert not {"--exclusive", "--mem=0"} & set(shared)
    assert {"--array=0-1", "--output=runs/run-%a/slurm.log"} <= set(shared)


def test_a_run_without_a_time_limit_is_signalled_in_time() -> None:
    assert "--signal=B:USR1@90" in options_of(script(grace_seconds=0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": ["partition=gpu"]}, "--sbatch=partition=gpu: accepted are options of sbatch"),
        ({"options": ["--comment=a\nb"]}, r"--sbatch=--comment=a\\nb: accepted are"),
        ({"time": "1 day"}, "--time=1 day: accepted is what sbatch takes"),
    ],
)
def test_what_is_no_option_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(cli.ConfigError, match=message):
        script(**given)


# ---- the command


def dry(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    capfd.readouterr()
    code = cli.main(["launch", "--slurm", "--dry", *arguments])
    out, err = capfd.readouterr()
    assert code == 0, err
    return out


def test_a_dry_launch_prints_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    axes = ["--array", "seed=1,2", "model.layers=2,3", "optimizer.lr=1e-3", "name=swept"]
    text = dry(capfd, *NODES, *axes, "trainer.steps=9", "trainer.grace_seconds=10")
    assert {"--array=0-3", "--job-name=swept", "--signal=B:USR1@40"} <= set(options_of(text))
    assert "settings=(optimizer.lr=1e-3 trainer.steps=9 trainer.grace_seconds=10)" in text
    assert "    2) settings+=(seed=2 model.layers=2) ;;" in text
    assert list(tmp_path.iterdir()) == []


def test_a_plan_says_how_many_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The ranks have the devices, so what says what they were planned for is not for them."""
    monkeypatch.chdir(tmp_path)
    cluster = ["cluster=dgx_a100", "cluster.devices=16", "cluster.device_memory=10GiB"]
    text = dry(capfd, *cluster, "name=planned", "experiment=tiny", "trainer.global_batch=16")
    assert {"--nodes=2", "--gpus-per-node=8"} <= set(options_of(text))
    assert "processes=8" in text
    assert "settings=(experiment=tiny trainer.global_batch=16 cluster.device_memory=10GiB)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "2"], "--slurm"),
        (["--slurm"], "--nodes N"),
        (["--slurm", "--nodes", "2"], "--gpus-per-node N"),
        (["--slurm", "--nodes", "0"], "--nodes=0: accepted are whole numbers from 1"),
        (["--slurm", *NODES, "trainer.stepz=3"], "trainer.stepz"),
        (["--slurm", *NODES, "trainer.resume=never"], "trainer.resume=never"),
        (["--slurm", *NODES, "--array", "seed=1,x"], "seed=x"),
        (["--slurm", *NODES, "--array", "nodes=1,2"], "cluster.nodes"),
        (["--slurm", *NODES, "--array", "seed=1,2", f"name={'a' * 99}"], "name=aaa"),
        (["--slurm", *NODES, "--array", "seed"], "--array seed: accepted is key=VALUE,VALUE"),
        (["--slurm", *NODES, "--cpus-per-node", "-1"], "--cpus-per-node=-1"),
        (["--slurm", *NODES, "--time", "a b"], "--time=a b"),
        (["--slurm", "cluster=mixed"], "the same number on each"),
        (["--slurm", *NODES], "there is no sbatch here"),
    ],
)
def test_mistakes_are_found_before_the_queue(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    code = cli.main(["launch", *arguments, "experiment=tiny"])
    (line,) = capfd.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith("parallax: ")
    assert message in line


# ---- the end of a run


class Node:
    """A head node without Slurm."""

    def __init__(self, folder: Path) -> None:
        self.run, self.calls = folder / "runs" / "run", folder / "calls"
        commands = folder / "bin"
        commands.mkdir()
        for name in ("srun", "scontrol", "scancel"):
            (commands / name).write_text(STAND_IN)
            (commands / name).chmod(0o755)
        self.environment = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
        }
        self.folder = folder

    def start(self, on_srun: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", script()],
            cwd=self.folder,
            env={**self.environment, "ON_SRUN": on_srun},
            stderr=subprocess.PIPE,
            text=True,
        )

    def ends(self, on_srun: str) -> tuple[int, str]:
        process = self.start(on_srun)
        _, err = process.communicate(timeout=20)
        return process.returncode, err.splitlines()[-1]

    def requeued(self) -> bool:
        return "scontrol requeue 7" in self.calls.read_text().splitlines()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def ended(how: str, step: int) -> str:
    """What srun does: the run leaves these."""
    summary = json.dumps({"steps": step, "ended": how}, indent=1)
    return (
        f"sleep 0.02; mkdir -p runs/run/checkpoints/step-{step:08d}; "
        f"printf '%s' '{summary}' > runs/run/summary.json"
    )


def test_a_complete_run_ends_the_job(node: Node) -> None:
    code, message = node.ends(ended("steps", 60))
    assert (code, node.requeued()) == (0, False)
    assert message == "slurm: job 7, start 1: runs/run on n[1-2], meeting at 10.0.0.1:20007"
    (call,) = [line for line in node.calls.read_text().splitlines() if line.startswith("srun ")]
    assert "--kill-on-bad-exit=1" in call
    assert node.ends("true")[0] == 0  # is complete already, so nothing is written
    assert not node.requeued()


def test_a_run_that_was_stopped_is_queued_again(node: Node) -> None:
    code, message = node.ends(ended("stopped", 5))
    assert (code, node.requeued()) == (0, True)
    assert message.endswith("resumes from runs/run/checkpoints/step-00000005")


def test_a_run_that_gets_nowhere_is_not(node: Node) -> None:
    """It would be queued again for ever."""
    assert node.ends(ended("stopped", 5))[0] == 0
    node.calls.unlink()
    code, message = node.ends(ended("stopped", 5))
    assert (code, node.requeued()) == (1, False)
    assert "has made no step since it was started" in message
    code, message = node.ends("true")  # what the last start has left is not this one's
    assert (code, node.requeued()) == (1, False)
    assert "was requested to end before its first step" in message


def test_a_failure_is_the_jobs(node: Node) -> None:
    node.ends(ended("stopped", 5))
    node.calls.unlink()
    code, message = node.ends("exit 3")
    assert (code, node.requeued()) == (3, False)
    assert message == "slurm: runs/run ended with code 3"


def test_the_batch_shell_forwards_its_signal(node: Node) -> None:
    """And waits for the end of the run, which saves."""
    process = node.start(
        f"touch started; while [[ ! -e may_end ]]; do sleep 0.02; done; {ended('stopped', 9)}"
    )
    end = time.monotonic() + 20
    while not (node.folder / "started").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    while "scancel --signal=USR1 7" not in node.calls.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    (node.folder / "may_end").touch()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert node.requeued()
