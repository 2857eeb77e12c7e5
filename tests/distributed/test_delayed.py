"""Delayed updates: under every plan those of a loop of a few lines, with one more version of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallax.errors import PlanError
from parallax.runtime.batch import TensorRows
from parallax.runtime.checkpoint import CheckpointReader, checkpoint_name
from parallax.runtime.engine import Engine
from parallax.runtime.optim.config import OptimizerConfig
from parallax.runtime.optim.emas.on import EmaOn
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.lion import LionConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.swap.optimizer.delaying import PREVIOUS, VERSION
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from tests.distributed.pool import Pool
from tests.distributed.test_checkpoint import CountingSource
from tests.distributed.test_engine import (
    SCHEDULE,
    STEPS,
    Case,
    Weights,
    check_near,
    gpt,
    make_batch,
    plain_blocks,
    plain_loss,
    poisoned,
    with_buffers,
    with_unused,
)
from tests.distributed.test_nonfinite import BAD, batches
from tests.held import held
from tests.plans import make_plan
from tests.results import read_metrics

DELAYED = {"updates": "delayed"}
KINDS: dict[str, OptimizerConfig] = {
    "sgd": SGDConfig(lr=0.3, momentum=0.0, clip_norm=0.5),
    "momentum": SGDConfig(lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": AdamWConfig(lr=3e-3, clip_norm=0.5),
    "lion": LionConfig(lr=1e-3, clip_norm=0.5),
}
PLANS: dict[str, dict[str, Any]] = {
    "one stage": {"replicas": (1,)},
    "replicas": {"replicas": (2,)},
    "two stages": {"replicas": (1, 1)},
    "two stages with replicas": {"replicas": (1, 2)},
    "four stages": {"replicas": (1, 1, 1, 1)},
    "zero bubble": {"replicas": (1, 1), "schedule": "zb-h1"},
    "virtual stages": {"replicas": (1, 1), "schedule": "interleaved", "interleave": 2},
    "sharded": {"replicas": (2,), "shard": True},
    "states on the host": {"replicas": (1,), "optimizer_offload": 0.5, "tier": "host"},
    "states on disk": {"replicas": (2,), "optimizer_offload": 1.0, "tier": "disk"},
    "offloaded parameters": {
        "replicas": (1, 1),
        "optimizer_offload": 1.0,
        "parameter_offload": 1.0,
        "tier": "disk",
    },
}
CASE = Case(gpt(tied=False), sizes=(8, 3, 7, 4, 2), optimizer=KINDS["adamw"])


def delayed(case: Case, plan: str, **changes: Any) -> Case:
    return replace(case, **changes).under(**{**PLANS[plan], **DELAYED})


def with_correction(case: Case) -> Case:
    return replace(case, optimizer=replace(case.optimizer, delay_correction=True))


@dataclass
class Versions:
    """The results of training: the loss of each step, the weights with which the next step computes, the newest
    weights, and the loss of a batch with these."""

    losses: list[float]
    model: Weights
    newest: Weights
    evaluated: float


def copies(tensors: Weights) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def plain(case: Case, given: Sequence[TensorRows] = ()) -> Versions:
    """w(t+1) = w(t) − lr · u(g(w(t−1)))."""
    blocks, tensors = plain_blocks(case)
    trained = [t for t in tensors.values() if t.requires_grad]
    config, newest = case.optimizer, {p: p.detach().clone() for p in trained}
    previous, losses = {p: p.detach().clone() for p in trained}, []
    decays = {True: config.weight_decay, False: 0.0}
    optimizer = config.create(
        [
            {"params": [p for p in trained if (p.dim() > 1) is many], "weight_decay": decay}
            for many, decay in decays.items()
        ]
    )
    for step, batch in enumerate(given or case.batches()):
        optimizer.zero_grad()
        loss = plain_loss(case, blocks, batch)
        losses.append(loss.item())
        if not torch.isfinite(loss):
            continue
        loss.backward()
        if config.clip_norm:
            nn.utils.clip_grad_norm_(trained, config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * SCHEDULE.factor(step, STEPS)
        with torch.no_grad():
            for p in trained:
                p.copy_(newest[p])
            optimizer.step()
            for p in trained:
                now, before, newest[p] = newest[p], previous[p], p.detach().clone()
                p.copy_(2 * now - before if config.delay_correction else now)
                previous[p] = now
    model = copies(tensors)
    with torch.no_grad():
        for p in trained:
            p.copy_(newest[p])
        evaluated = plain_loss(case, [b.eval() for b in blocks], make_batch(8, 99)).item()
    return Versions(losses, model, copies(tensors), evaluated)


def newest_of(engine: Engine) -> Weights:
    with engine.newest():
        return copies(engine.parameters)


def training(case: Case, folder: Path, given: Sequence[TensorRows] = ()) -> Versions:
    engine = case.engine(folder)
    losses = [engine.step(batch).loss for batch in given or case.batches()]
    evaluated = engine.evaluate(make_batch(8, 99))
    found = Versions(losses, copies(engine.parameters), newest_of(engine), evaluated)
    engine.close()
    return found


def check(found: list[Versions], expected: Versions, tolerance: float = 1e-9) -> None:
    for each in found:
        assert each.losses == pytest.approx(expected.losses, rel=tolerance, nan_ok=True)
        assert each.evaluated == pytest.approx(expected.evaluated, rel=tolerance)
        check_near(each.model, expected.model, tolerance)
        check_near(each.newest, expected.newest, tolerance)
    assert {name for each in found for name in each.model} == set(expected.model)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_is_the_loop_with_two_versions(
    pool: Pool, tmp_path: Path, plan: str, corrects: bool, kind: str
) -> None:
    # Lion steps by signs, and biases of keys have gradients of rounding errors alone.
    factory = with_buffers if kind == "lion" else CASE.factory
    case = delayed(CASE, plan, optimizer=KINDS[kind], factory=factory)
    case = with_correction(case) if corrects else case
    expected = plain(case)
    check(pool.run(training, case.world, case, tmp_path), expected)
    assert any(not torch.equal(t, expected.newest[n]) for n, t in expected.model.items())


def test_the_first_gradient_is_that_of_the_initial_weights(pool: Pool, tmp_path: Path) -> None:
    """So after one step, both rules have the same newest weights, and the second gradient is that of the first
    weights again."""
    case = replace(CASE, sizes=(8, 8), dtype=torch.float32)
    (synchronous,) = pool.run(training, 1, replace(case, sizes=(8,)).under((1,)), tmp_path)
    (once,) = pool.run(training, 1, delayed(case, "one stage", sizes=(8,)), tmp_path)
    assert all(torch.equal(t, synchronous.newest[n]) for n, t in once.newest.items())
    (initial,) = pool.run(training, 1, replace(case, sizes=()).under((1,)), tmp_path)
    assert all(torch.equal(t, initial.newest[n]) for n, t in once.model.items())


def test_parameters_without_gradients_keep_one_version(pool: Pool, tmp_path: Path) -> None:
    case = delayed(CASE, "two stages", factory=with_unused)
    check(pool.run(training, 2, case, tmp_path), plain(case))


@pytest.mark.sampled
@pytest.mark.parametrize("plan", ["one stage", "sharded", "offloaded parameters"])
def test_a_skipped_step_changes_no_version(pool: Pool, tmp_path: Path, plan: str) -> None:
    case = delayed(CASE, plan, loss=poisoned, skips=2)
    found = pool.run(training, case.world, case, tmp_path, batches())
    assert all(torch.tensor(each.losses[BAD]).isnan() for each in found)
    check(found, plain(case, batches()))


def resuming(case: Case, folder: Path, first: int, last: int) -> tuple[Versions, Weights]:
    """Steps ``first`` to ``last``, after loading the checkpoint of step ``first``, if any; then saves. Also returns all
    tensors that the engine holds."""
    engine = case.engine(folder)
    if first:
        engine.load(folder / checkpoint_name(first))
    losses = [engine.step(batch).loss for batch in case.batches()[first:last]]
    engine.save(folder, {})
    found = Versions(losses, copies(engine.parameters), newest_of(engine), 0.0)
    tensors = held(engine)
    engine.close()
    return found, tensors


@pytest.mark.sampled
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("plan", ["one stage", "sharded", "states on disk", "offloaded parameters"])
def test_resuming_is_bit_identical(pool: Pool, tmp_path: Path, plan: str, corrects: bool) -> None:
    case = delayed(CASE, plan, dtype=torch.float32)
    case = with_correction(case) if corrects else case
    whole = pool.run(resuming, case.world, case, tmp_path / "whole", 0, 4)
    pool.run(resuming, case.world, case, tmp_path / "parts", 0, 2)
    parts = pool.run(resuming, case.world, case, tmp_path / "parts", 2, 4)
    for (one, held_by_one), (other, held_by_other) in zip(whole, parts):
        assert one.losses[2:] == other.losses
        assert held_by_one.keys() == held_by_other.keys()
        assert all(torch.equal(t, held_by_other[n]) for n, t in held_by_one.items())


def test_a_checkpoint_resumes_under_another_plan(pool: Pool, tmp_path: Path) -> None:
    case = with_correction(delayed(CASE, "two stages with replicas"))
    pool.run(resuming, case.world, case, tmp_path, 0, 3)
    other = case.under(**{**PLANS["states on the host"], **DELAYED})
    ((found, _),) = pool.run(resuming, 1, other, tmp_path, 3, 5)
    expected = plain(case)
    for mine, theirs in ((found.model, expected.model), (found.newest, expected.newest)):
        assert all(torch.allclose(t, theirs[n], rtol=1e-9, atol=1e-12) for n, t in mine.items())


def test_a_checkpoint_has_the_newest_weights_as_the_models(pool: Pool, tmp_path: Path) -> None:
    ((found, _),) = pool.run(resuming, 1, delayed(CASE, "one stage"), tmp_path, 0, 3)
    reader = CheckpointReader(tmp_path / checkpoint_name(3))
    for name, tensor in found.newest.items():
        assert torch.equal(reader.read(f"model/{name}"), tensor)
        assert torch.equal(reader.read(f"{VERSION}/{name}"), found.model[name])
    reader.close()


def test_the_rule_may_change_between_starts(pool: Pool, tmp_path: Path) -> None:
    """A synchronous run goes on from the newest weights, and drops the others. A delayed run starts with one version
    for both."""
    case = delayed(CASE, "one stage")
    synchronous = CASE.under((1,))
    ((begun, _),) = pool.run(resuming, 1, case, tmp_path, 0, 2)
    ((going, tensors),) = pool.run(resuming, 1, synchronous, tmp_path, 2, 3)
    assert going.losses == [loss_with(case, begun.newest, 2)]
    assert not [name for name in tensors if name.startswith((VERSION, PREVIOUS))]
    ((ended, _),) = pool.run(resuming, 1, with_correction(case), tmp_path, 3, 5)
    first, second = (loss_with(case, going.newest, step) for step in (3, 4))
    assert ended.losses == [first, second]


def loss_with(case: Case, weights: Weights, step: int) -> float:
    """The loss of a step's batch with ``weights``."""
    blocks, tensors = plain_blocks(case)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(weights[name])
        return pytest.approx(plain_loss(case, blocks, case.batches()[step]).item(), rel=1e-12)


