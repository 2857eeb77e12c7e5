"""Nothing that a file names is imported unless the user has named it: on this command line, or on the one before."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallax import cli
from parallax.commands.options import trusting
from parallax.common import trust
from parallax.errors import ConfigError
from parallax.plan.schedule import SCHEDULES
from parallax.run.prepare import PreparedRun
from tests.distributed.pool import ROOT
from tests.faults.commands import DGX, call, one_line, prepared

MARKS = """
import pathlib
pathlib.Path("imported").touch()
def listing(pipeline_ranks, pipeline_rank, micro_batches):
    from own_schedule import halved
    return halved(pipeline_ranks, pipeline_rank, micro_batches)
"""
OWN = "plan.schedule=own_schedule:halved"


@pytest.fixture
def folder(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, a cache of its own, and no schedule but the built-in ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(ROOT / "examples")
    known = set(SCHEDULES)
    yield here
    for name in SCHEDULES.keys() - known:
        del SCHEDULES[name]


def forget(name: str) -> None:
    """As in the next process."""
    del SCHEDULES[name]


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that is refused."""
    capfd.readouterr()
    assert cli.main(arguments) == 2
    return one_line(capfd.readouterr().err)


def test_a_schedule_of_ones_own_is_explained_and_simulated(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *DGX, OWN, "plan.stages=2", "trainer.microbatch=4"]) == 0
    forget("own_schedule:halved")
    assert cli.main(["explain", "plan.yaml"]) == 0
    assert cli.main(["plan", "--diff", "plan.yaml", "plan.yaml"]) == 0
    assert "own_schedule:halved" not in SCHEDULES  # neither needs the function
    assert cli.main(["simulate", "plan.yaml", "--json"]) == 0  # named when it was planned
    forget("own_schedule:halved")

    theirs = folder / "theirs"
    theirs.mkdir()
    for name in ("plan.yaml", "plan.inputs.json"):
        shutil.copy(name, theirs)
    assert cli.main(["explain", "theirs/plan.yaml"]) == 0
    line = refusal(capfd, "simulate", "theirs/plan.yaml")
    assert f"theirs/plan.yaml names {OWN}" in line
    assert line.endswith(f"add {OWN} to the command")
    assert "the schedule of theirs/plan.yaml is own_schedule:halved" in refusal(
        capfd, "simulate", "theirs/plan.yaml", "plan.schedule=own_schedule:other"
    )
    assert "accepted are the class paths" in refusal(
        capfd, "simulate", "theirs/plan.yaml", "plan.stages=3"
    )
    assert "own_schedule:halved" not in SCHEDULES
    for command in ("explain", "simulate"):
        assert cli.main([command, "theirs/plan.yaml", "--json", OWN]) == 0


