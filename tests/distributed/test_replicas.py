"""What replicas do together: gradients that travel in fewer bytes."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import PlanError
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.runtime.replicas.reducer import ReplicaSync
from parallax.runtime.replicas.replicate import StageGradientSync
from tests.distributed.pool import Pool
from tests.distributed.test_engine import Case, Outcome, gpt, make_batch, same, training
from tests.plans import make_plan

POWER_SGD = ReplicasConfig(compress="powersgd", powersgd_rank=2)


def gradients(case: Case) -> tuple[dict[str, Tensor], int]:
    """The gradients of the first batch and of the second, and all-reduces for the second."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        found = {}
        for step, batch in enumerate(case.batches()):
            before = engine.all_reduces
            engine.gradients(batch)
            found |= {f"{step} {name}": g.clone() for name, g in engine.gradients_by_name.items()}
        counted = engine.all_reduces - before
        engine.close()
    return found, counted


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("replicas", "compress", "schedule"),
    [
        *(((2,), "bf16", "1f1b"), ((3,), "fp16", "zb-h1")),
        *(((1, 2), "bf16", "zb-h1"), ((1, 2), "fp16", "1f1b")),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in (
                *(((2,), "bf16", "zb-h1"), ((2,), "fp16", "1f1b"), ((2,), "fp16", "zb-h1")),
                *(((3,), "fp16", "1f1b"), ((3,), "bf16", "1f1b"), ((3,), "bf16", "zb-h1")),
                *(((1, 2), "bf16", "1f1b"), ((1, 2), "fp16", "zb-h1")),
            )
        ),
    ],
    ids=str,
)
def test_short_gradients_are_near_the_exact_ones(
    pool: Pool, replicas: tuple[int, ...], compress: str, schedule: str
) -> None:
    """Also of a batch with fewer rows than replicas."""
    case = Case(gpt(), dtype=torch.float32, sizes=(1, 8)).under(replicas, schedule=schedule)
    exact = pool.run(gradients, case.world, case)
    short = pool.run(
        gradients, case.world, replace(case, together=ReplicasConfig(compress=compress))
    )
    for (found, count), (expected, expected_count) in zip(short, exact):
        for name, gradient in expected.items():
            error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
            assert error <= (1e-2 if compress == "bf16" else 2e-3), (name, error)
        assert count == expected_count
    replicated = range(case.world - replicas[-1], case.world)
    assert any(
        not torch.equal(short[replicated[0]][0][n], exact[replicated[0]][0][n])
        for n in exact[replicated[0]][0]
    )
    first, *others = (short[rank][0] for rank in replicated)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def copied_buckets(case: Case) -> int:
    """All-reduces of gradients that were copied for it."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        for batch in case.batches():
            engine.gradients(batch)
        sync = engine._sync
        assert isinstance(sync, StageGradientSync)
        parts = list(sync._parts.values())
        engine.close()
    return sum(part._unannounced.all_reduces for part in parts if isinstance(part, ReplicaSync))


def test_a_replica_without_rows_sums_gradients_where_they_lie(pool: Pool) -> None:
    """They were copied, two buckets at a time, on all replicas: 90.2 MiB of 84.5 that were predicted."""
    case = Case(gpt(), dtype=torch.float32, sizes=(1, 8, 1)).under((2,))
    assert pool.run(copied_buckets, case.world, case) == [0, 0]


def test_short_gradients_of_offloaded_parameters(pool: Pool) -> None:
    options = {"replicas": (2,), "parameter_offload": 1.0, "optimizer_offload": 1.0, "tier": "disk"}
    case = Case(gpt(tied=False), dtype=torch.float32, sizes=(8,), options=options)
    exact = pool.run(gradients, 2, case)
    short = pool.run(gradients, 2, replace(case, together=ReplicasConfig(compress="bf16")))
    for (found, _), (expected, _) in zip(short, exact):
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= 1e-2 * gradient.norm(), name


def wide() -> nn.Module:
    """Matrices that are worth it, in more than one bucket."""
    return nn.Sequential(
        nn.Embedding(64, 512),
        *(nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512)) for _ in range(2)),
        nn.Linear(512, 64),
    )


def repeated(case: Case) -> tuple[Tensor, list[Tensor], list[float], Outcome]:
    """The exact gradient of one batch, what PowerSGD makes of it step by step, and losses of training on it."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        found: list[Tensor] = []
        for _ in range(12):
            engine.gradients(make_batch(8, 0))
            found.append(engine.gradients_by_name["1.0.weight"].clone())
        engine.close()
        engine = case.engine(folder)
        losses = [engine.step(make_batch(8, 0)).loss for _ in range(10)]
        weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
        engine.close()
    return found[0], found[2:], losses, Outcome([], [], weights)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch's PowerSGD waits for the GPU also on a CPU"
)
def test_power_sgd_gives_back_what_it_lost(pool: Pool, world: int) -> None:
    """Of the same gradient again and again, error feedback lets the average come closer and closer."""
    case = Case(
        wide,
        dtype=torch.float32,
        together=POWER_SGD,
        optimizer=AdamWConfig(lr=3e-3),
    )
    results = pool.run(repeated, world, case.under((world,), microbatch=4))
    for exact, found, losses, _ in results:
        errors = [
            float((torch.stack(found[:n]).mean(0) - exact).norm() / exact.norm())
            for n in (1, len(found))
        ]
        assert errors[0] > 0.05  # two of 512 columns are not all
        assert errors[1] < 0.8 * errors[0]  # without it, the same is lost each time
        assert losses[-1] < 0.5 * losses[0]
    same([outcome for *_, outcome in results[1:]], [results[0][3]] * (world - 1))


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch's PowerSGD waits for the GPU also on a CPU"
)
def test_power_sgd_trains_with_batches_of_any_size(pool: Pool) -> None:
    case = Case(gpt(), dtype=torch.float32, together=POWER_SGD).under((1, 2))
    outcomes = pool.run(training, 3, case)
    assert outcomes[1].losses == outcomes[2].losses
    assert all(torch.equal(outcomes[1].weights[name], w) for name, w in outcomes[2].weights.items())


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"replicas": (2, 1), "schedule": "zb-h1"}, "plan.schedule=1f1b"),
        ({"replicas": (2,), "parameter_offload": 1.0}, "plan.parameters=device"),
        ({"replicas": (1, 3)}, "trainer.microbatch=3"),
    ],
)
def test_power_sgd_needs_whole_gradients(options: dict[str, object], remedy: str) -> None:
    chain = Case(gpt()).chain()
    with pytest.raises(PlanError, match=f"replicas.compress=bf16, or plan with {remedy}"):
        POWER_SGD.check(make_plan(chain, **options))  # type: ignore[arg-type]
    ReplicasConfig().check(make_plan(chain, **options))  # type: ignore[arg-type]
    POWER_SGD.check(make_plan(chain, **{**options, "replicas": (1, 1)}))  # type: ignore[arg-type]
