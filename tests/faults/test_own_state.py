"""A data source's state in checkpoints: it resumes from it exactly, or is refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from parallax.runtime.checkpoint import list_checkpoints
from tests.faults.commands import check_same_weights, one_line, prepared

Called = Callable[..., tuple[int, str, str]]

# Draws rows by three generators, of which none has a state that JSON can hold.
SOURCE = """
import random, numpy, torch
from torch import nn
from parallax import TensorRows

class Rows:
    def __init__(self, keep="all"):
        self.keep = keep
        self.own, self.torch = random.Random(1), torch.Generator().manual_seed(1)
        self.numpy = numpy.random.RandomState(1)
    def batch(self, rows):
        shift = self.own.randrange(8) + self.numpy.randint(8)
        inputs = (torch.randint(0, 8, (rows, 4), generator=self.torch) + shift) % 8
        return TensorRows(inputs, inputs[:, 0])
    def validation(self, index, rows):
        return TensorRows(torch.zeros(rows, 4, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
    def state_dict(self):
        if self.keep == "large":
            return {"rows": [1, 2.5] * 1_100_000}
        if self.keep == "generator":
            return {"rows": {"torch": self.torch}}
        return {3: self.own.getstate(), "torch": self.torch.get_state(), "numpy": self.numpy.get_state()}
    def load_state_dict(self, state):
        self.own.setstate(state[3])
        self.torch.set_state(state["torch"])
        self.numpy.set_state(state["numpy"])

def build():
    return nn.Sequential(nn.Embedding(8, 8), nn.Flatten(), nn.Linear(32, 8))
"""
OWN = [
    "model=custom",
    "model.target=own_state:build",
    "+model.kwargs={}",
    "data=custom",
    "data.target=own_state:Rows",
    "trainer.steps=60",
    "trainer.global_batch=4",
    "trainer.eval_every=0",
    "trainer.checkpoint_every=2",
    "logger=none",
    "schedule.final=1",
]


@pytest.mark.faults
def test_states_of_generators_are_restored(here: Path, called: Called) -> None:
    (here / "own_state.py").write_text(SOURCE)
    whole = prepared(*OWN, "trainer.steps=4", name="whole", replicas=(1,))
    shortened = prepared(*OWN, "trainer.steps=2", name="shortened", replicas=(1,))
    for run in (whole, shortened):
        assert called("train", "--run-dir", str(run))[0] == 0
    settings = (shortened / "config.yaml").read_text()
    (shortened / "config.yaml").write_text(settings.replace("steps: 2", "steps: 4"))
    code, out, _ = called("train", "--run-dir", str(shortened))
    assert code == 0
    assert "continuing after step 2" in out
    check_same_weights(shortened, whole)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("generator", "(state_dict()) holds a Generator at ['source']['rows']['torch']: accepted"),
        pytest.param(
            "large",
            "values, and the limit is 2,097,152: give many numbers as one tensor or array",
            marks=pytest.mark.faults,
        ),
    ],
)
def test_what_could_not_be_read_again_ends_before_the_first_step(
    here: Path, called: Called, keep: str, message: str
) -> None:
    (here / "own_state.py").write_text(SOURCE)
    run = prepared(*OWN, f"+data.kwargs={{keep:{keep}}}", replicas=(1,))
    code, out, err = called("train", "--run-dir", str(run))
    assert code == 2
    assert message in one_line(err)
    assert "step " not in out
    assert list_checkpoints(run / "checkpoints") == []
