"""The search against every plan there is, on small cases."""

from __future__ import annotations

import functools
import math
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError, InfeasiblePlan
from parallax.plan.cluster import Cluster, Link
from parallax.plan.config import PlanConfig
from parallax.plan.cost.stage import load_block
from parallax.plan.cost.traffic import TIER_FLOOR
from parallax.plan.plan import Directive, Plan, StagePlan
from parallax.plan.profile import Affine, BlockCost, ModelProfile
from parallax.plan.search.exact_stage import ExactStageFitter, Flight
from parallax.plan.search.request import Request
from parallax.plan.search.search import CANDIDATES, SearchResult, find_candidates, search
from tests.unit.plan.brute_force import brute_force
from tests.unit.plan_fakes import FREE, block, cluster, profile

SIZES = [
    (1, 1),
    (2, 2),
    (2, 3),
    (3, 2),
    (3, 4),
    (4, 2),
    (4, 3),
    (4, 4),
    (5, 2),
    (5, 3),
    (6, 2),
    (6, 4),
    (8, 2),
    (8, 4),
]
CASES = 120  # of a thousand


def random_case(r: random.Random, count: int, devices: int) -> tuple[ModelProfile, Cluster, int]:
    blocks: list[Any] = []
    for i in range(count):
        if blocks and r.random() < 0.3:
            blocks.append(r.choice(blocks))
            continue
        line = lambda top: Affine(r.choice([0, r.uniform(0, top)]), r.uniform(0, top))  # noqa: E731
        backward, size = r.uniform(0.1, 4), r.randrange(1, 300)
        blocks.append(
            block(
                f"b{i}",
                r.uniform(0.1, 2),
                backward,
                weight_seconds=r.choice([0, backward / 2]),
                split_seconds=r.choice([0, backward / 10]),
                offload_seconds=r.choice([0, 0, backward / 5]),
                deferred=line(600),
                split_work=line(100),
                parameter_bytes=size,
                largest_bytes=r.choice([0, r.randrange(1, size + 1)]),
                moved=line(600),
                stays=line(20),
                input=line(40),
                output=line(40),
                forward_work=line(50),
                backward_work=line(100),
            )
        )
    ties = (
        ((blocks[0].parameter_bytes, (0, count - 1)),)
        if count > 1 and blocks[0] is blocks[-1]
        else ()
    )
    machines = cluster(
        devices,
        int(10 ** r.uniform(3.2, 4.1)),
        concurrent=r.choice([1, 2, 100]),
        link=Link(bytes_per_second=10 ** r.uniform(1, 4), latency_seconds=r.choice([0, 0.1])),
        write=Link(bytes_per_second=10 ** r.uniform(2, 4), latency_seconds=r.choice([0, 0.3])),
        read=Link(bytes_per_second=10 ** r.uniform(2, 4)),
        tier=r.choice([TIER_FLOOR, TIER_FLOOR + 2000, 2 * TIER_FLOOR, 2 * TIER_FLOOR]),
        reserve=r.choice([0, 100]),
        gap_share=r.choice([0.0, 0.1]),
        host_update_seconds=r.choice([0.0, 0.02]),
        below=r.choice(["host", "host", "disk"]),
    )
    return profile(blocks, ties=ties, optimizer_seconds=0.01), machines, r.choice([1, 3, 4, 6])


@functools.cache
def solved(seed: int) -> tuple[Request, SearchResult]:
    """A case, and what the search finds in it."""
    r = random.Random(seed)
    size, runnable = r.choice(SIZES), r.random() < 0.5
    if size == (8, 4) and r.random() < 0.8:
        size = (8, 3)  # the largest take a second each
    model, machines, batch = random_case(r, *size)
    splits = any(cost.weight_seconds.at(1) for cost in model.blocks)
    some = r.choice(["1f1b", "zb-h1", "zb-h2"] if splits else ["gpipe", "1f1b"])
    config = PlanConfig(schedule="auto" if r.random() < 0.2 else some, interleave=1)
    request = Request(model, machines, config, global_batch=batch, runnable=runnable)
    return request, find_candidates(request, CANDIDATES)