def averaged(case: Case, folder: Path) -> tuple[Weights, Weights]:
    """Averages with a decay of 0, and the newest weights."""
    engine = case.engine(folder)
    for batch in case.batches():
        engine.step(batch)
    with engine.averaged():
        averages = copies(engine.parameters)
    found = averages, newest_of(engine)
    engine.close()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("plan", ["one stage", "sharded", "offloaded parameters"])
def test_averages_are_of_the_newest_weights(pool: Pool, tmp_path: Path, plan: str) -> None:
    case = delayed(CASE, plan, ema=EmaOn(decay=0.0))
    for averages, newest in pool.run(averaged, case.world, case, tmp_path):
        assert all(torch.equal(tensor, newest[name]) for name, tensor in averages.items())


def looping(case: Case, folder: Path) -> tuple[float, float]:
    """The last validation loss of a loop, and that of the newest weights."""
    folder.mkdir(exist_ok=True)
    engine = case.engine(folder)
    trainer = TrainerConfig(steps=4, global_batch=8, eval_every=2, eval_batches=1)
    logger = LoggerConfig(to=[], events=False)
    train(engine, CountingSource(), trainer, logger, folder, tokens_per_row=16)
    newest = engine.evaluate(CountingSource().validation(0, 8))
    engine.close()
    found = [each for each in read_metrics(folder / "metrics.jsonl") if "validation_loss" in each]
    return found[-1]["validation_loss"], newest


