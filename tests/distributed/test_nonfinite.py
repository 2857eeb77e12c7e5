"""A step whose loss or gradients are not finite: skipped as if it had not been, under any plan, and its rows named."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import NonFiniteError
from parallax.model.describe import describe
from parallax.model.precision import PrecisionConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.meters.step import StepResult
from parallax.runtime.optim.kinds.sgd import SGDConfig
from tests.distributed.pool import Pool
from tests.distributed.test_engine import (
    POISON,
    Case,
    Weights,
    gpt,
    make_batch,
    plain_training,
    poisoned,
)
from tests.plans import make_plan

BAD = 1  # the step
ROW = 5


def batches() -> list[TensorRows]:
    found = [make_batch(8, step) for step in range(4)]
    found[BAD].targets(0, 8)[ROW, 3] = POISON
    return found


def skipping(case: Case, given: bool) -> tuple[Weights, list[StepResult], float]:
    """Training in which one step's batch is bad, or is not ``given`` at all; the weights, the messages, and the loss
    of an evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        results = []
        for step, batch in enumerate(batches()):
            if step != BAD or given:
                results.append(engine.step(batch))
            else:
                engine._step += 1
        weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
        held_out = engine.evaluate(make_batch(8, 9))
        engine.close()
    for result in results:
        result.spans.clear()
    return weights, results, held_out


PLANS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((1, 2), {}),
    ((2, 1), {"optimizer_offload": 1.0}),
    ((1, 1), {"schedule": "zb-h1", "optimizer_offload": 0.5}),
    ((1,), {"parameter_offload": 1.0, "optimizer_offload": 1.0}),
    ((2,), {"shard": True, "directive": "offload"}),
    ((1, 1), {"directive": "recompute", "schedule": "gpipe"}),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("replicas", "options"), PLANS, ids=str)
def test_a_skipped_step_is_as_if_it_had_not_been(
    pool: Pool, replicas: tuple[int, ...], options: dict[str, Any]
) -> None:
    case = replace(Case(gpt(tied=False), loss=poisoned), skips=2).under(replicas, **options)
    found = pool.run(skipping, case.world, case, True)
    without = pool.run(skipping, case.world, case, False)
    expected = plain_training(case, batches(), skips=True).weights
    for (weights, results, held_out), (others, _, other) in zip(found, without):
        assert held_out == other
        assert [result.skipped_steps for result in results] == [0, 1, 1, 1]
        assert [bool(result.trouble) for result in results] == [False, True, False, False]
        rows = f"row {ROW}" if replicas[-1] == 2 else "rows 4 to 5"
        output = f"the loss becomes nan on the last stage, from {rows} of the batch (micro-batch 2)"
        assert output in results[BAD].trouble
        for name, weight in weights.items():
            assert torch.equal(weight, others[name])
            assert torch.allclose(weight, expected[name], rtol=1e-8, atol=1e-12)


# ---- one rank


def rooted() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=False), Sqrt(), nn.Linear(4, 1))


class Sqrt(nn.Module):
    """Infinitely steep at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))


def engine(
    build: Callable[[], nn.Module],
    skips: int,
    rows: int = 8,
    microbatch: int = 4,
    precision: PrecisionConfig | None = None,
) -> Engine:
    chain = describe(build)
    plan = make_plan(chain, global_batch=rows, microbatch=microbatch)
    optimizer = SGDConfig()
    loss = nn.functional.mse_loss
    return Engine.build(
        chain,
        plan,
        loss=loss,
        optimizer=optimizer,
        precision=precision or PrecisionConfig(),
        nonfinite_skips=skips,
    )


def rows(bad: Callable[[Tensor], object] = lambda inputs: None, count: int = 8) -> TensorRows:
    torch.manual_seed(1)
    inputs = torch.randn(count, 3)
    bad(inputs)
    return TensorRows(inputs, torch.randn(count, 1))


def zero(*which: int) -> Callable[[Tensor], object]:
    return lambda inputs: [inputs[row].zero_() for row in which]


def test_gradients_that_are_none_where_the_loss_is_one() -> None:
    """The parameter is named; the inputs are as good as any."""
    trained = engine(rooted, 1)
    trouble = trained.step(rows(zero(2, 7))).trouble
    trained.close()
    assert trouble.startswith(
        "gradient norm nan: the gradient of 0.weight holds nan, seen first by"
    )


def test_nan_inputs_are_named_and_statistics_stay() -> None:
    """A NaN in running statistics would stay for ever."""
    trained = engine(normed, 1)
    before = {name: tensor.detach().clone() for name, tensor in trained.parameters.items()}
    trouble = trained.step(rows(lambda inputs: inputs[5:7].fill_(float("nan")))).trouble
    assert "rows 5, 6 of the batch's inputs hold nan (micro-batch 1)" in trouble
    after = trained.parameters
    trained.close()
    assert any("running_mean" in name for name in after)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_too_many_in_a_row_end_the_run() -> None:
    trained = engine(rooted, 2)
    for each in (zero(0), zero(1), lambda inputs: None, zero(2), zero(3)):
        trained.step(rows(each))
    assert trained.completed_steps == 5
    with pytest.raises(
        NonFiniteError,
        match=r"step 5: .* after 2 skipped steps in a row; nothing was updated: "
        r"the gradient of 0\.weight holds nan",
    ):
        trained.step(rows(zero(4)))
    assert trained.completed_steps == 5
    trained.close()
