"""Where the search puts activations, states and parameters as memory and bandwidth change."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest

from parallax.errors import ConfigError, InfeasiblePlan
from parallax.plan.cluster import Link
from parallax.plan.config import PlanConfig
from parallax.plan.cost.stage import load_block
from parallax.plan.plan import Directive, StagePlan
from parallax.plan.search.request import Request
from parallax.plan.search.search import find_candidates, search
from tests.unit.plan.searched import check, layers
from tests.unit.plan_fakes import block, cluster


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


def test_states_and_then_parameters_are_offloaded_as_memory_shrinks() -> None:
    """12 MB of parameters in 4 MB blocks, 48 MB with gradients and moments."""
    model, seconds, offloaded = (
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
            tier_name="host",
        )
        plan, _ = search(model, machines, PlanConfig(), global_batch=8)
        check(plan, machines)
        seconds.append(plan.prediction.step_seconds)
        offloaded.append((plan.stages[0].optimizer_offload, plan.stages[0].parameter_offload))
        with pytest.raises(InfeasiblePlan) if memory < 48 else nullcontext():
            search(model, machines, PlanConfig(optimizer="device"), global_batch=8)
    assert seconds == sorted(seconds)
    assert offloaded[0] == (0.0, 0.0)
    assert 0 < offloaded[1][0] < 1
    assert offloaded[-1] == (1.0, 1.0)
    terms = plan.prediction.stages[0].memory
    assert terms["parameters"] == terms["optimizer"] == 0
    # The block that runs, the next, and one block's gradients.
    assert terms["staging"] == 2 * 4 * 10**6 + 4 * 10**6
    # A parameter of two blocks stays, and the rest of the parameters is offloaded as before.
    tied = replace(model, ties=((10**6, (0, 2)),))
    plan, _ = search(tied, machines, PlanConfig(parameters="host"), global_batch=8)
    terms = plan.prediction.stages[0].memory
    assert (terms["parameters"], terms["gradients"]) == (10**6, 10**6)
    assert terms["staging"] == 2 * 4 * 10**6 + 4 * 10**6
    with pytest.raises(ConfigError, match=r"use plan.optimizer=host"):
        PlanConfig(parameters="host", optimizer="device")


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


def test_a_recomputation_ends_with_the_last_saved_tensor() -> None:
    cost = block(forward=3, backward=6, skipped_seconds=1.0)
    again = load_block(cost, Directive.RECOMPUTE, 2, speed=0.5)
    assert (again.forward_seconds, again.recompute_seconds, again.backward_seconds) == (12, 8, 32)
    whole = block(forward=3, backward=6, skipped_seconds=4.0)
    assert load_block(whole, Directive.RECOMPUTE, 2).recompute_seconds == 0


def test_what_the_loss_saves_stays_under_every_directive() -> None:
    cost = block(moved=100, stays=10, input=30, by_loss=1000)
    kept = [
        load_block(cost, directive, 1).kept_bytes
        for directive in (Directive.KEEP, Directive.OFFLOAD, Directive.RECOMPUTE)
    ]
    assert kept == [1110, 1010, 1030]


def test_parameters_are_offloaded_under_every_kind_of_schedule() -> None:
    machines = cluster(
        2, 15 * 10**6, write=Link(bytes_per_second=2e9), host_update_seconds=1e-9, tier_name="host"
    )
    model = layers(8, weight_seconds=1e-3, moved=1e5, parameter_bytes=10**6)
    for schedule in ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"):
        config = PlanConfig(parameters="host", stages=2, schedule=schedule)
        plan, _ = search(model, machines, config, global_batch=16)
        assert plan.schedule.name == schedule
        assert all(stage.parameter_offload == 1.0 for stage in plan.stages)
        # The window of a rank: the block that runs, the next, and the gradients of one, whatever its stages.
        for stage in plan.prediction.stages:
            assert stage.memory["staging"] == 3 * 10**6
        check(plan, machines)


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