def test_validation_uses_the_newest_weights(pool: Pool, tmp_path: Path) -> None:
    ((reported, newest), _) = pool.run(looping, 2, delayed(CASE, "sharded"), tmp_path / "run")
    assert reported == newest


def state_bytes(case: Case, folder: Path) -> tuple[int, int]:
    """The bytes of the rank's optimizer states, and of its trained parameters."""
    engine = case.engine(folder)
    engine.step(case.batches()[0])
    weights = sum(t.nbytes for t in engine.parameters.values() if t.requires_grad)
    found = engine.tier_bytes()["the optimizer's states"], weights
    engine.close()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("plan", ["one stage", "two stages", "four stages"])
def test_a_version_costs_the_bytes_of_the_weights(pool: Pool, tmp_path: Path, plan: str) -> None:
    case = replace(CASE, dtype=torch.float32)
    world = len(PLANS[plan]["replicas"])
    usual = pool.run(state_bytes, world, case.under(**PLANS[plan]), tmp_path / "usual")
    for number, each in enumerate((delayed(case, plan), with_correction(delayed(case, plan)))):
        found = pool.run(state_bytes, world, each, tmp_path / str(number))
        for (more, weights), (less, _) in zip(found, usual):
            assert more - less == (number + 1) * weights


def refused(case: Case, updates: str) -> str:
    chain = case.chain()
    plan = make_plan(chain, **case.options)
    with pytest.raises(PlanError) as caught:
        Engine.build(chain, plan, loss=case.loss, updates=updates)
    return str(caught.value)


def test_a_plan_of_the_other_rule_is_refused() -> None:
    assert "use trainer.updates=synchronous" in refused(CASE.under((1,)), "delayed")
    assert "use trainer.updates=delayed" in refused(delayed(CASE, "one stage"), "synchronous")


def test_a_plan_carries_the_rule() -> None:
    chain = CASE.chain()
    plan, usual = make_plan(chain, updates="delayed"), make_plan(chain)
    assert type(plan).from_dict(plan.to_dict()) == plan
    assert plan.hash() != usual.hash()
    assert "updates" not in usual.to_dict()
    assert plan.decisions() != usual.decisions()
    with pytest.raises(PlanError, match="updates=late: accepted are synchronous, delayed"):
        type(plan).from_dict({**plan.to_dict(), "updates": "late"})
