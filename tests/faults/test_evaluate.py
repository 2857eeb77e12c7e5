"""``parallax evaluate``: the figures that training printed, by any number of processes; mistakes are one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallax import cli
from tests.faults.commands import TORCHRUN, call, one_line, prepared
from tests.results import read_metrics

RUN = (
    *("experiment=tiny", "data.max_bytes=64KiB", "data.validation=0.02", "trainer.global_batch=4"),
    *("trainer.steps=4", "trainer.eval_every=2", "trainer.checkpoint_every=2", "logger=none"),
    *("metrics=[accuracy,perplexity]", "trainer.eval_batches=auto"),
)
SAME = "plan.stages=2", "plan.schedule=1f1b", "trainer.microbatch=2", "cluster.devices=2"
Called = Callable[..., tuple[int, str, str]]


def validated(run: Path) -> dict[int, dict[str, float]]:
    """The figures that training wrote, by step."""
    return {
        record["step"]: {k: v for k, v in record.items() if k.startswith("validation_")}
        for record in read_metrics(run / "metrics.jsonl")
        if "validation_loss" in record
    }


def figures(data: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in data.items() if key.startswith("validation_")}


@pytest.mark.faults
def test_a_whole_run_is_evaluated_again(called: Called) -> None:
    """Trained on two ranks, evaluated on one, on two with the same plan, and under torchrun."""
    run = prepared(*RUN, replicas=(1, 1))
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    due = validated(run)
    assert set(due) == {2, 4}

    code, out, err = called("evaluate", "run")
    assert code == 0, err
    assert f"{due[4]['validation_loss']:.4f}" in out
    assert "figures: runs/run/evaluate/step-00000004.json" in out
    written = json.loads((run / "evaluate" / "step-00000004.json").read_text())
    assert figures(written) == pytest.approx(due[4], rel=1e-5)
    assert (written["step"], written["weights"], len(written["ranks"])) == (4, "trained", 1)
    assert written["ranks"][0]["peak_bytes"] <= written["ranks"][0]["predicted_peak_bytes"]

    code, out, err = called("evaluate", "run", "--step", "2", "--json", *SAME)
    assert code == 0, err
    found = json.loads(out)
    assert figures(found) == due[2]  # bit for bit
    assert len(found["ranks"]) == 2

    code, out, err = call(
        "evaluate", "run", "--json", *SAME[:3], launcher=[*TORCHRUN, "-m", "parallax"]
    )
    assert code == 0, err
    (line,) = (each for each in out.splitlines() if each.startswith("{"))
    assert figures(json.loads(line)) == due[4]
    assert not list(Path(run / "evaluate").glob("*swap*/*"))


@pytest.mark.faults
def test_weights_from_disk_other_metrics_and_other_rows(called: Called, here: Path) -> None:
    run = prepared(*RUN, replicas=(1,))
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    due = validated(run)
    code, out, err = called(
        "evaluate",
        "run",
        "--json",
        "--out",
        "mine.json",
        "metrics=[top5]",
        "plan.parameters=host",
        "swap=disk",
    )
    assert code == 0, err
    found = json.loads(out)
    assert found == json.loads((here / "mine.json").read_text())
    assert set(figures(found)) == {"validation_loss", "validation_top5"}
    assert found["validation_loss"] == pytest.approx(due[4]["validation_loss"], rel=1e-5)

    (here / "other.txt").write_text("to be or not to be, that is the question\n" * 40)
    code, out, err = called("evaluate", "run", "--json", "data.path=other.txt")
    assert code == 0, err
    other = json.loads(out)
    assert other["sets"]["data"]["rows"] == (40 * 41 - 1) // 64
    assert any(line.startswith("data.path: ") for line in other["changed"])
    assert other["validation_loss"] != found["validation_loss"]


def refused(*arguments: str, capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    assert cli.main(["evaluate", *arguments]) == 2
    return one_line(capfd.readouterr().err)


def test_wrong_input_is_refused_in_one_line(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = prepared(*RUN, replicas=(1,))

    def line(*arguments: str) -> str:
        return refused(*arguments, capfd=capfd)

    assert "name the directory of a run" in line()
    assert "name the directory of a run" in line("data.path=x")
    assert "runs/absent is no run directory" in line("absent")
    assert "has no checkpoint yet" in line("run")
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    (run / "checkpoints" / "step-00000002" / "checkpoint.json").write_text("{}")
    assert "--step 7: accepted are the existing checkpoints" in line("run", "--step", "7")
    assert "step-00000002" in line("run")
    assert "--out " in line("run", "--out", "absent/figures.json")


MODEL = """
from torch import nn

def build(hidden=16):
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 4))
"""


@pytest.fixture
def trained(here: Path, called: Called) -> Path:
    """A run of a model of arrays, trained for a step, beside other arrays."""
    (here / "own.py").write_text(MODEL)
    arrays = np.random.default_rng(0)
    for name, rows in (("rows", 64), ("few", 3)):
        (here / name).mkdir()
        np.save(here / name / "x.npy", arrays.normal(size=(rows, 8)).astype(np.float32))
        np.save(here / name / "y.npy", arrays.integers(0, 4, rows))
    (here / "bare").mkdir()
    np.save(here / "bare" / "x.npy", np.zeros((8, 8), np.float32))
    run = prepared(
        *("model=custom", "model.target=own:build", "data=arrays", "data.path=rows"),
        *("data.inputs=x", "data.targets=y", "trainer.global_batch=8", "trainer.steps=1"),
        *("logger=none", "loss=cross_entropy"),
        replicas=(1,),
    )
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    return run


@pytest.mark.slow
def test_mistyped_settings_and_data_without_targets(
    trained: Path, called: Called, capfd: pytest.CaptureFixture[str]
) -> None:
    def line(*arguments: str) -> str:
        return refused("run", *arguments, capfd=capfd)

    assert "did you mean" in line("data.pth=x")
    assert "optimizer.lr: it does not change what a trained run computes" in line("optimizer.lr=1")
    assert "name: it does not change" in line("name=other")
    assert "there is no y" in line("data.path=bare")
    assert "--weights ema: step-00000001 has no averaged weights" in line("--weights", "ema")
    assert "model.kwargs" in line("model.kwargs.hidden=9")
    assert "plan.activations=keep: a plan with task=evaluation" in line("plan.activations=keep")
    assert "cluster=catalog: it is a cluster to plan for" in line("cluster=dgx_a100")
    assert "data.validation" in line("data.validation=0")


@pytest.mark.faults
def test_fewer_rows_than_a_batch(trained: Path, called: Called) -> None:
    code, out, err = called("evaluate", "run", "--json", "data.path=few")
    assert code == 0, err
    assert json.loads(out)["sets"] == {"data": {"rows": 3, "batches": 1, "truncated": False}}
