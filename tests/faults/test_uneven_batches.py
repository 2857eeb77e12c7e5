"""Batches with fewer rows than micro-batches, uneven or empty: they work, or are refused with the numbers."""

from __future__ import annotations

import math
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

class Rows:
    def __len__(self): return self.rows
    def __init__(self, rows): self.rows = rows
    def inputs(self, start, stop): return (torch.arange(start, stop) % 8,)
    def targets(self, start, stop): return torch.arange(start, stop) % 8

class Source:
    def __init__(self, sizes): self.sizes, self.taken = sizes, 0
    def batch(self, rows):
        self.taken += 1
        return Rows(self.sizes[self.taken - 1])
    def validation(self, index, rows): return Rows(rows)
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

def build():
    return nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
"""
OWN = [
    *("model=custom", "model.target=uneven:build", "data=custom", "data.target=uneven:Source"),
    *("logger=none", "trainer.eval_every=0"),
]
SIZES = (8, 9, 5, 1)  # of micro-batches of two rows: whole, one more, uneven, fewer than there are


@pytest.mark.faults
def test_any_number_of_rows_is_a_step_but_none(here: Path, called: Called) -> None:
    (here / "uneven.py").write_text(MODULE)
    sizes = ",".join(map(str, (*SIZES, 0)))
    run = prepared(
        *OWN,
        *("trainer.steps=9", "trainer.global_batch=8", "trainer.microbatch=2"),
        f"+data.kwargs.sizes=[{sizes}]",
    )
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 2
    assert f"the batch of step {len(SIZES)} has 0 rows, and a step needs at least one" in one_line(
        err
    )
    losses = [each["loss"] for each in read_metrics(run / "metrics.jsonl") if "loss" in each]
    assert len(losses) == len(SIZES)
    assert all(map(math.isfinite, losses))
    assert running(here) == []
    assert temporary() == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["trainer.global_batch=2", "trainer.microbatch=4"],
            "trainer.microbatch=4: it is more than the 2 row(s) of a batch; use trainer.microbatch=2 or less, or "
            "trainer.global_batch=4",
        ),
        (["trainer.global_batch=0"], "trainer.global_batch=0: accepted are numbers above 0"),
    ],
    ids=["fewer than a micro-batch", "none"],
)
def test_sizes_that_cannot_be_are_refused_with_the_numbers(
    here: Path, called: Called, settings: list[str], expected: str
) -> None:
    (here / "uneven.py").write_text(MODULE)
    code, _, err = called("plan", *OWN, "+data.kwargs.sizes=[]", "cluster.devices=2", *settings)
    assert code == 2
    assert expected in one_line(err)
    assert not (here / "plan.yaml").exists()
