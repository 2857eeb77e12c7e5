"""A loss in which the rows of a batch meet is that of one process under any plan that gathers its outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.errors import DataError, PlanError
from parallax.model.describe import Chain, describe, parameter_names
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.plan.schedule import SCHEDULES, Action, Kind, register_schedule
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan

ROWS, WIDTH = 7, 12
Loss = Callable[[Any, Tensor], Tensor]


class Bodies(nn.Module):
    """A layer for each of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.left(x)), torch.tanh(self.right(y))


class Heads(nn.Module):
    """What losses are made of: features, a temperature that has no rows, and other kinds of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(24, 16), nn.Linear(24, 16)
        self.unused = nn.Linear(24, 3)
        self.scale = nn.Parameter(torch.ones([]))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        left, right = self.left(x), self.right(y)
        kinds = right.argmax(1), left > 0, torch.complex(left, left), right.detach()
        return left, right, self.scale.exp(), *kinds, self.unused(y)


class Recorded(nn.Module):
    """The forward is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies, self.heads = Bodies(), Heads()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.heads(*self.bodies(x, y))
        return outputs


class Towers(Recorded):
    """The blocks are named."""

    def blocks(self) -> list[nn.Module]:
        return [self.bodies, self.heads]


def similar(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """Contrast of all pairs, as CLIP has it."""
    left, right, scale, *_ = outputs
    logits = scale * F.normalize(left, dim=1) @ F.normalize(right, dim=1).T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def labelled(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """Rows of one class are to be alike (SupCon); also whole numbers, truth values and complex numbers of all rows."""
    left, _, _, nearest, positive, waves, fixed, unused = outputs
    unused /= 2.0  # as authors do
    assert not fixed.requires_grad
    same = (targets[:, None] == targets[None]).to(left.dtype)
    kinds = nearest.float().std() + positive.float().mean(0).std()
    found = -(same * F.log_softmax(left @ fixed.T, dim=1)).sum(1).mean() * (1 + kinds)
    return found + (waves.mean(0).abs() ** 2).sum()


def decorrelated(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """Statistics over the batch, as Barlow Twins and VICReg have them."""
    left, right = (each - each.mean(0) for each in outputs[:2])
    shared = left.T @ right / len(left)
    size = outputs[0].square().mean() + outputs[1].square().mean()
    return ((shared - torch.eye(16)) ** 2).sum() + F.relu(1 - left.std(0)).mean() + size


def noisy(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """Draws random numbers."""
    left = outputs[0]
    return (left + torch.randn_like(left)).std(0).mean()


class Counted:
    """A sum over some rows' neighbours in the batch, of which the targets say how many there are."""

    __qualname__ = "Counted"

    def __call__(self, outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        near = torch.cdist(outputs[0], outputs[1])
        return near[targets > 0].sum()

    def count(self, targets: Tensor) -> Tensor:
        return (targets > 0).sum()


LOSSES: dict[str, Any] = {
    "similar": similar,
    "labelled": labelled,
    "decorrelated": decorrelated,
    "counted": Counted(),
    "noisy": noisy,
}
COMPARED = "similar", "labelled", "decorrelated", "counted"


def sample(rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, WIDTH), torch.zeros(rows, WIDTH)


@cache
def make_chain(dtype: torch.dtype, model: type[nn.Module] = Towers) -> Chain:
    return describe(model, seed=3, dtype=dtype, sample=sample)


def make_batch(dtype: torch.dtype, rows: int = ROWS) -> TensorRows:
    random = torch.Generator().manual_seed(5)
    x, y = (torch.randn(rows, WIDTH, generator=random, dtype=torch.float64) for _ in range(2))
    return TensorRows((x.to(dtype), y.to(dtype)), torch.arange(rows) % 3)


def reference(
    loss: str, dtype: torch.dtype, rows: int = ROWS
) -> tuple[float, dict[str, Tensor | None]]:
    """One process, one batch, plain torch."""
    chain, batch = make_chain(dtype), make_batch(dtype, rows)
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    found = chain.arguments(batch.inputs(0, rows))
    for block in blocks:
        found = block(*found)
    targets = batch.targets(0, rows)
    value = LOSSES[loss](chain.results(found), targets)
    if hasattr(LOSSES[loss], "count"):
        value = value / LOSSES[loss].count(targets)
    value.backward()
    names = parameter_names(chain, range(len(blocks))).items()
    return value.item(), {n: blocks[index].get_parameter(inner).grad for n, (index, inner) in names}


Found = tuple[float, float, dict[str, Tensor | None]]


def train(loss: str, dtype: torch.dtype, options: dict[str, Any]) -> Found:
    """Loss and gradients of a second round on the same engine, and the loss in evaluation."""
    options = dict(options)
    chain, batch = make_chain(dtype, options.pop("model", Towers)), make_batch(dtype)
    precision = PrecisionConfig()
    if dtype is torch.float64:
        precision = PrecisionConfig(parameters="fp64", compute="fp64")
    plan = {"schedule": "gpipe", "global_batch": ROWS, "microbatch": 2, **options}
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.build(
            chain,
            make_plan(chain, gather_loss=True, swap_limit=60000, **plan),
            loss=LOSSES[loss],
            precision=precision,
            swap=SwapConfig(minimum_bytes=1),
            scratch=Path(folder) / "swap",
        )
        try:
            engine.gradients(batch)
            found = engine.gradients(batch)
            gradients = {n: None if g is None else g.clone() for n, g in _gradients(engine).items()}
            return found, engine.evaluate(batch), gradients
        finally:
            engine.close()


def _gradients(engine: Engine) -> dict[str, Tensor | None]:
    found = engine.gradients_by_name
    return {name: found.get(name) for name in engine.parameters}


def all_of(variants: list[tuple[str, torch.dtype, dict[str, Any]]]) -> list[Found]:
    """In one world: making one takes as long as a step."""
    return [train(*variant) for variant in variants]


def compare(results: list[Found], loss: str, dtype: torch.dtype) -> None:
    tolerance = 5e-6 if dtype is torch.float32 else 1e-12  # pairs cancel: a sum in another order
    expected, gradients = reference(loss, dtype)
    seen: set[str] = set()
    for value, evaluated, found in results:
        assert abs(value - expected) <= tolerance * abs(expected)
        assert abs(evaluated - expected) <= tolerance * abs(expected)
        for name, gradient in found.items():
            seen.add(name)
            wanted = gradients[name]
            if wanted is None:
                assert gradient is None, name
                continue
            assert gradient is not None, name
            assert (gradient - wanted).norm() <= tolerance * wanted.norm(), name
    assert seen == set(gradients)


EASY: list[dict[str, Any]] = [{"directive": each} for each in ("keep", "recompute", "offload")]
ODD: list[dict[str, Any]] = [
    {"microbatch": 1},  # some replicas never have a row
    {"microbatch": 3, "directive": "recompute"},
    {"microbatch": ROWS, "schedule": "1f1b"},
    {"microbatch": ROWS, "schedule": "zb-h1"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas",
    [
        (1, 1),
        (1, 2),
        (2, 2),
        *(pytest.param(each, marks=pytest.mark.thorough) for each in [(1,), (3,), (2, 1), (1, 3)]),
    ],
    ids=str,
)
def test_a_gathered_loss_is_that_of_plain_training(pool: Pool, replicas: tuple[int, ...]) -> None:
    plans = [{"replicas": replicas, **each} for each in EASY + ODD]
    variants = [(loss, torch.float64, plan) for loss in COMPARED for plan in plans]
    variants = [
        variant for number, variant in enumerate(variants) if number % 3 == sum(replicas) % 3
    ]
    variants += [("similar", torch.float32, plans[0])]
    for (loss, dtype, _), *results in zip(variants, *pool.run(all_of, sum(replicas), variants)):
        compare(results, loss, dtype)


@pytest.mark.thorough
def test_a_recorded_model_gathers_its_outputs(pool: Pool) -> None:
    variants = [("similar", torch.float64, {"replicas": (1, 2), "model": Recorded})]
    (results,) = zip(*pool.run(all_of, 3, variants))
    compare(list(results), "similar", torch.float64)


def test_what_a_loss_draws_is_the_same_on_all_replicas(pool: Pool) -> None:
    alone = pool.run(train, 1, "noisy", torch.float64, {"replicas": (1,), "microbatch": ROWS})
    shared = pool.run(train, 2, "noisy", torch.float64, {"replicas": (2,)})
    for loss, _, gradients in shared:
        assert abs(loss - alone[0][0]) < 1e-12
        for name, gradient in alone[0][2].items():
            found = gradients[name]
            assert (gradient is None) is (found is None)
            assert gradient is None or (gradient - found).norm() <= 1e-12  # type: ignore[operator]


class Head(nn.Module):
    """``outputs`` of a layer."""

    def __init__(self, outputs: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.layer, self.prototypes = nn.Linear(WIDTH, 16), nn.Parameter(torch.ones(2, 16))
        self.outputs = outputs

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (*self.outputs(self.layer(x)), self.prototypes * 2)


def contrast(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    features, prototypes = outputs[0], outputs[-1]
    return (features @ features.T).logsumexp(1).mean() + (features @ prototypes.T).std()


def engine_of(outputs: Callable[[Tensor], tuple[Tensor, ...]], **plan: Any) -> Engine:
    chain = describe(lambda: nn.Sequential(Head(outputs)), dtype=torch.float64)
    options = {"schedule": "gpipe", "global_batch": ROWS, "microbatch": 3, **plan}
    return Engine.build(
        chain,
        make_plan(chain, gather_loss=True, **options),
        loss=contrast,
        precision=PrecisionConfig(parameters="fp64", compute="fp64"),
    )


def rows_of(count: int = ROWS) -> TensorRows:
    (x, _), targets = make_batch(torch.float64, count).inputs(0, count), torch.zeros(count)
    return TensorRows(x, targets)


def plain(features: Tensor) -> tuple[Tensor, ...]:
    return (features,)


def test_what_has_no_rows_may_be_as_long_as_some_micro_batches() -> None:
    """Parts of 2, 2 and 3 rows, and two prototypes."""
    found: list[tuple[float, dict[str, Tensor]]] = []
    for size in (3, ROWS):
        engine = engine_of(plain, microbatch=size)
        loss = engine.gradients(rows_of())
        found.append((loss, {n: g.clone() for n, g in engine.gradients_by_name.items()}))
        engine.close()
    (parts, gradients), (whole, expected) = found
    assert abs(parts - whole) <= 1e-12 * abs(whole)
    assert set(gradients) == set(expected) == {"0.layer.weight", "0.layer.bias", "0.prototypes"}
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-12 * gradient.norm()


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (lambda x: (x, x.mean()), "output 1 of the model has no rows and differs"),
        (lambda x: (x[:, : 2 + len(x)],), "output 0 of the model is float64 (4,) for a row and"),
        (lambda x: (x, x.to_sparse()), "output 1 of the model is a sparse_coo tensor"),
        (lambda x: (x,) * len(x), "the model returns 3 tensors for some micro-batches and 4 for"),
        (
            lambda x: (x, x.float() if len(x) > 2 else x),
            "output 1 of the model is float32 (16,) for",
        ),
    ],
)
def test_outputs_that_cannot_be_gathered_are_one_line(
    outputs: Callable[[Tensor], tuple[Tensor, ...]], message: str
) -> None:
    engine = engine_of(outputs)
    with pytest.raises(DataError) as caught:
        engine.gradients(rows_of())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    engine.close()


def test_a_schedule_that_goes_backward_too_soon_is_refused() -> None:
    with pytest.raises(PlanError, match="1f1b runs backward before all 3 micro-batches of 7 rows"):
        engine_of(plain, schedule="1f1b")
    engine = engine_of(plain, schedule="1f1b", microbatch=ROWS)
    assert engine.gradients(rows_of()) > 0
    with pytest.raises(PlanError, match="before all 2 micro-batches of 9 rows"):
        engine.step(rows_of(9))
    engine.close()


def forwards_then_backwards(
    pipeline_ranks: int, pipeline_rank: int, micro_batches: int
) -> list[Action]:
    """Backwards in the order of the forwards."""
    kinds = Kind.FORWARD, Kind.BACKWARD
    return [Action(kind, pipeline_rank, micro) for kind in kinds for micro in range(micro_batches)]


def test_a_schedule_of_ones_own_may_have_all_forwards_first() -> None:
    register_schedule("in-order", forwards_then_backwards)
    try:
        found = []
        for schedule in ("in-order", "gpipe"):
            engine = engine_of(plain, schedule=schedule)
            found.append((engine.gradients(rows_of()), engine.gradients_by_name["0.layer.weight"]))
            engine.close()
        assert found[0][0] == found[1][0]
        assert torch.allclose(found[0][1], found[1][1], rtol=1e-12)
    finally:
        del SCHEDULES["in-order"]
