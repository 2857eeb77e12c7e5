"""Inputs and targets of different numbers of rows do not belong together: one line with both, exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.commands import one_line, prepared, running, temporary

Called = Callable[..., tuple[int, str, str]]
MODULE = """
import torch
from torch import nn
from parallax import TensorRows

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)

    def loss(self, outputs, targets):
        return (outputs.mean() - targets.mean()) ** 2

class Rows:
    def __init__(self, rows, x, y): self.rows, self.x, self.y = rows, x, y
    def __len__(self): return self.rows
    def inputs(self, start, stop): return (self.x[start:stop],)
    def targets(self, start, stop): return self.y[start:stop]

class Source:
    def __init__(self, training=16, held_out=16, inputs=16, kind="own"):
        self.training, self.held_out, self.given, self.kind = training, held_out, inputs, kind
    def make(self, rows, targets):
        x, y = torch.ones(self.given, 4), torch.zeros(targets, 1)
        return TensorRows((x,), y) if self.kind == "tensors" else Rows(rows, x, y)
    def batch(self, rows): return self.make(rows, self.training)
    def validation(self, index, rows): return self.make(rows, self.held_out)
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

class Other(Source):
    def make(self, rows, targets):
        kinds = {"none": None, "tuple": (1, 2)}
        return Held(rows, torch.ones(rows, 4), kinds[self.kind])

class Held(Rows):
    def targets(self, start, stop): return self.y

def plain():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
"""
OWN = [
    *("model=custom", "model.target=unlike:Model", "data=custom", "data.target=unlike:Source"),
    *("trainer.global_batch=16", "trainer.microbatch=16", "trainer.steps=2"),
    *("logger=none", "trainer.eval_every=1", "schedule.warmup=1"),
]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["held_out=12"],
            "validation(0, 16) has 16 row(s), and its targets have 12: return inputs and",
        ),
        (
            ["inputs=12"],
            "validation(0, 16) has 16 row(s), and its inputs[0] have 12: return inputs and",
        ),
        (["held_out=12", "kind=tensors"], "got tensors of shapes [(16, 4), (12, 1)]"),
    ],
    ids=str,
)
def test_before_anything_is_planned(
    here: Path, called: Called, settings: list[str], message: str
) -> None:
    (here / "unlike.py").write_text(MODULE)
    overrides = [f"+data.kwargs.{setting}" for setting in settings]
    code, _, err = called("train", *OWN, *overrides)
    assert code == 2
    assert message in one_line(err)
    assert not (here / "runs").exists()


@pytest.mark.faults
@pytest.mark.parametrize("replicas", [(1,), (1, 1)], ids=str)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["training=12"],
            "the batch of step 0 has 16 row(s), and its targets have 12: return inputs and",
        ),
        (
            ["held_out=12"],
            "a batch that is evaluated at step 1 has 16 row(s), and its targets have 12: return inputs and",
        ),
        (["training=12", "kind=tensors"], "got tensors of shapes [(16, 4), (12, 1)]"),
    ],
    ids=str,
)
def test_in_a_run_that_is_planned(
    here: Path, called: Called, replicas: tuple[int, ...], settings: list[str], message: str
) -> None:
    (here / "unlike.py").write_text(MODULE)
    run = prepared(*OWN, *[f"+data.kwargs.{setting}" for setting in settings], replicas=replicas)
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 2
    assert message in one_line(err)
    assert running(here) == []
    assert temporary() == []


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["none", "tuple"])
def test_targets_of_a_kind_that_the_usual_loss_does_not_take(
    here: Path, called: Called, kind: str
) -> None:
    (here / "unlike.py").write_text(MODULE)
    changed = ["model.target=unlike:plain", "data.target=unlike:Other", f"+data.kwargs.kind={kind}"]
    run = prepared(*OWN, *changed, replicas=(1,))
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 2
    assert "the model's scores have shape [2, 8] and the targets are a " in one_line(err)
