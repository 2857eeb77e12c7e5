"""What a loss of all rows holds on the device is what the plan proves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parallax.model.describe import describe
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling import measure as module
from parallax.model.profiling.allocations import allocations
from parallax.model.profiling.measure import measure
from parallax.plan.simulation.predict import Pipeline, predict
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
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
    return TensorRows(torch.randn(ROWS, WIDTH), torch.zeros(ROWS, 8))


@pytest.mark.parametrize("directive", ["keep", "recompute"])
@pytest.mark.parametrize("microbatch", [16, 60])
def test_the_peak_of_a_step_is_below_the_predicted_one(microbatch: int, directive: str) -> None:
    chain, rows = describe(model), batch()
    plan = make_plan(
        chain,
        schedule="gpipe",
        directive=directive,
        global_batch=ROWS,
        microbatch=microbatch,
        gather_loss=True,
    )
    profile = measure(
        chain,
        pairs,
        lambda count: (rows.inputs(0, count), rows.targets(0, count)),
        (2, 4),
        device=CPU,
        precision=PrecisionConfig(),
        minimum_bytes=1,
        gathered=ROWS,
    )
    predicted = predict(profile, cluster(1), Pipeline.of(plan)).stages[0].memory
    coming = sum(predicted[term] for term in ("gradients", "activations", "boundary", "workspace"))
    engine = Engine.build(chain, plan, loss=pairs)
    engine.gradients(rows)  # loads libraries
    peak, _ = allocations(CPU, lambda: engine.gradients(rows))
    engine.close()
    assert predicted["loss"] == 0  # in no micro-batch
    assert peak <= coming
    assert peak > 0.9 * coming
    assert peak > 3 * ONE_MATRIX  # which a line through the losses of 2 and 4 rows knows nothing of
