"""Asynchronous replicas: each run equals a loop in plain torch that replays which versions its gradients were of."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.runtime.asynchronous import Interval
from parallax.runtime.batch import TensorRows
from parallax.runtime.optim.config import OptimizerConfig
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.runtime.replicas.asynchronous import Use
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
    same,
    training,
    with_unused,
)
from tests.distributed.test_local_steps import own_rows, torchs

FOUR = ReplicasConfig(mode="asynchronous", staleness=4)
ONE = replace(FOUR, staleness=1)
SIZES = (8, 3, 7, 4, 8, 6, 8, 5)
CASE = Case(gpt(tied=False), sizes=SIZES, together=FOUR)
MEETINGS = 3, 8  # the updates at which all ranks meet


class Late(TensorRows):
    """Rows whose reader waits until ``path`` exists, and makes ``own`` exist."""

    def __init__(self, batch: TensorRows, path: Path | None, own: Path | None) -> None:
        super().__init__(batch.inputs(0, len(batch))[0], batch.targets(0, len(batch)))
        self._path, self._own = path, own
        self.row_numbers = 0  # so that the comparison of rows between ranks does not read them

    def inputs(self, start: int, stop: int) -> tuple[Tensor, ...]:
        if self._own is not None:
            self._own.touch()
        while self._path is not None and not self._path.exists():
            time.sleep(0.005)
        if self._path is not None:
            time.sleep(0.1)  # for replicas that do not wait for this one
        return super().inputs(start, stop)


@dataclass
class Trained:
    outcome: Outcome
    uses: list[Use]
    staleness: dict[int, int]
    stage: int
    state_bytes: int


def asynchronously(case: Case, late: Path | None = None) -> Trained:
    """Train between meetings. With ``late``, replica 1 reads its first rows when another replica has begun the last
    update that the staleness allows."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        batches: list[TensorRows] = list(case.batches())
        if late is not None:
            path = late if engine.mesh.replica == 1 else None
            batches = [Late(each, path, None) for each in batches]
            if path is None:
                begun = case.together.staleness
                batches[begun] = Late(batches[begun], None, late)
        results, uses, reported = [], list[Use](), []
        for stop in MEETINGS if late is None else MEETINGS[-1:]:
            waiting = iter(batches[engine.completed_steps + 1 :])
            interval = Interval(
                stop, lambda: next(waiting), lambda: False, lambda *each: reported.append(each)
            )
            results += engine.steps(batches[engine.completed_steps], interval)
            assert engine._shares is not None
            uses += engine._shares.uses
        assert [step for step, _ in reported] == (
            [*range(1, STEPS_HERE + 1)]
            if engine.mesh.replica == 0 and engine.mesh.pipeline_rank == 0
            else []
        )
        weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
        states = engine.tier_bytes()["the optimizer's states"]
        stage, staleness = engine.mesh.pipeline_rank, engine.staleness
        engine.close()
    outcome = Outcome([r.loss for r in results], [r.gradient_norm for r in results], weights)
    return Trained(outcome, uses, staleness, stage, states)


STEPS_HERE = len(SIZES)


