"""The search against every plan there is, on small cases."""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from typing import Any

import pytest

from parallax.errors import ConfigError, InfeasiblePlan
from parallax.plan.cluster import Cluster, Link
from parallax.plan.cost import load_block, load_stage, ring_bytes
from parallax.plan.plan import Directive, Plan, StagePlan
from parallax.plan.profile import Affine, ModelProfile
from parallax.plan.rows import micro_batch_count
from parallax.plan.schedule import ORDERS, in_flight
from parallax.plan.search import SIMULATED, PlanConfig, _Request, _sizes, search
from parallax.plan.simulate import simulate
from parallax.plan.stages import TIER_FLOOR, TIER_SLACK
from tests.unit.plan_fakes import block, cluster, profile

Key = tuple[float, str, int]


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    return [c for c in itertools.product(range(1, total + 1), repeat=parts) if sum(c) == total]


def best_stage(model: ModelProfile, machines: Cluster, start: int, stop: int, r: int, rows: int, flight: int) -> Any:
    """(seconds, tail, bytes) of the fastest directives that fit, all 3^n of them tried; None where none fits."""
    device = machines.devices[0]
    best = None
    for directives in itertools.product(Directive, repeat=stop - start):
        load = load_stage(model, start, directives, rows, device=device)
        largest = max(b.moved_bytes for b in load.blocks)
        fixed = load.static_bytes + load.boundary_bytes + flight * sum(b.kept_bytes for b in load.blocks)
        work = max(max(b.forward_work, b.backward_work) for b in load.blocks)
        moved = sum(b.moved_bytes for b in load.blocks)
        if fixed + work + largest > device.memory_bytes:
            continue
        if moved and math.ceil(flight * moved * TIER_SLACK) + TIER_FLOOR > device.tier_bytes:
            continue
        compute = sum(b.forward_seconds + b.backward_seconds for b in load.blocks)
        seconds = max(compute, device.write.seconds(moved) + device.read.seconds(moved))
        if best is None or seconds < best[0]:
            reduce = machines.local.seconds(ring_bytes(load.parameter_bytes, r))
            best = seconds, load.update_seconds + reduce
    return best


