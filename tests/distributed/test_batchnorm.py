"""BatchNorm under plans: whose rows, counted once, the same on all replicas."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.model.describe import describe
from parallax.plan.rows import micro_batch_rows, replica_rows
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.replicas.config import ReplicasConfig
from tests.distributed.pool import Pool
from tests.distributed.test_engine import Case, Outcome, compare, plain_blocks, same
from tests.plans import make_plan


class Residual(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm, self.last_norm = norm(width, **options), norm(width, affine=False, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(F.relu(self.norm(self.first(x))))
        normed: Tensor = self.last_norm(x)
        return normed


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(self.norm(x.mean((2, 3)).repeat_interleave(2, 0)))
        return scores.unflatten(0, (-1, 2)).mean(1)


def resnet() -> nn.Module:
    stem = nn.Conv2d(3, 6, 3, padding=1)
    return nn.Sequential(
        stem, Residual(6, nn.BatchNorm2d), Residual(6, nn.BatchNorm2d, momentum=0.3), Head(6)
    )


def resnet_of_sync_norms() -> nn.Module:
    stem = nn.Conv2d(3, 6, 3, padding=1)
    return nn.Sequential(
        stem, Residual(6, nn.SyncBatchNorm), Residual(6, nn.SyncBatchNorm, momentum=0.3), Head(6)
    )


class Pictures(Case):
    """Labelled pictures in the place of text."""

    def batches(self) -> list[TensorRows]:
        found = []
        for step, rows in enumerate(self.sizes):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(rows, 3, 4, 4, generator=generator).to(self.dtype) + step
            found.append(TensorRows(x, torch.randint(0, 5, (rows,), generator=generator)))
        return found


def pictures(mode: str, sizes: Sequence[int] = (8, 5, 8), **options: Any) -> Pictures:
    together = ReplicasConfig(batchnorm=mode)
    return Pictures(resnet, loss=F.cross_entropy, sizes=sizes, together=together).under(
        (1,), **options
    )  # type: ignore[return-value]


def losses_and_states(case: Case) -> Outcome:
    """Training, with buffers; and an evaluation at the end, as a last loss."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        results = [engine.step(batch) for batch in case.batches()]
        losses = [result.loss for result in results]
        losses.append(engine.evaluate(case.batches()[0]))
        weights = {
            name: tensor.detach().clone().double() for name, tensor in engine.parameters.items()
        }
        engine.close()
    return Outcome(losses, [result.gradient_norm for result in results], weights)


PLANS: list[Any] = [
    pytest.param((2,), {}, marks=pytest.mark.slow),
    pytest.param((3,), {"directive": "recompute"}, marks=pytest.mark.thorough),
    pytest.param((2,), {"directive": "offload"}, marks=pytest.mark.thorough),
    ((1, 2), {"schedule": "gpipe"}),
    ((2, 1), {"directive": "recompute", "schedule": "zb-h1"}),
    pytest.param((2, 3), {"directive": "offload"}, marks=pytest.mark.thorough),
    ((2, 2), {"directive": "recompute", "interleave": 2, "schedule": "interleaved"}),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("replicas", "options"), PLANS, ids=str)
