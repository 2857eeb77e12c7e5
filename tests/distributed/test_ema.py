"""Averaged weights: under every plan those of torch's ``AveragedModel``, in place only while they are evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from parallax.errors import ConfigError, ParallaxError
from parallax.runtime.checkpoint import checkpoint_name
from parallax.runtime.optim.ema import EmaConfig
from parallax.runtime.optim.emas.average import EmaAverage
from parallax.runtime.optim.emas.off import EmaOff
from parallax.runtime.optim.emas.on import EmaOn
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.swap.optimizer.averaging import AVERAGE
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from tests.distributed.pool import Pool
from tests.distributed.test_checkpoint import CountingSource
from tests.distributed.test_engine import (
    OPTIMIZER,
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
    with_unused,
)
from tests.distributed.test_nonfinite import batches
from tests.distributed.test_resharding import everything
from tests.held import held
from tests.results import read_metrics

CASE = Case(gpt(tied=False), sizes=(8, 3, 7, 4, 2), ema=EmaOn(decay=0.8))
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"replicas": (1,)},
    "stages": {"replicas": (1, 1)},
    "replicas": {"replicas": (2,)},
    "sharded": {"replicas": (2,), "shard": True},
    "sharded stages": {"replicas": (1, 2), "shard": True},
    "states on the host": {"replicas": (1,), "optimizer_offload": 0.5, "tier": "host"},
    "states on disk": {"replicas": (2,), "optimizer_offload": 1.0, "tier": "disk"},
    "streamed": {
        "replicas": (1, 1),
        "optimizer_offload": 1.0,
        "parameter_offload": 1.0,
        "tier": "disk",
    },
    "streamed to replicas": {
        "replicas": (2,),
        "optimizer_offload": 1.0,
        "parameter_offload": 0.5,
        "tier": "host",
    },
}


def warmed_up(averages: list[Tensor], weights: list[Tensor], updates: Tensor | int) -> None:
    done = int(updates)
    torch._foreach_lerp_(averages, weights, 1 - min(0.8, (1 + done) / (10 + done)))


KINDS: dict[str, tuple[EmaConfig, Callable[..., None], Callable[[int], bool]]] = {
    "warmed up": (EmaOn(decay=0.8), warmed_up, lambda step: True),
    "constant": (
        EmaOn(decay=0.8, warmup="off", every=2),
        get_ema_multi_avg_fn(0.8),
        lambda step: step % 2 == 0,
    ),
    "mean": (EmaAverage(start=2), get_swa_multi_avg_fn(), lambda step: step >= 2),
}


@pytest.mark.parametrize(
    ("config", "steps"), [(EmaAverage(start=9), 8), (EmaOn(every=9), 8), (EmaOff(), 0)]
)
def test_a_run_that_averages_nothing_is_refused(config: EmaConfig, steps: int) -> None:
    config.check(9)
    if steps:
        with pytest.raises(ConfigError, match=r"ends after step 8, .*; lower ema\.start"):
            config.check(steps)


@dataclass
class Averaged:
    """Weights and averages of one rank after training; the loss of a batch with each; whether the weights after the
    evaluation were those before it."""

    losses: list[float]
    weights: Weights
    averages: Weights
    evaluated: tuple[float, float]
    restored: bool


def copies(tensors: Weights) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def plain(case: Case, kind: str = "warmed up") -> Averaged:
    blocks, tensors = plain_blocks(case)
    _, average, due = KINDS[kind]
    averaged = AveragedModel(nn.ModuleList(blocks), multi_avg_fn=average)
    trained = [t for t in tensors.values() if t.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True)
    losses = []
    for step, batch in enumerate(case.batches()):
        optimizer.zero_grad()
        loss = plain_loss(case, blocks, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, OPTIMIZER.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * SCHEDULE.factor(step, STEPS)
        optimizer.step()
        losses.append(loss.item())
        if due(step + 1):
            averaged.update_parameters(nn.ModuleList(blocks))
    found = dict(
        zip(
            map(id, nn.ModuleList(blocks).state_dict(keep_vars=True).values()),
            averaged.module.state_dict().values(),
        )
    )
    with torch.no_grad():
        both = [
            plain_loss(case, [block.eval() for block in each], make_batch(8, 99)).item()
            for each in (blocks, list(averaged.module))
        ]
    averages = {name: found[id(tensor)] for name, tensor in tensors.items()}
    return Averaged(losses, copies(tensors), copies(averages), (both[0], both[1]), True)


def training(case: Case, folder: Path) -> Averaged:
    engine = case.engine(folder)
    losses = [engine.step(batch).loss for batch in case.batches()]
    batch, weights, before = make_batch(8, 99), copies(engine.parameters), held(engine)
    usual = engine.evaluate(batch)
    with engine.averaged():
        averages = copies(engine.parameters)
        loss = engine.evaluate(batch)
    after = held(engine)
    restored = before.keys() == after.keys() and all(
        torch.equal(value, after[name]) for name, value in before.items()
    )
    engine.close()
    return Averaged(losses, weights, averages, (usual, loss), restored)


def check(found: list[Averaged], expected: Averaged, tolerance: float) -> None:
    for each in found:
        assert each.restored
        assert each.losses == pytest.approx(expected.losses, rel=tolerance)
        assert each.evaluated == pytest.approx(expected.evaluated, rel=tolerance)
        check_near(each.weights, expected.weights, tolerance)
        check_near(each.averages, expected.averages, tolerance)
    assert {name for each in found for name in each.averages} == set(expected.averages)


@pytest.mark.sampled
@pytest.mark.parametrize("plan", PLANS)
def test_averages_are_those_of_torch(pool: Pool, tmp_path: Path, plan: str) -> None:
    case = CASE.under(**PLANS[plan])
    expected = plain(case)
    check(pool.run(training, case.world, case, tmp_path), expected, 1e-11)
    assert expected.evaluated[0] != expected.evaluated[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factory", [gpt(), with_unused], ids=["tied", "unused"])
def test_kinds_of_averages(
    pool: Pool, tmp_path: Path, kind: str, factory: Callable[[], nn.Module]
) -> None:
    case = replace(CASE, factory=factory, ema=KINDS[kind][0]).under((1, 1), shard=False)
    # torch divides in single precision for the mean.
    tolerance = 1e-7 if kind == "mean" else 1e-11
    check(pool.run(training, 2, case, tmp_path), plain(case, kind), tolerance)


def test_one_micro_batch_in_single_precision_is_bit_identical(pool: Pool, tmp_path: Path) -> None:
    case = replace(CASE, dtype=torch.float32, sizes=(8,) * STEPS)
    expected = plain(case)
    for options in ({}, {"optimizer_offload": 1.0, "tier": "disk"}):
        (found,) = pool.run(training, 1, case.under((1,), microbatch=8, **options), tmp_path)
        assert found.restored
        for mine, theirs in (
            (found.weights, expected.weights),
            (found.averages, expected.averages),
        ):
            assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_statistics_of_batches_stay_as_trained(pool: Pool, tmp_path: Path) -> None:
    factory, together = partial(everything, tied=False), ReplicasConfig(batchnorm="sync")
    case = replace(CASE, factory=factory, together=together).under((1,))
    (found,) = pool.run(training, 1, case, tmp_path)
    assert found.restored
    kept = [name for name in found.weights if found.weights[name].equal(found.averages[name])]
    assert [name for name in kept if "running" in name]
    assert not [name for name in kept if "used.weight" in name and "unused" not in name]


def refusing(case: Case, folder: Path) -> list[str]:
    """What refused to be done with averages in place, and before there are some."""
    engine, found = case.engine(folder), list[str]()
    with engine.averaged():
        engine.step(case.batches()[0])  # there are none yet
    with engine.averaged():
        for action in (lambda: engine.step(case.batches()[1]), lambda: engine.save(folder, {})):
            try:
                action()
            except ParallaxError as error:
                found.append(str(error))
    engine.step(case.batches()[1])
    engine.close()
    return found


def test_no_step_and_no_checkpoint_with_averages_in_place(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(refusing, 1, CASE.under((1,)), tmp_path)
    assert len(found) == 2
    assert all("leave the context first" in each for each in found)


def resuming(case: Case, folder: Path, first: int, last: int) -> Averaged:
    """Steps ``first`` to ``last``, after loading the checkpoint of step ``first``, if any; then saves."""
    engine = case.engine(folder)
    if first:
        engine.load(folder / checkpoint_name(first))
    losses = [engine.step(batch).loss for batch in case.batches()[first:last]]
    weights = copies(engine.parameters)
    with engine.averaged():
        averages = copies(engine.parameters)
    engine.save(folder, {})
    stored = any(name.startswith(AVERAGE) for name in held(engine))
    engine.close()
    return Averaged(losses, weights, averages, (0.0, 0.0), stored)


def test_averages_may_begin_and_end_between_starts(
    pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Begun later, they are those of the weights since then; ended, they are dropped."""
    case = CASE.under((1,))
    without = replace(case, ema=EmaOff())
    pool.run(resuming, 1, without, tmp_path, 0, 2)
    (begun,) = pool.run(resuming, 1, case, tmp_path, 2, 3)
    assert all(torch.equal(t, begun.weights[name]) for name, t in begun.averages.items())
    (going,) = pool.run(resuming, 1, case, tmp_path, 3, 4)
    for name, tensor in going.averages.items():
        share = 1 - min(0.8, 2 / 11)
        assert torch.equal(tensor, torch.lerp(begun.weights[name], going.weights[name], share))
    with caplog.at_level("WARNING", logger="parallax"):
        ended = resuming(without, tmp_path, 4, 5)
    assert "step 4 was saved with averaged weights, and ema=off: they are dropped" in caplog.text
    assert not ended.restored
    assert all(torch.equal(t, ended.weights[name]) for name, t in ended.averages.items())


