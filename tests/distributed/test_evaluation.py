"""Evaluations by forwards alone give the figures that training gave, under any plan, and hold nothing of training."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import CheckpointError, PlanError
from parallax.model.factory.gpt import GPT
from parallax.plan.plan import Plan
from parallax.plan.task import PlanTask
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.evaluation import EvaluationEngine
from parallax.runtime.metrics import MetricsConfig
from parallax.runtime.optim.emas.on import EmaOn
from parallax.swap.config import SwapConfig
from parallax.train.evaluation import Evaluated, HeldOut
from tests.distributed.pool import Pool
from tests.distributed.test_engine import Case, gpt, gpt_with_dropout, make_batch
from tests.distributed.test_engine_evaluation import numbers_held
from tests.distributed.test_forward import SMALL, with_statistics
from tests.plans import make_plan

ROWS, BATCH = 19, 8  # the last batch has three rows
METRICS = ["accuracy", "f1", "perplexity"]


class Rows:
    """Held-out rows, the last batch of which is not complete."""

    validation_rows = ROWS

    def validation(self, index: int, rows: int) -> TensorRows:
        whole = make_batch(ROWS, 9)
        inputs, targets = whole.inputs(0, ROWS), whole.targets(0, ROWS)
        part = slice(index * rows, (index + 1) * rows)
        return TensorRows(tuple(each[part] for each in inputs), targets[part])


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and the figures of its run's own evaluation."""

    checkpoint: Path
    figures: Evaluated


def plan_of(case: Case) -> Plan:
    return make_plan(case.chain(), **{"global_batch": BATCH, "microbatch": 3, **case.options})


def metrics() -> MetricsConfig:
    return MetricsConfig(metrics=MetricsConfig.read(METRICS))


def held_out(engine: Engine | EvaluationEngine) -> Evaluated:
    found = HeldOut(engine, Rows(), BATCH, None).evaluate(lambda done, count: True)
    assert found is not None
    return found


def trained(case: Case, folder: Path, *, averaged: bool = False) -> Trained:
    """Train two steps, save, and evaluate as a run does."""
    engine = Engine.build(
        case.chain(),
        plan_of(case),
        loss=case.loss,
        precision=case.precision(),
        swap=SwapConfig(minimum_bytes=1),
        scratch=folder / "swap",
        metrics=metrics(),
        ema=EmaOn(decay=0.5) if averaged else None,
    )
    for step in range(2):
        engine.step(make_batch(BATCH, step))
    saved = engine.save(folder / "checkpoints", {})
    if averaged:
        with engine.averaged():
            figures = held_out(engine)
    else:
        figures = held_out(engine)
    engine.close()
    return Trained(saved, figures)


def built(case: Case, folder: Path, plan: Plan | None = None) -> EvaluationEngine:
    return EvaluationEngine.build(
        case.chain(),
        plan or plan_of(case),
        loss=case.loss,
        metrics=metrics(),
        precision=case.precision(),
        swap=SwapConfig(minimum_bytes=1),
        scratch=folder / "evaluation-swap",
    )


def evaluated(case: Case, folder: Path, checkpoint: Path, *, averaged: bool = False) -> Evaluated:
    engine = built(case, folder)
    engine.load(checkpoint, averaged=averaged)
    figures = held_out(engine)
    assert engine.completed_steps == 2
    again = held_out(engine)
    assert str(again) == str(figures)
    engine.close()
    return figures


def compare(found: Evaluated, due: Evaluated, *, exactly: bool) -> None:
    assert (found.rows, found.batches) == (due.rows, due.batches) == (ROWS, 3)
    if exactly:
        assert found == due
        return
    assert found.loss == pytest.approx(due.loss, rel=1e-6)
    assert found.metrics == pytest.approx(due.metrics, rel=1e-6)