def replayed(case: Case, found: Sequence[Trained], replicas: int) -> Outcome:
    """Train one copy of the model, with gradients of the versions that the owners of the stages have used."""
    blocks, tensors = plain_blocks(case)
    owners = [each for each in found if each.uses]
    trained = {name: t for name, t in tensors.items() if t.requires_grad}
    matrices = [p for p in trained.values() if p.dim() > 1]
    others = [p for p in trained.values() if p.dim() == 1]
    optimizer = torchs(
        case.optimizer,
        [
            {"params": matrices, "weight_decay": case.optimizer.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
    )
    versions: list[Weights] = []
    outcome = Outcome([], [], tensors)
    for update, batch in enumerate(case.batches()):
        versions.append({name: p.detach().clone() for name, p in trained.items()})
        sums: dict[str, Tensor] = {}
        losses = 0.0
        for part in range(replicas):
            for owner in owners:
                (use,) = (u for u in owner.uses if u.share == (update, part))
                for name in owner.outcome.weights.keys() & trained.keys():
                    trained[name].data.copy_(versions[use.version][name])
            rows = own_rows(batch, replicas, [part])
            if rows is None:
                continue
            (x,) = rows.inputs(0, len(rows))
            for block in blocks:
                x = block(x)
            loss = case.loss(x, rows.targets(0, len(rows))) * len(rows) / len(batch)
            optimizer.zero_grad()
            loss.backward()
            losses += loss.item()
            for name, p in trained.items():
                if p.grad is not None:
                    known = sums.get(name)
                    sums[name] = p.grad.clone() if known is None else known + p.grad
        for name, p in trained.items():
            p.data.copy_(versions[-1][name])
            p.grad = sums.get(name)
        outcome.losses.append(losses)
        outcome.norms.append(
            float(nn.utils.clip_grad_norm_([*trained.values()], case.optimizer.clip_norm))
        )
        for group in optimizer.param_groups:
            group["lr"] = case.optimizer.lr * SCHEDULE.factor(update, STEPS)
        optimizer.step()
    return outcome


def check(found: Sequence[Trained], case: Case, replicas: int) -> None:
    stages = {each.stage for each in found}
    owners = [each for each in found if each.uses]
    assert {each.stage for each in owners} == stages
    assert len(owners) == len(stages)
    for each in owners:
        shares = Counter(use.share for use in each.uses)
        assert shares == Counter((u, p) for u in range(STEPS_HERE) for p in range(replicas))
        assert all(0 <= use.staleness <= case.together.staleness for use in each.uses)
    for each in found:
        assert sum(each.staleness.values()) == len(stages) * STEPS_HERE * replicas
        assert max(each.staleness) <= case.together.staleness
        assert (each.state_bytes > 0) == bool(each.uses)
    compare([each.outcome for each in found], replayed(case, found, replicas), 1e-9)


PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": (2,)},
    "stages": {"replicas": (2, 2)},
    "three replicas": {"replicas": (3,)},
    "virtual stages": {"replicas": (2, 2), "schedule": "interleaved", "interleave": 2},
    "split backward": {"replicas": (2, 2), "schedule": "zb-h1"},
    "states on the host": {"replicas": (2,), "optimizer_offload": 0.5, "tier": "host"},
    "states on disk": {"replicas": (2, 2), "optimizer_offload": 1.0, "tier": "disk"},
}


@pytest.mark.sampled
@pytest.mark.parametrize("rule", [ONE, FOUR], ids=["1", "4"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_run_is_its_replay_in_plain_torch(pool: Pool, plan: str, rule: ReplicasConfig) -> None:
    case = replace(CASE, together=rule).under(**PLANS[plan])
    check(pool.run(asynchronously, case.world, case), case, PLANS[plan]["replicas"][0])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("factory", "optimizer"),
    [
        (gpt(tied=True), AdamWConfig(lr=3e-3, clip_norm=0.5)),
        (gpt(tied=False), SGDConfig(lr=0.1, momentum=0.9, clip_norm=0.5)),
        (with_unused, AdamWConfig(lr=3e-3, clip_norm=0.5)),
    ],
    ids=["adamw-tied", "sgd", "adamw-unused"],
)
def test_models_and_optimizers(
    pool: Pool, factory: Callable[[], nn.Module], optimizer: OptimizerConfig
) -> None:
    case = replace(CASE, factory=factory, optimizer=optimizer).under((2,))
    check(pool.run(asynchronously, 2, case), case, 2)


@pytest.mark.parametrize("rule", [ONE, FOUR], ids=["1", "4"])
@pytest.mark.parametrize("replicas", [(2,), (2, 2)], ids=str)
def test_a_late_replica_is_waited_for_at_the_bound(
    pool: Pool, tmp_path: Path, replicas: tuple[int, ...], rule: ReplicasConfig
) -> None:
    case = replace(CASE, together=rule, sizes=(8,) * STEPS_HERE).under(replicas)
    found = pool.run(asynchronously, case.world, case, tmp_path / "begun")
    check(found, case, 2)


@pytest.mark.parametrize("replicas", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "optimizer", [AdamWConfig(lr=3e-3), SGDConfig(lr=0.1)], ids=["adamw", "sgd"]
)
def test_without_staleness_replicas_are_synchronous(
    pool: Pool, replicas: tuple[int, ...], optimizer: OptimizerConfig
) -> None:
    case = replace(CASE, optimizer=optimizer, together=replace(FOUR, staleness=0)).under(replicas)
    usual = replace(case, together=ReplicasConfig())
    same(pool.run(training, case.world, case), pool.run(training, case.world, usual))
