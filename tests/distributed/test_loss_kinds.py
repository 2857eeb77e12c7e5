"""A loss of torch, chosen by name, has under every plan the value and gradients of one process with the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.model.describe import Chain, describe, parameter_names
from parallax.model.loss_kinds import LOSSES, LossConfig
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from tests.distributed.pool import Pool
from tests.plans import make_plan

ROWS, LENGTH, CLASSES = 7, 3, 5
WEIGHT = [0.5, 1.0, 2.5, 0.25, 3.0]
PRECISION = {
    torch.float64: PrecisionConfig(parameters="fp64", compute="fp64"),
    torch.float32: PrecisionConfig(),
}
# Torch's divisor of a mean may be one of micro-batch 0 alone: half of the rows count nothing.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "classes": ("cross_entropy", {}, "masked"),
    "weights": ("cross_entropy", {"weight": WEIGHT, "label_smoothing": 0.1}, "masked"),
    "ignored": ("cross_entropy", {"ignore_index": 2}, "classes"),
    "soft": ("cross_entropy", {"weight": WEIGHT, "label_smoothing": 0.1}, "soft"),
    "summed": ("cross_entropy", {"reduction": "sum"}, "masked"),
    "nll": ("nll_loss", {"weight": WEIGHT, "ignore_index": -1}, "classes"),
    "margin": ("multi_margin_loss", {"weight": WEIGHT, "p": 2}, "classes"),
    "mse": ("mse_loss", {}, "numbers"),
    "l1": ("l1_loss", {}, "numbers"),
    "smooth": ("smooth_l1_loss", {"beta": 0.5}, "numbers"),
    "huber": ("huber_loss", {"delta": 0.3}, "numbers"),
    "bce": ("binary_cross_entropy", {}, "labels"),
    "logits": ("binary_cross_entropy_with_logits", {"pos_weight": WEIGHT}, "labels"),
    "weighted logits": ("binary_cross_entropy_with_logits", {"weight": WEIGHT}, "labels"),
    "kl": ("kl_div", {}, "soft"),
    "kl of rows": ("kl_div", {"reduction": "batchmean", "log_target": True}, "numbers"),
    "poisson": ("poisson_nll_loss", {"full": True}, "labels"),
    "soft margin": ("soft_margin_loss", {}, "signs"),
    "hinge": ("hinge_embedding_loss", {"margin": 0.5}, "signs"),
    "labels": ("multilabel_soft_margin_loss", {"weight": WEIGHT}, "labels"),
    "label margin": ("multilabel_margin_loss", {}, "indices"),
}
PLANS: list[tuple[tuple[int, ...], str, int, bool]] = [
    ((1,), "1f1b", 1, False),
    ((1, 2), "1f1b", 3, False),
    ((2, 1), "zb-h1", 2, False),
    ((1, 3), "gpipe", 4, True),
]


class Probabilities(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid()


def targets_of(kind: str, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(5)
    classes = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=random)
    numbers = torch.randn(ROWS, LENGTH, CLASSES, generator=random, dtype=torch.float64).to(dtype)
    if kind == "masked":
        mask = torch.rand(ROWS, LENGTH, generator=random) < 0.4
        mask[0], mask[1], mask[-2:] = True, False, True
        return classes.masked_fill(mask, -100)
    if kind == "indices":
        order = torch.rand(ROWS, LENGTH, CLASSES, generator=random).argsort(-1)
        return order.masked_fill(torch.arange(CLASSES) > 2, -1)
    return {
        "classes": classes,
        "soft": numbers.softmax(-1),
        "numbers": numbers,
        "labels": (numbers > 0).to(dtype),
        "signs": (numbers > 0).to(dtype) * 2 - 1,
    }[kind]


@functools.cache
def chain_of(probabilities: bool, dtype: torch.dtype) -> Chain:
    def build() -> nn.Module:
        last = [Probabilities()] if probabilities else []
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES), *last)

    return describe(build, seed=3, dtype=dtype)


def batch_of(kind: str, dtype: torch.dtype) -> TensorRows:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, LENGTH, 4, generator=random, dtype=torch.float64).to(dtype)
    return TensorRows(inputs, targets_of(kind, dtype))


def of_torch(name: str, kwargs: dict[str, Any], outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss as one would call torch's function, with the classes in dimension 1 where it wants them there."""
    given = {k: outputs.new_tensor(v) if isinstance(v, list) else v for k, v in kwargs.items()}
    if name in ("cross_entropy", "nll_loss"):
        soft = targets.is_floating_point()
        return getattr(F, name)(
            outputs.movedim(-1, 1), targets.movedim(-1, 1) if soft else targets, **given
        )
    if name.startswith("multi"):
        flat = targets.flatten() if name == "multi_margin_loss" else targets.flatten(0, 1)
        return getattr(F, name)(outputs.flatten(0, 1), flat, **given)
    return getattr(F, name)(outputs, targets, **given)


def run(
    keys: list[str], plan: tuple[tuple[int, ...], str, int, bool], dtype: torch.dtype
) -> list[tuple[float, float, float, dict[str, Tensor]]]:
    replicas, schedule, micro, gathers = plan
    found = []
    for key in keys:
        loss, kwargs, kind = CASES[key]
        chain = chain_of(loss == "binary_cross_entropy", dtype)
        made = make_plan(
            chain,
            replicas=replicas,
            schedule=schedule,
            global_batch=ROWS,
            microbatch=micro,
            gather_loss=gathers,
        )
        chosen = LossConfig(name=loss, kwargs=kwargs).build()
        assert chosen is not None
        engine = Engine.build(chain, made, loss=chosen, precision=PRECISION[dtype])
        batch = batch_of(kind, dtype)
        value = engine.gradients(batch)
        gradients = {n: each.clone() for n, each in engine.gradients_by_name.items()}
        found.append((value, engine.evaluate(batch), engine.step(batch).loss, gradients))
        engine.close()
    return found


def whole(key: str, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    loss, kwargs, kind = CASES[key]
    batch, chain = batch_of(kind, dtype), chain_of(loss == "binary_cross_entropy", dtype)
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    values: Any = chain.arguments(batch.inputs(0, ROWS))
    for block in blocks:
        values = block(*values)
        values = values if isinstance(values, tuple) else (values,)
    value = of_torch(loss, kwargs, values[0], batch.targets(0, ROWS))
    value.backward()
    names = parameter_names(chain, range(len(blocks)))
    held = {n: dict(blocks[i].named_parameters())[inner].grad for n, (i, inner) in names.items()}
    return value.item(), {n: grad for n, grad in held.items() if grad is not None}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("third", range(3))
def test_losses_of_torch_are_those_of_the_whole_batch(
    pool: Pool, plan: Any, dtype: torch.dtype, third: int
) -> None:
    close, keys = 1e-10 if dtype is torch.float64 else 1e-6, list(CASES)[third::3]
    by_rank = pool.run(run, sum(plan[0]), keys, plan, dtype)
    for index, key in enumerate(keys):
        expected, gradients = whole(key, dtype)
        names = set[str]()
        for value, evaluated, stepped, found in (each[index] for each in by_rank):
            assert (value, evaluated, stepped) == pytest.approx((expected,) * 3, rel=close), key
            for name, gradient in found.items():
                names.add(name)
                scale = float(gradients[name].abs().max())
                assert float((gradient - gradients[name]).abs().max()) <= 4 * close * scale, key
        assert names == gradients.keys()


def test_every_loss_has_a_case() -> None:
    assert {name for name, *_ in CASES.values()} | {"model", "custom"} == {*LOSSES}
