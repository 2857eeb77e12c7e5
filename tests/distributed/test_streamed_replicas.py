"""Gradients of offloaded parameters, summed over replicas in buckets while the last backward runs."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.plan.schedule import Kind
from tests.distributed.pool import Pool
from tests.distributed.test_engine import Case, Outcome, close, make_batch
from tests.distributed.test_engine import training as train

OFFLOADED = {"parameter_offload": 1.0, "optimizer_offload": 1.0}
WIDE = 1100  # a matrix of fp32 fills more than one bucket


class Sometimes(nn.Module):
    """A second layer for some of the rows; a third one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.some = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.never = nn.Linear(WIDE, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0, 0] > 0).detach()
        found: Tensor = torch.tanh(self.always(x))
        return found + self.some(x) * rows[:, None, None] if bool(rows.any()) else found


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, WIDE), *(nn.Linear(WIDE, WIDE) for _ in range(3)), nn.Linear(WIDE, 64)
    )


def sometimes() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, WIDE), Sometimes(), nn.Linear(WIDE, 64))


def odd(rank: int) -> bool:
    return rank % 2 == 1


@dataclass
class Found:
    """``during``: the action in which each all-reduce of offloaded gradients began, in the second and third step."""

    gradients: dict[str, Tensor]
    during: list[list[Kind]]
    reduced: int


def summing(case: Case, late: bool = False) -> Found:
    """The gradients of three batches; ``late``: odd ranks begin each sum after a while."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        begun: list[Kind] = []
        all_reduce = dist.all_reduce

        def noting(tensor: Tensor, *args: Any, **options: Any) -> Any:
            if engine.mesh.streamed is not None and options.get("group") is engine.mesh.streamed:
                assert engine.current is not None
                begun.append(engine.current[0].kind)
                time.sleep(0.1 if late and odd(engine.mesh.rank) else 0)
            return all_reduce(tensor, *args, **options)

        dist.all_reduce = noting
        during, found, before = [], {}, 0
        try:
            for step in range(3):
                before, begun = engine.all_reduces, []
                engine.gradients(make_batch(8, step))
                during.append(begun)
                found |= {f"{step} {n}": g.clone() for n, g in engine.gradients_by_name.items()}
        finally:
            dist.all_reduce = all_reduce
        reduced = engine.all_reduces - before
        engine.close()
    return Found(found, during[1:], reduced)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "last"), [("1f1b", Kind.BACKWARD), ("zb-h1", Kind.BACKWARD_WEIGHT)]
)
@pytest.mark.parametrize("late", [False, True])
def test_sums_are_those_of_gradients_on_the_device(
    pool: Pool, late: bool, schedule: str, last: Kind
) -> None:
    """If other ranks are late, gradients are offloaded and fetched again. (They were once summed one by one, after the
    backward.)"""
    case = Case(wide, dtype=torch.float32, sizes=(8,))
    expected = pool.run(summing, 2, case.under((2,), schedule=schedule))
    job = case.under((2,), **OFFLOADED, schedule=schedule)
    for found, other in zip(pool.run(summing, 2, job, late), expected):
        assert found.gradients.keys() == other.gradients.keys()
        assert all(torch.equal(found.gradients[n], g) for n, g in other.gradients.items())
        assert 5 <= found.reduced <= 8  # of ten parameters, fourteen MiB in all
        for begun in found.during:
            assert begun[0] is last
            assert late or begun.count(last) >= 2


def test_larger_buckets_are_fewer(pool: Pool) -> None:
    case = Case(wide, dtype=torch.float32, sizes=(8,))
    job = case.under((2,), **OFFLOADED, bucket_bytes=64 * 2**20)
    assert [found.reduced for found in pool.run(summing, 2, job)] == [1, 1]


@pytest.mark.parametrize("compress", ["none", "bf16"])
def test_what_some_or_no_replicas_have_used(pool: Pool, compress: str) -> None:
    """A replica without a gradient adds nothing, and what none has used has none."""
    case = Case(sometimes, dtype=torch.float32, sizes=(8,))
    case = replace(case, together=replace(case.together, compress=compress))
    expected = pool.run(summing, 2, case.under((2,), microbatch=2))
    for found, other in zip(
        pool.run(summing, 2, case.under((2,), **OFFLOADED, microbatch=2)), expected
    ):
        assert found.gradients.keys() == other.gradients.keys()
        assert not any("never" in name for name in found.gradients)
        for name, gradient in other.gradients.items():
            tolerance = 1e-5 if compress == "none" else 1e-2
            error = (found.gradients[name] - gradient).norm()
            assert error <= tolerance * gradient.norm(), name


def test_training_is_that_of_weights_on_the_device(pool: Pool) -> None:
    case = Case(sometimes, dtype=torch.float32, sizes=(8, 3, 8, 1))
    expected: list[Outcome] = pool.run(train, 2, case.under((2,)))
    for found, other in zip(pool.run(train, 2, case.under((2,), **OFFLOADED)), expected):
        pairs = [*zip(found.losses, other.losses), *zip(found.norms, other.norms)]
        assert all(close(*pair, 1e-5) for pair in pairs), pairs


class BreaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Broken.armed:
            raise ArithmeticError("a backward breaks")
        return gradient


class Broken(nn.Module):
    """Breaks the backward, behind it, when armed."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = BreaksBackward.apply(x)
        return found


def breaking() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, WIDE),
        Broken(),
        *(nn.Linear(WIDE, WIDE) for _ in range(2)),
        nn.Linear(WIDE, 64),
    )


def after_a_failure(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a batch before and after a backward that failed in the middle, when sums were on their way."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        found = []
        for fails in (False, True):
            if fails:
                Broken.armed = True
                with pytest.raises(ArithmeticError):
                    engine.gradients(make_batch(8, 1))
                Broken.armed = False
            engine.gradients(make_batch(8, 0))
            found.append({n: g.clone() for n, g in engine.gradients_by_name.items()})
        engine.close()
    return found[0], found[1]


def test_a_step_that_failed_leaves_nothing_behind(pool: Pool) -> None:
    case = Case(breaking, dtype=torch.float32, sizes=(8,)).under((2,), **OFFLOADED, microbatch=8)
    for before, after in pool.run(after_a_failure, 2, case):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], gradient) for name, gradient in after.items())