@pytest.mark.parametrize(
    "seed",
    [*range(CASES), *(pytest.param(s, marks=pytest.mark.thorough) for s in range(CASES, 1000))],
)
def test_no_plan_beats_the_search_by_its_formula(seed: int) -> None:
    request, found = solved(seed)
    expected = brute_force(request)
    if math.isinf(expected):
        assert not found.candidates
        return
    assert found.exact
    score = found.candidates[0].score[0]
    assert score <= expected * (1 + 2e-6)
    # The greedy search shares states where its own choice was slower without.
    if score < expected * (1 - 2e-6):
        assert any(stage.shard_optimizer for stage in found.candidates[0].stages)
        expected = brute_force(request, always=True)
    for candidate in found.candidates:
        assert candidate.score[0] >= expected * (1 - 2e-6)


def test_the_cases_above_are_not_all_alike() -> None:
    plans = [
        found.candidates[0].stages for _, found in map(solved, range(CASES)) if found.candidates
    ]
    kinds = {
        "sharded": [any(stage.shard_optimizer for stage in plan) for plan in plans],
        "uneven": [len({stage.replicas for stage in plan}) > 1 for plan in plans],
        "below": [any(stage.optimizer_offload for stage in plan) for plan in plans],
        "offload": [any(Directive.OFFLOAD in stage.directives for stage in plan) for plan in plans],
        "recompute": [
            any(Directive.RECOMPUTE in stage.directives for stage in plan) for plan in plans
        ],
    }
    assert len(plans) > CASES * 2 / 5
    assert {kind for kind, each in kinds.items() if sum(each) <= len(plans) / 40} == set()


@pytest.mark.parametrize("seed", range(40))
def test_the_plan_is_one_of_the_best_and_fits(seed: int) -> None:
    r = random.Random(seed)
    model, machines, batch = random_case(r, *r.choice(SIZES[:10]))
    config = PlanConfig(interleave=1)  # interleaved stages are cut one way only
    expected = brute_force(Request(model, machines, config, global_batch=batch))
    if math.isinf(expected):
        with pytest.raises(InfeasiblePlan):
            search(model, machines, config, global_batch=batch)
        return
    plan, simulation = search(model, machines, config, global_batch=batch)
    check(plan, machines)
    assert plan.exact
    assert plan.bound_seconds == pytest.approx(
        min(expected, simulation.step_seconds), rel=1e-5, abs=1e-6
    )
    assert plan.prediction.step_seconds == pytest.approx(simulation.step_seconds, abs=1e-6)
    for terms in plan.prediction.stages:
        assert sum(terms.seconds.values()) == pytest.approx(
            simulation.step_seconds, rel=1e-3, abs=1e-4
        )
        assert sum(terms.memory.values()) <= machines.devices[0].memory_bytes
    for other in plan.alternatives:
        assert other.step_seconds >= plan.prediction.step_seconds


def check(plan: Plan, machines: Cluster) -> None:
    assert plan.world_size == len(machines.devices)
    for rank, device in zip(plan.prediction.ranks, machines.devices):
        assert rank.peak_bytes <= rank.budget_bytes == device.memory_bytes
        assert rank.tier_peak_bytes <= device.tier_bytes
    for stage in plan.stages:
        assert stage.tier_bytes <= machines.devices[0].tier_bytes


