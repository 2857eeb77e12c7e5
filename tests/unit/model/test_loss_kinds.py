"""Losses by name: refused options end in one line, and a loss of one's own keeps what it counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from parallax.config import compose
from parallax.errors import DataError, DescribeError, ParallaxError
from parallax.model.loss_kinds import LOSSES, LossConfig, TorchLoss
from tests.configs.refused import error_of

CONFIGS = Path(__file__).parents[3] / "configs" / "loss"


def margin(outputs: Tensor, targets: Tensor, *, margin: float = 1.0) -> Tensor:
    return (outputs - targets - margin).clamp(min=0).sum()


margin.count = len  # type: ignore[attr-defined]


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.scale * (outputs - targets).mean()


def custom(name: str, **kwargs: Any) -> Any:
    return LossConfig(name="custom", target=f"{__name__}:{name}", kwargs=kwargs).build()


def test_every_loss_is_an_option() -> None:
    names = {path.stem: yaml.safe_load(path.read_text()) for path in CONFIGS.glob("*.yaml")}
    assert names.keys() == {*LOSSES}
    for name, held in names.items():
        assert held.get("name", LossConfig().name) == name
    assert compose(["loss=huber_loss"]).loss.name == "huber_loss"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["loss=mse_loss", "loss.kwargs.delta=1"],
            "loss.kwargs.delta: loss=mse_loss takes no such",
        ),
        (["loss=cross_entropy", "loss.kwargs.label_smoothing=2"], "must be between 0.0 and 1.0"),
        (["loss=cross_entropy", "loss.kwargs.weight=2"], "a list with a number for each class"),
        (["loss=l1_loss", "loss.kwargs.reduction=none"], "loss.kwargs.reduction=none"),
        (["loss.kwargs.weight=[1,2]"], "loss=model has no options"),
        (["loss=nll_loss", "loss.target=a:b"], "only loss=custom has a target"),
    ],
)
def test_options_that_torch_refuses_end_in_one_line(words: list[str], error: str) -> None:
    found = error_of(*words)
    assert error in found


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "error"),
    [
        (
            "mse_loss",
            torch.zeros(3, 1),
            torch.zeros(4),
            "outputs have shape [3, 1] and the targets [4]",
        ),
        ("cross_entropy", torch.zeros(3, 5), torch.zeros(3), "a class for each vector of scores"),
        ("cross_entropy", torch.zeros(3, 5), {"y": torch.zeros(3)}, "the targets are a dict"),
        (
            "multilabel_soft_margin_loss",
            torch.zeros(3, 5),
            torch.zeros(3),
            "a label for each score",
        ),
    ],
)
def test_targets_that_do_not_fit_are_refused(
    name: str, outputs: Tensor, targets: Any, error: str
) -> None:
    """Torch would broadcast some of them."""
    loss = LossConfig(name=name).build()
    assert loss is not None
    if name == "cross_entropy" and isinstance(targets, Tensor):
        targets = targets[:2]
    with pytest.raises(ParallaxError) as caught:
        loss(outputs, targets)
    assert error in str(caught.value)


def test_weights_need_a_number_for_each_class() -> None:
    loss: Any = LossConfig(name="cross_entropy", kwargs={"weight": [1, 2]}).build()
    with pytest.raises(ParallaxError, match="it has 2 numbers, and the model gives 5 outputs"):
        loss(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match="classes 0 to 4"):
        loss.count(torch.arange(5))


def test_one_column_of_outputs_is_not_broadcast() -> None:
    loss: Any = LossConfig(name="mse_loss").build()
    outputs, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([3, 5])
    assert float(loss(outputs, targets)) == 4 + 9
    assert loss.count(targets) == 2


def test_a_sum_of_half_precision_is_computed_in_single() -> None:
    loss: Any = LossConfig(name="mse_loss").build()
    found = loss(torch.full((1000,), 100.0, dtype=torch.float16), torch.zeros(1000))
    assert float(found) == 1e7


def test_a_function_of_ones_own_keeps_its_count_and_its_options() -> None:
    loss = custom("margin", margin=0.5)
    assert float(loss(torch.ones(4), torch.zeros(4))) == 2
    assert loss.count(torch.zeros(4)) == 4
    assert loss.__qualname__ != custom("margin").__qualname__, "caches tell them apart"
    assert float(custom("Scaled", scale=3.0)(torch.ones(4), torch.zeros(4))) == 3


@pytest.mark.parametrize(
    ("name", "kwargs", "error"),
    [
        ("margin", {"margn": 1}, "unexpected keyword argument 'margn'"),
        ("Scaled", {}, "missing a required argument: 'scale'"),
        ("missing", {}, "has no missing"),
    ],
)
def test_wrong_arguments_of_ones_own_loss_are_named(
    name: str, kwargs: dict[str, Any], error: str
) -> None:
    with pytest.raises(ParallaxError) as caught:
        custom(name, **kwargs)
    assert error in str(caught.value)


@pytest.mark.parametrize("shifted", [True, False])
def test_scores_of_the_next_label_are_not_compared_with_the_label(shifted: bool) -> None:
    """A causal model of transformers computes its loss from labels that are not shifted."""
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, 7, generator=random)
    labels = torch.randint(0, 7, (2, 5), generator=random)
    labels[0, 1] = -100
    scores, classes = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
    own = torch.nn.functional.cross_entropy(scores.flatten(0, 1), classes.flatten())
    outputs = SimpleNamespace(logits=logits, loss=own)
    loss: Any = LossConfig(name="cross_entropy").build()
    if shifted:
        with pytest.raises(ParallaxError, match="compares each score with the next label"):
            loss(outputs, labels)
    else:
        assert float(loss(outputs, labels) / loss.count(labels)) == pytest.approx(float(own))


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss", "multi_margin_loss"])
def test_a_single_class_is_refused(name: str) -> None:
    """Its loss is 0 from the first step on, so nothing would be trained."""
    with pytest.raises(DescribeError, match=r"a single class.*binary_cross_entropy_with_logits"):
        TorchLoss(name, {})(torch.randn(4, 1), torch.zeros(4, dtype=torch.int64))
