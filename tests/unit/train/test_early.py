"""Runs end by a number of their held-out rows, after the same step however often they are interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallax.errors import ConfigError
from parallax.model.describe import describe
from parallax.model.loss_kinds import LossConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.checkpoint.retention import Retention
from parallax.runtime.engine import Engine
from parallax.runtime.metrics import MetricsConfig
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.train.early import OutOfPatience, TargetReached, TrackedMetric
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from parallax.train.watchdog import NoWatchdog
from tests.plans import make_plan
from tests.results import read_metrics

STEPS, ROWS = 60, 8


class Noise:
    """Training rows whose classes are random, so that held-out rows soon get no better."""

    validation_rows = 20

    def __init__(self, learnable: bool = False) -> None:
        self.learnable, self.read = learnable, 0

    def rows(self, count: int, seed: int) -> TensorRows:
        random = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, 4, generator=random)
        classes = torch.randint(0, 3, (count,), generator=random)
        return TensorRows(inputs, inputs[:, :3].argmax(1) if self.learnable else classes)

    def batch(self, rows: int) -> TensorRows:
        self.read += 1
        return self.rows(rows, self.read)

    def validation(self, index: int, rows: int) -> TensorRows:
        return self.rows(rows, 10_000 + index)

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


class StopsAfter(NoWatchdog):
    """Asks the run to end after some steps, as a signal does."""

    def __init__(self, steps: int) -> None:
        self.asked, self.steps = 0, steps

    def stop_requested(self) -> int:
        self.asked += 1
        return 15 if self.asked > self.steps else 0


def run(
    folder: Path,
    source: Noise,
    *,
    watchdog: NoWatchdog | None = None,
    metric: str = "validation_loss",
    best: int = 0,
    **options: Any,
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    chain = describe(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), seed=3)
    loss = LossConfig(name="cross_entropy").build()
    assert loss is not None
    engine = Engine.build(
        chain,
        make_plan(chain, global_batch=ROWS, microbatch=3),
        loss=loss,
        steps=STEPS,
        optimizer=AdamWConfig(lr=0.03),
        metrics=MetricsConfig(metrics=MetricsConfig.read(["accuracy", "auroc"])),
    )
    try:
        return train(
            engine,
            source,
            TrainerConfig(steps=STEPS, global_batch=ROWS, eval_every=2, **options),
            LoggerConfig(to=[], events=False),
            folder,
            tokens_per_row=1,
            checkpoint=CheckpointConfig(metric=metric, best=best),
            watchdog=watchdog,
        )
    finally:
        engine.close()


def validated(folder: Path, key: str) -> list[tuple[int, float]]:
    found = read_metrics(folder / "metrics.jsonl")
    return [(each["step"], each[key]) for each in found if key in each]


@pytest.mark.parametrize("options", [{"patience": 2}, {"target": 0.1}])
def test_a_metric_without_held_out_rows_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    source = Noise()
    source.validation_rows = 0
    with pytest.raises(ConfigError, match="the data has no held-out rows whose metric"):
        run(tmp_path, source, **options)
    assert not source.read


@pytest.mark.parametrize("metric", ["validation_loss", "validation_accuracy"])
def test_a_run_ends_when_its_metric_no_longer_improves(
    tmp_path: Path, metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run(tmp_path, Noise(), metric=metric, patience=3)
    assert summary["ended"] == "patience"
    values = [value for _, value in validated(tmp_path, metric)]
    better = max if metric == "validation_accuracy" else min
    best = better(values)
    assert summary[f"best_{metric}"] == best
    said = f"{metric} has not improved on {best:.4f} in 3 evaluations: training ends"
    assert capsys.readouterr().out.count(said) == 1
    assert values.index(best) == len(values) - 4, "three evaluations without a better one"
    assert summary["steps"] == 2 * len(values) < STEPS
    step = f"step-{summary['steps']:08d}"
    assert (tmp_path / "checkpoints" / step).is_dir(), "it ends with a checkpoint"


def test_an_interrupted_run_ends_after_the_same_step(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", Noise(), patience=4)
    assert whole["ended"] == "patience"
    parts, starts = tmp_path / "parts", 0
    while True:
        found = run(parts, Noise(), watchdog=StopsAfter(9), patience=4)
        starts += 1
        if found["ended"] != "stopped":
            break
    assert starts > 1
    assert (found["ended"], found["steps"]) == ("patience", whole["steps"])
    for key in ("loss", "accuracy", "validation_loss", "validation_accuracy", "validation_auroc"):
        assert validated(parts, key) == validated(tmp_path / "whole", key)
    again = run(parts, Noise(), patience=4)
    assert (again["ended"], again["steps"]) == ("patience", whole["steps"]), "it has ended"
    assert again["validation_accuracy"] == whole["validation_accuracy"]
    more = run(parts, Noise(), patience=5)
    assert more["steps"] > whole["steps"], "more patience resumes it"


def test_a_run_ends_when_its_metric_reaches_the_target(tmp_path: Path) -> None:
    summary = run(tmp_path, Noise(learnable=True), metric="validation_accuracy", target=0.6, best=1)
    values = validated(tmp_path, "validation_accuracy")
    assert summary["ended"] == "target"
    assert [value >= 0.6 for _, value in values] == [False] * (len(values) - 1) + [True]
    assert summary["steps"] == values[-1][0] < STEPS


def test_of_several_reasons_the_steps_come_first(tmp_path: Path) -> None:
    summary = run(tmp_path, Noise(learnable=True), patience=STEPS)
    assert (summary["ended"], summary["steps"]) == ("steps", STEPS)


@pytest.mark.parametrize("higher", [False, True])
def test_values_that_are_not_numbers_are_no_improvement(higher: bool) -> None:
    tracked = TrackedMetric("validation_x", higher=higher)
    patience, target = OutOfPatience(tracked, 2), TargetReached(tracked, 0.5)
    for value in (float("nan"), None):
        assert (patience.stop_requested(), target.stop_requested()) == (0, 0)
        tracked.add(value)
    assert patience.stop_requested() == 1
    tracked.add(0.6 if higher else 0.4)
    assert (patience.stop_requested(), target.stop_requested()) == (0, 1)
    other = TrackedMetric("validation_y", higher=higher)
    other.load_state_dict(tracked.state_dict())
    assert other.best is None, "the state is of another metric"


def test_the_checkpoints_with_the_highest_values_are_kept() -> None:
    held = {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.6}
    kept = Retention(keep_last=1, best=1, metric="validation_accuracy", higher=True)
    assert kept.superseded(held, 4) == [1, 3]
    assert Retention(keep_last=1, best=1).superseded(held, 4) == [2, 3]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"metric": "validation_f1"}, "checkpoint.metric=validation_f1: accepted are"),
        ({"metric": "loss", "patience": 1}, "is not of held-out rows"),
    ],
)
def test_metrics_that_are_not_computed_are_refused(
    tmp_path: Path, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        run(tmp_path, Noise(), **options)
