"""Faults that a search could have without anyone noticing: plans that do not fit, fixes that do not work, bad input."""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from parallax.errors import ConfigError, InfeasiblePlan, ParallaxError, PlanError
from parallax.plan.cluster import Cluster, Device, Link, Node
from parallax.plan.config import PlanConfig
from parallax.plan.cost.collective import all_reduce_seconds
from parallax.plan.cost.stage import StageLoad, load_planned, rank_memory
from parallax.plan.plan import Directive, Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.search.exact_stage import StageSetting, evaluate_stage
from parallax.plan.search.request import Request, Shape
from parallax.plan.search.search import search
from tests.unit.plan.searched import SIZES, layers, random_case
from tests.unit.plan_fakes import FREE, block, cluster, profile


def some(default: int, thorough: int) -> list[Any]:
    """So many seeds by default, and the others for the thorough tests."""
    more = (pytest.param(seed, marks=pytest.mark.thorough) for seed in range(default, thorough))
    return [*range(default), *more]


def check_fits(plan: Plan, model: ModelProfile, machines: Cluster) -> None:
    """Every device is used once, and its bytes, counted again from the profile, are within its memory and its tier."""
    used = [
        rank for pipeline_rank in range(plan.pipeline_ranks) for rank in plan.ranks(pipeline_rank)
    ]
    assert sorted(used) == list(range(len(machines.devices)))
    micro_batches = plan.micro_batches(plan.global_batch)
    stages = dict[int, list[tuple[StageLoad, int, int]]]()
    for index, stage in enumerate(plan.stages):
        rows = -(-plan.microbatch // stage.replicas)
        count = len(plan.stages)
        in_flight = plan.schedule.in_flight(count, index, micro_batches, plan.interleave)
        for rank in plan.ranks(index):
            device = machines.devices[rank]
            load = load_planned(
                model,
                stage,
                rows,
                device=device,
                split=plan.schedule.splits,
                visits=plan.visits(index),
                boundaries_held=plan.boundaries_held,
            )
            stages.setdefault(rank, []).append((load, in_flight, stage.swap_limit_bytes))
            assert sum(rank_memory(stages[rank]).values()) <= device.memory_bytes
            assert stage.tier_bytes + load.host_state_bytes <= device.tier_bytes
            assert not stage.offloads or stage.swap_limit_bytes >= load.smallest_swap_limit


def with_memory(machines: Cluster, memory: int) -> Cluster:
    nodes = [
        replace(n, devices=tuple(replace(d, memory_bytes=memory) for d in n.devices))
        for n in machines.nodes
    ]
    return replace(machines, nodes=tuple(nodes))


def odd_case(r: random.Random) -> tuple[ModelProfile, Cluster, PlanConfig, dict[str, Any]]:
    """Ties over any blocks, gaps of both sorts, several nodes, replicas or stages or directives that are given."""
    blocks, devices = r.choice(SIZES[:11])
    model, machines, batch = random_case(r, blocks, devices)
    device = replace(
        machines.devices[0],
        gap_tensors=r.choice([0, 1.5, 3]),
        gap_limit=r.choice([0.1, 0.5, 1]),
        gap_share=r.choice([0, 0.07, 0.3]),
        reserve_bytes=50,
    )
    ends = [0, *sorted(r.sample(range(1, devices), r.randrange(min(devices, 3)))), devices]
    nodes = [
        Node(name=f"n{a}", devices=(device,) * (b - a), concurrent=2)
        for a, b in itertools.pairwise(ends)
    ]
    if blocks > 1 and r.random() < 0.5:
        users = tuple(sorted(r.sample(range(blocks), r.randrange(2, blocks + 1))))
        trained, frozen = (
            min(getattr(model.blocks[user], kind) for user in users) // 2
            for kind in ("trained_bytes", "frozen_bytes")
        )
        model = replace(
            model,
            ties=((trained, users),) if trained else (),
            frozen_ties=((frozen, users),) if frozen else (),
        )
    else:
        model = replace(model, ties=(), frozen_ties=())
    stages = r.randrange(1, min(blocks, devices) + 1)
    bounds = [0, *sorted(r.sample(range(1, devices), stages - 1)), devices]
    requested: dict[str, Any] = r.choice(
        [{}, {"stages": stages}, {"replicas": [b - a for a, b in itertools.pairwise(bounds)]}]
    )
    config = PlanConfig(**requested, activations=r.choice(["auto", "keep", "offload", "recompute"]))
    options = {
        "global_batch": batch,
        "microbatch": r.choice(["auto", 1, 2, 5]),
    }
    remote = Link(bytes_per_second=10 ** r.uniform(1, 4))
    return model, replace(machines, nodes=tuple(nodes), remote=remote), config, options


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(30, 240))
def test_plans_fit_and_fixes_are_the_smallest_that_work(seed: int) -> None:
    model, machines, config, options = odd_case(random.Random(seed))
    refusal = refused(model, machines, config, options)
    if refusal is None:
        check_fits(search(model, machines, config, **options)[0], model, machines)
        return
    found = re.search(r"\(([\d,]+) bytes more\)", refusal)
    if found is None:
        assert "in tier" in refusal
        assert refused(model, with_memory(machines, 10**15), config, options)
        return
    needed = machines.devices[0].memory_bytes + int(found[1].replace(",", ""))
    enough = with_memory(machines, needed)
    check_fits(search(model, enough, config, **options)[0], model, enough)
    assert refused(model, with_memory(machines, needed - 1), config, options)
    rows = re.search(r"trainer.microbatch=(\d+)", refusal)
    assert rows is None or not refused(
        model, machines, config, {**options, "microbatch": int(rows[1])}
    )


