"""Steps that overlap (PipeDream-2BW): the numbers of delayed updates, without a drained pipeline between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallax.errors import ParallaxError, PlanError
from parallax.model.precision import PrecisionConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.checkpoint import checkpoint_name
from parallax.runtime.engine import Engine
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from tests.distributed.pool import Pool
from tests.distributed.test_checkpoint import CountingSource
from tests.distributed.test_delayed import (
    CASE,
    DELAYED,
    KINDS,
    Versions,
    check,
    copies,
    newest_of,
    plain,
    with_correction,
)
from tests.distributed.test_engine import (
    SCHEDULE,
    Case,
    make_batch,
    plain_blocks,
    plain_loss,
    poisoned,
    with_buffers,
    with_unused,
)
from tests.distributed.test_engine import STEPS as PLANNED_STEPS
from tests.plans import make_plan
from tests.results import read_metrics

PLANS: dict[str, dict[str, Any]] = {
    "two stages": {"replicas": (1, 1)},
    "recomputing": {"replicas": (1, 1), "directive": "recompute"},
    "replicas": {"replicas": (2, 1)},
    "three stages": {"replicas": (1, 1, 1)},
    "four stages": {"replicas": (1, 1, 1, 1)},
}
STEPS = 6


def overlapping(case: Case, plan: str, **changes: Any) -> Case:
    return replace(case, sizes=(8,) * STEPS, **changes).under(
        **{**PLANS[plan], **DELAYED, "schedule": "2bw"}
    )


def steps_of(
    engine: Engine, batches: list[TensorRows], drains: Collection[int] = ()
) -> list[float]:
    """Train on ``batches``, and drain the pipeline after those with the indices ``drains`` and the last one."""
    given: list[TensorRows | None] = [*batches, None]
    return [
        engine.step(batch, None if index in drains else given[index + 1]).loss
        for index, batch in enumerate(batches)
    ]


def training(case: Case, folder: Path, drains: Collection[int]) -> Versions:
    engine = case.engine(folder)
    losses = steps_of(engine, case.batches(), drains)
    evaluated = engine.evaluate(make_batch(8, 99))
    found = Versions(losses, copies(engine.parameters), newest_of(engine), evaluated)
    engine.close()
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("drains", [(), (0,), (2,), (0, 1, 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_overlapping_steps_are_the_loop_with_two_versions(
    pool: Pool, tmp_path: Path, plan: str, corrects: bool, kind: str, drains: tuple[int, ...]
) -> None:
    factory = with_buffers if kind == "lion" else CASE.factory
    case = overlapping(CASE, plan, optimizer=KINDS[kind], factory=factory)
    case = with_correction(case) if corrects else case
    check(pool.run(training, case.world, case, tmp_path, drains), plain(case))


@dataclasses.dataclass(frozen=True)
class Short(Case):
    """Weights of two bytes, which are stepped as master weights."""

    def precision(self) -> PrecisionConfig:
        return PrecisionConfig(parameters="bf16", compute="bf16")


@pytest.mark.sampled
@pytest.mark.parametrize("drains", [(), (0,), (2,), (0, 1, 3)], ids=str)
@pytest.mark.parametrize("factory", [CASE.factory, with_buffers], ids=["gpt", "buffers"])
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_weights_of_two_bytes_are_those_of_a_schedule_that_drains(
    pool: Pool,
    tmp_path: Path,
    plan: str,
    corrects: bool,
    factory: Callable[[], nn.Module],
    drains: tuple[int, ...],
) -> None:
    case = Short(factory, dtype=torch.bfloat16, optimizer=KINDS["adamw"])
    case = overlapping(with_correction(case) if corrects else case, plan)
    draining = case.under(**{**PLANS[plan], **DELAYED})
    expected = pool.run(training, case.world, draining, tmp_path, range(STEPS))
    for found, other in zip(pool.run(training, case.world, case, tmp_path, drains), expected):
        assert found.losses == other.losses
        assert found.evaluated == other.evaluated
        for mine, theirs in ((found.model, other.model), (found.newest, other.newest)):
            assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
        assert any(not tensor.equal(found.newest[name]) for name, tensor in found.model.items())


def plain_masters(case: Case) -> list[float]:
    """The losses of a loop in plain torch, with weights of two bytes that are rounded from master weights."""
    blocks, tensors = plain_blocks(case)
    trained = [t for t in tensors.values() if t.requires_grad]
    newest = [nn.Parameter(p.detach().float()) for p in trained]
    config, losses = case.optimizer, list[float]()
    optimizer = config.create(
        [
            {"params": [m for m in newest if (m.dim() > 1) is many], "weight_decay": decay}
            for many, decay in {True: config.weight_decay, False: 0.0}.items()
        ]
    )
    for step, batch in enumerate(case.batches()):
        for p in trained:
            p.grad = None
        loss = plain_loss(case, blocks, batch)
        losses.append(loss.item())
        loss.backward()
        for p, master in zip(trained, newest):
            p.data.copy_(
                master.detach()
            )  # the next step computes with the weights before this update
            master.grad = p.grad.float()
        nn.utils.clip_grad_norm_(newest, config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * SCHEDULE.factor(step, PLANNED_STEPS)
        optimizer.step()
    return losses


def test_weights_of_two_bytes_are_near_a_loop_with_master_weights(
    pool: Pool, tmp_path: Path
) -> None:
    case = Short(CASE.factory, dtype=torch.bfloat16, optimizer=KINDS["adamw"])
    case = overlapping(case, "two stages")
    expected = plain_masters(case)
    for found in pool.run(training, case.world, case, tmp_path, ()):
        assert found.losses == pytest.approx(expected, rel=2e-2)


def test_the_first_stage_has_one_set_of_gradients(pool: Pool, tmp_path: Path) -> None:
    case = overlapping(CASE, "three stages")
    first, *others = pool.run(held_gradients, case.world, case, tmp_path)
    assert first == 0
    assert all(others)


def held_gradients(case: Case, folder: Path) -> int:
    """The bytes of gradients that are kept aside while passes of the next step run."""
    engine = case.engine(folder)
    steps_of(engine, case.batches())
    held = engine._optimizer._on_device._held
    engine.close()
    return sum(gradient.nbytes for gradient in held.values())


@pytest.mark.parametrize(
    "sizes", [(8, 8, 3, 3, 8, 7), (8, 4, 8, 4, 8, 4), (8, 8, 2, 2, 1, 8)], ids=str
)
def test_batches_of_other_sizes_drain_the_pipeline(
    pool: Pool, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    case = replace(overlapping(CASE, "two stages", factory=with_unused), sizes=sizes)
    check(pool.run(training, case.world, case, tmp_path, ()), plain(case))


def test_a_run_with_weights_of_two_bytes_resumes(pool: Pool, tmp_path: Path) -> None:
    case = Short(CASE.factory, dtype=torch.bfloat16, optimizer=KINDS["adamw"])
    case = overlapping(with_correction(case), "two stages")
    expected = pool.run(resuming, 2, case, tmp_path / "whole", 0, STEPS)
    pool.run(resuming, 2, case, tmp_path, 0, 2)
    for found, whole in zip(pool.run(resuming, 2, case, tmp_path, 2, STEPS), expected):
        assert found.losses == whole.losses[2:]
        assert all(torch.equal(tensor, whole.newest[n]) for n, tensor in found.newest.items())


def resuming(case: Case, folder: Path, first: int, last: int) -> Versions:
    engine = case.engine(folder)
    if first:
        engine.load(folder / checkpoint_name(first))
    losses = steps_of(engine, case.batches()[first:last])
    engine.save(folder, {})
    found = Versions(losses, copies(engine.parameters), newest_of(engine), 0.0)
    engine.close()
    return found


@pytest.mark.parametrize("corrects", [False, True])
def test_a_run_resumes_under_a_schedule_that_drains_and_back(
    pool: Pool, tmp_path: Path, corrects: bool
) -> None:
    case = overlapping(CASE, "three stages")
    case = with_correction(case) if corrects else case
    draining = case.under(**{**PLANS["two stages"], **DELAYED})
    pool.run(resuming, case.world, case, tmp_path, 0, 2)
    pool.run(resuming, draining.world, draining, tmp_path, 2, 4)
    found = pool.run(resuming, case.world, case, tmp_path, 4, STEPS)
    expected = plain(case)
    evaluated = dataclasses.replace(expected, losses=expected.losses[4:], evaluated=0.0)
    check(found, evaluated)


def refusing(case: Case, folder: Path) -> list[str]:
    """The errors of calls that a begun step forbids."""
    engine = case.engine(folder)
    first, second, third = case.batches()[:3]
    engine.step(first, second)
    errors = []
    for call in (
        lambda: engine.evaluate(third),
        lambda: engine.predict(third),
        lambda: engine.save(folder, {}),
        lambda: newest_of(engine),
        lambda: engine.gradients(third),
    ):
        with pytest.raises(ParallaxError) as caught:
            call()
        errors.append(str(caught.value))
    engine.step(second)
    engine.step(third, first)
    with pytest.raises(ParallaxError, match="has begun with another batch"):
        engine.step(second)
    engine.step(first)
    engine.close()
    return errors


def test_a_begun_step_is_ended_first(pool: Pool, tmp_path: Path) -> None:
    case = overlapping(CASE, "two stages")
    for errors in pool.run(refusing, case.world, case, tmp_path):
        assert all("while a step has begun" in error for error in errors)


def looping(case: Case, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    engine = case.engine(folder)
    trainer = TrainerConfig(
        steps=9, global_batch=8, eval_every=4, eval_batches=2, checkpoint_every=3
    )
    logger = LoggerConfig(to=[], events=False)
    train(engine, CountingSource(), trainer, logger, folder, tokens_per_row=16)
    engine.close()
    kept = "step", "loss", "gradient_norm", "validation_loss"
    return [
        {key: each[key] for key in kept if key in each}
        for each in read_metrics(folder / "metrics.jsonl")
    ]


def test_the_loop_reports_the_same_under_both_schedules(pool: Pool, tmp_path: Path) -> None:
    case = overlapping(CASE, "two stages")
    draining = case.under(**{**PLANS["two stages"], **DELAYED})
    found = pool.run(looping, 2, case, tmp_path / "2bw")[0]
    expected = pool.run(looping, 2, draining, tmp_path / "1f1b")[0]
    assert [each["step"] for each in found] == [each["step"] for each in expected]
    for one, other in zip(found, expected):
        assert one == pytest.approx(other, rel=1e-12)
    assert sorted(path.name for path in (tmp_path / "2bw" / "checkpoints").iterdir()) == sorted(
        path.name for path in (tmp_path / "1f1b" / "checkpoints").iterdir()
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"updates": "synchronous"}, "needs delayed updates"),
        ({"gather_loss": True}, "a loss of each micro-batch"),
        ({"optimizer_offload": 1.0}, "all tensors on the device"),
        ({"microbatch": 8}, "as many micro-batches as stages"),
    ],
    ids=str,
)
def test_what_cannot_overlap_is_refused(changes: dict[str, Any], words: str) -> None:
    options = {**PLANS["two stages"], **DELAYED, "schedule": "2bw", **changes}
    with pytest.raises(PlanError, match=words):
        make_plan(CASE.chain(), **options)


def test_steps_that_may_be_skipped_do_not_overlap() -> None:
    case = overlapping(CASE, "two stages")
    plan = make_plan(case.chain(), **case.options)
    with pytest.raises(PlanError, match=r"use trainer\.nonfinite=stop"):
        Engine.build(case.chain(), plan, loss=poisoned, nonfinite_skips=1)
