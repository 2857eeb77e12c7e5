"""Metrics under any plan are those of one process with all rows at once."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torchmetrics
import torchmetrics.regression
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parallax.model.describe import Chain, describe
from parallax.model.loss_kinds import LossConfig
from parallax.run.job import usual_loss
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.metrics import MetricsConfig
from parallax.train.evaluation import HeldOut
from tests.distributed import test_counted_losses as counted
from tests.distributed.pool import Pool
from tests.plans import make_plan

LENGTH, CLASSES, ROWS = 3, 5, 6
KINDS: dict[str, tuple[str, list[Any]]] = {
    "classes": (
        "cross_entropy",
        ["accuracy", "top2", "f1", "balanced_accuracy", "auroc", "mcc", "perplexity"],
    ),
    "labels": ("binary_cross_entropy_with_logits", ["accuracy", "f1", "average_precision"]),
    "numbers": (
        "mse_loss",
        ["rmse", "mae", "pearson", {"name": "r2", "kwargs": {"multioutput": "uniform_average"}}],
    ),
}
PLANS: list[tuple[tuple[int, ...], str, int, bool]] = [
    ((1,), "1f1b", 1, False),
    ((1, 2), "1f1b", 3, False),
    ((1, 3), "1f1b", 2, False),
    ((2, 1), "zb-h1", 2, False),
    ((1, 2), "gpipe", 2, True),
]
Plans = tuple[tuple[int, ...], str, int, bool]


def targets_of(kind: str, rows: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    if kind == "numbers":
        return torch.randn(rows, generator=random)
    if kind == "labels":
        return torch.randint(0, 2, (rows, CLASSES), generator=random)
    targets = torch.randint(0, CLASSES, (rows, LENGTH), generator=random)
    mask = torch.rand(rows, LENGTH, generator=random) < 0.5
    mask[:1], mask[1:2] = True, False
    return targets.masked_fill(mask, -100)


def inputs_of(kind: str, rows: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed + 1)
    shape = (rows, LENGTH, 4) if kind == "classes" else (rows, 4)
    return torch.randn(shape, generator=random)


@functools.cache
def chain_of(kind: str) -> Chain:
    outputs = 1 if kind == "numbers" else CLASSES

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))

    return describe(build, seed=3)


class Rows:
    """Held-out rows in batches, the last of which may be short."""

    def __init__(self, kind: str, rows: int, seed: int) -> None:
        self.inputs, self.targets = inputs_of(kind, rows, seed), targets_of(kind, rows, seed)
        self.validation_rows = rows

    def validation(self, index: int, rows: int) -> TensorRows:
        part = slice(index * rows, (index + 1) * rows)
        return TensorRows(self.inputs[part], self.targets[part])


def measured(kind: str, plan: Plans, rows: int, seed: int) -> tuple[dict[str, float], ...]:
    """The metrics of all held-out rows, those of a step, and the outputs of both."""
    replicas, schedule, micro, gathers = plan
    loss, entries = KINDS[kind]
    chain, held = chain_of(kind), Rows(kind, rows, seed)
    engine = Engine.build(
        chain,
        make_plan(
            chain,
            replicas=replicas,
            schedule=schedule,
            global_batch=ROWS,
            microbatch=micro,
            gather_loss=gathers,
        ),
        loss=LossConfig(name=loss).build(),  # type: ignore[arg-type]
        metrics=MetricsConfig(metrics=MetricsConfig.read(entries)),
    )
    engine.check_metrics(TensorRows(inputs_of(kind, ROWS, 9), targets_of(kind, ROWS, 9)))
    found = [HeldOut(engine, held, ROWS, None).evaluate(lambda done, count: True) for _ in "ab"]
    assert found[0] is not None
    assert str(found[0]) == str(found[1]), f"an evaluation starts from zero: {found}"
    steps = TensorRows(inputs_of(kind, ROWS, 7), targets_of(kind, ROWS, 7))
    stepped = engine.step(steps).metrics
    columns = engine.mesh.gather_columns(stepped)
    engine.close()
    return found[0].metrics, {name: sum(values) for name, values in columns.items()}


def outputs_of(kind: str, inputs: Tensor) -> Tensor:
    chain = chain_of(kind)
    engine = Engine.build(
        chain, make_plan(chain, global_batch=len(inputs)), loss=lambda outputs, _: outputs.mean()
    )
    parts = engine.predict(TensorRows(inputs, torch.zeros(len(inputs))))
    engine.close()
    return torch.cat([part for _, part in sorted(parts, key=lambda each: each[0])])


@functools.cache
def expected(kind: str, rows: int, seed: int) -> dict[str, float]:
    outputs = outputs_of(kind, inputs_of(kind, rows, seed))
    targets = targets_of(kind, rows, seed)
    one: dict[str, Any] = {}
    if kind == "classes":
        outputs, targets = outputs.flatten(0, 1), targets.flatten()
        usual = {"task": "multiclass", "num_classes": CLASSES, "ignore_index": -100}
        one = {
            "accuracy": torchmetrics.Accuracy(**usual, average="micro"),
            "top2": torchmetrics.Accuracy(**usual, average="micro", top_k=2),
            "f1": torchmetrics.F1Score(**usual, average="macro"),
            "balanced_accuracy": torchmetrics.Accuracy(**usual, average="macro"),
            "auroc": torchmetrics.AUROC(**usual),
            "mcc": torchmetrics.MatthewsCorrCoef(**usual),
        }
    elif kind == "labels":
        outputs = outputs.sigmoid()
        usual = {"task": "multilabel", "num_labels": CLASSES}
        one = {
            "accuracy": torchmetrics.Accuracy(**usual, average="micro"),
            "f1": torchmetrics.F1Score(**usual, average="macro"),
            "average_precision": torchmetrics.AveragePrecision(**usual, average="macro"),
        }
    else:
        outputs = outputs.squeeze(1)
        one = {
            "rmse": torchmetrics.regression.MeanSquaredError(squared=False),
            "mae": torchmetrics.regression.MeanAbsoluteError(),
            "pearson": torchmetrics.regression.PearsonCorrCoef(),
            "r2": torchmetrics.regression.R2Score(),
        }
    found = {name: float(metric(outputs, targets)) for name, metric in one.items()}
    if kind == "classes":
        found["perplexity"] = float(nn.functional.cross_entropy(outputs, targets).exp())
    return found


@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # a smaller example would take as long
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
# Torchmetrics has no correlation of replicas with a row each.
@given(rows=st.integers(4, 3 * ROWS), seed=st.integers(0, 1000))
@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_metrics_are_those_of_all_rows_at_once(
    pool: Pool, plan: Plans, kind: str, rows: int, seed: int
) -> None:
    due, of_step = expected(kind, rows, seed), expected(kind, ROWS, 7)
    for validated, stepped in pool.run(measured, sum(plan[0]), kind, plan, rows, seed):
        assert validated == pytest.approx(due, rel=1e-5, abs=1e-6, nan_ok=True)
        assert stepped == pytest.approx({name: of_step[name] for name in stepped}, rel=1e-5)
        assert {*stepped} == {*due} - {"auroc", "perplexity", "average_precision", "pearson"}


def of_labels(kind: str, plan: Plans) -> tuple[dict[str, float], float]:
    """Metrics and loss of a model of transformers with labels among its inputs."""
    replicas, schedule, micro, gathers = plan
    chain, batch = counted.labelled_chain(kind), counted.labelled_batch(kind)
    engine = Engine.build(
        chain,
        make_plan(
            chain,
            replicas=replicas,
            schedule=schedule,
            global_batch=counted.ROWS,
            microbatch=micro,
            gather_loss=gathers,
        ),
        loss=usual_loss,
        precision=counted.FP64,
        metrics=MetricsConfig(metrics=MetricsConfig.read(["accuracy", "perplexity"])),
    )
    engine.check_metrics(batch)
    engine.metrics.begin(training=False)
    loss = engine.evaluate(batch)
    found = engine.metrics.evaluated()
    engine.close()
    return found, loss


@pytest.mark.sampled
@pytest.mark.parametrize("plan", [PLANS[0], PLANS[1]], ids=str)
@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_labels_among_the_inputs_are_scored(pool: Pool, kind: str, plan: Plans) -> None:
    """Those of a causal model shifted by one: the exponential of the loss says whether they are."""
    chain, batch = counted.labelled_chain(kind), counted.labelled_batch(kind)
    plain = make_plan(chain, global_batch=counted.ROWS)
    engine = Engine.build(chain, plain, loss=usual_loss, precision=counted.FP64)
    outputs = [part for _, part in sorted(engine.predict(batch), key=lambda each: each[0])]
    engine.close()
    scores = torch.cat([each.logits for each in outputs])
    labels = batch.inputs(0, counted.ROWS)["labels"]
    if kind == "causal":
        scores, labels = scores[:, :-1], labels[:, 1:]
    right = (scores.argmax(-1) == labels)[labels >= 0]
    for found, loss in pool.run(of_labels, sum(plan[0]), kind, plan):
        assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
        assert found["accuracy"] == pytest.approx(float(right.double().mean()), rel=1e-6)