def refused(
    model: ModelProfile, machines: Cluster, config: PlanConfig, options: dict[str, Any]
) -> str | None:
    """The message of the refusal; None where there is a plan."""
    try:
        search(model, machines, config, **options)
    except InfeasiblePlan as error:
        return str(error)
    return None


def mixed_cluster(r: random.Random, machines: Cluster, devices: int) -> Cluster:
    """Two kinds of devices, in any order, over two nodes."""
    base = machines.devices[0]
    kinds = [
        replace(
            base,
            memory_bytes=int(base.memory_bytes * r.uniform(0.7, 1.5)),
            speed=r.choice([0.3, 1.0, 2.0]),
            gap_share=r.choice([0, 0.1]),
            reserve_bytes=r.choice([0, 300]),
        )
        for _ in range(2)
    ]
    chosen, boundary = [r.choice(kinds) for _ in range(devices)], r.randrange(1, devices)
    nodes = (
        Node(name="a", devices=tuple(chosen[:boundary]), concurrent=r.choice([0.5, 1, 100])),
        Node(name="b", devices=tuple(chosen[boundary:]), concurrent=100),
    )
    return replace(machines, nodes=nodes)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(15, 120))
def test_plans_for_devices_that_differ_fit(seed: int) -> None:
    r = random.Random(seed)
    blocks, devices = r.choice([(3, 2), (3, 3), (4, 3), (3, 4)])
    model, machines, batch = random_case(r, blocks, devices)
    mixed = mixed_cluster(r, machines, devices)
    try:
        plan, _ = search(model, mixed, PlanConfig(), global_batch=batch)
    except InfeasiblePlan:
        return
    check_fits(plan, model, mixed)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(15, 120))
def test_no_pipeline_scores_below_the_bound_of_its_shape(seed: int) -> None:
    """Pipelines drawn at random, over devices of different speeds, under every schedule."""
    r = random.Random(seed)
    blocks, devices = r.randrange(2, 9), r.randrange(2, 7)
    model, machines, _ = random_case(r, blocks, devices)
    mixed = mixed_cluster(r, with_memory(machines, 10**9), devices)
    schedule = "auto" if any(cost.weight_seconds.at(1) for cost in model.blocks) else "1f1b"
    request = Request(model, mixed, PlanConfig(schedule=schedule), global_batch=r.randrange(1, 40))
    for shape in request.shapes():
        for _ in range(5):
            assert random_score(r, request, shape) >= shape.bound[0]


