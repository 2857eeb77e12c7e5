"""A batch in micro-batches has the loss and the gradients of the whole batch, whatever targets the loss ignores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parallax.errors import ConfigError
from parallax.model.describe import describe, parameter_names
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.run.job import usual_loss
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from tests.plans import make_plan

CLASSES, LENGTH, WIDTH = 7, 5, 4
WEIGHT = torch.linspace(0.1, 2.0, CLASSES, dtype=torch.float64)


def nanogpt(logits: Tensor, targets: Tensor) -> Tensor:
    rows, length, classes = logits.shape
    return F.cross_entropy(
        logits.view(rows * length, classes), targets.view(rows * length), ignore_index=-1
    )


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    shifted = logits[:, :-1].contiguous()
    return nn.CrossEntropyLoss()(shifted.view(-1, CLASSES), targets[:, 1:].reshape(-1))


def picked(logits: Tensor, targets: Tensor) -> Tensor:
    chosen = targets != -100
    return F.cross_entropy(logits[chosen], targets[chosen])


def likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    scores = F.log_softmax(logits, -1).flatten(0, 1)
    return F.nll_loss(scores, targets.flatten(), weight=WEIGHT)


class Subclass(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.transpose(1, 2), target)


def transposed(loss: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, targets: loss(logits.transpose(1, 2), targets)


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "usual": usual_loss,
    "nanogpt": nanogpt,
    "next token": next_token,
    "picked": picked,
    "likelihood": likelihood,
    "subclass": Subclass(weight=WEIGHT, label_smoothing=0.1),
    "function": transposed(F.cross_entropy),
    "module": transposed(nn.CrossEntropyLoss(label_smoothing=0.2)),
    "weights": transposed(nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2)),
    "partial": transposed(functools.partial(F.cross_entropy, ignore_index=3)),
    "module of likelihoods": transposed(lambda x, y: nn.NLLLoss()(x.log_softmax(1), y)),
    "last token": lambda logits, targets: F.cross_entropy(logits[:, -1], targets[:, -1]),
}


@functools.cache
def chain_of(build: Callable[[], nn.Module]) -> Any:
    return describe(build, seed=3, dtype=torch.float64)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def whole(chain: Any, loss: Callable[[Any, Any], Tensor], inputs: Any, targets: Any) -> Any:
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    value = loss(nn.Sequential(*blocks)(inputs), targets)
    value.backward()
    names = parameter_names(chain, range(len(blocks)))
    return value.item(), {n: blocks[i].get_parameter(inner).grad for n, (i, inner) in names.items()}


def by_micro_batches(
    chain: Any, loss: Callable[[Any, Any], Tensor], batch: TensorRows, micro: int, **options: Any
) -> tuple[float, dict[str, Tensor], float]:
    plan = make_plan(chain, global_batch=len(batch), microbatch=micro, **options)
    precision = PrecisionConfig(parameters="fp64", compute="fp64")
    engine = Engine.build(chain, plan, loss=loss, precision=precision)
    value = engine.gradients(batch)
    found = {name: each.clone() for name, each in engine.gradients_by_name.items()}
    evaluated = engine.evaluate(batch)
    engine.close()
    return value, found, evaluated


def targets_of(rows: int, seed: int, ignored: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, CLASSES, (rows, LENGTH), generator=random)
    share = torch.rand(rows, 1, generator=random)  # of each row: some are ignored as a whole
    mask = torch.rand(rows, LENGTH, generator=random) < 1.6 * share - 0.3
    mask[0] = False  # no mean is one of nothing
    return targets.masked_fill(mask, ignored)


@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(st.sampled_from(sorted(LOSSES)), st.integers(2, 7), st.integers(1, 4), st.integers(0, 10**6))
def test_random_losses_with_random_masks(name: str, rows: int, micro: int, seed: int) -> None:
    ignored = {"nanogpt": -1, "weights": 2, "partial": 3}.get(name, -100)
    targets = targets_of(rows, seed, ignored)
    inputs = torch.randn(
        rows, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    chain = chain_of(build)
    value, gradients = whole(chain, LOSSES[name], inputs, targets)
    found, parts, evaluated = by_micro_batches(
        chain, LOSSES[name], TensorRows(inputs, targets), micro
    )
    assert found == pytest.approx(value, rel=1e-12)
    assert evaluated == pytest.approx(value, rel=1e-12)
    assert parts.keys() == gradients.keys()
    for key, expected in gradients.items():
        torch.testing.assert_close(parts[key], expected, rtol=1e-10, atol=1e-14)


def test_probabilities_are_no_classes() -> None:
    loss = transposed(nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1))
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(5, LENGTH, WIDTH, dtype=torch.float64, generator=random)
    targets = torch.rand(5, CLASSES, LENGTH, dtype=torch.float64, generator=random)
    chain = chain_of(build)
    assert by_micro_batches(chain, loss, TensorRows(inputs, targets), 2)[0] == pytest.approx(
        whole(chain, loss, inputs, targets)[0], rel=1e-12
    )


@pytest.mark.parametrize("rows", [1, 4])
def test_a_batch_without_counted_targets_has_no_loss_and_no_gradients(rows: int) -> None:
    batch = TensorRows(
        torch.ones(rows, LENGTH, WIDTH, dtype=torch.float64), torch.full((rows, LENGTH), -100)
    )
    value, gradients, evaluated = by_micro_batches(chain_of(build), usual_loss, batch, 2)
    assert (value, evaluated) == (0.0, 0.0)
    assert not any(each.any() for each in gradients.values())


def test_a_loss_is_called_once_for_a_micro_batch_as_far_as_it_can_tell() -> None:
    """What it does behind its cross-entropy, such as to log a number, it does once."""
    logged: list[float] = []

    def logging_loss(logits: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        logged.append(value.item())
        return value

    inputs = torch.randn(6, LENGTH, WIDTH, dtype=torch.float64)
    chain = chain_of(build)
    plan = make_plan(chain, global_batch=6, microbatch=2)
    engine = Engine.build(
        chain, plan, loss=logging_loss, precision=PrecisionConfig(parameters="fp64", compute="fp64")
    )
    engine.step(TensorRows(inputs, targets_of(6, 1, -100)))
    engine.close()
    assert len(logged) == 3


def own_mean(logits: Tensor, targets: Tensor) -> Tensor:
    kept = targets >= 0
    each = F.cross_entropy(logits.transpose(1, 2), targets.clamp(min=0), reduction="none")
    return (each * kept).sum() / kept.sum()


class OwnCounted:
    """The way out."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        return own_mean(logits, targets) * self.count(targets)

    def count(self, targets: Tensor) -> int:
        return int((targets >= 0).sum())


