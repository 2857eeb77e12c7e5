"""What a run measured makes the next prediction better: on runs that the simulator plays with a true profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.common.events import Span
from parallax.errors import PlanError
from parallax.plan.cluster import Cluster, Link
from parallax.plan.plan import Plan, Prediction, RankPrediction
from parallax.plan.profile import ModelProfile
from parallax.plan.simulation.calibrate import (
    calibrate,
    evident_factors,
    scaled,
    seconds_by_term,
    step_seconds,
    times,
)
from parallax.plan.simulation.simulate import simulate
from tests.unit import plan_fakes as fakes

BLOCKS = 6
LINK = Link(bytes_per_second=1000.0, latency_seconds=0.001)


def true_profile() -> ModelProfile:
    blocks = [
        fakes.block(str(i), 0.1 + 0.02 * i, 0.25, parameter_bytes=8, input=2, output=2, moved=4)
        for i in range(BLOCKS)
    ]
    return fakes.profile(blocks, optimizer_seconds=0.01)


def plan_of(
    bounds: Sequence[int], replicas: Sequence[int], directive: str, schedule: str = "1f1b"
) -> Plan:
    rank = RankPrediction(
        peak_bytes=1, budget_bytes=1, tier_peak_bytes=0, offloaded_bytes=0, stall_seconds=0.0
    )
    return fakes.plan(
        stages=tuple(fakes.stages(bounds, replicas, directive)),
        schedule=schedule,
        prediction=Prediction(step_seconds=1.0, bubble=0.0, ranks=(rank,) * sum(replicas)),
    )


def spans_of(profile: ModelProfile, cluster: Cluster, plan: Plan) -> list[Span]:
    found = simulate(profile, cluster, plan)
    return list(found.spans)


def distorted(
    profile: ModelProfile, forward: Sequence[float], backward: Sequence[float], update: float
) -> ModelProfile:
    blocks = tuple(
        replace(
            block,
            forward_seconds=scaled(block.forward_seconds, f),
            backward_seconds=scaled(block.backward_seconds, b),
        )
        for block, f, b in zip(profile.blocks, forward, backward)
    )
    return replace(profile, blocks=blocks, optimizer_seconds=profile.optimizer_seconds * update)


def error(profile: ModelProfile, cluster: Cluster, plan: Plan, truth: Sequence[Span]) -> float:
    return abs(step_seconds(spans_of(profile, cluster, plan)) / step_seconds(truth) - 1)


FACTORS = st.lists(st.floats(0.3, 3.0), min_size=BLOCKS, max_size=BLOCKS)
PIPELINES = st.sampled_from(
    [((0, 6), (1,)), ((0, 3, 6), (1, 1)), ((0, 2, 6), (1, 2)), ((0, 1, 4, 6), (1, 1, 1))]
)


@settings(max_examples=60, deadline=None)
@given(
    FACTORS,
    FACTORS,
    st.floats(0.3, 3.0),
    PIPELINES,
    st.sampled_from(["1f1b", "gpipe"]),
    st.sampled_from(["keep", "recompute", "offload"]),
    st.sampled_from([1.0, 2.0, 100.0]),
)
def test_a_second_prediction_is_at_most_half_as_wrong(
    forward: list[float],
    backward: list[float],
    update: float,
    pipeline: tuple[tuple[int, ...], tuple[int, ...]],
    schedule: str,
    directive: str,
    concurrent: float,
) -> None:
    bounds, replicas = pipeline
    plan = plan_of(bounds, replicas, directive, schedule)
    cluster = fakes.cluster(sum(replicas), concurrent=concurrent, link=LINK, write=LINK)
    truth = spans_of(true_profile(), cluster, plan)
    wrong = distorted(true_profile(), forward, backward, update)
    first = error(wrong, cluster, plan, truth)
    better = calibrate(wrong, spans_of(wrong, cluster, plan), truth, plan, cluster)
    assert error(better, cluster, plan, truth) <= max(first / 2, 0.005)


def test_ratios_of_each_stage_forward_and_backward_apart() -> None:
    plan, cluster = plan_of((0, 2, 6), (1, 1), "keep"), fakes.cluster(2)
    wrong = distorted(true_profile(), [2, 2, 0.5, 0.5, 0.5, 0.5], [4, 4, 1, 1, 1, 1], 3.0)
    better = calibrate(
        wrong, spans_of(wrong, cluster, plan), spans_of(true_profile(), cluster, plan), plan
    )
    for found, wanted in zip(better.blocks, true_profile().blocks):
        assert found.forward_seconds.at(2) == pytest.approx(wanted.forward_seconds.at(2))
        assert found.backward_seconds.at(2) == pytest.approx(wanted.backward_seconds.at(2))
    assert better.optimizer_seconds == pytest.approx(0.01)


def test_a_recomputed_forward_is_not_attributed_to_the_backward() -> None:
    plan, cluster = plan_of((0, 6), (1,), "recompute"), fakes.cluster(1)
    wrong = distorted(true_profile(), [3.0] * BLOCKS, [1.0] * BLOCKS, 1.0)
    better = calibrate(
        wrong, spans_of(wrong, cluster, plan), spans_of(true_profile(), cluster, plan), plan
    )
    assert sum(b.forward_seconds.at(2) for b in better.blocks) == pytest.approx(0.9 * 2)
    assert sum(b.backward_seconds.at(2) for b in better.blocks) == pytest.approx(1.5 * 2)


def test_what_no_block_explains_is_spread_over_all() -> None:
    """The measured machine spends time between its actions, which no span holds."""
    plan, cluster = plan_of((0, 3, 6), (1, 1), "keep"), fakes.cluster(2)
    truth = [
        s._replace(start=1.3 * s.start, end=1.3 * s.start + s.end - s.start)
        for s in spans_of(true_profile(), cluster, plan)
    ]
    first = error(true_profile(), cluster, plan, truth)
    better = calibrate(
        true_profile(), spans_of(true_profile(), cluster, plan), truth, plan, cluster
    )
    assert first > 0.1
    assert error(better, cluster, plan, truth) < 0.01


def test_the_wait_for_replicas_is_no_compute() -> None:
    """In a run, the last backward of a replicated stage ends when its gradients are reduced."""
    plan, cluster = plan_of((0, 6), (2,), "keep"), fakes.cluster(2)
    predicted = spans_of(true_profile(), cluster, plan)
    last = {
        rank: max(s.end for s in predicted if s.rank == rank and s.kind == "backward")
        for rank in (0, 1)
    }
    slow = [
        s._replace(end=s.end + 5) if s.kind == "backward" and s.end == last[s.rank] else s
        for s in predicted
    ]
    assert calibrate(true_profile(), predicted, slow, plan).blocks == true_profile().blocks


def test_terms_add_up_to_the_step() -> None:
    plan, cluster = plan_of((0, 3, 6), (1, 2), "offload"), fakes.cluster(3, link=LINK, write=LINK)
    spans = spans_of(true_profile(), cluster, plan)
    found = seconds_by_term(spans)
    assert sorted(found) == [0, 1, 2]
    for terms in found.values():
        assert sum(terms.values()) == pytest.approx(step_seconds(spans))
        assert min(terms["forward"], terms["backward"], terms["update"]) > 0
    assert found[0]["forward"] == pytest.approx(
        sum(b.forward_seconds.at(8) for b in true_profile().blocks[:3])
    )
    assert found[1]["receive"] > 0


def test_several_steps_count_by_their_median() -> None:
    plan, cluster = plan_of((0, 6), (1,), "keep"), fakes.cluster(1)
    one = spans_of(true_profile(), cluster, plan)
    steps = [
        s._replace(step=n, start=s.start + 100 * n, end=s.end + 100 * n)
        for n in range(3)
        for s in one
    ]
    assert step_seconds(steps) == pytest.approx(step_seconds(one))
    better = calibrate(
        times(true_profile(), 2.0), spans_of(times(true_profile(), 2.0), cluster, plan), steps, plan
    )
    assert better.blocks[0].forward_seconds.per_row == pytest.approx(
        true_profile().blocks[0].forward_seconds.per_row
    )


def test_spans_of_another_plan_are_refused() -> None:
    plan, cluster = plan_of((0, 3, 6), (1, 1), "keep"), fakes.cluster(2)
    spans = spans_of(true_profile(), cluster, plan)
    with pytest.raises(
        PlanError, match=r"measured spans are of stages \[0\], the plan has stages 0 to 1"
    ):
        calibrate(true_profile(), spans, [s for s in spans if s.stage == 0], plan)
    with pytest.raises(PlanError, match="calibrate with the profile of the same run"):
        calibrate(replace(true_profile(), fingerprint="other"), spans, spans, plan)


def test_actions_of_microseconds_give_no_ratio() -> None:
    """Their dispatch takes most of it. The error of the step is distributed over all blocks instead."""
    plan, cluster = plan_of((0, 1, 6), (1, 1), "keep"), fakes.cluster(2)
    tiny = [fakes.block("0", 1e-7, 2e-7, parameter_bytes=8, input=2, output=2, moved=4)]
    profile = replace(true_profile(), blocks=(*tiny, *true_profile().blocks[1:]))
    truth = [
        s._replace(end=s.start + 40e-6) if s.stage == 0 and s.kind in ("forward", "backward") else s
        for s in spans_of(profile, cluster, plan)
    ]
    better = calibrate(profile, spans_of(profile, cluster, plan), truth, plan)
    assert better.blocks[0] == profile.blocks[0]


def test_a_replica_without_rows_changes_no_ratio() -> None:
    plan, cluster = plan_of((0, 3, 6), (1, 2), "keep"), fakes.cluster(3)
    predicted = spans_of(true_profile(), cluster, plan)
    idle = [
        s._replace(rank=2, start=s.start, end=s.start + 3e-6)
        for s in predicted
        if s.rank == 1 and s.kind in ("forward", "backward")
    ]
    spans = [s for s in predicted if s.rank != 2]
    better = calibrate(true_profile(), spans, [*spans, *idle], plan)
    for found, wanted in zip(better.blocks, true_profile().blocks):
        assert found.forward_seconds.at(2) == pytest.approx(wanted.forward_seconds.at(2), rel=1e-3)


@pytest.mark.parametrize(("slowness", "planned"), [(1.0, {}), (0.9, {}), (4.0, {1: 6.0})])
def test_a_factor_is_no_larger_than_its_spans_show(
    slowness: float, planned: dict[int, float]
) -> None:
    plan, cluster = plan_of((0, 3, 6), (1, 1), "keep"), fakes.cluster(2)
    predicted = spans_of(true_profile(), cluster, plan)
    measured = [
        s._replace(end=s.start + (s.end - s.start) * (slowness if s.rank == 1 else 1.0))
        for s in predicted
    ]
    found = evident_factors({1: 25150.3}, predicted, measured)
    assert found == {rank: pytest.approx(factor) for rank, factor in planned.items()}
    assert evident_factors({1: 3.0}, predicted, measured) == ({1: 3.0} if planned else {})


def test_where_all_ranks_are_slow_the_prediction_is_wrong() -> None:
    plan, cluster = plan_of((0, 3, 6), (1, 1), "keep"), fakes.cluster(2)
    predicted = spans_of(true_profile(), cluster, plan)
    assert evident_factors({0: 9.0, 1: 9.0}, predicted, predicted) == {}
