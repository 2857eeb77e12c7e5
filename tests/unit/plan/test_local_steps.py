"""Plans with local steps: equally many replicas of every stage, with all states, that exchange weights once in a
round."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from parallax.common.units import plural
from parallax.plan.cluster import Link
from parallax.plan.config import PlanConfig
from parallax.plan.cost.collective import all_reduce_seconds
from parallax.plan.cost.states import Sizes, load_states
from parallax.plan.explained import explain
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.search.search import search
from parallax.runtime.optim.builder import OptimizerBuilder
from parallax.runtime.optim.kinds.sgd import SGDConfig
from tests.unit.plan.searched import SIZES, random_case
from tests.unit.plan_fakes import block, cluster, profile


def model(local_steps: int = 0, **fields: float) -> ModelProfile:
    blocks = [block(parameter_bytes=1000, largest_bytes=1000) for _ in range(4)]
    return profile(blocks, local_steps=local_steps, **fields)


@pytest.mark.parametrize("seed", range(12))
def test_every_stage_has_equally_many_replicas(seed: int) -> None:
    r = random.Random(seed)
    costs, machines, rows = random_case(r, *SIZES[seed % len(SIZES)])
    plan, _ = search(
        replace(costs, local_steps=5), machines, PlanConfig(), global_batch=rows, spare=True
    )
    assert len({stage.replicas for stage in plan.stages}) == 1
    assert not any(stage.shard_optimizer for stage in plan.stages)
    assert plan.local_steps == 5
    assert Plan.from_dict(plan.to_dict()) == plan


def test_weights_are_exchanged_once_in_a_round() -> None:
    slow = Link(bytes_per_second=1000.0)
    machines, config = cluster(2, link=slow), PlanConfig(stages=1, replicas=2)
    exact, _ = search(model(), machines, config, global_batch=2)
    whole = all_reduce_seconds(4000, (0, 1), machines)
    assert whole == 4.0
    for steps in (1, 10, 50):
        plan, _ = search(model(steps), machines, config, global_batch=2)
        spent = plan.prediction.stages[0].seconds
        assert spent["update"] == pytest.approx(whole / steps)
        assert plan.exchanged_bytes == 4000 / steps
        assert spent["reduce"] == 0.0
        assert f"takes {plural(steps, 'step')} by itself" in explain(plan)[0]
        # A synchronous step hides its sum behind a backward of 8 s.
        assert plan.prediction.step_seconds == exact.prediction.step_seconds + whole / steps
    halved, _ = search(model(10, synced_bytes=0.5), machines, config, global_batch=2)
    assert halved.exchanged_bytes == 200


def test_steps_hide_the_exchange_of_a_fragment() -> None:
    """Over a link on which the weights take 400 s, beside steps of 24 s: two rows through four blocks of 3 s."""
    slow = Link(bytes_per_second=10.0)
    machines, config = cluster(2, link=slow), PlanConfig(stages=1, replicas=2)
    for fragments, delay, exposed in (
        (1, 0, 400),
        (4, 0, 400),
        (4, 2, 4 * (100 - 2 * 12)),
        (1, 40, 0),
        (4, 5, 4 * (100 - 5 * 12)),
        (4, 9, 0),
        (20, 9, 400 - 40 * 12 if 400 > 40 * 12 else 0),
    ):
        costs = model(40, fragments=fragments, fragment_delay=delay)
        plan, _ = search(costs, machines, config, global_batch=2)
        assert plan.exchanged_bytes == 100
        assert plan.prediction.stages[0].seconds["update"] == pytest.approx(exposed / 40)
        assert Plan.from_dict(plan.to_dict()) == plan
    text = explain(plan)[0]
    assert "one of 20 fragments at a time, during 9 more steps" in text


@pytest.mark.parametrize("seed", range(20))
def test_copies_under_way_are_counted(seed: int) -> None:
    """For the parameters of any stage, which the whole model's division gives to fragments."""
    r = random.Random(seed)
    sizes = [r.choice((1, 10, 100, 1000)) * r.randint(1, 9) for _ in range(r.randint(1, 40))]
    count, every, delay = r.randint(1, 5), 20, r.randint(1, 19)
    named = {f"p{n}": nn.Parameter(torch.empty(size)) for n, size in enumerate(sizes)}
    division = OptimizerBuilder.over(SGDConfig(lr=1.0), named).groups.fragments(count)
    blocks = [block(parameter_bytes=4 * size, largest_bytes=4 * size) for size in sizes]
    costs = profile(blocks, local_steps=every, fragments=count, fragment_delay=delay)
    start = r.randrange(len(sizes))
    stop = r.randint(start + 1, len(sizes))
    held = [0] * count
    for number in range(start, stop):
        held[division[f"p{number}"]] += 4 * sizes[number]
    begun = [(k + 1) * every // count for k in range(count)]
    most = max(
        sum(held[k] for k in range(count) if (step - begun[k]) % every < delay)
        for step in range(every)
    )
    device = cluster(1).devices[0]
    found = load_states(costs, Sizes.of(costs, start, stop), device).exchange_bytes
    assert 2 * most <= found <= 2 * sum(held)


def test_replicas_are_preferred_where_the_link_is_slow() -> None:
    """Over a link that makes summed gradients dearer than any pipeline."""
    slow = Link(bytes_per_second=30.0)
    exact, _ = search(model(), cluster(2, link=slow), PlanConfig(), global_batch=4)
    local, _ = search(model(100), cluster(2, link=slow), PlanConfig(), global_batch=4)
    assert exact.pipeline_ranks == 2
    assert [stage.replicas for stage in local.stages] == [2]
    assert local.prediction.step_seconds < exact.prediction.step_seconds


def test_offloaded_states_are_whole_on_each_replica() -> None:
    machines = cluster(2, tier_name="host", host_update_seconds=1e-9)
    config, bytes_of = PlanConfig(stages=1, replicas=2), {}
    for steps in (0, 10):
        costs = replace(model(steps), optimizer_seconds=1e-9)
        plan, _ = search(costs, machines, replace(config, optimizer="host"), global_batch=2)
        bytes_of[steps] = plan.stages[0].state_bytes
    assert bytes_of[0] < bytes_of[10]
    assert bytes_of[10] >= 2 * 4000