def layers(count: int, seed: int | None = None, **fields: Any) -> ModelProfile:
    r = random.Random(seed)
    factor = (lambda: 1.0) if seed is None else (lambda: r.uniform(0.5, 2))
    return profile(
        [
            block(
                f"layer{i}",
                1e-3 * factor(),
                2e-3 * factor(),
                **{
                    "parameter_bytes": int(4e6 * factor()),
                    "moved": 1e6 * factor(),
                    "stays": 1e4,
                    "input": 1e5,
                    "output": 1e5,
                    "forward_work": 1e5 * factor(),
                    "backward_work": 2e5 * factor(),
                    **fields,
                },
            )
            for i in range(count)
        ]
    )


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
        for part in cut(model, plan)
    ]
    # Three layers; the head's stage holds one layer beside it.
    assert max(times) == pytest.approx(9e-3)
    assert min(stage.stop - stage.start for stage in plan.stages) >= 1


def cut(model: ModelProfile, plan: Plan) -> list[tuple[BlockCost, ...]]:
    return [model.blocks[stage.start : stage.stop] for stage in plan.stages]


def two_kinds(slow: int, fast: int) -> Cluster:
    """Devices of half the speed and half the memory before devices of full speed."""
    small = cluster(slow, 40 * 10**6, speed=0.5).nodes[0]
    large = cluster(fast, 80 * 10**6).nodes[0]
    return Cluster(
        nodes=(replace(small, name="slow"), replace(large, name="fast")), local=FREE, remote=FREE
    )


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
@pytest.mark.parametrize("schedule", ["auto", "gpipe", "1f1b"])
@pytest.mark.parametrize("activations", ["auto", "keep", "offload", "recompute"])
def test_what_was_asked_for_is_respected(
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
    assert plan.positions == stages
    assert (
        replicas is None
        or tuple(stage.replicas for stage in plan.stages[: plan.positions]) == replicas
    )
    assert schedule in ("auto", plan.schedule.name)
    assert activations in ("auto", *{str(d) for stage in plan.stages for d in stage.directives})
    check(plan, machines)


def test_without_swap_nothing_is_offloaded() -> None:
    machines = cluster(2, 25 * 10**6, write=Link(bytes_per_second=1e12))
    model = layers(4, parameter_bytes=10**6, moved=3e6)
    swapped, _ = search(model, machines, PlanConfig(stages=2), global_batch=8, microbatch=2)
    plain, _ = search(
        model, machines, PlanConfig(stages=2), global_batch=8, microbatch=2, swap=False
    )
    assert any(stage.offloads for stage in swapped.stages)
    assert not any(stage.offloads for stage in plain.stages)
    assert swapped.prediction.step_seconds < plain.prediction.step_seconds
    with pytest.raises(ConfigError, match=r"swap.tier is none"):
        search(model, machines, PlanConfig(activations="offload"), global_batch=8, swap=False)


def test_more_memory_is_never_slower_by_the_formula() -> None:
    model, before = layers(5, 1, parameter_bytes=10**6), math.inf
    for memory in range(6, 60, 3):
        machines = cluster(2, memory * 10**6, write=Link(bytes_per_second=1e9))
        found = find_candidates(
            Request(model, machines, PlanConfig(), global_batch=8), 1
        ).candidates
        now = found[0].score[0] if found else math.inf
        assert now <= before * (1 + 2e-6)
        before = now
    assert before < math.inf


@settings(max_examples=150, deadline=None, derandomize=True)
@given(r=st.randoms(use_true_random=True), count=st.integers(1, 5), flight=st.integers(1, 4))
def test_the_peak_is_monotone_in_the_budget(r: random.Random, count: int, flight: int) -> None:
    model, machines, _ = random_case(r, count, 1)
    before = 0
    for memory in range(400, 12_000, 400):
        device = cluster(1, memory, write=machines.devices[0].write, tier=2 * TIER_FLOOR).devices[0]
        fitter = ExactStageFitter(model, device, allowed=list(Directive))
        found = fitter.fit(0, count, Flight(1, 2, flight))
        peak = found[0].peak_bytes if found else 0
        assert peak >= before
        assert peak <= memory
        before = peak


def test_half_the_bandwidth_moves_blocks_from_offload_to_recompute() -> None:
    model, counts = layers(8, parameter_bytes=10**6), []
    for bandwidth in (8e8, 4e8, 2e8, 1e8, 5e7):
        machines = cluster(1, 48 * 10**6, write=Link(bytes_per_second=bandwidth))
        plan, _ = search(
            model, machines, PlanConfig(schedule="gpipe"), global_batch=8, microbatch=2
        )
        counts.append(
            [plan.stages[0].directives.count(d) for d in (Directive.OFFLOAD, Directive.RECOMPUTE)]
        )
    offloaded, recomputed = zip(*counts)
    assert list(offloaded) == sorted(offloaded, reverse=True)
    assert list(recomputed) == sorted(recomputed)
    assert offloaded[0] > offloaded[-1]
    assert recomputed[0] < recomputed[-1]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        ({"stages": 1}, {}),
        ({"stages": 2, "activations": "keep"}, {"microbatch": 4}),
        ({"activations": "recompute", "schedule": "gpipe"}, {"microbatch": 2}),
        ({"activations": "offload"}, {"microbatch": 8}),
        ({"replicas": [1, 2]}, {"swap": False}),
    ],
)
def test_the_fix_for_an_infeasible_plan_is_the_smallest_that_works(
    config: dict[str, Any], options: dict[str, Any]
) -> None:
    model, wanted = layers(5, 3), PlanConfig(**config)

    def attempt(memory: int, config: PlanConfig = wanted, **changes: Any) -> Plan:
        return search(model, cluster(3, memory), config, global_batch=8, **{**options, **changes})[
            0
        ]

    with pytest.raises(InfeasiblePlan) as error:
        attempt(10**6)
    message = str(error.value)
    assert re.search(r"no plan fits 976.6 KiB per device: the best needs [\d.]+ MiB", message), (
        message
    )
    fixed = int(re.search(r"cluster.device_memory=(\d+)MiB", message)[1])  # type: ignore[index]
    attempt(fixed * 2**20)
    with pytest.raises(InfeasiblePlan):
        attempt((fixed - 1) * 2**20)
    needed = (
        math.ceil(int(re.search(r"\(([\d,]+) bytes more\)", message)[1].replace(",", ""))) + 10**6
    )  # type: ignore[index]
    check(attempt(needed), cluster(3, needed))
    with pytest.raises(InfeasiblePlan) as error:
        attempt(needed - 1)
    message = str(error.value)
    smaller = re.search(r"trainer.microbatch=(\d+)", message)
    if smaller:
        attempt(needed - 1, microbatch=int(smaller[1]))
    stages = re.search(r"plan.stages=(\d+)", message)
    if stages:
        attempt(needed - 1, replace(wanted, stages=int(stages[1])))
    if "plan=auto swap=auto" in message:
        attempt(needed - 1, PlanConfig(), swap=True)
    elif "swap=auto" in message:
        attempt(needed - 1, swap=True)