def brute_force(model: ModelProfile, machines: Cluster, batch: int) -> float:
    """The least step time by the formula, over every plan."""
    blocks, devices = len(model.blocks), len(machines.devices)
    known: dict[Any, Any] = {}
    least = math.inf
    sizes = _sizes(batch, "auto")
    for schedule, micro in itertools.product(ORDERS, sizes):
        count = min(batch, micro_batch_count(batch, micro))
        for parts in range(1, min(blocks, devices) + 1):
            for cuts in itertools.combinations(range(1, blocks), parts - 1):
                bounds = [0, *cuts, blocks]
                for replicas in compositions(devices, parts):
                    if max(replicas) > micro and micro < batch:
                        continue
                    found = []
                    for s, r in enumerate(replicas):
                        rows, flight = -(-micro // r), in_flight(schedule, parts, s, count)
                        key = bounds[s], bounds[s + 1], r, rows, flight
                        if key not in known:
                            known[key] = best_stage(model, machines, *key)
                        found.append(known[key])
                    if None in found:
                        continue
                    pipelined = (count - 1) * max(f[0] for f in found) + sum(f[0] for f in found)
                    shared = count * sum(f[0] * r for f, r in zip(found, replicas)) / machines.nodes[0].concurrent
                    least = min(least, max(pipelined, shared) + max(f[1] for f in found))
    return least


def random_case(seed: int) -> tuple[ModelProfile, Cluster, int]:
    r = random.Random(seed)
    count, devices = r.choice([(1, 1), (2, 2), (2, 3), (3, 2), (3, 4), (4, 2), (4, 3), (4, 4), (5, 2), (5, 3), (6, 2)])
    blocks: list[Any] = []
    for i in range(count):
        if blocks and r.random() < 0.3:
            blocks.append(r.choice(blocks))
            continue
        line = lambda top: Affine(r.choice([0, r.uniform(0, top)]), r.uniform(0, top))  # noqa: E731
        blocks.append(
            block(
                f"b{i}",
                r.uniform(0.1, 2),
                r.uniform(0.1, 4),
                parameter_bytes=r.randrange(1, 300),
                moved=line(600),
                stays=line(20),
                input=line(40),
                output=line(40),
                forward_work=line(50),
                backward_work=line(100),
            )
        )
    ties = ((blocks[0].parameter_bytes, (0, count - 1)),) if count > 1 and blocks[0] is blocks[-1] else ()
    machines = cluster(
        devices,
        int(10 ** r.uniform(3.2, 4.1)),
        concurrent=r.choice([1, 2, 100]),
        link=Link(bytes_per_second=10 ** r.uniform(1, 4), latency_seconds=r.choice([0, 0.1])),
        write=Link(bytes_per_second=10 ** r.uniform(2, 4), latency_seconds=r.choice([0, 0.3])),
        read=Link(bytes_per_second=10 ** r.uniform(2, 4)),
        tier=r.choice([TIER_FLOOR, TIER_FLOOR + 2000, 2 * TIER_FLOOR, 2 * TIER_FLOOR]),
        reserve=r.choice([0, 100]),
    )
    return profile(blocks, ties=ties, optimizer_seconds=0.01), machines, r.choice([1, 3, 4, 6])


def formula(model: ModelProfile, machines: Cluster, plan: Plan) -> float:
    """The step time of a plan by the formula."""
    device, count = machines.devices[0], plan.micro_batches(plan.global_batch)
    seconds, tails, works = [], [], []
    for stage in plan.stages:
        load = load_stage(model, stage.start, stage.directives, -(-plan.microbatch // stage.replicas), device=device)
        copying = device.write.seconds(load.moved_bytes) + device.read.seconds(load.moved_bytes)
        seconds.append(max(load.compute_seconds, copying))
        works.append(seconds[-1] * stage.replicas)
        tails.append(load.update_seconds + machines.local.seconds(ring_bytes(load.parameter_bytes, stage.replicas)))
    pipelined = (count - 1) * max(seconds) + sum(seconds)
    return max(pipelined, count * sum(works) / machines.nodes[0].concurrent) + max(tails)


@pytest.mark.parametrize("group", range(4))
def test_no_plan_beats_the_search_by_its_formula(group: int) -> None:
    feasible = offloading = recomputing = uneven = 0
    for seed in range(group * 80, (group + 1) * 80):
        model, machines, batch = random_case(seed)
        expected = brute_force(model, machines, batch)
        request = _Request(model, machines, PlanConfig(), batch, _sizes(batch, "auto"), True)
        candidates = request.candidates(SIMULATED)
        assert request.fitter.exact
        if math.isinf(expected):
            assert not candidates, seed
            with pytest.raises(InfeasiblePlan):
                search(model, machines, PlanConfig(), global_batch=batch)
            continue
        feasible += 1
        assert candidates[0].score[0] == pytest.approx(expected, rel=1e-9), seed
        plan, simulation = search(model, machines, PlanConfig(), global_batch=batch)
        check(plan, machines)
        assert formula(model, machines, plan) >= expected * (1 - 1e-9)
        first = candidates[0]
        again = simulate(
            model,
            machines,
            first.stages,
            schedule=first.schedule,
            rows=batch,
            micro_batches=min(batch, micro_batch_count(batch, first.microbatch)),
        )
        assert simulation.step_seconds <= again.step_seconds
        directives = [d for stage in plan.stages for d in stage.directives]
        offloading += Directive.OFFLOAD in directives
        recomputing += Directive.RECOMPUTE in directives
        uneven += len({stage.replicas for stage in plan.stages}) > 1
    assert feasible > 40
    assert min(offloading, recomputing, uneven) > 2


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
    config: dict[str, Any], stages: int, replicas: tuple[int, ...] | None, schedule: str, activations: str
) -> None:
    machines = cluster(4, write=Link(bytes_per_second=1e9))
    plan, _ = search(
        layers(5), machines, PlanConfig(**config, schedule=schedule, activations=activations), global_batch=8
    )
    assert len(plan.stages) == stages
    assert replicas is None or tuple(stage.replicas for stage in plan.stages) == replicas
    assert schedule in ("auto", plan.schedule)
    assert activations in ("auto", *{str(d) for stage in plan.stages for d in stage.directives})
    check(plan, machines)


def test_without_swap_nothing_is_offloaded() -> None:
    machines = cluster(2, 25 * 10**6, write=Link(bytes_per_second=1e12))
    model = layers(4, parameter_bytes=10**6, moved=3e6)
    swapped, _ = search(model, machines, PlanConfig(stages=2), global_batch=8, microbatch=2)
    plain, _ = search(model, machines, PlanConfig(stages=2), global_batch=8, microbatch=2, swap=False)
    assert any(stage.offloads for stage in swapped.stages)
    assert not any(stage.offloads for stage in plain.stages)
    assert swapped.prediction.step_seconds < plain.prediction.step_seconds
    with pytest.raises(ConfigError, match=r"swap.tier is none"):
        search(model, machines, PlanConfig(activations="offload"), global_batch=8, swap=False)


def test_more_memory_is_never_slower_by_the_formula() -> None:
    model, before = layers(5, 1, parameter_bytes=10**6), math.inf
    for memory in range(6, 60, 3):
        machines = cluster(2, memory * 10**6, write=Link(bytes_per_second=1e9))
        found = _Request(model, machines, PlanConfig(), 8, _sizes(8, "auto"), True).candidates(1)
        now = found[0].score[0] if found else math.inf
        assert now <= before * (1 + 1e-9)
        before = now
    assert before < math.inf


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
        return search(model, cluster(3, memory), config, global_batch=8, **{**options, **changes})[0]

    with pytest.raises(InfeasiblePlan) as error:
        attempt(10**6)
    message = str(error.value)
    assert re.search(r"no plan fits 976.6 KiB per device: the best needs [\d.]+ MiB", message), message
    fixed = int(re.search(r"cluster.device_memory=(\d+)MiB", message)[1])  # type: ignore[index]
    attempt(fixed * 2**20)
    with pytest.raises(InfeasiblePlan):
        attempt((fixed - 1) * 2**20)
    request = _Request(
        model,
        cluster(3, 10**6),
        wanted,
        8,
        _sizes(8, options.get("microbatch", "auto")),
        options.get("swap", True),
    )
    needed = int(request._least_memory())
    check(attempt(needed), cluster(3, needed))
    with pytest.raises(InfeasiblePlan) as error:
        attempt(needed - 1)
    message = str(error.value)
    smaller = re.search(r"trainer.microbatch=(\d+)", message)
    if smaller:
        attempt(needed - 1, microbatch=int(smaller[1]))
    if "plan=auto swap=auto" in message:
        attempt(needed - 1, PlanConfig(), swap=True)


def test_a_tier_without_room_is_named() -> None:
    with pytest.raises(InfeasiblePlan, match=r"1.0 MiB per device in tier disk cannot hold"):
        search(layers(3), cluster(1, tier=TIER_FLOOR), PlanConfig(activations="offload"), global_batch=4)


def test_one_huge_block() -> None:
    blocks = [block(f"b{i}", parameter_bytes=10**9 if i == 2 else 100) for i in range(4)]
    with pytest.raises(InfeasiblePlan, match=r"needs 3.7 GiB .*cluster.device_memory=\d+MiB"):
        search(profile(blocks), cluster(4, 10**9), PlanConfig(), global_batch=4)
    plan, _ = search(profile(blocks), cluster(4, 4 * 10**9 + 1000), PlanConfig(), global_batch=4)
    check(plan, cluster(4, 4 * 10**9 + 1000))


@pytest.mark.parametrize("config", [{"stages": 5}, {"stages": 3, "replicas": 2}, {"replicas": [1, 1]}])
def test_shapes_that_cannot_use_every_device(config: dict[str, Any]) -> None:
    with pytest.raises(InfeasiblePlan, match=r"does not use 4 device\(s\) and 4 block\(s\)"):
        search(layers(4), cluster(4), PlanConfig(**config), global_batch=4)


def test_fewer_rows_than_replicas() -> None:
    """Once math.ceil(inf): every micro-batch was too small for the only shape there is."""
    plan, _ = search(layers(1), cluster(3), PlanConfig(), global_batch=2)
    assert [stage.replicas for stage in plan.stages] == [3]


def test_bytes_that_are_no_whole_number_fit_their_swap_limit() -> None:
    """Once BudgetExceeded: a limit of 100.5 bytes was cut to 100."""
    model = profile([block(moved=100.5), block(moved=33.3)])
    plan, _ = search(model, cluster(1), PlanConfig(activations="offload"), global_batch=1)
    assert plan.stages[0].swap_limit_bytes >= 101


def test_devices_that_differ() -> None:
    small, large = cluster(1, 10**8, reserve=10), cluster(1, 12 * 10**7, reserve=5 * 10**7, tier=2 * 10**6)
    both = Cluster(nodes=(*small.nodes, *large.nodes), local=small.local, remote=small.remote)
    plan, _ = search(layers(6, parameter_bytes=10**6), both, PlanConfig(), global_batch=8)
    for rank, device in zip(plan.prediction.ranks, both.devices):
        assert rank.peak_bytes <= device.memory_bytes
    assert all(stage.tier_bytes <= 2 * 10**6 for stage in plan.stages)


@pytest.mark.parametrize(
    ("blocks", "memory", "limit", "seed"), [(10, 60e6, 5, 0), (10, 1e9, 5, 0), (26, 90e6, 60, None)]
)
def test_the_search_is_fast(blocks: int, memory: float, limit: float, seed: int | None) -> None:
    begun = time.process_time()
    machines = cluster(8, int(memory), concurrent=2, write=Link(bytes_per_second=1e9))
    plan, _ = search(layers(blocks, seed), machines, PlanConfig(), global_batch=32)
    assert time.process_time() - begun < limit
    assert plan.exact
    check(plan, machines)


def test_a_search_that_was_cut_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallax.plan.stages.FRONT", 0)
    model, machines = layers(6, 5, parameter_bytes=10**6), cluster(1, 38 * 10**6, write=Link(bytes_per_second=1e8))
    plan, _ = search(model, machines, PlanConfig(), global_batch=8, microbatch=4)
    assert not plan.exact
    check(plan, machines)


def test_stage_plans_are_what_the_loads_say() -> None:
    cost = layers(1).blocks[0]
    for directive in Directive:
        load = load_block(cost, directive, 3)
        assert all(
            isinstance(n, int) for n in (load.kept_bytes, load.moved_bytes, load.forward_work, load.backward_work)
        )
    assert isinstance(search(layers(2), cluster(2), PlanConfig(), global_batch=2)[0].stages[0], StagePlan)


def test_what_the_loss_saves_stays_under_every_directive() -> None:
    cost = block(moved=100, stays=10, input=30, by_loss=1000)
    kept = [
        load_block(cost, directive, 1).kept_bytes
        for directive in (Directive.KEEP, Directive.OFFLOAD, Directive.RECOMPUTE)
    ]
    assert kept == [1110, 1010, 1030]
