"""Forecasts where not every action is simulated."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from parallax.plan.cluster import Cluster, Link
from parallax.plan.plan import Pipeline
from parallax.plan.schedule import SCHEDULES
from parallax.plan.simulation import predict as predicting
from parallax.plan.simulation.predict import placements, predict
from tests.unit.plan.simulated import DRAINING
from tests.unit.plan_fakes import block, cluster, profile, stages

MODEL = [
    block(f"b{i}", 1.0 + i % 3, 2.0 + i % 2, weight_seconds=1.0, input=4, output=4)
    for i in range(8)
]


def pipeline(
    schedule: str, pipeline_ranks: int, rows: int, interleave: int = 1, replicas: int = 1
) -> Pipeline:
    count = pipeline_ranks * interleave
    bounds = [8 * s // count for s in range(count + 1)]
    return Pipeline(
        schedule=SCHEDULES[schedule],
        stages=tuple(stages(bounds, [replicas] * count)),
        global_batch=rows,
        microbatch=replicas,
        interleave=interleave,
        placement=tuple(range(pipeline_ranks * replicas)),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline_ranks", [2, 4])
def test_very_many_micro_batches_take_what_all_of_them_would(
    schedule: str, pipeline_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicting, "SIMULATED_BLOCKS", 0)
    requested = pipeline(
        schedule, pipeline_ranks, 100 * pipeline_ranks, 1 + SCHEDULES[schedule].allows(2)
    )
    whole = predict(profile(MODEL), cluster(pipeline_ranks), requested)
    monkeypatch.setattr(predicting, "MANY_MICRO_BATCHES", 10)
    short = predict(profile(MODEL), cluster(pipeline_ranks), requested)
    assert short.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
    assert short.bubble == pytest.approx(whole.bubble, abs=1e-9)


@pytest.mark.parametrize("schedule", [each.name for each in DRAINING])
@pytest.mark.parametrize("replicas", [1, 2])
def test_timed_and_simulated_agree_where_nothing_is_shared(
    schedule: str, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = pipeline(schedule, 4, 8 * replicas, 1 + SCHEDULES[schedule].allows(2), replicas)
    machines = cluster(4 * replicas, link=Link(bytes_per_second=100.0))
    simulated = predict(profile(MODEL), machines, requested)
    monkeypatch.setattr(predicting, "SIMULATED_BLOCKS", 0)
    timed = predict(profile(MODEL), machines, requested)
    assert simulated.spans
    assert not timed.spans
    assert timed.step_seconds == pytest.approx(simulated.step_seconds, rel=1e-6)
    assert [rank.budget_bytes for rank in timed.ranks] == [
        rank.budget_bytes for rank in simulated.ranks
    ]
    for ours, theirs in zip(timed.ranks, simulated.ranks):
        assert ours.peak_bytes >= theirs.peak_bytes
    for terms in timed.stages:
        assert math.isclose(sum(terms.seconds.values()), timed.step_seconds, rel_tol=1e-4)


def test_replicas_that_reduce_much_stand_on_one_node() -> None:
    """Two nodes of two: with large parameters the replicas of a stage share a node, with large activations the stages
    of a replica do."""
    node = cluster(2).nodes[0]
    machines = Cluster(
        nodes=(node, replace(node, name="other")),
        local=Link(bytes_per_second=1e4),
        remote=Link(bytes_per_second=1e2),
    )
    requested = pipeline("1f1b", 2, 8, replicas=2)
    heavy = profile([replace(cost, parameter_bytes=10**5) for cost in MODEL])
    chatty = profile(
        [replace(cost, input=replace(cost.input, per_row=5e3), output=cost.input) for cost in MODEL]
    )
    chatty = profile(
        [replace(cost, output=replace(cost.output, per_row=5e3)) for cost in chatty.blocks]
    )
    for costs, order in ((heavy, (0, 1, 2, 3)), (chatty, (0, 2, 1, 3))):
        fastest = min(
            placements(machines, requested),
            key=lambda placed: predict(costs, machines, placed).step_seconds,
        )
        assert fastest.placement == order


def test_random_orders_of_devices_predict_every_rank_once() -> None:
    order = list(range(8))
    random.Random(3).shuffle(order)
    requested = replace(pipeline("1f1b", 4, 16, replicas=2), placement=tuple(order))
    machines = cluster(8)
    found = predict(profile(MODEL), machines, requested)
    assert len(found.ranks) == 8
    assert len(found.stages) == 4