def looping(case: Case, folder: Path) -> tuple[float, float, float]:
    """The last validation loss of a loop; that of the trained weights, and that of the averages."""
    folder.mkdir(exist_ok=True)
    engine = case.engine(folder)
    trainer = TrainerConfig(steps=4, global_batch=8, eval_every=2, eval_batches=1)
    logger = LoggerConfig(to=[], events=False)
    train(engine, CountingSource(), trainer, logger, folder, tokens_per_row=16)
    held_out = CountingSource().validation(0, 8)
    trained = engine.evaluate(held_out)
    with engine.averaged():
        averaged = engine.evaluate(held_out)
    engine.close()
    found = [each for each in read_metrics(folder / "metrics.jsonl") if "validation_loss" in each]
    return found[-1]["validation_loss"], trained, averaged


@pytest.mark.parametrize("averages", [True, False])
def test_validation_uses_the_averages_if_asked(pool: Pool, tmp_path: Path, averages: bool) -> None:
    case = replace(CASE, ema=EmaOn(decay=0.8, evaluate=averages)).under((2,), shard=True)
    ((reported, trained, averaged), _) = pool.run(looping, 2, case, tmp_path / "run")
    assert trained != averaged
    assert reported == (averaged if averages else trained)


def skipping(case: Case, folder: Path) -> list[bool]:
    """Of each step whether it was skipped, and whether it changed anything."""
    engine, found = case.engine(folder), list[bool]()
    for batch in batches():
        before = held(engine)
        skipped, after = bool(engine.step(batch).trouble), held(engine)
        same = all(
            torch.equal(before[name], value) for name, value in after.items() if name in before
        )
        found += [skipped, before.keys() == after.keys() and same]
    engine.close()
    return found


@pytest.mark.parametrize("plan", ["one rank", "sharded", "streamed"])
def test_a_skipped_step_updates_no_average(pool: Pool, tmp_path: Path, plan: str) -> None:
    case = replace(CASE, loss=poisoned, skips=2).under(**PLANS[plan])
    for found in pool.run(skipping, case.world, case, tmp_path):
        assert found[0::2] == found[1::2] == [False, True, False, False]