def test_a_tier_without_room_is_named() -> None:
    with pytest.raises(InfeasiblePlan, match=r"1.0 MiB per device in tier disk cannot hold"):
        search(
            layers(3),
            cluster(1, tier=TIER_FLOOR),
            PlanConfig(activations="offload"),
            global_batch=4,
        )


def test_one_huge_block() -> None:
    blocks = [block(f"b{i}", parameter_bytes=10**9 if i == 2 else 100) for i in range(4)]
    with pytest.raises(
        InfeasiblePlan, match=r"needs 3.7 GiB .*cluster.device_memory=\d+MiB \([\d,]+ bytes more\)"
    ):
        search(profile(blocks), cluster(4, 10**9), PlanConfig(), global_batch=4)
    plan, _ = search(profile(blocks), cluster(4, 4 * 10**9 + 1000), PlanConfig(), global_batch=4)
    check(plan, cluster(4, 4 * 10**9 + 1000))


@pytest.mark.parametrize(
    "config", [{"stages": 5}, {"stages": 3, "replicas": 2}, {"replicas": [1, 1]}]
)
def test_shapes_that_cannot_use_every_device(config: dict[str, Any]) -> None:
    with pytest.raises(InfeasiblePlan, match=r"does not use 4 device\(s\) and 4 block\(s\)"):
        search(layers(4), cluster(4), PlanConfig(**config), global_batch=4)


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
    plan, simulation = search(model, machines, PlanConfig(), global_batch=256, runnable=False)
    check(plan, machines)
    assert not plan.exact or plan.bound_seconds == pytest.approx(
        plan.prediction.step_seconds, rel=0.2
    )
    assert 0 < plan.bound_seconds <= plan.prediction.step_seconds < 2 * plan.bound_seconds
    assert sorted(rank for s in range(plan.positions) for rank in plan.ranks(s)) == list(range(64))
    assert len(plan.alternatives) > 1
    assert simulation.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-3)