def row_mean(logits: Tensor, targets: Tensor) -> Tensor:
    """Masked targets, and the mean over rows all the same."""
    kept = targets >= 0
    each = F.cross_entropy(logits.transpose(1, 2), targets.clamp(min=0), reduction="none")
    return ((each * kept).sum(1) / kept.sum(1).clamp(min=1)).mean()


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_a_custom_mean_over_masked_targets_is_refused(micro: int) -> None:
    """Only once a batch has some, and with a way out that is one."""
    torch.manual_seed(0)
    inputs = torch.randn(6, LENGTH, WIDTH, dtype=torch.float64)
    targets = targets_of(6, 4, -100)
    targets[:, 0] = 1
    targets[0], targets[1:3, 1:] = (
        1,
        -100,
    )  # rows of other numbers of counted targets in each partition
    chain = chain_of(build)
    unmasked = TensorRows(inputs, targets.clamp(min=0))
    by_micro_batches(chain, own_mean, unmasked, micro)
    with pytest.raises(
        ConfigError, match=r"the loss depends on the micro-batches.*count\(targets"
    ) as caught:
        by_micro_batches(chain, own_mean, TensorRows(inputs, targets), micro)
    assert "\n" not in str(caught.value)
    by_micro_batches(chain, own_mean, TensorRows(inputs, targets), 6)
    by_micro_batches(chain, row_mean, TensorRows(inputs, targets), micro)
    value, _, _ = by_micro_batches(chain, OwnCounted(), TensorRows(inputs, targets), micro)
    assert value == pytest.approx(whole(chain, own_mean, inputs, targets)[0], rel=1e-12)
    gathered = by_micro_batches(
        chain, own_mean, TensorRows(inputs, targets), micro, gather_loss=True, schedule="gpipe"
    )
    assert gathered[0] == pytest.approx(value, rel=1e-12)
