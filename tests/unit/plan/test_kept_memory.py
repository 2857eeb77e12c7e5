"""Freed memory that a CPU's allocator keeps is in the predicted peak, and never decides whether a plan fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallax.plan.cluster import Link
from parallax.plan.config import PlanConfig
from parallax.plan.cost.peak import with_kept
from parallax.plan.plan import Directive, Pipeline, Plan, StagePlan
from parallax.plan.profile import Affine
from parallax.plan.schedule import SCHEDULES
from parallax.plan.search.ample import with_ample_memory
from parallax.plan.search.search import search
from parallax.plan.simulation.predict import predict
from tests.unit.plan_fakes import FREE, block, cluster, profile

TERMS = {"parameters": 50, "activations": 60, "loss": 10, "swap": 20, "boundary": 5, "workspace": 5}
TERMS["staging"] = 40


@pytest.mark.parametrize(
    ("budget", "peak"),
    [
        (
            1000,
            262,
        ),  # half of the 100 bytes that come and go, of six times a block's workspace, of a quarter of fetched blocks
        (262, 262),
        (261, 192),  # freed memory goes back at once, so that none is kept
        (191, 192),  # too small for what is needed, which is not less for that
    ],
)
def test_freed_memory_is_kept_where_the_budget_allows_it(budget: int, peak: int) -> None:
    (device,) = cluster(1).devices
    device = replace(device, memory_bytes=budget, kept_share=0.5)
    found, returns_freed = with_kept({**TERMS, "allocator": 2}, device, TERMS["workspace"])
    assert (sum(found.values()), returns_freed) == (peak, peak == 192)
    assert {term: found[term] for term in TERMS} == TERMS


def test_ranks_near_their_budget_take_as_long_as_the_profile_says() -> None:
    """Freed memory that goes back at once costs a third of a small model's step."""
    model = replace(profile([block(moved=Affine(0, 100))] * 4), freeing_slowdown=(1.5,))
    ample, near = (
        replace(
            cluster(1, memory), nodes=(replace(node, devices=(replace(device, kept_share=0.5),)),)
        )
        for memory in (10_000, 450)
        for node in cluster(1, memory).nodes
        for device in node.devices
    )
    config = PlanConfig(activations="keep")
    first, _ = search(model, ample, config, global_batch=4, microbatch=1)
    second, _ = search(model, near, config, global_batch=4, microbatch=1)
    assert [plan.prediction.ranks[0].returns_freed for plan in (first, second)] == [False, True]
    ratio = second.prediction.step_seconds / first.prediction.step_seconds
    assert ratio == pytest.approx(1.5)
    assert Plan.from_dict(second.to_dict()) == second


@pytest.mark.parametrize("tier", [FREE, Link(bytes_per_second=20.0)], ids=["free", "slow"])
@pytest.mark.parametrize(("budget", "most"), [(340, 340), (360, 360), (600, 480)])
def test_a_swap_limit_leaves_memory_for_freed_blocks_where_that_is_faster(
    tier: Link, budget: int, most: int
) -> None:
    """What is read back once more costs less than giving all memory back; over a slow link it costs more. Where a fifth
    of the budget can stay free it does."""
    model = replace(profile([block(moved=Affine(0, 100))] * 12), freeing_slowdown=(1.2,))
    machine = cluster(1, budget, write=tier, kept_share=0.5)
    config = PlanConfig(activations="offload")
    plan, _ = search(model, machine, config, global_batch=4, microbatch=1)
    (rank,) = plan.prediction.ranks
    assert rank.returns_freed == (tier is not FREE)
    most = budget if rank.returns_freed else most
    assert most - 4 <= rank.peak_bytes <= most
    if tier is FREE:
        assert plan.prediction.step_seconds == pytest.approx(4 * 12 * 3)


def test_an_offloading_stage_without_a_limit_is_left_as_it_is() -> None:
    """Its offloaded blocks save nothing, so that there is no limit to be lowered."""
    model = replace(profile([block(stays=Affine(0, 60))] * 4), freeing_slowdown=(1.2,))
    machine = cluster(1, 300, kept_share=0.5)
    stage = StagePlan(start=0, stop=4, replicas=1, directives=(Directive.OFFLOAD,) * 4)
    pipeline = Pipeline(
        schedule=SCHEDULES["1f1b"], stages=(stage,), global_batch=4, microbatch=1, placement=(0,)
    )
    forecast = predict(model, machine, pipeline)
    assert forecast.ranks[0].returns_freed
    assert with_ample_memory(model, machine, pipeline, forecast) == (pipeline, forecast)


def test_blocks_are_recomputed_to_leave_memory_for_freed_blocks_where_that_is_faster() -> None:
    """Recomputing one more block costs less than giving all memory back; no more blocks than necessary are."""
    model = replace(profile([block(moved=Affine(0, 100))] * 12), freeing_slowdown=(1.2,))
    machine = cluster(1, 780, kept_share=0.1)
    directives = (Directive.KEEP,) * 6 + (Directive.RECOMPUTE,) * 6
    stage = StagePlan(start=0, stop=12, replicas=1, directives=directives)
    pipeline = Pipeline(
        schedule=SCHEDULES["1f1b"], stages=(stage,), global_batch=4, microbatch=1, placement=(0,)
    )
    forecast = predict(model, machine, pipeline)
    found, faster = with_ample_memory(model, machine, pipeline, forecast)
    assert forecast.ranks[0].returns_freed
    assert not faster.ranks[0].returns_freed
    again = Directive.RECOMPUTE
    assert found.stages[0].directives == (again, *directives[1:])
    assert faster.step_seconds == pytest.approx(4 * (12 * 3 + 7))
    assert forecast.step_seconds == pytest.approx(1.2 * 4 * (12 * 3 + 6))


def test_offloaded_activations_are_counted_once_among_freed_blocks() -> None:
    """They are freed when they are written, within the swap limit; a block's own workspace is freed again and again."""
    model = profile([block(moved=Affine(0, 100), backward_work=Affine(0, 30))] * 12)
    machine = cluster(1, 600, kept_share=0.5)
    plan, _ = search(
        model, machine, PlanConfig(activations="offload"), global_batch=4, microbatch=1
    )
    (rank,), (stage,) = plan.prediction.ranks, plan.prediction.stages
    assert not rank.returns_freed
    terms = stage.memory
    transient = terms["swap"] + terms["workspace"] + terms["boundary"] + terms["activations"]
    assert terms["workspace"] == 100
    assert terms["allocator"] == (transient + 6 * 30) // 2
