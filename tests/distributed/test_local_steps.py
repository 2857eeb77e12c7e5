"""Local steps: every plan equals a loop over replicas in plain torch, and rounds end where they should, also when a run
resumes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.errors import ConfigError, ParallaxError, PlanError
from parallax.plan.config import PlanConfig
from parallax.plan.rows import micro_batch_count, micro_batch_rows, replica_rows
from parallax.runtime.batch import TensorRows
from parallax.runtime.optim.config import OptimizerConfig
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.lion import LionConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.runtime.replicas.config import ReplicasConfig
from tests.distributed.pool import Pool
from tests.distributed.test_engine import (
    SCHEDULE,
    STEPS,
    Case,
    Outcome,
    Weights,
    compare,
    gpt,
    plain_blocks,
    plain_training,
    same,
    training,
    with_unused,
)
from tests.plans import make_plan

LOCAL = ReplicasConfig(mode="local", sync_every=2)
DILOCO = replace(LOCAL, outer_lr=0.7, outer_momentum=0.9)
CASE = Case(gpt(tied=False), sizes=(8, 3, 7, 4, 8, 6), together=DILOCO)
PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": (2,)},
    "stages": {"replicas": (2, 2)},
    "one replica": {"replicas": (1, 1)},
    "more replicas than rows": {"replicas": (3,)},
    "virtual stages": {"replicas": (2, 2), "schedule": "interleaved", "interleave": 2},
    "split backward": {"replicas": (2, 2), "schedule": "zb-h1"},
    "states on the host": {"replicas": (2,), "optimizer_offload": 0.5, "tier": "host"},
    "states on disk": {"replicas": (2, 2), "optimizer_offload": 1.0, "tier": "disk"},
    "streamed": {
        "replicas": (2,),
        "optimizer_offload": 1.0,
        "parameter_offload": 0.5,
        "tier": "host",
    },
}


def own_rows(batch: TensorRows, replicas: int, mine: Sequence[int]) -> TensorRows | None:
    """The rows of the replicas ``mine``, of all micro-batches of two rows."""
    count, rows = micro_batch_count(len(batch), 2), []
    for micro in range(count):
        first, stop = micro_batch_rows(len(batch), count, micro)
        for replica in mine:
            low, high = replica_rows(stop - first, replicas, replica)
            rows += range(first + low, first + high)
    if not rows:
        return None
    (inputs,) = batch.inputs(0, len(batch))
    return TensorRows(inputs[rows], batch.targets(0, len(batch))[rows])


def torchs(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return config.create([{**group} for group in groups])


def plain_rounds(case: Case, replicas: int) -> Outcome:
    """Train copies of the model by local steps, each with its own optimizer, and an outer SGD of torch."""
    groups = case.together.local_groups or replicas
    copies = [plain_blocks(case) for _ in range(groups)]
    each = replicas // groups
    trained = [[t for t in found.values() if t.requires_grad] for _, found in copies]
    optimizers = [
        torchs(
            case.optimizer,
            [
                {
                    "params": [p for p in mine if p.dim() > 1],
                    "weight_decay": case.optimizer.weight_decay,
                },
                {"params": [p for p in mine if p.dim() == 1], "weight_decay": 0.0},
            ],
        )
        for mine in trained
    ]
    together, outcome = case.together, Outcome([], [], copies[0][1])
    start = [nn.Parameter(p.detach().clone()) for p in trained[0]]
    outer = torch.optim.SGD(
        start,
        lr=together.outer_lr,
        momentum=together.outer_momentum,
        nesterov=together.outer_momentum > 0,
    )
    for step, batch in enumerate(case.batches()):
        losses, squares = 0.0, 0.0
        for group, ((blocks, _), mine) in enumerate(zip(copies, trained)):
            optimizers[group].zero_grad(set_to_none=False)
            rows = own_rows(batch, replicas, range(group * each, (group + 1) * each))
            if rows is not None:
                (x,) = rows.inputs(0, len(rows))
                for block in blocks:
                    x = block(x)
                share = len(rows) / len(batch)
                loss = case.loss(x, rows.targets(0, len(rows))) * share
                (loss * groups).backward()
                losses += loss.item()
            norm = float(nn.utils.clip_grad_norm_(mine, case.optimizer.clip_norm))
            squares += norm * norm / groups
            for settings in optimizers[group].param_groups:
                settings["lr"] = case.optimizer.lr * SCHEDULE.factor(step, STEPS)
            optimizers[group].step()
        outcome.losses.append(losses)
        outcome.norms.append(squares**0.5)
        if (step + 1) % together.sync_every == 0:
            end_round(outer, start, trained)
    return outcome


def end_round(
    outer: torch.optim.Optimizer, start: list[nn.Parameter], trained: Sequence[Sequence[Tensor]]
) -> None:
    with torch.no_grad():
        for parameter, *copies in zip(start, *trained):
            parameter.grad = parameter - torch.stack([*copies]).mean(0)
        outer.step()
        for parameter, *copies in zip(start, *trained):
            for copy in copies:
                copy.copy_(parameter)


@pytest.mark.sampled
@pytest.mark.parametrize("rule", [DILOCO, LOCAL], ids=["diloco", "local"])
@pytest.mark.parametrize("plan", PLANS)
def test_local_steps_are_those_of_plain_torch(pool: Pool, plan: str, rule: ReplicasConfig) -> None:
    case = replace(CASE, together=rule).under(**PLANS[plan])
    expected = plain_rounds(case, PLANS[plan]["replicas"][0])
    compare(pool.run(training, case.world, case), expected, 1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("factory", [gpt(tied=True), gpt(tied=False)], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("groups", "options"),
    [
        (1, {"replicas": (2,)}),
        (2, {"replicas": (4,)}),
        (2, {"replicas": (4,), "shard": True}),
        (2, {"replicas": (4,), "optimizer_offload": 0.5, "tier": "host"}),
        (2, {"replicas": (4,), "optimizer_offload": 1.0, "parameter_offload": 1.0, "tier": "disk"}),
        (1, {"replicas": (2, 2), "schedule": "zb-h1"}),
        (3, {"replicas": (3,)}),
    ],
    ids=str,
)
def test_groups_sum_their_gradients(
    pool: Pool, groups: int, options: dict[str, Any], factory: Callable[[], nn.Module]
) -> None:
    case = replace(CASE, factory=factory, together=replace(DILOCO, groups=groups)).under(**options)
    compare(pool.run(training, case.world, case), plain_rounds(case, options["replicas"][0]), 1e-9)


# Lion steps by the sign of gradients, which for some biases of attention are rounding errors.
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("factory", "optimizer"),
    [
        (gpt(tied=True), AdamWConfig(lr=3e-3, clip_norm=0.5)),
        (gpt(tied=True), SGDConfig(lr=0.01, clip_norm=0.5)),
        (with_unused, AdamWConfig(lr=3e-3, clip_norm=0.5)),
        (with_unused, LionConfig(lr=1e-4)),
    ],
    ids=["adamw-tied", "sgd-tied", "adamw-unused", "lion-unused"],
)
def test_models_and_optimizers(
    pool: Pool, factory: Callable[[], nn.Module], optimizer: OptimizerConfig
) -> None:
    case = replace(CASE, factory=factory, optimizer=optimizer).under((2, 2))
    compare(pool.run(training, 4, case), plain_rounds(case, 2), 1e-9)


def test_a_round_of_one_step_of_sgd_is_data_parallelism(pool: Pool) -> None:
    usual = SGDConfig(lr=0.1, momentum=0.9, clip_norm=0.0)
    exact = replace(CASE, optimizer=usual, together=ReplicasConfig()).under((2, 2))
    expected = pool.run(training, 4, exact)
    for rule in (
        replace(LOCAL, sync_every=1),
        replace(LOCAL, sync_every=1, outer_lr=1 - 1e-16),
    ):
        found = pool.run(training, 4, replace(exact, together=rule))
        for mine, theirs in zip(found, expected):
            assert mine.losses == pytest.approx(theirs.losses, rel=1e-12)
            for name, tensor in mine.weights.items():
                torch.testing.assert_close(tensor, theirs.weights[name], rtol=1e-10, atol=1e-12)


def test_one_replica_with_an_outer_rate_of_one_trains_as_ever(pool: Pool) -> None:
    case = replace(CASE, together=LOCAL).under((1, 1))
    usual = replace(case, together=ReplicasConfig())
    same(pool.run(training, 2, case), pool.run(training, 2, usual))


def test_replicas_exchange_nothing_within_a_round(pool: Pool) -> None:
    case = CASE.under((2,))
    for compress, size in (("none", 8), ("bf16", 2), ("fp16", 2)):
        rule = replace(DILOCO, outer_compress=compress)
        for sent, numbers, all_reduces, differs in pool.run(
            exchanging, 2, replace(case, together=rule)
        ):
            assert all_reduces == 0
            assert differs == [True, False] * 3
            assert sent == 3 * numbers * size


def exchanging(case: Case, *_: Any) -> tuple[int, int, int, list[bool]]:
    """Bytes sent, weights, gradient reductions; after each step, whether replicas have different weights."""
    with tempfile.TemporaryDirectory() as folder:
        engine, differs = case.engine(folder), []
        for batch in case.batches():
            engine.step(batch)
            total = torch.stack([p.detach().double().sum() for p in engine.parameters.values()])
            both = [torch.empty_like(total) for _ in range(2)]
            dist.all_gather(both, total)
            differs.append(not torch.equal(*both))
        numbers = sum(p.numel() for p in engine.parameters.values())
        found = engine.synced_bytes, numbers, engine.all_reduces, differs
        engine.close()
    return found


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, 16), nn.Flatten(), nn.BatchNorm1d(256), nn.Linear(256, 1024), Unflatten()
    )


class Unflatten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), 16, 64)


def statistics(case: Case) -> list[Weights]:
    """The statistics of BatchNorms after each step."""
    with tempfile.TemporaryDirectory() as folder:
        engine, found = case.engine(folder), []
        for batch in case.batches():
            engine.step(batch)
            known = {n: t.clone() for n, t in engine.parameters.items() if "running" in n}
            found.append(known)
        engine.close()
    return found


@pytest.mark.parametrize("groups", ["auto", 2])
def test_statistics_of_batches_are_averaged_with_the_weights(pool: Pool, groups: Any) -> None:
    rule = replace(DILOCO, groups=groups)
    case = replace(CASE, factory=normed, sizes=(8,) * 4, together=rule).under((4,), microbatch=8)
    first, *others = pool.run(statistics, 4, case)
    for step, mine in enumerate(first):
        equal = [all(torch.equal(mine[n], other[step][n]) for n in mine) for other in others]
        assert all(equal) if step % 2 else not any(equal)


def weights_of(case: Case, folder: Path, start: int, steps: int, saves: bool) -> Weights:
    """Load the last checkpoint if there is one, train, and save or return the weights."""
    engine = case.engine(folder)
    paths, _ = engine.checkpoints(folder / "checkpoints")
    if start:
        engine.load(paths[-1])
    for batch in case.batches()[start : start + steps]:
        engine.step(batch)
    if saves:
        engine.save(folder / "checkpoints", {})
    else:
        engine.end_round()
    found = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    engine.close()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {"replicas": (2, 2)},
        {"replicas": (2, 2), "optimizer_offload": 1.0, "tier": "disk"},
        {"replicas": (4,), "shard": True, "groups": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_resumed_run_goes_on_bit_for_bit(
    pool: Pool, tmp_path: Path, options: dict[str, Any], dtype: torch.dtype
) -> None:
    options = dict(options)
    groups = options.pop("groups", "auto")
    case = replace(CASE, dtype=dtype, together=replace(DILOCO, groups=groups)).under(**options)
    expected = pool.run(weights_of, 4, case, tmp_path / "whole", 0, 6, False)
    pool.run(weights_of, 4, case, tmp_path, 0, 4, True)
    found = pool.run(weights_of, 4, case, tmp_path, 4, 2, False)
    for mine, theirs in zip(found, expected):
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.mark.sampled
@pytest.mark.parametrize("replicas", [(1,), (3,), (1, 1)], ids=str)
@pytest.mark.parametrize("rule", [DILOCO, ReplicasConfig()], ids=["local", "synchronous"])
def test_a_run_resumes_with_other_replicas(
    pool: Pool, tmp_path: Path, replicas: tuple[int, ...], rule: ReplicasConfig
) -> None:
    saved = pool.run(weights_of, 2, CASE.under((2,)), tmp_path, 0, 4, True)
    case = replace(CASE, together=rule).under(replicas)
    loaded = pool.run(weights_of, case.world, case, tmp_path, 4, 0, False)
    for found in loaded:
        assert all(torch.equal(tensor, saved[0][name]) for name, tensor in found.items())
    for found in pool.run(weights_of, case.world, case, tmp_path, 4, 2, False):
        assert not any(torch.equal(tensor, saved[0][name]) for name, tensor in found.items())


def within_a_round(case: Case, folder: Path) -> list[str]:
    engine = case.engine(folder)
    batch = case.batches()[0]
    engine.step(batch)
    found = []
    for call in (
        partial(engine.evaluate, batch),
        partial(engine.predict, batch),
        partial(engine.save, folder / "checkpoints", {}),
    ):
        with pytest.raises(ParallaxError) as error:
            call()
        found.append(str(error.value))
    engine.end_round()
    engine.evaluate(batch)
    engine.close()
    return found


def test_nothing_is_read_within_a_round(pool: Pool, tmp_path: Path) -> None:
    for texts in pool.run(within_a_round, 2, CASE.under((2,)), tmp_path):
        assert all("engine.end_round()" in text for text in texts)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"mode": "global"}, "accepted"),
        ({"sync_every": 10}, "add replicas.mode=local"),
        ({"outer_momentum": 0.5}, "add replicas.mode=local"),
        ({"mode": "local", "sync_every": 0}, "sync_every"),
        ({"mode": "local", "outer_momentum": 1.0}, "outer_momentum"),
        ({"mode": "local", "compress": "bf16"}, "outer_compress=bf16"),
        ({"mode": "local", "batchnorm": "sync"}, "batchnorm=replica"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        ReplicasConfig(**settings)


def test_plans_that_local_steps_cannot_run_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan\.replicas=2, or"):
        DILOCO.check_requested(PlanConfig(replicas=[1, 3]))
    with pytest.raises(ConfigError, match=r"plan\.shard=none"):
        DILOCO.check_requested(PlanConfig(shard="optimizer"))
    chain = CASE.chain()
    for options in ({"replicas": (1, 2)}, {"replicas": (2,), "shard": True}):
        with pytest.raises(PlanError, match="plan again"):
            make_plan(chain, local_steps=2, **options)
    with pytest.raises(PlanError, match="rounds of 2 local steps"):
        DILOCO.check(make_plan(chain, replicas=(2,)))
    with pytest.raises(PlanError, match="gradients summed in every step"):
        ReplicasConfig().check(make_plan(chain, replicas=(2,), local_steps=2))
    for changed, way_out in (
        ({"averages": True}, "ema=off"),
        ({"gather_loss": True}, "replicas.mode=synchronous"),
        ({"delays": True}, "trainer.updates=synchronous"),
    ):
        with pytest.raises(ConfigError, match=way_out):
            DILOCO.check_beside(
                **{"averages": False, "gather_loss": False, "delays": False, **changed}
            )


def test_the_first_loss_is_that_of_synchronous_training(pool: Pool) -> None:
    """Up to the first step, and the loss of a step is of the rows of all replicas."""
    case = CASE.under((2,))
    assert pool.run(training, 2, case)[0].losses[0] == pytest.approx(
        plain_training(case).losses[0], rel=1e-12
    )
