"""Metrics and losses of a run: what it reports, and one line with exit code 2 for those that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.commands import one_line, prepared, running, temporary
from tests.results import read_metrics

Called = Callable[..., tuple[int, str, str]]
MODULE = """
import torch
from torch import nn
from parallax import TensorRows

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

def hinge(outputs, targets, margin=1.0):
    right = outputs.gather(1, targets[:, None])
    return (outputs - right + margin).clamp(min=0).sum()

hinge.count = len

class Source:
    def __init__(self): self.read = 0
    def rows(self, count, seed):
        x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
        return TensorRows(x, x[:, :3].argmax(1))
    def batch(self, rows):
        self.read += 1
        return self.rows(rows, self.read)
    validation_rows = 21
    def validation(self, index, rows): return self.rows(rows, 1000 + index)
    def state_dict(self): return {"read": self.read}
    def load_state_dict(self, state): self.read = state["read"]
"""
OWN = [
    *("model=custom", "model.target=scored:build", "data=custom", "data.target=scored:Source"),
    *("trainer.global_batch=8", "trainer.microbatch=4", "trainer.steps=4", "trainer.eval_every=2"),
    *("logger=none", "loss=custom", "loss.target=scored:hinge"),
    "loss.kwargs.margin=0.5",
]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("[accuracy,mae]", "metrics=[mae]: "),
        ("[top4]", "metrics=[top4]: Expected argument `top_k` to be smaller or equal"),
    ],
)
def test_metrics_that_do_not_fit_end_a_run_before_its_first_step(
    here: Path, called: Called, metrics: str, message: str
) -> None:
    (here / "scored.py").write_text(MODULE)
    run = prepared(*OWN, f"metrics={metrics}", replicas=(1, 2))
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 2
    assert message in one_line(err)
    assert not [each for each in read_metrics(run / "metrics.jsonl") if "loss" in each]
    assert running(here) == []
    assert temporary() == []


@pytest.mark.faults
def test_metrics_are_in_the_files_of_a_run(here: Path, called: Called) -> None:
    (here / "scored.py").write_text(MODULE)
    run = prepared(
        *OWN, "metrics=[accuracy,auroc]", "checkpoint.metric=validation_auroc", replicas=(1, 2)
    )
    code, out, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    records = read_metrics(run / "metrics.jsonl")
    steps = [each for each in records if "loss" in each]
    assert all(0 <= each["accuracy"] <= 1 and "auroc" not in each for each in steps)
    evaluated = [each for each in records if "loss" not in each]
    names = ["step", "validation_accuracy", "validation_auroc", "validation_loss"]
    assert [sorted(each) for each in evaluated] == [names, names]
    assert evaluated[-1]["validation_accuracy"] * 21 == pytest.approx(
        round(evaluated[-1]["validation_accuracy"] * 21), abs=1e-5
    )
    summary = json.loads((run / "summary.json").read_text())
    for name in names[1:]:
        assert summary[name] == evaluated[-1][name]
    assert summary["best_validation_auroc"] == max(each["validation_auroc"] for each in evaluated)
    line = f"accuracy {summary['validation_accuracy']:.4f}, auroc {summary['validation_auroc']:.4f}"
    assert f"step 4: validation loss {summary['validation_loss']:.4f}, {line}" in out