def random_score(r: random.Random, request: Request, shape: Shape) -> float:
    """The formula for random bounds, replicas and directives of a shape."""
    blocks, devices = len(request.profile.blocks), len(request.devices)
    stages = shape.pipeline_ranks * shape.interleave
    bounds = [0, *sorted(r.sample(range(1, blocks), stages - 1)), blocks]
    ends = [0, *sorted(r.sample(range(1, devices), shape.pipeline_ranks - 1)), devices]
    times, tails, work = [], [], 0.0
    for pipeline_rank, (first, stop) in enumerate(itertools.pairwise(ends)):
        seconds = tail = 0.0
        where = StageSetting(stop - first, -(-shape.microbatch // (stop - first)), 1)
        for stage in range(pipeline_rank, stages, shape.pipeline_ranks):
            directives = tuple(
                r.choice(list(Directive)) for _ in range(bounds[stage + 1] - bounds[stage])
            )
            device = replace(request.device(first, stop), tier_bytes=10**12)
            choice = evaluate_stage(
                request.profile, device, bounds[stage], directives, where, request.host_states[0]
            )
            assert choice is not None
            seconds, tail = seconds + choice.seconds, tail + choice.tail_seconds
            gradients = choice.trained_bytes * request.profile.gradient_bytes
            tail += all_reduce_seconds(gradients, request.order[first:stop], request.cluster)
        times.append(seconds)
        tails.append(tail)
        work += seconds * (stop - first)
    return request.score(shape, max(times), sum(times), max(tails), work)[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda: cluster(2, 0),
        lambda: cluster(2, tier=-1),
        lambda: cluster(0),
        lambda: cluster(2, link=Link(bytes_per_second=0)),
        lambda: cluster(2, link=Link(bytes_per_second=math.nan)),
        lambda: cluster(2, write=Link(bytes_per_second=math.inf)),
        lambda: cluster(2, write=Link(bytes_per_second=1e9, latency_seconds=-1)),
        lambda: cluster(2, speed=0.0),
        lambda: cluster(2, gap_share=1.0),
        lambda: cluster(2, gap_tensors=math.nan),
        lambda: cluster(2, gap_limit=-1),
        lambda: cluster(2, reserve=-1),
        lambda: profile([]),
        lambda: profile([block(forward=math.nan)]),
        lambda: profile([block(backward=-1)]),
        lambda: profile([block(parameter_bytes=10)] * 2, ties=((10, (0, 2)),)),
        lambda: profile([block(parameter_bytes=10)] * 2, ties=((10, (1, 1)),)),
        lambda: profile([block(parameter_bytes=10)], optimizer_bytes=math.inf),
    ],
)
def test_machines_and_profiles_that_cannot_be(change: Any) -> None:
    with pytest.raises(PlanError):
        change()


@pytest.mark.parametrize("replicas", [[0, 2], [2, -2], [1.0, 1], [True, 1], ["1", 1], 0, "two"])
def test_replicas_that_are_no_counts(replicas: Any) -> None:
    with pytest.raises(ConfigError, match=r"plan.replicas="):
        PlanConfig(replicas=replicas)


@pytest.mark.parametrize(
    "config", [{"replicas": [1]}, {"replicas": [1, 1, 1]}, {"replicas": []}, {"stages": 10**9}]
)
def test_replicas_and_stages_that_do_not_add_up(config: dict[str, Any]) -> None:
    with pytest.raises(InfeasiblePlan, match=r"does not use 2 device\(s\)"):
        search(layers(4), cluster(2), PlanConfig(**config), global_batch=8)


@pytest.mark.parametrize("scale", [1e-9, 0.0, 1e6])
@pytest.mark.parametrize("memory", [10**9, 2**60, 10**30])
def test_numbers_of_any_size(scale: float, memory: int) -> None:
    blocks = [
        block(f"b{i}", scale, 2 * scale, parameter_bytes=100, moved=i * 1000) for i in range(4)
    ]
    model, machines = profile(blocks), cluster(2, memory)
    plan, _ = search(model, machines, PlanConfig(), global_batch=8)
    check_fits(plan, model, machines)
    assert plan.prediction.step_seconds == pytest.approx(12 * scale * 8 / 2, rel=0.5, abs=1e-6)


def test_more_rows_than_a_micro_batch_can_have() -> None:
    plan, _ = search(layers(2), cluster(2), PlanConfig(), global_batch=3, microbatch=100)
    assert plan.microbatch == 3


@pytest.mark.parametrize("interleave", [3, 100])
def test_interleaving_more_than_the_blocks_allow_is_refused(interleave: int) -> None:
    with pytest.raises(ParallaxError) as error:
        search(layers(4), cluster(2), PlanConfig(interleave=interleave), global_batch=8)
    assert "\n" not in str(error.value)


def one_of(memory: int) -> Device:
    return cluster(1, memory).devices[0]


def test_the_smaller_of_two_devices_decides_for_a_pipeline_rank_of_both() -> None:
    """Replicas of one stage hold the same bytes."""
    node = Node(name="n", devices=(one_of(10**9), one_of(2 * 10**7)), concurrent=2)
    model = layers(1, moved=1e6, parameter_bytes=10**5)
    machines = Cluster(nodes=(node,), local=FREE, remote=FREE)
    plan, _ = search(model, machines, PlanConfig(), global_batch=32)
    check_fits(plan, model, machines)
    assert all(rank.peak_bytes <= 2 * 10**7 for rank in plan.prediction.ranks)


def test_interleaving_needs_even_pipeline_ranks() -> None:
    with pytest.raises(InfeasiblePlan, match=r"3 cannot be divided by 2: use cluster.devices=2"):
        search(layers(8), cluster(3), PlanConfig(stages=2, schedule="interleaved"), global_batch=8)
