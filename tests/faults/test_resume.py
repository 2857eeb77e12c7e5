"""A run resumes by its name alone, with its own settings; settings that its checkpoint does not allow are named before
anything starts; and no two runs train into one directory."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallax import cli, config
from parallax.commands.options import read_plan
from parallax.common.lock import LOCK, locked
from parallax.errors import ConfigError
from parallax.nodes.places import Nodes
from parallax.plan.simulation.predict import predict
from parallax.run.job import open_source
from parallax.run.planning import Planned
from parallax.run.prepare import write_run
from parallax.run.processes import together
from parallax.run.resume import settings
from tests.distributed.pool import Pool
from tests.faults.commands import (
    DGX,
    SETTLED,
    TINY,
    TORCHRUN,
    call,
    one_line,
    prepared,
    weights,
)

RUNS = Path("runs")


def checkpointed(*overrides: str, name: str = "run") -> Path:
    """A run directory with a checkpoint that says what it was trained on."""
    run = prepared(*overrides, name=name)
    state = {"source": open_source(config.load((run / "config.yaml").read_text())).state_dict()}
    index = {
        "version": 1,
        "step": 2,
        "state": state,
        "fingerprint": "f",
        "optimizer": [],
        "checksums": {},
    }
    folder = run / "checkpoints" / "step-00000002"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text(json.dumps(index))
    return run


def test_a_name_alone_resumes_with_its_own_settings(here: Path) -> None:
    run = checkpointed(*TINY, "trainer.steps=7", "plan.stages=3", "optimizer.lr=0.5")
    stored = config.load((run / "config.yaml").read_text())
    assert settings(["name=run"], RUNS).config == stored
    assert settings(["name=run"], RUNS).changed == []
    assert settings(["trainer.steps=9"], RUNS).changed is None
    assert settings(["name=other"], RUNS).config.trainer.steps == 0
    assert settings(["name=run", "trainer.resume=never"], RUNS).config.trainer.steps == 0


@pytest.mark.parametrize(
    ("typed", "changed"),
    [
        (["trainer.steps=9"], ["trainer.steps: 4 -> 9"]),
        (
            ["+trainer.steps=9", "plan.replicas=[1,2]"],
            ["plan.replicas: auto -> [1, 2]", "trainer.steps: 4 -> 9"],
        ),
        (["plan=single"], ["plan.stages: 3 -> 1", "plan.replicas: auto -> 1"]),
        (["trainer.eval_every=${trainer.global_batch}"], ["trainer.eval_every: 2 -> 4"]),
        (
            ["swap=off", "logger.events=false"],
            ["swap.tier: auto -> none", "logger.events: true -> false"],
        ),
        (["precision=bf16"], ["precision.compute: fp32 -> bf16"]),
        (
            ["precision=mixed_bf16"],
            ["precision.parameters: fp32 -> bf16", "precision.compute: fp32 -> bf16"],
        ),
        (["optimizer.betas=[0.8,0.9]"], ["optimizer.betas: [0.9, 0.95] -> [0.8, 0.9]"]),
        (
            ["cluster.devices=2", "compile=true"],
            ["cluster.devices: auto -> 2", "compile: false -> true"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_is_typed_is_applied_on_top(here: Path, typed: list[str], changed: list[str]) -> None:
    checkpointed(*TINY, "plan.stages=3")
    assert sorted(settings(["name=run", *typed], RUNS).changed or []) == sorted(changed)


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (["model.layers=3"], ["model.layers: 2 -> 3"]),
        (["model=mlp"], ["model.name: gpt -> mlp"]),
        (["optimizer=sgd"], ["optimizer.name: adamw -> sgd"]),
        (["precision=fp64"], ["precision.parameters: fp32 -> fp64"]),
        (["seed=7", "model.hidden=32"], ["seed: 1 -> 7", "model.hidden: 64 -> 32"]),
        (["data.max_bytes=32KiB"], ["data.max_bytes: 64KiB -> 32KiB"]),
        (["data=custom", "data.target=a:b"], ["data.name: text -> custom"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_a_checkpoint_cannot_follow_is_named(
    here: Path,
    capfd: pytest.CaptureFixture[str],
    typed: list[str],
    named: list[str],
) -> None:
    run = checkpointed(*TINY)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    assert cli.main(["train", "name=run", *typed, "trainer.steps=9"]) == 2
    line = one_line(capfd.readouterr().err)
    assert "runs/run cannot resume with" in line
    assert all(f"{text}" in line for text in named)
    assert "trainer.steps" not in line
    assert "step-00000002" in line
    assert line.endswith("leave the change out, or start another run with name=OTHER")
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before
    for checkpoint in (
        run / "checkpoints"
    ).iterdir():  # without a checkpoint nothing stands against it
        checkpoint.joinpath("checkpoint.json").unlink()
    assert settings(["name=run", *typed], RUNS).changed


def test_the_same_text_elsewhere_is_the_same_data(here: Path) -> None:
    for name in ("old", "new"):
        (here / name).mkdir()
        (here / name / "a.txt").write_text("All happy families are alike. " * 400)
    checkpointed(*TINY, f"data.path={here / 'old'}")
    assert settings(["name=run", f"data.path={here / 'new'}"], RUNS).changed
    (here / "new" / "a.txt").write_text("Each unhappy family is unhappy in its own way. " * 300)
    with pytest.raises(ConfigError, match=r"data\.path"):
        settings(["name=run", f"data.path={here / 'new'}"], RUNS)


def test_settings_that_came_from_a_file_are_never_resolved(here: Path) -> None:
    run = prepared(*TINY)
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("pattern: '*'", "pattern: ${oc.env:HOME}"))
    assert settings(["name=run", "trainer.steps=9"], RUNS).config.data.pattern == "${oc.env:HOME}"  # type: ignore[union-attr]


OWN_MODEL = """
from torch import nn
def build(width):
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256))
"""


@pytest.mark.thorough  # what was named is remembered: test_own_class_paths.py; a run resumes by its name: test_runs.py
def test_a_run_of_ones_own_model_resumes_by_its_name(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    """Its class path was named when it was begun."""
    (here / "narrow_model.py").write_text(OWN_MODEL)
    model = ["model=custom", "model.target=narrow_model:build", "model.kwargs.width=16"]
    common = [
        *SETTLED,
        "data.max_bytes=64KiB",
        "trainer.global_batch=4",
        "cluster.devices=2",
        "trainer.eval_every=0",
    ]
    code, _, err = called("train", *model, *common, "name=a", "trainer.steps=2")
    assert (code, err.strip()) == (0, "")
    other = ["precision=mixed_bf16", "plan.stages=1", "trainer.global_batch=6"]
    code, out, err = called("train", "name=a", "trainer.steps=3", *other)
    assert (code, err.strip()) == (0, "")
    assert "runs/a resumes with its own settings, but " in out
    for changed in ("trainer.steps: 2 -> 3", "global_batch: 4 -> 6", "parameters: fp32 -> bf16"):
        assert changed in " ".join(out.split())
    assert "continuing after step 2" in out
    assert config.load(Path("runs/a/config.yaml").read_text()).model.kwargs == {"width": 16}  # type: ignore[union-attr]
    assert not Path("runs/a", LOCK).exists()
    assert weights(Path("runs/a"))


# ---- one run to a directory


def test_a_directory_has_one_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    with locked(run):
        assert (run / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        with pytest.raises(
            ConfigError,
            match=f"is being trained by process {os.getpid()} on {socket.gethostname()}",
        ):
            locked(run).__enter__()
        (run / "kept").touch()
    assert [path.name for path in run.iterdir()] == ["kept"]
    with locked(tmp_path / "runs" / "b" / "c"):
        pass
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from parallax.common.lock import locked\n"
        "with locked(Path(sys.argv[1])):\n    print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ConfigError, match=f"process {holder.pid} on"):
            locked(tmp_path / "a").__enter__()
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / "a" / LOCK).exists()
    with locked(tmp_path / "a"):
        pass
    assert not (tmp_path / "a" / LOCK).exists()


def read_for_all(directory: Path) -> str:
    """Return the error of a rank that the user's own torchrun has started."""
    with contextlib.ExitStack() as held, pytest.raises(ConfigError) as reported:
        together.read_together(directory, Nodes.gather(), held, lambda file, found: None)
    return str(reported.value)