def named(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(
    "options", [{"replicas": (1, 2)}, {"replicas": (1,), "schedule": "gpipe"}], ids=str
)
@pytest.mark.parametrize("factory", [gpt(), gpt_with_dropout, with_statistics], ids=named)
def test_the_figures_of_training_bit_for_bit_under_its_plan(
    pool: Pool, tmp_path: Path, factory: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    case = Case(factory, dtype=torch.float32, options=options)
    (due, *_) = pool.run(trained, case.world, case, tmp_path)
    for found in pool.run(evaluated, case.world, case, tmp_path, due.checkpoint):
        compare(found, due.figures, exactly=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"replicas": (1,), "microbatch": 8},
        {"replicas": (2,), "microbatch": 1},
        {"replicas": (1, 1), "microbatch": 2},
        {"replicas": (1, 3), "microbatch": 4},
        {"replicas": (1, 1, 1, 1), "microbatch": 3},
        {"replicas": (1,), "parameter_offload": 1.0},
        {"replicas": (1, 2), "parameter_offload": 0.5, "tier": "host"},
        {
            "replicas": (1, 1),
            "schedule": "breadth-first",
            "interleave": 2,
            "parameter_offload": 1.0,
        },
    ],
    ids=str,
)
def test_figures_do_not_depend_on_the_plan(
    pool: Pool, tmp_path: Path, options: dict[str, Any]
) -> None:
    case = Case(gpt(), options={"replicas": (1, 1)})
    (due, *_) = pool.run(trained, case.world, case, tmp_path)
    other = replace(case, options=options)
    for found in pool.run(evaluated, other.world, other, tmp_path, due.checkpoint):
        compare(found, due.figures, exactly=False)


def whole_batch_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Depends on all rows of a batch together."""
    return GPT.loss(outputs, targets) + outputs.mean((1, 2)).var(correction=0)


@pytest.mark.parametrize(
    "options", [{"replicas": (1, 2)}, {"replicas": (1,), "microbatch": 4}], ids=str
)
def test_a_loss_over_the_whole_batch(pool: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    gathers = {"gather_loss": True, "schedule": "gpipe"}
    case = Case(gpt(), loss=whole_batch_loss, options={"replicas": (1, 2), **gathers})
    (due, *_) = pool.run(trained, case.world, case, tmp_path)
    other = replace(case, options={**options, **gathers})
    for found in pool.run(evaluated, other.world, other, tmp_path, due.checkpoint):
        compare(found, due.figures, exactly="microbatch" not in options)


@pytest.mark.parametrize(
    "options", [{"replicas": (1, 1)}, {"replicas": (1,), "parameter_offload": 1.0}], ids=str
)
def test_averaged_weights(pool: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    case = Case(gpt(), dtype=torch.float32, options={"replicas": (1, 1)})
    (due, *_) = pool.run(partial(trained, averaged=True), case.world, case, tmp_path)
    other = replace(case, options=options)
    run = partial(evaluated, averaged=True)
    for found in pool.run(run, other.world, other, tmp_path, due.checkpoint):
        compare(found, due.figures, exactly=options["replicas"] == (1, 1))
    (plain, *_) = pool.run(evaluated, other.world, other, tmp_path, due.checkpoint)
    assert plain.loss != due.figures.loss


def memory(case: Case, folder: Path) -> tuple[int, int, bool]:
    """Numbers that a new engine holds beyond its parameters and buffers, those that a second evaluation adds, and
    whether a parameter has a gradient or requires one."""
    case.chain()
    gc.collect()
    before = numbers_held()
    engine = built(case, folder)
    gc.collect()
    stage = engine._forward._built.stage
    own = sum(tensor.numel() for tensor in stage.held())
    first = numbers_held() - before - own
    held_out(engine)  # messages and metrics have buffers from now on
    gc.collect()
    held = numbers_held()
    held_out(engine)
    gc.collect()
    more = numbers_held() - held
    trains = any(t.grad is not None for t in stage.parameters())
    engine.close()
    return first, more, trains


def test_there_is_no_memory_for_training(pool: Pool, tmp_path: Path) -> None:
    case = Case(gpt(), options={"replicas": (1, 2), "optimizer_offload": 1.0})
    for first, more, trains in pool.run(memory, case.world, case, tmp_path):
        assert first < SMALL
        assert more < SMALL
        assert not trains


def refused(case: Case, folder: Path) -> str:
    engine = built(case, folder)
    try:
        engine.load(folder / "step-000001")
    except CheckpointError as error:
        return str(error)
    finally:
        engine.close()
    raise AssertionError("a checkpoint that is not there was loaded")


def test_a_missing_checkpoint_is_named(pool: Pool, tmp_path: Path) -> None:
    case = Case(gpt()).under((1, 1))
    for message in pool.run(refused, case.world, case, tmp_path):
        assert "step-000001" in message
        assert "\n" not in message


def test_training_refuses_a_plan_of_forwards() -> None:
    case = Case(gpt()).under((1,))
    plan = replace(plan_of(case), task=PlanTask.INFERENCE)
    with pytest.raises(PlanError, match="the plan is for inference"):
        Engine.build(case.chain(), plan, loss=case.loss)
