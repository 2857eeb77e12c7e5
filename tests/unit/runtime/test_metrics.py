"""Metrics by name: entries that are wrong end in one line, and so do metrics that outputs or targets do not fit."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallax.common import trust
from parallax.common.metrics import larger_is_better
from parallax.config import compose, dump, load
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.model.describe import describe
from parallax.model.loss_kinds import LossConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.metrics import Metrics, MetricsConfig
from parallax.runtime.metrics.config import _USUAL as known_metrics
from parallax.runtime.metrics.config import Task
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


def test_names_that_do_not_fit_the_targets_are_refused_with_those_that_do() -> None:
    config = MetricsConfig(metrics=MetricsConfig.read(["f1", "mse"]))
    config.check_targets(classes=False)
    with pytest.raises(
        ConfigError, match=r"metrics=\[mse\]: .* accuracy, .*perplexity, top5$"
    ) as caught:
        config.check_targets(classes=True)
    assert "rmse" not in str(caught.value)
    for name in ("top3", "perplexity"):
        with pytest.raises(ConfigError, match=r"accuracy, .* mse, .*spearman$"):
            MetricsConfig(metrics=MetricsConfig.read([name])).check_targets(classes=False)


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
        ("accuracy", torch.zeros(4, 3), torch.full((4,), 7), "4 targets are classes above 2"),
        ("accuracy", torch.zeros(4, 3), torch.full((4, 3), 0.5), "12 of the targets are not 0 and 1"),
        ("accuracy", torch.zeros(4, 3), torch.zeros(4), "a class for each vector of scores"),
        ("accuracy", torch.zeros(4, 3), None, "the targets are a NoneType"),
        ("mcc", torch.zeros(2, 5000), torch.zeros(2, dtype=torch.int64), "a table of 5000 × 5000"),
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


TASKS: dict[str, tuple[dict[str, Any], Tensor, Tensor]] = {
    "multiclass": (
        {"num_classes": 5},
        torch.randn(40, 5, generator=torch.Generator().manual_seed(1)),
        torch.randint(0, 5, (40,), generator=torch.Generator().manual_seed(2)),
    ),
    "binary": (
        {},
        torch.randn(40, generator=torch.Generator().manual_seed(3)),
        torch.randint(0, 2, (40,), generator=torch.Generator().manual_seed(4)),
    ),
    "multilabel": (
        {"num_labels": 3},
        torch.randn(40, 3, generator=torch.Generator().manual_seed(5)),
        torch.randint(0, 2, (40, 3), generator=torch.Generator().manual_seed(6)),
    ),
}


@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 1}, {"average": "weighted"}, {"threshold": 0.7}, {"top_k": 2}],
    ids=str,
)
@pytest.mark.parametrize(
    "name",
    ["Accuracy", "F1Score", "Specificity", "HammingDistance", "JaccardIndex", "MatthewsCorrCoef"],
)
@pytest.mark.parametrize("task", list(TASKS))
def test_counts_are_those_of_torchmetrics(task: str, name: str, options: dict[str, Any]) -> None:
    """They are counted here, without a wait for the device."""
    sized, outputs, targets = TASKS[task]
    kind = getattr(torchmetrics.classification, task.title() + name)
    if not {*options} <= {*inspect.signature(kind).parameters}:
        pytest.skip("no such option")
    found = computed(
        [
            {
                "name": "x",
                "target": f"torchmetrics.classification:{kind.__name__}",
                "kwargs": options,
            }
        ],
        outputs,
        targets,
        parts=3,
    )
    given = outputs.softmax(-1) if task == "multiclass" else outputs.sigmoid()
    assert found["x"] == pytest.approx(float(kind(**sized, **options)(given, targets)), abs=1e-6)


class Reads(TorchDispatchMode):
    """Counts the operators for which the host waits for an accelerator."""

    NAMES = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "bincount",
        "equal",
        "unique",
        "item",
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("index", "index_put", "index_put_"):
            self.count += any(each is not None and each.dtype is torch.bool for each in args[1])
        self.count += name.startswith(self.NAMES) or "unique" in name
        return func(*args, **kwargs or {})


KINDS = {
    "cross_entropy": ["accuracy", "f1", "top2", "mcc", "jaccard"],
    "binary_cross_entropy_with_logits": ["accuracy", "f1", "mcc", "mae"],
    "mse_loss": ["mse", "mae", "mape", "r2", "explained_variance"],
}


@pytest.mark.parametrize("loss", list(KINDS))
def test_the_host_reads_nothing_more_from_the_device_for_metrics(loss: str) -> None:
    def reads(names: list[str], micro: int) -> tuple[int, dict[str, float]]:
        chain = describe(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))
        engine = Engine.build(
            chain,
            make_plan(chain, global_batch=8, microbatch=micro),
            loss=LossConfig(name=loss).build(),  # type: ignore[arg-type]
            metrics=MetricsConfig(metrics=MetricsConfig.read(names)),
        )
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        batch = TensorRows(
            x,
            {"cross_entropy": x[:, :3].argmax(1), "mse_loss": x[:, :3]}.get(
                loss, (x[:, :3] > 0).float()
            ),
        )
        engine.check_metrics(batch)
        engine.step(batch)
        computed_on_host, engine.metrics.stepped = engine.metrics.stepped, dict  # type: ignore[method-assign]
        with Reads() as found:
            engine.step(batch)
        engine.close()
        return found.count, computed_on_host()

    for micro in (8, 2):
        without, _ = reads([], micro)
        count, metrics = reads(KINDS[loss], micro)
        assert {*metrics} == {*KINDS[loss]}
        assert count == without


def test_sums_are_in_double_precision() -> None:
    outputs = torch.full((20000,), 0.1)
    found = computed(["mae"], outputs, torch.zeros(20000), parts=2000)
    assert found["mae"] == pytest.approx(float(outputs[0]), rel=1e-7)


def test_reports_without_settings_know_the_direction_of_usual_metrics() -> None:
    names = [*known_metrics, "top5"]
    config = MetricsConfig(metrics=MetricsConfig.read(names))
    smaller = {"calibration_error", "perplexity", "mse", "rmse", "mae", "mape"}
    for name in names:
        assert larger_is_better(f"validation_{name}") == (name not in smaller), name
        assert config.higher_is_better(f"validation_{name}") == (name not in smaller), name


@pytest.mark.filterwarnings("ignore:Metric .* will save all targets")
def test_the_direction_of_usual_metrics_is_that_of_their_classes() -> None:
    for each in MetricsConfig.read([*known_metrics, "top5"]):
        told = getattr(each.build(Task("multiclass", 10)), "higher_is_better", None)
        assert told in (None, each.higher_is_better()), each.name