def test_all_ranks_report_a_locked_directory(here: Path, pool: Pool) -> None:
    run = prepared(*TINY, "trainer.steps=1").absolute()
    with locked(run):
        reported = pool.run(read_for_all, 2, run)
    assert reported[0] == reported[1]
    assert f"is being trained by process {os.getpid()}" in reported[0]


@pytest.mark.thorough  # that it is printed once is asserted of wrong input under torchrun
def test_a_directory_that_is_held_under_torchrun(here: Path) -> None:
    run = prepared(*TINY, "trainer.steps=1")
    with locked(run):
        code, _, err = call("-m", "parallax", "train", "--run-dir", str(run), launcher=TORCHRUN)
    assert code != 0
    assert err.count("is being trained by process") == 1
    assert "Traceback" not in err.split("parallax: ")[0]


@pytest.mark.thorough  # test_requests_to_end.py trains a prepared run under torchrun, test_runs.py one to its end
def test_a_directory_that_was_held_under_torchrun(here: Path) -> None:
    run = prepared(*TINY, "trainer.steps=1")
    with locked(run):
        pass
    code, out, _ = call("-m", "parallax", "train", "--run-dir", str(run), launcher=TORCHRUN)
    assert code == 0
    assert out.count("results: runs/run") == 1


@pytest.mark.parametrize("place", ["runs", "runs/run"])
def test_a_file_where_the_run_directory_should_be(
    here: Path,
    capfd: pytest.CaptureFixture[str],
    place: str,
) -> None:
    Path(place).parent.mkdir(exist_ok=True)
    Path(place).write_text("mine")
    assert cli.main(["train", *TINY, "name=run"]) == 2
    assert "cannot write the run directory runs/run: " in one_line(capfd.readouterr().err)
    assert Path(place).read_text() == "mine"