def test_a_schedule_that_a_script_registered(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its name says nothing of where the function is."""
    assert cli.main(["plan", *DGX, OWN, "plan.stages=2"]) == 0
    file = folder / "plan.yaml"
    file.write_text(file.read_text().replace("own_schedule:halved", "by-halves"))
    assert cli.main(["explain", "plan.yaml"]) == 0
    assert "add plan.schedule=package.module:function" in refusal(capfd, "simulate", "plan.yaml")
    assert cli.main(["simulate", "plan.yaml", OWN]) == 0
    assert "by-halves" in SCHEDULES


def stranger(folder: Path, key: str) -> Path:
    """A run directory from elsewhere, whose configuration names a module that leaves a mark when it is imported."""
    (folder / "marks.py").write_text(MARKS)
    run = prepared("experiment=tiny", name="theirs")
    assert cli.main(["plan", *DGX, "plan.stages=2"]) == 0
    for name in ("plan.yaml", "plan.inputs.json"):
        (folder / name).replace(run / name)
    file = run / "config.yaml"
    data = yaml.safe_load(file.read_text())
    group, _, name = key.partition(".")
    own = {"name": "custom", "target": "marks:listing", "kwargs": {}}
    if key == "callbacks":
        changed: Any = ["marks:listing"]
    elif key == "model.target":
        changed = own | {"blocks": [], "weights": "", "adapter": {}, "verify": "auto"}
    else:
        changed = (own if name == "target" else data[group]) | {name: "marks:listing"}
    file.write_text(yaml.safe_dump(data | {group: changed}))
    if group == "plan":
        plan = yaml.safe_load((run / "plan.yaml").read_text())
        (run / "plan.yaml").write_text(yaml.safe_dump(plan | {name: "marks:listing"}))
    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("key", trust.KEYS)
def test_nothing_of_a_stranger_is_imported(
    folder: Path, capfd: pytest.CaptureFixture[str], key: str
) -> None:
    run = stranger(folder, key)
    before = {path: path.read_bytes() for path in run.iterdir()}
    for command in (
        ["calibrate", "theirs"],
        ["calibrate", str(run)],
        ["train", "name=theirs", "trainer.steps=9"],
    ):
        line = refusal(capfd, *command)
        word = f"{key}={'[marks:listing]' if key == 'callbacks' else 'marks:listing'}"
        assert f"config.yaml names {word}" in line
        assert line.endswith(f"add {word} to the command")
    assert cli.main(["explain", "runs/theirs"]) == 0
    simulated = cli.main(["simulate", "runs/theirs"])
    assert simulated == (2 if key == "plan.schedule" else 0)
    assert not (folder / "imported").exists()
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    if key == "plan.schedule":  # at the user's word it is
        assert cli.main(["simulate", "runs/theirs", f"{key}=marks:listing"]) == 0
        assert (folder / "imported").exists()


@pytest.mark.faults
def test_a_prepared_directory_of_a_stranger(
    folder: Path, capfd: pytest.CaptureFixture[str], called: Callable[..., tuple[int, str, str]]
) -> None:
    """The files are this user's, as all that comes out of an archive is; that says nothing of what they name."""
    run = stranger(folder, "model.target")
    word = "model.target=marks:listing"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    training = ["train", "--run-dir", str(run)]
    under_torchrun = call("-m", "parallax", *training, launcher=torchrun)
    for code, out, err in (called(*training), under_torchrun):
        assert (code == 0, out) == (False, "")
        (line,) = [line for line in err.splitlines() if line.startswith("parallax: ")]
        assert f"config.yaml names {word}" in line
        assert line.endswith(f"add {word} to the command")
    assert not (folder / "imported").exists()
    line = refusal(capfd, "train", "--run-dir", str(run), "model.target=other:build")
    assert f"runs/theirs/config.yaml says {word}, and the file's settings apply" in line
    for command in (["train", "--run-dir", str(run)], ["calibrate", "theirs"]):
        assert "config.yaml names no data.target" in refusal(
            capfd, *command, word, "data.target=marks:rows"
        )
    assert not (folder / "imported").exists()
    named = trusting({"model.target": "marks:listing"})
    # At the user's word.
    assert PreparedRun.read(run, named).config.model.target == "marks:listing"


def test_class_paths_of_held_out_sets() -> None:
    found = trust.class_paths(
        "data: {validation: {far: {transform: 'a:b', path: 'c:d'}, near: {}}}"
    )
    assert found == {"data.validation.far.transform": "a:b"}
    assert trust.is_key("data.validation.far.transform")
    assert not trust.is_key("data.validation.far.path")


def test_what_was_named_is_remembered_for_its_folder(folder: Path) -> None:
    mine, other = folder / "mine", folder / "other"
    trust.remember(mine, {"model.target": "a:b"})
    trust.check_named(mine / "config.yaml", {"model.target": "a:b"})
    trust.check_named(mine / "config.yaml", {})
    for file, found in (
        (other / "config.yaml", {"model.target": "a:b"}),
        (mine / "config.yaml", {"model.target": "os:system"}),
        (mine / "config.yaml", {"data.target": "a:b"}),
        (mine / "config.yaml", {"model.target": "a:b", "data.target": "c:d"}),
    ):
        with pytest.raises(ConfigError, match="not imported unless you type them"):
            trust.check_named(file, found)
    trust.check_named(other / "config.yaml", {"model.target": "a:b"}, ["model.target=a:b"])
