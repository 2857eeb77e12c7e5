"""Plans for asynchronous replicas: their shape, and the seconds and bytes of their exchanges."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parallax.plan.cluster import Link
from parallax.plan.config import PlanConfig
from parallax.plan.explained import explain
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.search.search import search
from tests.unit.plan.searched import SIZES, random_case
from tests.unit.plan_fakes import block, cluster, profile


def model(staleness: int = 0, **fields: float) -> ModelProfile:
    blocks = [block(parameter_bytes=1000, largest_bytes=1000) for _ in range(4)]
    return profile(blocks, staleness=staleness, **fields)


@pytest.mark.parametrize("seed", range(8))
def test_every_stage_has_equally_many_replicas(seed: int) -> None:
    r = random.Random(seed)
    costs, machines, rows = random_case(r, *SIZES[seed % len(SIZES)])
    plan, _ = search(
        replace(costs, staleness=2), machines, PlanConfig(), global_batch=rows, spare=True
    )
    assert len({stage.replicas for stage in plan.stages}) == 1
    assert not any(stage.shard_optimizer or stage.parameter_offload for stage in plan.stages)
    assert plan.staleness == 2
    assert Plan.from_dict(plan.to_dict()) == plan


def test_each_replica_exchanges_with_the_owner() -> None:
    machines = cluster(3, link=Link(bytes_per_second=1000.0))
    config = PlanConfig(stages=1, replicas=3)
    plan, _ = search(model(4, synced_bytes=2.0), machines, config, global_batch=3)
    spent = plan.prediction.stages[0].seconds
    assert spent["reduce"] == 0.0
    assert spent["update"] == pytest.approx(2 * 8000 / 1000)
    assert plan.exchanged_bytes == 8000
    assert "3 replicas train on one state" in explain(plan)[0]
    assert "at most 4 updates before" in explain(plan)[0]


def test_the_owner_holds_sums_of_gradients_and_weights_to_send() -> None:
    machines, config = cluster(2), PlanConfig(stages=1, replicas=2)
    exact, _ = search(model(), machines, config, global_batch=2)
    for staleness in (1, 4):
        plan, _ = search(model(staleness), machines, config, global_batch=2)
        summing = [each.prediction.stages[0].memory["summing"] for each in (plan, exact)]
        assert summing[0] - summing[1] == 4000 * (staleness + 2 + 1)
    alone, _ = search(model(4), machines, PlanConfig(stages=2), global_batch=2)
    assert alone.prediction.stages[0].memory["summing"] == 0
