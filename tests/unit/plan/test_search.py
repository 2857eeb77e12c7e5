"""What the search chooses: boundaries, replicas, placement and schedules, as requested or on its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallax.errors import ConfigError
from parallax.plan.cluster import Cluster, Link
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Directive, Plan, StagePlan
from parallax.plan.profile import BlockCost, ModelProfile
from parallax.plan.search.search import describe, search
from parallax.plan.task import PlanTask
from tests.unit.plan.searched import check, layers, two_kinds
from tests.unit.plan_fakes import block, cluster, pipeline, profile


def test_five_equal_blocks_on_four_stages_leave_none_empty() -> None:
    plan, _ = search(layers(5), cluster(4), PlanConfig(stages=4), global_batch=8)
    assert sorted(stage.stop - stage.start for stage in plan.stages) == [1, 1, 1, 2]


def test_forty_two_layers_on_sixteen_stages_balance_embedding_and_head() -> None:
    """A user's report: with equal numbers of layers, the stage of the head was half as slow again as the others."""
    ends = [block("embedding", 4e-4, 4e-4), block("head", 15e-4, 30e-4)]
    model = profile([ends[0], *layers(42, parameter_bytes=10**6).blocks, ends[1]])
    plan, _ = search(model, cluster(16), PlanConfig(stages=16), global_batch=64, microbatch=1)
    times = [
        sum(b.forward_seconds.at(1) + b.backward_seconds.at(1) for b in part)
        for part in partition(model, plan)
    ]
    # Three layers; the head's stage holds one layer beside it.
    assert max(times) == pytest.approx(9e-3)
    assert min(stage.stop - stage.start for stage in plan.stages) >= 1


def partition(model: ModelProfile, plan: Plan) -> list[tuple[BlockCost, ...]]:
    return [model.blocks[stage.start : stage.stop] for stage in plan.stages]


def test_two_kinds_of_devices_get_what_they_can_do() -> None:
    plan, _ = search(
        layers(9, parameter_bytes=10**5), two_kinds(1, 2), PlanConfig(replicas=1), global_batch=32
    )
    held = {
        rank: stage.stop - stage.start
        for s, stage in enumerate(plan.stages)
        for rank in plan.ranks(s)
    }
    assert sorted(held.values()) == [2, 3, 4] or held[0] < min(held[1], held[2])
    assert held[0] == 2 or held[0] == 1
    check(plan, two_kinds(1, 2))


@pytest.mark.parametrize("blocks", [5, 40])
def test_a_heavy_end_goes_to_the_larger_devices(blocks: int) -> None:
    """The first block alone needs more than the small device has, and the small one is first in the list."""
    model = profile(
        [
            replace(layers(1).blocks[0], parameter_bytes=15 * 10**6),
            *layers(blocks, parameter_bytes=10**5).blocks,
        ]
    )
    machines = two_kinds(1, 1)
    plan, _ = search(model, machines, PlanConfig(stages=2), global_batch=8, microbatch=1)
    assert plan.ranks(0) == (1,)
    assert plan.placement == (1, 0)
    check(plan, machines)


@pytest.mark.parametrize(
    ("config", "stages", "replicas"),
    [
        ({"stages": 2}, 2, None),
        ({"replicas": 2}, 2, (2, 2)),
        ({"stages": 1}, 1, (4,)),
        ({"replicas": [1, 3]}, 2, (1, 3)),
        ({"replicas": (3, 1), "stages": 2}, 2, (3, 1)),
        ({"replicas": 1}, 4, (1, 1, 1, 1)),
    ],
)
@pytest.mark.parametrize(
    ("schedule", "activations"),
    [
        *(("auto", "auto"), ("gpipe", "offload"), ("1f1b", "recompute"), ("auto", "keep")),
        *(
            pytest.param(*pair, marks=pytest.mark.thorough)
            for pair in (
                *(("auto", "offload"), ("auto", "recompute"), ("gpipe", "auto"), ("gpipe", "keep")),
                *(("gpipe", "recompute"), ("1f1b", "auto"), ("1f1b", "keep"), ("1f1b", "offload")),
            )
        ),
    ],
)
def test_requested_settings_are_respected(
    config: dict[str, Any],
    stages: int,
    replicas: tuple[int, ...] | None,
    schedule: str,
    activations: str,
) -> None:
    machines = cluster(4, write=Link(bytes_per_second=1e9))
    plan, _ = search(
        layers(5),
        machines,
        PlanConfig(**config, schedule=schedule, activations=activations),
        global_batch=8,
    )
    assert plan.pipeline_ranks == stages
    assert (
        replicas is None
        or tuple(stage.replicas for stage in plan.stages[: plan.pipeline_ranks]) == replicas
    )
    assert schedule in ("auto", plan.schedule.name)
    assert activations in ("auto", *{str(d) for stage in plan.stages for d in stage.directives})
    check(plan, machines)


