"""What people's losses return, and losses and optimizers of their own in an engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.errors import ConfigError, DataError, DescribeError
from parallax.model.describe import describe
from parallax.model.losses import call_loss, check_loss
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling.count import count
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.optim.builder import OptimizerBuilder
from parallax.runtime.optim.config import Group, as_config
from parallax.runtime.optim.schedules.cosine import CosineSchedule
from tests.plans import make_plan

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)


def engine(loss: Any, folder: Path, **options: Any) -> Engine:
    chain = describe(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    return Engine.build(chain, make_plan(chain), loss=loss, scratch=folder, **options)


def losses(loss: Any, folder: Path, **options: Any) -> list[float]:
    built = engine(loss, folder, **options)
    try:
        return [built.step(TensorRows(X, Y)).loss for _ in range(4)]
    finally:
        built.close()


WITH_MORE: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda loss: (loss, {"accuracy": 1.0}),
    "list": lambda loss: [loss, loss.detach()],
    "dictionary": lambda loss: {"loss": loss, "accuracy": 1.0},
    "model output": lambda loss: OrderedDict(accuracy=1.0, loss=loss),
    "object": lambda loss: SimpleNamespace(loss=loss, logits=None),
    "one number": lambda loss: loss.reshape(1, 1),
}


@pytest.mark.parametrize("more", WITH_MORE.values(), ids=WITH_MORE)
def test_a_loss_beside_other_results(more: Callable[[Tensor], Any], tmp_path: Path) -> None:
    found = losses(lambda outputs, targets: more(F.cross_entropy(outputs, targets)), tmp_path)
    assert found == losses(F.cross_entropy, tmp_path)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "float": (lambda loss: loss.item(), r"is a float: .*remove \.item\(\) and float\(\)"),
    "None": (lambda loss: None, "is a NoneType: accepted is a tensor of one number"),
    "text": (lambda loss: {"total": loss}, "is a dict: .* as loss in a dictionary"),
    "empty": (lambda loss: (), "is a tuple"),
    "rows": (
        lambda loss: loss.expand(3),
        r"has shape \(3,\) and must be one number: return its mean\(\)",
    ),
}


@pytest.mark.parametrize(("result", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_loss(result: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(DescribeError, match=message) as found:
        call_loss(lambda outputs, targets: result(F.cross_entropy(outputs, targets)), X, Y)
    assert "\n" not in str(found.value)


class Margin(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs * self.scale, targets)


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (torch.tensor([-1, 0]), r"Target -1 is out of bounds"),
        (torch.tensor([0, 4]), r"Target 4 is out of bounds"),
        (torch.tensor([0.5, 1.0]), r"got Float|found Float"),
        (torch.eye(4)[:2].long(), r"probabilities, got Long"),
        (torch.tensor([[1], [2]]), r"multi-target not supported"),
    ],
)
def test_targets_that_are_no_classes_are_one_line(targets: Tensor, reason: str) -> None:
    wanted = (
        rf"the loss does not take the targets \(.*({reason}).* have shape \(2, 4\) .* from 0 to 3"
    )
    with pytest.raises(DataError, match=wanted) as error:
        call_loss(F.cross_entropy, torch.ones(2, 4), targets)
    assert str(error.value).isprintable()
    assert call_loss(F.cross_entropy, torch.ones(2, 4), torch.tensor([0, 3])).item() > 0


def test_parameters_of_a_loss_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DescribeError, match="loss=Margin: its parameter scale would not be"
    ) as found:
        engine(Margin(), tmp_path)
    assert "make it a layer of the model" in str(found.value)
    assert losses(Margin().requires_grad_(False), tmp_path) == losses(F.cross_entropy, tmp_path)
    check_loss(nn.CrossEntropyLoss(weight=torch.ones(4)))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("share", torch.ones(4))

    def weighted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, weight=self.share)

    def decayed(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + self.linear.weight.square().sum()

    def alone(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.linear.weight.square().sum()


@pytest.mark.parametrize("name", ["weighted", "decayed", "alone"])
def test_a_loss_that_uses_the_model_is_refused(name: str) -> None:
    with torch.device("meta"):
        model = WithLoss()
    with pytest.raises(
        DescribeError, match="the loss of WithLoss uses a parameter or buffer"
    ) as found:
        call_loss(getattr(model, name), X, Y)
    assert "linear.weight" in str(found.value)
    assert "let forward return it" in str(found.value)


# ---- optimizers of one's own


def biases_apart(groups: Sequence[Group]) -> torch.optim.Optimizer:
    """Biases have a learning rate of their own."""
    trained = [p for group in groups for p in group["params"]]
    return torch.optim.RMSprop(
        [
            {"params": [p for p in trained if p.dim() > 1]},
            {"params": [p for p in trained if p.dim() == 1], "lr": 0.5},
        ],
        lr=1e-3,
    )


def test_groups_keep_rates_of_their_own(tmp_path: Path) -> None:
    schedule = CosineSchedule(warmup=1)
    built = engine(F.cross_entropy, tmp_path, optimizer=biases_apart, schedule=schedule, steps=10)
    groups = built._optimizer._on_device.optimizer.param_groups
    for step in range(3):
        result = built.step(TensorRows(X, Y))
        factor = schedule.factor(step, 10)
        assert [g["lr"] for g in groups] == [1e-3 * factor, 0.5 * factor]
        assert result.learning_rate == 0.5 * factor, "the highest that the function sets"
    assert built._optimizer.name == "biases_apart"
    built.close()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adafactor])
def test_stepping_copies_of_offloaded_parameters_raises(kind: Any, tmp_path: Path) -> None:
    chain = describe(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    for offload in (0.0, 1.0):
        plan = make_plan(chain, parameter_offload=offload)
        built = Engine.build(chain, plan, loss=F.cross_entropy, scratch=tmp_path)
        before = {name: value.clone() for name, value in built.parameters.items()}
        optimizer = kind(built.parameters.values(), lr=0.1)
        built.gradients(TensorRows(X, Y))
        if offload:
            with pytest.raises(ConfigError, match=f"{kind.__name__} has 4 copies.*Engine.build"):
                optimizer.step()
        else:
            optimizer.step()
            assert not any(built.parameters[name].equal(value) for name, value in before.items())
        built.close()


def test_a_step_after_an_evaluation_in_inference_mode(tmp_path: Path) -> None:
    trained, plain = engine(F.cross_entropy, tmp_path), engine(F.cross_entropy, tmp_path)
    with torch.inference_mode():
        trained.evaluate(TensorRows(X, Y))
    assert trained.step(TensorRows(X, Y)).loss == plain.step(TensorRows(X, Y)).loss
    trained.close()
    plain.close()


# ---- several losses


def counted_loss(loss: Any) -> int:
    """Count the work of training with ``loss``, as a run does before it plans; return the number of blocks."""
    chain = describe(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    rows = TensorRows(X, Y)
    work = count(
        chain,
        loss,
        lambda number: (rows.inputs(0, number), rows.targets(0, number)),
        precision=PrecisionConfig(),
        minimum_bytes=1,
    )
    return len(work.blocks)


def of_a_gan(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(outputs, targets), -outputs.square().mean()


def test_losses_that_are_minimised_in_turns_are_refused() -> None:
    with pytest.raises(DescribeError, match=r"only the first would be trained.* a GAN's"):
        counted_loss(of_a_gan)


def test_a_plan_of_ones_own_does_not_train_the_first_of_two_losses(tmp_path: Path) -> None:
    """No model is measured then: the engine trained it without a word."""
    built = engine(of_a_gan, tmp_path)
    with pytest.raises(DescribeError, match="only the first would be trained"):
        built.step(TensorRows(X, Y))
    built.close()


def test_parts_of_a_loss_and_reported_numbers_may_follow_it() -> None:
    def with_others(outputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        part, size = F.cross_entropy(outputs, targets), outputs.square().mean()
        loss = part + 0.1 * size
        return loss, part, loss.exp(), outputs.abs().mean().detach(), outputs

    assert counted_loss(with_others) == 3


def test_two_optimizers_are_refused() -> None:
    def of_a_gan(groups: Sequence[Group]) -> Any:
        return torch.optim.Adam(groups), torch.optim.Adam(groups)

    with pytest.raises(ConfigError, match="it returned a tuple"):
        _ = OptimizerBuilder.of(as_config(of_a_gan), nn.Linear(4, 4)).nature
