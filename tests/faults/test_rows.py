"""The rows that a model sees are the same under every plan, with any workers, through kills and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.commands import running
from tests.results import read_metrics

Called = Callable[..., tuple[int, str, str]]
MODULE = """
import os, random, signal
from pathlib import Path

import torch
from torch import nn

class Numbers(torch.utils.data.Dataset):
    def __init__(self, rows): self.rows = rows
    def __len__(self): return self.rows
    def __getitem__(self, row):
        # Of the row and of what an augmentation draws for it.
        return torch.tensor([hash((row, random.random())) % 1000003 / 1000003]), torch.tensor(0.0)

class Same(nn.Module):
    def __init__(self, kill):
        super().__init__()
        self.weight, self.left = nn.Parameter(torch.ones(1)), kill

    def forward(self, x):
        if self.left and self.training and "RANK" in os.environ and torch.is_grad_enabled():
            self.left -= 1
            if not self.left and not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return x * self.weight

class Model(nn.Module):
    def __init__(self, kill=0):
        super().__init__()
        self.layers = nn.Sequential(Same(0), Same(0), Same(kill), Same(0))

    def forward(self, x): return self.layers(x)
    def loss(self, outputs, targets): return (outputs.double() ** 2).mean() + targets.double().mean()
"""
SETTINGS = [
    *(
        "model=custom",
        "model.target=numbers_of:Model",
        "data=dataset",
        "data.target=numbers_of:Numbers",
    ),
    *(
        "data.kwargs.rows=37",
        "trainer.global_batch=6",
        "data.validation=0",
        "trainer.checkpoint_every=2",
    ),
    *(
        "logger=none",
        "optimizer=sgd",
        "optimizer.lr=1e-30",
        "precision=fp64",
    ),
    *("trainer.eval_every=0", "schedule.final=1", "cluster.kind=cpu"),
]


def losses(run: str) -> list[float]:
    found = [each for each in read_metrics(Path("runs") / run / "metrics.jsonl") if "loss" in each]
    assert [each["step"] for each in found] == list(range(1, len(found) + 1))
    return [each["loss"] for each in found]


@pytest.mark.faults
def test_the_rows_of_a_step_depend_on_data_seed_and_step_alone(here: Path, called: Called) -> None:
    (here / "numbers_of.py").write_text(MODULE)
    code, out, err = called(
        *("train", *SETTINGS, "name=whole", "trainer.epochs=3", "plan.stages=1", "data.workers=0"),
        "data.validation={few:{kwargs:{rows:5}},many:{kwargs:{rows:50}}}",
    )
    assert code == 0, err
    evaluated = [
        each for each in read_metrics(Path("runs/whole/metrics.jsonl")) if "loss" not in each
    ]
    assert [sorted(each) for each in evaluated] == [
        ["step", "validation_loss"],
        ["step", "validation_loss/many"],
    ]
    assert evaluated[0]["validation_loss"] != evaluated[1]["validation_loss/many"]
    assert "validation loss of many" in out
    code, _, err = called(
        *("train", *SETTINGS, "name=broken", "trainer.steps=8", "+model.kwargs.kill=10"),
        *("plan.stages=2", "trainer.microbatch=2", "cluster.devices=2", "data.workers=1"),
    )
    assert code == 0, err
    assert (here / "killed").exists()
    code, out, err = called(
        *("train", "name=broken", "trainer.epochs=3", "data.workers=3"),
        *("plan.stages=1", "trainer.microbatch=1", "plan.replicas=2"),
    )
    assert code == 0, err
    assert "data.workers: 1 -> 3" in out
    whole = losses("whole")
    assert len(whole) == 19  # 3 × 37 rows, 6 a step, the last with rows of the fourth epoch
    assert len(set(whole)) == 19
    assert losses("broken") == pytest.approx(whole, rel=1e-12)
    assert running(here) == []