def test_states_and_then_parameters_move_below_as_memory_shrinks() -> None:
    """12 MB of parameters in 4 MB blocks, 48 MB with gradients and moments."""
    model, seconds, below = (
        layers(3, moved=1e5, input=1e4, output=1e4, forward_work=1e4, backward_work=1e4),
        [],
        [],
    )
    for memory in (60, 40, 30, 20):
        machines = cluster(
            1,
            memory * 10**6,
            write=Link(bytes_per_second=2e9),
            host_update_seconds=1e-9,
            below="host",
        )
        plan, _ = search(model, machines, PlanConfig(), global_batch=8, runnable=False)
        check(plan, machines)
        seconds.append(plan.prediction.step_seconds)
        below.append((plan.stages[0].optimizer_offload, plan.stages[0].parameter_offload))
        with pytest.raises(InfeasiblePlan) if memory < 48 else nullcontext():
            search(model, machines, PlanConfig(optimizer="device"), global_batch=8, runnable=False)
    assert seconds == sorted(seconds)
    assert below[0] == (0.0, 0.0)
    assert 0 < below[1][0] < 1
    assert below[-1] == (1.0, 1.0)
    terms = plan.prediction.stages[0].memory
    assert terms["parameters"] == terms["optimizer"] == 0
    # The block that runs, the next, and one block's gradients.
    assert terms["staging"] == 2 * 4 * 10**6 + 4 * 10**6
    tied = replace(model, ties=((4 * 10**6, (0, 2)),))
    with pytest.raises(ConfigError, match=r"plan.parameters=host: blocks of m share parameters"):
        search(tied, machines, PlanConfig(parameters="host"), global_batch=8)
    with pytest.raises(ConfigError, match=r"use plan.optimizer=host"):
        PlanConfig(parameters="host", optimizer="device")


@pytest.mark.parametrize(
    "options", [{"global_batch": 0}, {"global_batch": 1.5}, {"microbatch": 0}, {"microbatch": "8"}]
)
def test_rows_that_are_no_count_are_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.(global_batch|microbatch)=.*accepted"):
        search(layers(2), cluster(1), PlanConfig(), **{"global_batch": 4, **options})


def test_a_shape_that_cannot_be_is_named() -> None:
    with pytest.raises(InfeasiblePlan, match=r"plan.interleave=3 has no shape for 4 block\(s\)"):
        search(layers(4), cluster(2), PlanConfig(interleave=3), global_batch=8, runnable=False)


def test_the_stages_that_fit_come_with_their_replicas() -> None:
    with pytest.raises(InfeasiblePlan, match=r"plan.stages=\d plan.replicas=auto"):
        search(layers(8), cluster(4, 42 * 10**6), PlanConfig(stages=2, replicas=2), global_batch=8)


def test_a_search_that_was_cut_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallax.plan.search.exact_stage.FRONT", 0)
    model, machines = (
        layers(6, 5, parameter_bytes=10**6),
        cluster(1, 38 * 10**6, write=Link(bytes_per_second=1e8)),
    )
    plan, _ = search(model, machines, PlanConfig(), global_batch=8, microbatch=4)
    assert not plan.exact
    assert plan.bound_seconds < plan.prediction.step_seconds
    check(plan, machines)