def test_devices_that_differ() -> None:
    small, large = (
        cluster(1, 10**8, reserve=10),
        cluster(1, 12 * 10**7, reserve=5 * 10**7, tier=2 * 10**6),
    )
    both = Cluster(nodes=(*small.nodes, *large.nodes), local=small.local, remote=small.remote)
    plan, _ = search(layers(6, parameter_bytes=10**6), both, PlanConfig(), global_batch=8)
    for rank, device in zip(plan.prediction.ranks, both.devices):
        assert rank.peak_bytes <= device.memory_bytes
    assert all(stage.tier_bytes <= 2 * 10**6 for stage in plan.stages)


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.thorough
def test_many_blocks_on_many_devices(distinct: bool) -> None:
    """The greedy rule's plan fits, uses every device, and is within its printed gap of the bound."""
    model = layers(60, 7 if distinct else None, weight_seconds=1e-3)
    node = cluster(8, 90 * 10**6, write=Link(bytes_per_second=1e9)).nodes[0]
    machines = Cluster(
        nodes=tuple(replace(node, name=f"n{i}") for i in range(8)),
        local=Link(bytes_per_second=1e10),
        remote=Link(bytes_per_second=1e9),
    )
    plan, simulation = search(model, machines, PlanConfig(), global_batch=256)
    check(plan, machines)
    assert not plan.exact or plan.bound_seconds == pytest.approx(
        plan.prediction.step_seconds, rel=0.2
    )
    assert 0 < plan.bound_seconds <= plan.prediction.step_seconds < 2 * plan.bound_seconds
    assert sorted(rank for s in range(plan.pipeline_ranks) for rank in plan.ranks(s)) == list(
        range(64)
    )
    assert len(plan.alternatives) > 1
    assert simulation.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-3)


def test_an_aborted_search_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallax.plan.search.exact_stage.FRONT", 0)
    model, machines = (
        layers(6, 5, parameter_bytes=10**6),
        cluster(1, 38 * 10**6, write=Link(bytes_per_second=1e8)),
    )
    plan, _ = search(model, machines, PlanConfig(), global_batch=8, microbatch=4)
    assert not plan.exact
    assert plan.bound_seconds < plan.prediction.step_seconds
    check(plan, machines)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_every_schedule_can_be_requested_and_run(schedule: str) -> None:
    model = layers(8, weight_seconds=1e-3)
    plan, _ = search(model, cluster(2), PlanConfig(schedule=schedule, stages=2), global_batch=16)
    assert plan.schedule.name == schedule
    shares = plan.schedule.has_virtual_stages
    assert (plan.interleave > 1) == shares
    if shares:
        config = PlanConfig(schedule=schedule, stages=2, activations="offload")
        offloading, _ = search(model, cluster(2), config, global_batch=16)
        assert all(stage.offloads for stage in offloading.stages)
        check(offloading, cluster(2))
    if plan.schedule.splits:
        with pytest.raises(
            ConfigError, match=r"does not measure the gradients of parameters separately"
        ):
            search(layers(8), cluster(2), PlanConfig(schedule=schedule), global_batch=16)


def test_a_small_bubble_is_chosen_where_messages_are_free() -> None:
    model, machines = layers(8, weight_seconds=1e-3), cluster(4)
    config = PlanConfig(stages=4)
    plan, _ = search(model, machines, config, global_batch=8, microbatch=1)
    assert plan.schedule.name.startswith("zb")
    best, _ = search(
        model, machines, replace(config, schedule="1f1b"), global_batch=8, microbatch=1
    )
    assert plan.prediction.step_seconds < best.prediction.step_seconds


@pytest.mark.parametrize(("weights", "replicas"), [((1, 1, 4), (1, 2)), ((4, 1, 1), (2, 1))])
def test_uneven_replicas_beat_every_even_plan_where_a_stage_is_twice_as_heavy(
    weights: tuple[int, ...], replicas: tuple[int, ...]
) -> None:
    """A block that takes twice as long as the two others, which have most of the parameters, on three ranks. One stage
    of three replicas has to add up all gradients, and three stages cannot be balanced."""
    size = {1: 2 * 10**8, 4: 10**7}
    model = profile(
        [
            block(f"b{i}", 1e-2 * w, 2e-2 * w, parameter_bytes=size[w], input=1e5, output=1e5)
            for i, w in enumerate(weights)
        ]
    )
    machines = cluster(3, link=Link(bytes_per_second=3e8, latency_seconds=1e-4))
    plan, forecast = search(model, machines, PlanConfig(), global_batch=24)
    assert tuple(stage.replicas for stage in plan.stages) == replicas
    for even in ({"stages": 1}, {"replicas": 1}):
        other = search(model, machines, PlanConfig(**even), global_batch=24)[1]
        assert forecast.step_seconds < 0.95 * other.step_seconds


def test_a_line_names_the_directives_of_training_and_the_parameters_that_forwards_fetch() -> None:
    kept, moved = Directive.KEEP, Directive.OFFLOAD
    stages = [
        StagePlan(start=0, stop=2, replicas=2, directives=(kept, moved), parameter_offload=0.25),
        StagePlan(start=2, stop=3, replicas=1, directives=(moved,), optimizer_offload=0.5),
    ]
    training = pipeline(stages)
    shape = "1f1b, 2 stages × [2, 1] replicas, 4 micro-batches of 1"
    assert describe(training) == (
        f"{shape}, keep 1, offload 2, up to 50% of optimizer states offloaded"
    )
    states = replace(stages[1], optimizer_offload=0.0)
    forwards = replace(training, stages=(stages[0], states), task=PlanTask.EVALUATION)
    assert describe(forwards) == f"{shape}, up to 25% of parameters offloaded"


def test_states_may_be_sharded_where_a_stage_has_one_replica() -> None:
    """That stage has nothing to shard. With so many blocks the search is greedy."""
    config = PlanConfig(stages=2, replicas=[2, 1], shard="optimizer")
    plan, _ = search(layers(120, parameter_bytes=10**6), cluster(3), config, global_batch=8)
    assert [(stage.replicas, stage.start, stage.stop) for stage in plan.stages] == [
        (2, 0, 83),
        (1, 83, 120),
    ]
