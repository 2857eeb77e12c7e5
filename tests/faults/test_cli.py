"""The command line as people meet it: real processes, their files, their last words, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from parallax import cli, config
from parallax.job import build_chain
from parallax.plan.plan import Plan
from parallax.runtime.checkpoint import list_checkpoints
from tests.distributed.pool import ROOT
from tests.plans import make_plan

TINY = ["experiment=tiny", "data.max_bytes=64KiB", "trainer.global_batch=4"]
SETTLED = [
    "trainer.microbatch=2",
    "plan.stages=2",
    "plan.schedule=1f1b",
    "plan.activations=keep",
    "optimizer.final_rate=1",
]
MODULE = [sys.executable, "-m", "parallax"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
DONE_SECONDS = 120
NOISE = ("Warning", "W1", "E1", "[W", "[E", "Traceback")

OWN_MODEL = """
import os, pathlib, torch
from torch import nn

class Fails(nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls == 3:
            pathlib.Path("raised").touch()
            raise ValueError("boom\\n\\x1b[31m")
        return x * 1.0

def build():
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256), Fails())
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what still runs in it afterwards fails the test."""
    folder = tmp_path / "here"
    for path in (folder, tmp_path / "tmp"):
        path.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield folder
    left = running(folder)
    for process in left:
        process.kill()
    assert not left


def temporary() -> list[Path]:
    """What processes started here have left in their temporary folder."""
    return [path for path in (Path.cwd().parent / "tmp").iterdir() if not path.name.startswith("torchinductor")]


def running(folder: Path) -> list[psutil.Process]:
    """Living processes that work in ``folder``, but this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                Path(process.cwd()) == folder
                and process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def start(command: Sequence[str], **added: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path.cwd()}",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(Path.cwd().parent / "tmp"),
    }
    environment |= added
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=DONE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


def call(*arguments: str, launcher: Sequence[str] = MODULE) -> tuple[int, str, str]:
    return finish(start([*launcher, *arguments]))


def one_line(err: str) -> str:
    """The only thing that was said on stderr."""
    (line,) = err.splitlines()
    assert line.startswith("parallax: ")
    assert line.isprintable()
    return line


def wait_for(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DONE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.02)


def prepared(*overrides: str, name: str = "run", plan: Callable[[Plan], Plan] = lambda plan: plan) -> Path:
    """A run directory as ``prepare`` writes it, without measuring anything."""
    settings = config.compose([*overrides, f"name={name}"])
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config.dump(settings))
    made = make_plan(build_chain(settings), replicas=(1, 1), global_batch=settings.trainer.global_batch)
    plan(made).save(folder / "plan.yaml")
    return folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    last = list_checkpoints(run / "checkpoints")[-1]
    return {name: tensor for part in sorted(last.glob("*.safetensors")) for name, tensor in load_file(part).items()}


# ---- a run from end to end


def test_train_resume_and_torchrun(here: Path) -> None:
    settings = [*TINY, *SETTLED, "trainer.checkpoint_every=2"]
    code, out, err = call("train", *settings, "name=a", "cluster.devices=2", "trainer.steps=4")
    assert (code, err.strip()) == (0, "")
    assert "results: runs/a" in out
    run = Path("runs/a")
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.yaml",
        "plan.yaml",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "timeline.png",
        "tensorboard",
    }
    assert {"events-rank0.jsonl", "events-rank1.jsonl", "events-predicted.jsonl"} <= names
    summary = json.loads((run / "summary.json").read_text())
    for key in ("loss_first", "loss_last", "unigram_entropy", "step_seconds_median", "predicted_step_seconds"):
        assert summary[key] > 0
    assert summary["steps"] == 4
    assert 0 <= summary["bubble_predicted"] < 1
    assert 0 <= summary["bubble_measured"] < 1
    assert [(rank["stage"], rank["replica"]) for rank in summary["ranks"]] == [(0, 0), (1, 0)]
    for rank in summary["ranks"]:
        assert rank["budget_bytes"] >= rank["predicted_peak_bytes"] > 0
        assert {"measured_peak_bytes", "offloaded_bytes_per_step", "stall_seconds_per_step"} <= rank.keys()
    assert [path.name for path in here.iterdir()] == ["runs"]
    assert temporary() == []

    code, out, err = call("train", *settings, "name=a", "cluster.devices=2", "trainer.steps=6")
    assert (code, err.strip()) == (0, "")
    assert "continuing after step 4 from runs/a/checkpoints/step-00000004" in out
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps == [1, 2, 3, 4, 5, 6]

    code, out, err = call("-m", "parallax", "train", *settings, "name=b", "trainer.steps=6", launcher=TORCHRUN)
    assert code == 0
    assert not [line for line in err.splitlines() if line.startswith(NOISE)], err
    assert out.count("results: runs/b") == 1
    resumed, whole = weights(run), weights(Path("runs/b"))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


# ---- wrong input

