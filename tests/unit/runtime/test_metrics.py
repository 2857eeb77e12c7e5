"""Metrics by name: entries that are wrong end in one line, and so do metrics that outputs or targets do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from parallax.common import trust
from parallax.common.metrics import larger_is_better
from parallax.config import compose, dump, load
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.model.describe import describe
from parallax.runtime.metrics import Metrics, MetricsConfig
from parallax.runtime.metrics.config import _USUAL as known_metrics
from tests.configs.refused import error_of
from tests.plans import make_plan


class MeanOfMeans(torchmetrics.Metric):
    """Its state is averaged over replicas, whatever their numbers of rows."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.mean = (preds.argmax(-1) == target).float().mean()

    def compute(self) -> Tensor:
        return self.mean


class LargestScore(torchmetrics.Metric):
    """A metric of one's own; whether higher is better, it does not tell."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.add_state("largest", torch.full((), -1e9), dist_reduce_fx="max")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.largest = torch.maximum(self.largest, preds.max())

    def compute(self) -> Tensor:
        return self.largest * self.factor


def own(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"name": "own", "target": f"{__name__}:{name}", "kwargs": kwargs}


def computed(
    entries: list[Any], outputs: Tensor, targets: Any, parts: int = 1, **options: Any
) -> dict[str, float]:
    chain = describe(lambda: nn.Sequential(nn.Linear(1, 1)))
    mesh = Mesh.create(make_plan(chain), torch.device("cpu"), {})
    metrics = Metrics(MetricsConfig(metrics=MetricsConfig.read(entries), **options), mesh)
    metrics.begin(training=False)
    for few, own in zip(outputs.chunk(parts), targets.chunk(parts) if parts > 1 else [targets]):
        metrics.add(few, own, training=False)
    found = metrics.evaluated()
    mesh.close()
    return found


@pytest.mark.parametrize(
    ("metrics", "error"),
    [
        ("[acuracy]", "metrics[0]=acuracy: unknown metric; known are accuracy"),
        ("[f1,f1]", "metrics: f1 is there twice"),
        ("[loss]", "loss is another number of metrics.jsonl"),
        ("[{nam: f1}]", "accepted is a name, or {name: NAME"),
        ("[{name: f1, kwargs: 3}]", "kwargs keys and values"),
        ("3", "a list, each"),
    ],
)
def test_entries_that_are_wrong_are_named(metrics: str, error: str) -> None:
    assert error in error_of(f"metrics={metrics}")


def test_entries_come_back_from_text_with_their_direction() -> None:
    entries = "metrics=[accuracy,{name: brier, target: 'torchmetrics:MeanSquaredError'}]"
    config = compose([entries, "checkpoint.metric=validation_accuracy", "trainer.patience=2"])
    assert load(dump(config)) == config
    found = config.metrics_config
    assert found.higher_is_better("validation_accuracy")
    assert not found.higher_is_better("validation_brier")
    assert not found.higher_is_better("validation_loss")
    assert "did you mean 'validation_accuracy'" in error_of(entries, "checkpoint.metric=accuracy")
    with pytest.raises(ConfigError, match="does not tell whether higher is better"):
        MetricsConfig(metrics=MetricsConfig.read([own("LargestScore")])).higher_is_better(
            "validation_own"
        )


def test_a_class_of_ones_own_in_a_file_must_be_typed() -> None:
    """Those of torchmetrics need not be."""
    config = compose(
        [
            "metrics=[f1,{name: x, target: 'torchmetrics.text:Perplexity'},{name: y, target: 'mine:Y'}]"
        ]
    )
    assert trust.class_paths(dump(config)) == {"metrics.2.target": "mine:Y"}
    assert trust.is_key("metrics.2.target")
    assert not trust.is_key("metrics.target")


@pytest.mark.parametrize(
    ("entry", "outputs", "targets", "error"),
    [
        ("mse", torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), "expected to have the same shape"),
        ("top5", torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), "smaller or equal to `num_classes`"),
        ("top2", torch.zeros(4), torch.zeros(4), "not scores of several classes"),
        ("accuracy", torch.zeros(4, 3), torch.full((4,), 7), "the targets hold classes up to 7"),
        ("accuracy", torch.zeros(4, 3), torch.full((4, 3), 0.5), "the targets are not 0 and 1"),
        ("accuracy", torch.zeros(4, 3), torch.zeros(4), "a class for each vector of scores"),
        ("accuracy", torch.zeros(4, 3), None, "the targets are a NoneType"),
        ("f1", torch.zeros(2, 5000), torch.zeros(2, dtype=torch.int64), "a table of 5000 × 5000"),
        ({"name": "f1", "kwargs": {"average": "none"}}, torch.zeros(4, 3), torch.arange(4) % 3, "it gives 3 numbers"),
        (own("MeanOfMeans"), torch.zeros(4, 3), torch.arange(4) % 3, "cannot be added over replicas exactly"),
        (own("LargestScore", factr=2), torch.zeros(4, 3), torch.arange(4) % 3, "takes no such argument"),
        ({"name": "x", "target": "torch.nn:Linear"}, torch.zeros(4, 3), torch.arange(4) % 3, "is no class of metrics"),
    ],
)  # fmt: skip
def test_metrics_that_do_not_fit_are_refused_in_one_line(
    entry: Any, outputs: Tensor, targets: Any, error: str
) -> None:
    with pytest.raises(ConfigError, match=error) as caught:
        computed([entry], outputs, targets)
    assert str(caught.value).isprintable()


def test_a_metric_of_ones_own_is_computed() -> None:
    outputs = torch.arange(12.0).view(4, 3)
    found = computed([own("LargestScore", factor=2.0)], outputs, torch.arange(4) % 3, parts=2)
    assert found == {"own": 22.0}


def test_logits_become_probabilities_the_same_way_in_each_part() -> None:
    """Torchmetrics takes a batch with all logits in [0, 1] for one of probabilities."""
    logits, labels = torch.tensor([0.2, 0.3, -2.0, 3.0]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    for parts in (1, 2):
        assert computed(["accuracy"], logits, labels, parts) == {"accuracy": 1.0}
    found = computed(["accuracy"], logits.clamp(0, 1), labels, 2, probabilities=True)
    assert found == {"accuracy": 0.5}


def test_probabilities_of_classes_are_compared_by_the_most_probable() -> None:
    outputs, targets = torch.eye(3), torch.tensor([[0.9, 0.1, 0], [0.6, 0.4, 0], [0, 0, 1.0]])
    assert computed(["accuracy"], outputs, targets, mixed=True)["accuracy"] == pytest.approx(2 / 3)


def test_sums_are_in_double_precision() -> None:
    outputs = torch.full((20000,), 0.1)
    found = computed(["mae"], outputs, torch.zeros(20000), parts=2000)
    assert found["mae"] == pytest.approx(float(outputs[0]), rel=1e-7)


def test_reports_without_settings_know_the_direction_of_usual_metrics() -> None:
    names = [*known_metrics, "top5"]
    config = MetricsConfig(metrics=MetricsConfig.read(names))
    keys = [f"validation_{name}" for name in names]
    assert {k: larger_is_better(k) for k in keys} == {k: config.higher_is_better(k) for k in keys}
