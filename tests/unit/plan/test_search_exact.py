"""The search against every plan there is, on small cases."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import InfeasiblePlan
from parallax.plan.config import PlanConfig
from parallax.plan.cost.traffic import TIER_FLOOR
from parallax.plan.plan import Directive
from parallax.plan.profile import Affine, ModelProfile
from parallax.plan.search.exact_stage import ExactStageFitter, StageSetting
from parallax.plan.search.request import Request
from parallax.plan.search.search import (
    CANDIDATES,
    SearchResult,
    find_candidates,
    has_rows_for_all,
    search,
)
from tests.unit.plan.brute_force import brute_force
from tests.unit.plan.searched import SIZES, check, random_case
from tests.unit.plan_fakes import cluster

CASES, CHECKED = 60, 40  # of a thousand: known not to be all alike, and compared by default


def sharing(model: ModelProfile) -> ModelProfile:
    """``model`` with blocks of which each saves some bytes that the block before it saves, too."""
    shared = [
        replace(b, shared=Affine(0.0, min(a.moved.per_row, b.moved.per_row) // 1))
        for a, b in itertools.pairwise(model.blocks)
    ]
    return replace(model, blocks=(model.blocks[0], *shared))


@functools.cache
def solved(seed: int) -> tuple[Request, SearchResult]:
    """A case, and what the search finds in it."""
    r = random.Random(seed)
    size = r.choice(SIZES)
    if size == (8, 4) and r.random() < 0.8:
        size = (8, 3)  # the largest take a second each
    model, machines, batch = random_case(r, *size)
    if seed % 3 == 0:
        model = sharing(model)
    splits = any(cost.weight_seconds.at(1) for cost in model.blocks)
    some = r.choice(["1f1b", "zb-h1", "zb-h2"] if splits else ["gpipe", "1f1b"])
    config = PlanConfig(schedule="auto" if r.random() < 0.2 else some, interleave=1)
    request = Request(model, machines, config, global_batch=batch)
    return request, find_candidates(request, CANDIDATES)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "seed",
    [*range(CHECKED), *(pytest.param(s, marks=pytest.mark.thorough) for s in range(CHECKED, 1000))],
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


@pytest.mark.slow  # of the cases, not of the search
def test_the_cases_above_are_not_all_alike() -> None:
    plans = [
        found.candidates[0].stages for _, found in map(solved, range(CASES)) if found.candidates
    ]
    kinds = {
        "sharded": [any(stage.shard_optimizer for stage in plan) for plan in plans],
        "uneven": [len({stage.replicas for stage in plan}) > 1 for plan in plans],
        "offloaded": [any(stage.optimizer_offload for stage in plan) for plan in plans],
        "offload": [any(Directive.OFFLOAD in stage.directives for stage in plan) for plan in plans],
        "recompute": [
            any(Directive.RECOMPUTE in stage.directives for stage in plan) for plan in plans
        ],
    }
    assert len(plans) > CASES * 2 / 5
    assert {kind for kind, each in kinds.items() if sum(each) <= len(plans) / 40} == set()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "seed", [*range(14), *(pytest.param(s, marks=pytest.mark.thorough) for s in range(14, 40))]
)
def test_the_plan_is_one_of_the_best_and_fits(seed: int) -> None:
    r = random.Random(seed)
    model, machines, batch = random_case(r, *r.choice(SIZES[:10]))
    config = PlanConfig(interleave=1)  # interleaved stages have a single partition
    request = Request(model, machines, config, global_batch=batch)
    idle = not has_rows_for_all(request)
    expected = brute_force(request.changed(idle=idle))
    if math.isinf(expected):
        with pytest.raises(InfeasiblePlan):
            search(model, machines, config, global_batch=batch)
        return
    plan, simulation = search(model, machines, config, global_batch=batch)
    check(plan, machines)
    assert idle or all(map(plan.rows_of, range(plan.world_size)))
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


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True)
@given(r=st.randoms(use_true_random=True), count=st.integers(1, 5), in_flight=st.integers(1, 4))
def test_the_peak_is_monotone_in_the_budget(r: random.Random, count: int, in_flight: int) -> None:
    model, machines, _ = random_case(r, count, 1)
    before = 0
    for memory in range(400, 12_000, 400):
        device = cluster(1, memory, write=machines.devices[0].write, tier=2 * TIER_FLOOR).devices[0]
        fitter = ExactStageFitter(model, device, allowed=list(Directive))
        found = fitter.fit(0, count, StageSetting(1, 2, in_flight))
        peak = found[0].peak_bytes if found else 0
        assert peak >= before
        assert peak <= memory
        before = peak