WRONG = [
    (["trainer.stps=3"], "did you mean 'steps'"),
    (["trainer.steps=-1"], "trainer.steps=-1"),
    (["trainer.steps=many"], "trainer.steps=many"),
    (["modle.layers=3"], "modle"),
    (["experiment=tyni"], "did you mean 'tiny'"),
    (["name=../elsewhere"], "name="),
    (["nothing"], "nothing"),
    (["experiment=tiny", "model.heads=5"], "model.heads=5"),
    (["model=custom", "model.target=nowhere:build"], "cannot import nowhere"),
    (["data.path=no/such/folder"], "there is no"),
    (["experiment=tiny", "model.vocabulary=7"], "model.vocabulary=7"),
    (["--run-dir", "no/run"], "no/run is no run directory"),
    (["--run-dir", "no/run", "trainer.steps=3"], "leave out one of them"),
]


@pytest.mark.parametrize(
    ("arguments", "expected"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_wrong_input_is_one_line(
    here: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert cli.main(["train", *arguments]) == 2
    out, err = capfd.readouterr()
    assert expected in one_line(err)
    assert out.strip() == ""
    assert list(here.iterdir()) == []


def test_infeasible_budget_is_one_line(here: Path) -> None:
    code, out, err = call("train", *TINY, "cluster.devices=2", "cluster.device_memory=1MiB")
    assert code == 2
    assert "MiB" in one_line(err)
    assert out.strip() == ""
    assert list(here.iterdir()) == []


def test_wrong_input_under_torchrun_is_said_once(here: Path) -> None:
    code, _, err = call("-m", "parallax", "train", "trainer.stps=3", launcher=TORCHRUN)
    assert code != 0  # torchrun's own, whatever the ranks' is
    assert err.count("did you mean 'steps'") == 1
    assert list(here.iterdir()) == []


def test_plan_as_json_of_an_own_folder(here: Path) -> None:
    texts = here / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("All happy families are alike. " * 400)
    code, out, err = call("plan", *TINY, f"data.path={texts}", "cluster.devices=2", "--json", "--output", "mine.yaml")
    assert (code, err.strip()) == (0, "")
    assert len(out.splitlines()) == 1
    assert json.loads(out)["hash"] == Plan.load(Path("mine.yaml")).hash()
    assert {path.name for path in here.iterdir()} == {"texts", "mine.yaml"}


@pytest.mark.parametrize("command", ["train", "plan", "doctor"])
def test_help_shows_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"examples:\n  parallax {command}" in capsys.readouterr().out


# ---- a rank that fails


def test_exception_on_one_rank(here: Path) -> None:
    (here / "own_model.py").write_text(OWN_MODEL)
    sizes = ["trainer.global_batch=4", "trainer.microbatch=2", "data.max_bytes=64KiB"]
    run = prepared("model=custom", "model.target=own_model:build", "+model.kwargs={}", *sizes)
    code, _, err = call("train", "--run-dir", str(run))
    assert time.time() - (here / "raised").stat().st_mtime < 5
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("parallax: ")]
    assert line.startswith("parallax: rank 1, ")
    assert "stage 1 of 2, step 1" in line
    assert line.endswith(r"ValueError: boom\n\x1b[31m")
    assert err.count("Traceback") == 1
    assert "own_model.py" in err
    assert temporary() == []
    assert not [line for line in err.splitlines() if line.startswith(("W1", "E1", "[W", "[E"))]


def ranks(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    return [p for p in psutil.Process(launcher.pid).children(recursive=True) if "--run-dir" in " ".join(p.cmdline())]


def started(run: Path, last: list[int]) -> subprocess.Popen[str]:
    """A run that has saved a checkpoint after those seen before."""

    def newest() -> int:
        found = list_checkpoints(run / "checkpoints")
        return int(found[-1].name[5:]) if found else 0

    process = start([*MODULE, "train", "--run-dir", str(run)])
    wait_for(lambda: newest() > last[-1] or process.poll() is not None, "a checkpoint")
    assert process.poll() is None, process.communicate()
    last.append(newest())
    return process


def test_killed_and_interrupted_runs(here: Path) -> None:
    run = prepared(*TINY, "trainer.steps=1000000", "trainer.checkpoint_every=1", "trainer.eval_every=0")
    last = [0]
    process = started(run, last)
    assert len(ranks(process)) == 2
    ranks(process)[1].kill()
    code, _, err = finish(process)
    assert code == 1
    assert "was killed by SIGKILL" in one_line(err)
    assert running(here) == []

    process = started(run, last)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130
    assert "`parallax train name=run` continues" in one_line(err)
    assert "continuing after step" in out
    assert running(here) == []
    assert temporary() == []

    process = started(run, last)
    process.kill()
    finish(process)
    wait_for(lambda: not running(here), "the ranks of a launcher that was killed")


def test_ranks_that_read_different_runs(here: Path) -> None:
    first = prepared(*TINY, name="first")
    second = prepared(*TINY, "trainer.steps=5", name="second", plan=lambda plan: replace(plan, microbatch=1))
    second.joinpath("config.yaml").write_text(second.joinpath("config.yaml").read_text().replace("second", "first"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_ERROR_FILE": str(here / "a/b/c"),
    }
    (here / "a").mkdir()
    processes = [
        start([*MODULE, "train", "--run-dir", str(run)], RANK=str(rank), LOCAL_RANK=str(rank), **world)
        for rank, run in enumerate([first, second])
    ]
    ended = [finish(process) for process in processes]
    assert [code for code, _, _ in ended] == [2, 2]
    line = one_line("".join(err for _, _, err in ended))
    assert "rank 1 read another run than rank 0: trainer.steps: 4 != 5; microbatch: 2 -> 1" in line
