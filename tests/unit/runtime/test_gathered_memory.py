"""What a loss of all rows holds on the device is what the plan proves."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.model.describe import describe
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling import measure as module
from parallax.model.profiling.allocations import measure_allocations
from parallax.model.profiling.measure import measure
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.simulation.predict import predict
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from tests.distributed.pool import Pool
from tests.plans import make_plan
from tests.unit.plan_fakes import cluster

CPU, ROWS, WIDTH = torch.device("cpu"), 256, 32
ONE_MATRIX = 4 * ROWS * ROWS


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "SECONDS_PER_BLOCK", 0.0)


def pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    """Matrices of all pairs are saved, and more are made on the way."""
    return torch.tanh(outputs @ outputs.T).square().mean() + (targets.float() ** 2).mean()


def model() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])


def batch() -> TensorRows:
    """The same on every rank."""
    made = torch.Generator().manual_seed(0)
    return TensorRows(torch.randn(ROWS, WIDTH, generator=made), torch.zeros(ROWS, 8))


@functools.cache
def measured() -> ModelProfile:
    rows = batch()
    return measure(
        describe(model),
        pairs,
        lambda count: (rows.inputs(0, count), rows.targets(0, count)),
        (2, 4),
        device=CPU,
        precision=PrecisionConfig(),
        minimum_bytes=1,
        gathered=ROWS,
    )


def planned(**options: Any) -> Plan:
    common = {"schedule": "gpipe", "global_batch": ROWS, "gather_loss": True}
    return make_plan(describe(model), **common, **options)


def coming(memory: dict[str, int]) -> int:
    """What is not there before a step."""
    return sum(memory[term] for term in ("gradients", "activations", "boundary", "workspace"))


def peak_of(plan: Plan) -> int:
    """What a second step allocates on this rank at most."""
    engine, rows = Engine.build(describe(model), plan, loss=pairs), batch()
    engine.gradients(rows)  # loads libraries
    peak = measure_allocations(CPU, lambda: engine.gradients(rows)).most
    engine.close()
    return peak


@pytest.mark.sampled
@pytest.mark.parametrize("directive", ["keep", "recompute"])
@pytest.mark.parametrize("microbatch", [16, 60])
def test_the_peak_of_a_step_is_below_the_predicted_one(microbatch: int, directive: str) -> None:
    plan = planned(microbatch=microbatch, directive=directive)
    memory = predict(measured(), cluster(1), plan).stages[0].memory
    peak = peak_of(plan)
    assert memory["loss"] == 0  # in no micro-batch
    assert peak <= coming(memory)
    assert peak > 0.9 * coming(memory)
    # Which a line through the losses of 2 and 4 rows knows nothing of.
    assert peak > 3 * ONE_MATRIX


@pytest.mark.sampled
@pytest.mark.parametrize("replicas", [(2,), (1, 2), (2, 1)], ids=str)
def test_each_replica_has_memory_for_the_loss(pool: Pool, replicas: tuple[int, ...]) -> None:
    plan = planned(microbatch=30, replicas=replicas)
    found = predict(measured(), cluster(sum(replicas)), plan)
    stages = [stage for stage, count in enumerate(replicas) for _ in range(count)]
    for stage, peak in zip(stages, pool.run(peak_of, sum(replicas), plan)):
        assert peak <= coming(found.stages[stage].memory)
        assert (peak > 3 * ONE_MATRIX) is (stage == len(replicas) - 1)
