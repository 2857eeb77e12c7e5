"""A chain that differs from its model, and rows that must not be divided, are refused in one line before training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from parallax.config import compose, differences
from parallax.plan.plan import Plan
from parallax.run.prepare import prepare
from parallax.run.resume import check_resumable
from tests.faults.commands import one_line
from tests.results import read_metrics

MODELS = """
import torch
import torch.nn.functional as F
from torch import nn

from parallax import TensorRows


class Model(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 8), nn.Linear(8, 3), scale

    def blocks(self):
        return [self.first, self.last]

    def forward(self, x):
        return self.last(self.first(x) * self.scale)


class Contrastive(Model):
    @staticmethod
    def loss(outputs, targets):
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class Centred(Contrastive):
    def blocks(self):
        return [self]

    def forward(self, x):
        features = super().forward(x)
        return features - features.mean(0)


class Source:
    def batch(self, rows):
        random = torch.Generator().manual_seed(rows)
        return TensorRows(torch.randn(rows, 4, generator=random), torch.zeros(rows, dtype=torch.int64))

    def validation(self, index, rows):
        return self.batch(rows)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
"""
OWN = ["model=custom", "data=custom", "data.target=checked:Source"]
RUN = ["trainer.global_batch=8", "trainer.steps=3", "trainer.eval_every=0"]
SMALL = ["trainer.global_batch=8", "trainer.steps=2", "cluster.devices=1", "plan.stages=1"]
Called = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _models(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (here / "checked.py").write_text(MODELS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "verified"))


def test_a_chain_that_is_not_its_model_is_one_line(called: Called) -> None:
    model = "model.target=checked:Model"
    code, _, err = called("train", *OWN, *SMALL, model, "model.kwargs.scale=2.0")
    assert code == 2
    assert "block 2 of 2 (last) of Model does not compute" in one_line(err)


@pytest.mark.faults
def test_interacting_rows_are_one_line_where_the_plan_splits_them(called: Called) -> None:
    model = "model.target=checked:Contrastive"
    code, _, err = called("train", *OWN, *SMALL, model, "trainer.microbatch=2")
    assert code == 2
    line = one_line(err)
    assert "4 micro-batch(es) and 1 replica(s)" in line
    assert "trainer.microbatch=8 plan.replicas=1" in line
    assert "use trainer.gather_loss=true, which computes it once" in line


def test_rows_that_interact_in_the_model_have_one_remedy(called: Called) -> None:
    model = "model.target=checked:Centred"
    split = "trainer.microbatch=2", "trainer.gather_loss=true"
    code, _, err = called("train", *OWN, *SMALL, model, *split)
    assert code == 2
    line = one_line(err)
    assert line.startswith(
        "parallax: rows of a batch interact in the model, and the plan has 4 micro"
    )
    assert (
        "use trainer.microbatch=8 plan.replicas=1, or return a value for each row from the model"
        in line
    )


def test_a_schedule_without_all_forwards_first_is_one_line(called: Called) -> None:
    requested = "trainer.gather_loss=true", "plan.schedule=1f1b", "model.target=checked:Contrastive"
    code, _, err = called("train", *OWN, *SMALL, *requested)
    assert code == 2
    assert "use plan.schedule=gpipe, or trainer.microbatch=8" in one_line(err)


def test_a_model_of_sizes_alone_has_no_loss_to_gather(called: Called) -> None:
    code, _, err = called(
        "plan", "model=transformer", "cluster=dgx_a100", "trainer.gather_loss=true"
    )
    assert code == 2
    assert one_line(err).endswith("use trainer.gather_loss=false")


@pytest.mark.thorough
def test_a_contrastive_loss_trains_in_a_pipeline_with_replicas(called: Called) -> None:
    """Losses are those of one process with one micro-batch."""
    model = "model.target=checked:Contrastive"
    for name, settings in {
        "whole": ["cluster.devices=1", "plan.stages=1", "trainer.microbatch=8"],
        "parts": [
            "cluster.devices=3",
            "plan.replicas=[1,2]",
            "trainer.microbatch=3",
            "trainer.gather_loss=true",
        ],
    }.items():
        code, _, err = called("train", *OWN, *RUN, model, *settings, f"name={name}")
        assert code == 0, err
    whole, parts = (
        [
            found["loss"]
            for found in read_metrics(Path(f"runs/{name}/metrics.jsonl"))
            if "loss" in found
        ]
        for name in ("whole", "parts")
    )
    assert len(whole) == 3
    assert parts == pytest.approx(whole, rel=1e-5)
    plan = Plan.load(Path("runs/parts/plan.yaml"))
    assert plan.gather_loss
    assert plan.micro_batches(8) == 3


def plan_of(*overrides: str) -> Plan:
    """What would be trained."""
    with contextlib.ExitStack() as held:
        return prepare([*OWN, *SMALL, *overrides], Console(quiet=True), held).plan


@pytest.mark.faults
def test_remedies_work() -> None:
    model = "model.target=checked:Contrastive"
    whole = plan_of(model, "trainer.microbatch=8", "name=whole")
    assert whole.micro_batches(8) == 1
    split = plan_of(model, "trainer.microbatch=2", "model.verify=false", "name=split")
    assert split.micro_batches(8) == 4
    gathered = plan_of(model, "trainer.microbatch=2", "trainer.gather_loss=true", "name=gathered")
    assert gathered.micro_batches(8) == 4
    assert gathered.gather_loss


def test_a_run_may_resume_with_another_model_verify(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "step-00000001"
    saved.mkdir(parents=True)
    (saved / "checkpoint.json").touch()
    before = compose([*OWN, "model.target=checked:Model"])
    after = compose([*OWN, "model.target=checked:Model", "model.verify=true"])
    assert differences(before, after) == ["model.verify: auto != true"]
    check_resumable(tmp_path, before, after)


@pytest.mark.parametrize("value", ["maybe", "1"])
def test_other_values_are_one_line(called: Called, value: str) -> None:
    code, _, err = called("train", f"model.verify={value}")
    assert code == 2
    assert one_line(err) == f"parallax: model.verify={value}: accepted are auto, true, false"