def test_sync_equals_one_replica_with_the_whole_micro_batch(
    pool: Pool, replicas: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Also where a micro-batch has fewer rows than replicas."""
    case = pictures("sync", sizes=(8, 5, 3, 2), microbatch=3)
    (expected,) = pool.run(losses_and_states, 1, case)
    case = replace(
        case, options={"microbatch": 3, "directive": "keep", **options, "replicas": replicas}
    )
    compare(pool.run(losses_and_states, case.world, case), expected, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas", [(1,), pytest.param((2,), marks=pytest.mark.thorough), (1, 3)], ids=str
)
def test_whatever_becomes_of_activations(pool: Pool, replicas: tuple[int, ...]) -> None:
    """A recomputed forward counts nothing."""
    for mode in ("replica", "sync"):
        found = {}
        for directive in ("keep", "offload", "recompute"):
            case = replace(
                pictures(mode),
                options={"replicas": replicas, "directive": directive, "microbatch": 6},
            )
            found[directive] = pool.run(losses_and_states, case.world, case)
        same(found["offload"], found["keep"])
        same(found["recompute"], found["keep"])
        tracked = [
            w
            for o in found["keep"]
            for n, w in o.weights.items()
            if n.endswith("num_batches_tracked")
        ]
        assert all(count == 5 for count in tracked)  # 8 rows, 5, 8 in micro-batches of at most 6


def of_own_rows(
    case: Case, replicas: int, microbatch: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By hand: gradients and statistics of one step in which every replica normalises its own rows."""
    (batch,) = case.batches()
    total = len(batch)
    gradients: dict[str, Tensor] = {}
    statistics: dict[str, Tensor] = {}
    seen = 0
    blocks, _ = plain_blocks(case)
    for k in range(replicas):
        model = nn.Sequential(*copy.deepcopy(blocks))
        count, micros = 0, -(-total // microbatch)
        for m in range(micros):
            low, high = micro_batch_rows(total, micros, m)
            a, b = replica_rows(high - low, replicas, k)
            if a < b:
                count += 1
                (x,) = batch.inputs(low + a, low + b)
                loss: Tensor = case.loss(model(x), batch.targets(low + a, low + b)) * (
                    (b - a) / total
                )
                loss.backward()
        seen += count
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
        for name, buffer in model.named_buffers():
            value = buffer.double()
            if name.endswith("tracked"):
                statistics[name] = torch.maximum(statistics.get(name, value), value)
            else:
                statistics[name] = statistics.get(name, 0) + value * count
    return gradients, {n: v if n.endswith("tracked") else v / seen for n, v in statistics.items()}


def one_step(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        engine.gradients(case.batches()[0])
        gradients = {name: g.clone() for name, g in engine.gradients_by_name.items()}
        statistics = {
            n: t.detach().clone().double()
            for n, t in engine.parameters.items()
            if n not in gradients
        }
        engine.close()
    return gradients, statistics


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("rows", "replicas"), [(8, (2,)), (5, (3,)), (4, (3,)), (8, (2, 2))], ids=str
)
def test_every_replica_normalises_its_own_rows(
    pool: Pool, rows: int, replicas: tuple[int, ...]
) -> None:
    case = replace(
        pictures("replica", sizes=(rows,)),
        options={"replicas": replicas, "microbatch": 4 if rows > 5 else 3},
    )
    expected = of_own_rows(case, replicas[0], case.options["microbatch"])
    for found in pool.run(one_step, case.world, case):
        for mine, wanted in zip(found, expected):
            assert mine
            for name, value in mine.items():
                assert torch.allclose(value, wanted[name], rtol=1e-9, atol=1e-12), name


def test_statistics_agree_on_all_ranks(pool: Pool) -> None:
    case = replace(pictures("replica"), options={"replicas": (3,), "microbatch": 4})
    outcomes = pool.run(losses_and_states, 3, case)
    assert len({tuple(outcome.losses) for outcome in outcomes}) == 1
    same(outcomes[1:], [outcomes[0]] * 2)


@pytest.mark.parametrize("replicas", [(2,), (1, 3)], ids=str)
def test_frozen_trains_weights_and_leaves_statistics(pool: Pool, replicas: tuple[int, ...]) -> None:
    case = pictures("frozen", sizes=(8, 1, 5))
    (expected,) = pool.run(losses_and_states, 1, case)
    found = pool.run(
        losses_and_states,
        sum(replicas),
        replace(case, options={**case.options, "replicas": replicas}),
    )
    compare(found, expected, 1e-9)
    for name, tensor in expected.weights.items():
        if "running_var" in name:
            assert torch.equal(tensor, torch.ones_like(tensor))
        if "tracked" in name:
            assert tensor == 0
    assert not torch.equal(expected.weights["1.norm.weight"], torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("mode", ["replica", "sync"])
def test_modules_that_synchronise_by_themselves_obey(pool: Pool, mode: str) -> None:
    """SyncBatchNorm would meet ranks of all stages, and refuses a CPU."""
    case = replace(pictures(mode, sizes=(8, 5)), options={"replicas": (1, 2), "microbatch": 4})
    of_own = replace(case, factory=resnet_of_sync_norms)
    for outcome, expected in zip(
        pool.run(losses_and_states, 3, of_own), pool.run(losses_and_states, 3, case)
    ):
        compare([outcome], replace(expected, weights=outcome.weights), 1e-12)


def test_autocast(pool: Pool) -> None:
    case = replace(pictures("sync"), dtype=torch.float32, compute="bf16")
    (expected,) = pool.run(losses_and_states, 1, case)
    for outcome in pool.run(
        losses_and_states, 2, replace(case, options={**case.options, "replicas": (2,)})
    ):
        assert outcome.losses[0] == pytest.approx(expected.losses[0], rel=1e-2)
        assert outcome.losses[-1] == pytest.approx(expected.losses[-1], rel=5e-2)


class Chosen(nn.Module):
    """Statistics of all rows before one of two experts for each; a weight of theirs fills a bucket of the reducer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(1024, 1024),
            nn.BatchNorm1d(1024),
            nn.Linear(1024, 4),
        )
        self.experts = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden, chosen = self.norm(self.first(x)), x[:, 0] > 0
        result = hidden.clone()
        for number, expert in enumerate(self.experts):
            mine = chosen == bool(number)
            if mine.any():
                result[mine] = expert(hidden[mine])
        scores: Tensor = self.last(hidden + result)
        return scores


def chosen() -> nn.Module:
    return nn.Sequential(Chosen())


def gradients_of_chosen(replicas: int) -> dict[str, Tensor]:
    chain = describe(chosen, seed=1)
    plan = make_plan(chain, replicas=(replicas,), global_batch=8, microbatch=4)
    x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(0))
    # Each replica uses one expert, and each another.
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0] * 2)
    engine = Engine.build(chain, plan, loss=F.mse_loss, replicas=ReplicasConfig(batchnorm="sync"))
    engine.gradients(TensorRows(x, x[:, :4]))
    found = {name: gradient.clone() for name, gradient in engine.gradients_by_name.items()}
    engine.close()
    return found


def test_statistics_and_buckets_do_not_meet(pool: Pool) -> None:
    """They were reduced in one group: a replica that had used an expert sent its bucket while the other still sent the
    gradient of its statistics, and gloo ended the processes."""
    (expected,) = pool.run(gradients_of_chosen, 1, 1)
    for found in pool.run(gradients_of_chosen, 2, 2):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
