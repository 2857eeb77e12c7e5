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
from parallax.runtime.batch import Rows, TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.health.part_runs import PartRuns
from parallax.runtime.health.search import culprits
from parallax.runtime.meters.step import StepResult
from parallax.runtime.optim.optimizer import OptimizerConfig
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
    """Training in which one step's batch is bad, or is not ``given`` at all; the weights, what was said, and the loss
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
        said = f"row {ROW} of the batch (micro-batch 2) makes loss nan by itself"
        assert said in results[BAD].trouble
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
    optimizer = OptimizerConfig(name="sgd", warmup_steps=0)
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
    """Both rows are named, in their micro-batches; their inputs are as good as any."""
    trained = engine(rooted, 1)
    trouble = trained.step(rows(zero(2, 7))).trouble
    trained.close()
    assert trouble.startswith(
        "gradient norm nan: the gradient of 0.weight holds nan, seen first by"
    )
    assert trouble.endswith(
        "row 2 of the batch (micro-batch 0) makes gradients of norm nan by itself, and "
        "row 7 of the batch (micro-batch 1) makes gradients of norm nan by itself"
    )


def test_rows_are_searched_with_the_loss_as_it_was_scaled() -> None:
    """Gradients of one row overflow only with the scale: without it no row would be found."""
    precision = PrecisionConfig(loss_scale=2.0**100)
    trained = engine(lambda: nn.Sequential(nn.Linear(3, 1, bias=False)), 1, precision=precision)
    batch = rows(lambda inputs: inputs.mul_(1e-6)[5].mul_(1e12))
    batch.targets(0, 8).zero_()
    trained.step(batch)
    with pytest.raises(
        NonFiniteError, match=r"row 5 of the batch \(micro-batch 1\) makes gradients"
    ):
        trained.step(batch)
    trained.close()


def test_inputs_that_are_none_are_said_and_statistics_stay() -> None:
    """A NaN in running statistics would stay for ever."""
    trained = engine(normed, 1)
    before = {name: tensor.detach().clone() for name, tensor in trained.parameters.items()}
    trouble = trained.step(rows(lambda inputs: inputs[5:7].fill_(float("nan")))).trouble
    assert "rows 5, 6 of the batch's inputs hold nan (micro-batch 1)" in trouble
    assert "by itself" not in trouble
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
        match=r"step 5: .* after 2 skipped steps in a row \(trainer.nonfinite_limit=2\); nothing was updated: .*"
        r"row 4 of the batch \(micro-batch 1\) makes",
    ):
        trained.step(rows(zero(4)))
    assert trained.completed_steps == 5
    trained.close()


@pytest.mark.parametrize(
    ("together", "named"),
    [
        ({3}, ["row 3"]),
        ({1, 2}, ["rows 0 to 3"]),
        ({0, 3, 6}, ["rows 0 to 3", "row 6"]),
        (set(), []),
    ],
)
def test_rows_that_only_fail_together(together: set[int], named: list[str]) -> None:
    """Rows that are too large only in their sum: the smallest half that holds them."""

    def fails(micros: tuple[int, int], interval: tuple[int, int]) -> str:
        mine = [{row for row in together if row // 4 == micro} for micro in range(*micros)]
        return "loss inf" if any(each and each <= set(range(*interval)) for each in mine) else ""

    found = culprits([(0, 4), (4, 8)], fails)
    assert [str(each).partition(" of the batch")[0] for each in found] == named


class Runs:
    """Counts what is computed again; rows that are in ``bad`` together fail."""

    def __init__(self, *bad: set[int]) -> None:
        self.bad, self.counted = bad, 0

    def fails(self, micros: tuple[int, int], rows: tuple[int, int]) -> str:
        self.counted += 1
        return "loss nan" if any(each <= set(range(*rows)) for each in self.bad) else ""


@pytest.mark.parametrize("bad", [0, 77, 130, 255])
def test_micro_batches_are_halved_first(bad: int) -> None:
    """One row of 64 micro-batches of four: two runs for each of eight halvings, and not one for each micro-batch."""
    runs = Runs({bad})
    (found,) = culprits([(4 * m, 4 * m + 4) for m in range(64)], runs.fails)
    assert str(found) == f"row {bad} of the batch (micro-batch {bad // 4}) makes loss nan by itself"
    assert runs.counted == 2 * 8


def test_micro_batches_that_only_fail_together() -> None:
    runs = Runs({5, 6})
    (found,) = culprits([(2 * m, 2 * m + 2) for m in range(8)], runs.fails)
    assert str(found) == "rows 4 to 7 of the batch (micro-batches 2 to 3) make loss nan together"


def test_a_failure_that_does_not_come_again_takes_two_runs() -> None:
    runs = Runs()
    assert culprits([(m, m + 1) for m in range(64)], runs.fails) == []
    assert runs.counted == 2


def test_micro_batches_that_would_be_cut_anew_are_computed_alone() -> None:
    """Of seven rows in four micro-batches the last two hold four, which would be cut elsewhere."""
    parts = [(0, 1), (1, 3), (3, 5), (5, 7)]
    seen: list[tuple[int, int]] = []

    def fails(micros: tuple[int, int], rows: tuple[int, int]) -> str:
        seen.append(micros)
        return "loss nan" if rows[0] <= 6 < rows[1] else ""

    (found,) = culprits(parts, fails, fits=lambda micros: micros != (2, 4))
    assert (found.start, found.stop, found.micros) == (6, 7, (3, 4))
    assert seen == [(0, 2), (2, 3), (3, 4), (3, 4), (3, 4)]


def test_one_bad_row_of_many_micro_batches_takes_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the engine itself: its action lists of fewer micro-batches, each as large as in the step."""
    compute, runs = PartRuns.run, list[int]()

    def counted(parts: PartRuns, part: Rows, first_row: int) -> tuple[float, float]:
        runs.append(len(part))
        return compute(parts, part, first_row)

    monkeypatch.setattr(PartRuns, "run", counted)
    trained = engine(rooted, 1, rows=64, microbatch=2)
    trouble = trained.step(rows(zero(37), count=64)).trouble
    trained.close()
    assert "row 37 of the batch (micro-batch 18) makes gradients of norm nan by itself" in trouble
    assert sorted(runs, reverse=True) == [32, 32, 16, 16, 8, 8, 4, 4, 2, 2, 2, 2]