def test_a_folder_that_cannot_be_written(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("runs").symlink_to("/proc/self/fd")  # not even root can make a folder there
    assert cli.main(["train", *TINY, "name=run"]) == 2
    assert "cannot write the run directory runs/run: " in one_line(capfd.readouterr().err)


def test_a_disk_that_is_full_leaves_all_as_it_was(here: Path) -> None:
    """A limit on the size of files ends writes as a full disk does."""
    assert cli.main(["plan", *DGX, "plan.stages=2"]) == 0
    plan, inputs = read_plan(Path("plan.yaml"), {})
    forecast = predict(inputs.profile, inputs.cluster, plan)
    planned = Planned(plan, forecast, inputs.profile, inputs.cluster)
    run = prepared(*TINY)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, allowed[1]))
    try:
        with pytest.raises(ConfigError, match="cannot write the run directory runs/run: "):
            write_run(run, config.compose(TINY), planned)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    write_run(run, config.compose(TINY), planned)
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.yaml",
        "plan.yaml",
        "plan.inputs.json",
        "profile.json",
        "events-predicted.jsonl",
    }
    assert not [name for name in names if name.startswith(".")]


def test_nothing_is_left_of_a_run_that_could_not_be_planned(
    here: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert (
        cli.main(["train", *TINY, "cluster.devices=2", "cluster.device_memory=1MiB", "name=run"])
        == 2
    )
    one_line(capfd.readouterr().err)
    assert list(here.iterdir()) == []
