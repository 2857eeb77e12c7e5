"""Faults while a checkpoint is written beside the steps: the one before stays, and the run ends as if nothing had
been."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from parallax.errors import CheckpointError
from parallax.runtime.checkpoint import checkpoint_name, list_checkpoints
from tests.faults.commands import (
    ENDLESS,
    finish,
    one_line,
    prepared,
    running,
    stepping,
    temporary,
    weights,
)
from tests.faults.failing import fail_in_save
from tests.results import read_metrics

SETTINGS = [
    "data.max_bytes=64KiB",
    "trainer.steps=300",
    "trainer.checkpoint_every=100",
    "checkpoint.keep=0",
    "trainer.eval_every=0",
    "logger=none",
]
Called = Callable[..., tuple[int, str, str]]


def undisturbed(called: Called) -> dict[str, torch.Tensor]:
    run = prepared(*SETTINGS, *fail_in_save(-1, -1, "raises"), name="whole")
    assert called("train", "--run-dir", str(run))[0] == 0
    return {name: tensor.clone() for name, tensor in weights(run).items()}


def equal(run: Path, expected: dict[str, torch.Tensor]) -> bool:
    found = weights(run)
    return all(torch.equal(found[name], expected[name]) for name in found | expected)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("how", "rank"), [("is_killed", 0), ("is_killed", 1), ("finds_no_room", 1)]
)
def test_a_fault_behind_the_steps_leaves_the_checkpoint_before(
    here: Path, called: Called, how: str, rank: int
) -> None:
    expected = undisturbed(called)
    run = prepared(*SETTINGS, *fail_in_save(rank, 200, how))
    code, _, err = called("train", "--run-dir", str(run))
    assert code
    assert "Traceback" not in err
    last = [line for line in err.splitlines() if line.startswith("parallax: ")]
    assert len(last) == 1
    if how == "finds_no_room":
        assert code == CheckpointError.exit_code
        assert "No space left on device" in last[0]
    steps = [record["step"] for record in read_metrics(run / "metrics.jsonl")]
    assert max(steps) > 200  # training went on
    found = sorted(path.name for path in list_checkpoints(run / "checkpoints"))
    assert found == [checkpoint_name(100)]
    assert running(here) == []
    code, out, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    assert "continuing after step 100" in out
    assert equal(run, expected)
    left = {path.name for path in (run / "checkpoints").glob("*step*")}
    assert left == {checkpoint_name(step) for step in (100, 200, 300)}


@pytest.mark.faults
@pytest.mark.parametrize("where", ["weight", "state", "header", "index", "truncated", "gone"])
def test_damage_is_named_and_the_checkpoint_before_is_taken(
    here: Path, called: Called, where: str
) -> None:
    expected = undisturbed(called)
    run = Path("runs/whole")
    last = list_checkpoints(run / "checkpoints")[-1]
    file = last / ("checkpoint.json" if where in ("index", "gone") else "stage-01.safetensors")
    named = damage(file, where)
    code, out, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("skipped: ")]
    assert str(file) in line
    assert named in line
    assert "continuing after step 200" in out
    assert equal(run, expected)


def damage(file: Path, where: str) -> str:
    """What is named."""
    if where == "gone":
        file.unlink()
        return "No such file"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    if where in ("weight", "state"):
        name = "model/2.weight" if where == "weight" else "exp_avg_sq/2.bias"
        start, _ = json.loads(data[8 : 8 + length])[name]["data_offsets"]
        data[8 + length + start + 1] ^= 4
        file.write_bytes(data)
        return name
    if where == "truncated":
        file.write_bytes(data[:-50])
        return "is damaged"
    at = {"header": 8 + length - 1, "index": len(data) // 2}[where]
    data[at] ^= 1
    file.write_bytes(data)
    return "damaged"


SHORT = [
    "experiment=tiny",
    "data.max_bytes=64KiB",
    "trainer.global_batch=4",
    "trainer.steps=2",
    "logger=none",
]


@pytest.mark.faults
@pytest.mark.parametrize("what", ["gone", "index"])
def test_a_run_whose_only_checkpoint_is_damaged_does_not_restart(
    here: Path, called: Called, what: str
) -> None:
    """It would write over what could be restored."""
    run = prepared(*SHORT, replicas=(1,))
    assert called("train", "--run-dir", str(run))[0] == 0
    (last,) = list_checkpoints(run / "checkpoints")
    damage(last / "checkpoint.json", what)
    left = {path: path.read_bytes() for path in last.iterdir()}
    code, out, err = called("train", "--run-dir", str(run))
    assert code == CheckpointError.exit_code
    assert re.fullmatch(
        rf"parallax: {last / 'checkpoint.json'} is damaged \(.*\); use an earlier checkpoint \(no other checkpoint is "
        r"whole; another name=NAME starts a new run\)|parallax: .*: it is damaged \(SHA-256\).*starts a new run\)",
        one_line(err),
    ), err
    assert "step " not in out
    assert {path: path.read_bytes() for path in last.iterdir()} == left


@pytest.mark.faults
@pytest.mark.parametrize("how", ["moved", "removed"])
def test_the_folder_of_a_run_that_is_gone_is_not_made_again(here: Path, how: str) -> None:
    """A part of the run would lie there, as if it were the run."""
    run = prepared(*ENDLESS, "trainer.checkpoint_every=20", replicas=(1,))
    launcher = stepping(run)
    if how == "moved":
        run.rename("elsewhere")
    else:
        shutil.rmtree(run)
    code, _, err = finish(launcher)
    assert code == CheckpointError.exit_code, err
    assert one_line(err) == (
        f"parallax: {run} has been removed or moved while the run was trained, so nothing can be saved there: move it "
        "back, and the same command resumes from its last checkpoint"
    )
    assert not run.exists()
    assert running(here) == []
    assert temporary() == []