def test_stage_plans_are_what_the_loads_say() -> None:
    cost = layers(1).blocks[0]
    for directive in Directive:
        load = load_block(cost, directive, 3)
        assert all(
            isinstance(n, int)
            for n in (load.kept_bytes, load.moved_bytes, load.forward_work, load.backward_work)
        )
    assert isinstance(
        search(layers(2), cluster(2), PlanConfig(), global_batch=2)[0].stages[0], StagePlan
    )


def test_what_the_loss_saves_stays_under_every_directive() -> None:
    cost = block(moved=100, stays=10, input=30, by_loss=1000)
    kept = [
        load_block(cost, directive, 1).kept_bytes
        for directive in (Directive.KEEP, Directive.OFFLOAD, Directive.RECOMPUTE)
    ]
    assert kept == [1110, 1010, 1030]


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_every_schedule_can_be_asked_for_and_run(schedule: str) -> None:
    model = layers(8, weight_seconds=1e-3)
    plan, _ = search(model, cluster(2), PlanConfig(schedule=schedule, stages=2), global_batch=16)
    assert plan.schedule.name == schedule
    shares = plan.schedule.shares_positions
    assert (plan.interleave > 1) == shares
    for fields, message in (
        ({"parameters": "host"}, r"parameters visit the device for whole backwards of one stage"),
        ({"activations": "offload"}, r"would need one swap limit together"),
    ):
        if shares or "parameters" in fields:
            with pytest.raises(ConfigError, match=message):
                search(model, cluster(2), PlanConfig(schedule=schedule, **fields), global_batch=16)
    if plan.schedule.splits:
        with pytest.raises(ConfigError, match=r"does not tell the gradients of parameters apart"):
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


def test_parameters_stream_only_where_a_stage_runs_whole_backwards() -> None:
    machines = cluster(
        2, 15 * 10**6, write=Link(bytes_per_second=2e9), host_update_seconds=1e-9, below="host"
    )
    model = layers(8, weight_seconds=1e-3, moved=1e5, parameter_bytes=10**6)
    request = Request(model, machines, PlanConfig(), global_batch=16)
    for shape in request.shapes():
        streams = any(below.parameters for below in request.states_below(shape))
        assert streams == (shape.interleave == 1 and not shape.split)
    plan, _ = search(model, machines, PlanConfig(parameters="host"), global_batch=16)
    assert plan.interleave == 1
    assert plan.schedule.name in ("gpipe", "1f1b")


def test_replicas_share_states_where_that_saves_recomputation() -> None:
    """16 MB of parameters: with gradients and moments 64 MB, with half of the moments 48 MB and half a parameter."""
    model = layers(4, largest_bytes=10**5, moved=4e6, input=1e4, output=1e4)
    for memory, shard in ((100, False), (70, True)):
        machines = cluster(
            2, memory * 10**6, write=Link(bytes_per_second=1e6), link=Link(bytes_per_second=1e11)
        )
        fields = {"global_batch": 4, "microbatch": 2}
        plan, _ = search(model, machines, PlanConfig(stages=1), **fields)
        check(plan, machines)
        assert plan.stages[0].shard_optimizer == shard
        assert set(plan.stages[0].directives) == {Directive.KEEP}
        never, _ = search(model, machines, PlanConfig(stages=1, shard="none"), **fields)
        assert not never.stages[0].shard_optimizer
        assert (Directive.RECOMPUTE in never.stages[0].directives) == shard
        always, _ = search(model, machines, PlanConfig(stages=1, shard="optimizer"), **fields)
        assert always.stages[0].shard_optimizer
        assert always.prediction.stages[0].memory["optimizer"] == 16 * 10**6 + 10**5
    with pytest.raises(ConfigError, match=r"plan.shard=optimizer: .*use plan.optimizer=device"):
        PlanConfig(shard="optimizer", optimizer="host")


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
