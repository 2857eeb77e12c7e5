"""The fast timeline against formulas, against the event simulator, and against its own promises."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import DeadlockError, PlanError
from parallax.plan.cluster import Link
from parallax.plan.edge import chain
from parallax.plan.schedule import SCHEDULES, Action, Kind, Schedule
from parallax.plan.schedule.order import Order
from parallax.plan.schedule.zero_bubble import zero_bubble
from parallax.plan.simulation.longest_path import StageTimes, time_orders
from parallax.plan.simulation.simulate import simulate
from tests.unit.plan.simulated import DRAINING, timed
from tests.unit.plan_fakes import block, cluster, pipeline, profile, stages

SHAPES = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 5), (4, 4), (4, 16), (5, 2), (8, 24)]
TIME = st.floats(0.01, 10.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pipeline_ranks", "micro"), SHAPES)
def test_bubble_of_equal_stages(schedule: str, pipeline_ranks: int, micro: int) -> None:
    """GPipe, Huang et al. 2019, section 2.3: (S − 1) / (M + S − 1)."""
    found = timed(SCHEDULES[schedule], [StageTimes(1, 1.5, 0.5)] * pipeline_ranks, micro)
    assert found.step_seconds == pytest.approx(3 * (micro + pipeline_ranks - 1))
    assert found.bubble == pytest.approx((pipeline_ranks - 1) / (micro + pipeline_ranks - 1))


@pytest.mark.parametrize(("pipeline_ranks", "micro"), [(2, 4), (4, 4), (4, 16), (8, 24)])
@pytest.mark.parametrize("interleave", [2, 3])
def test_interleaving_divides_the_bubble(pipeline_ranks: int, micro: int, interleave: int) -> None:
    """Narayanan et al. 2021, section 2.2: (p − 1)·(t_f + t_b) / v of idle time."""
    times = [StageTimes(1 / interleave, 2 / interleave)] * (pipeline_ranks * interleave)
    found = timed(SCHEDULES["interleaved"], times, micro, interleave=interleave)
    assert found.step_seconds == pytest.approx(3 * micro + 3 * (pipeline_ranks - 1) / interleave)


@pytest.mark.parametrize(("pipeline_ranks", "micro"), [(2, 6), (4, 12), (8, 24)])
@pytest.mark.parametrize(("forward", "backward", "weight"), [(1, 1, 1), (1.0, 1.1, 0.6)])
def test_idle_time_of_zero_bubble_schedules(
    pipeline_ranks: int, micro: int, forward: float, backward: float, weight: float
) -> None:
    """Qi et al. 2024, table 2: (p − 1)·(T_F + T_B − T_W) for H1 and (p − 1)·(T_F + T_B − 2·T_W) for H2."""
    times, work = (
        [StageTimes(forward, backward, weight)] * pipeline_ranks,
        micro * (forward + backward + weight),
    )
    idle = {
        s: timed(SCHEDULES[s], times, micro).span_seconds - work for s in ("1f1b", "zb-h1", "zb-h2")
    }
    assert idle["1f1b"] == pytest.approx((pipeline_ranks - 1) * (forward + backward + weight))
    assert idle["zb-h1"] == pytest.approx((pipeline_ranks - 1) * (forward + backward - weight))
    assert idle["zb-h2"] == pytest.approx(
        (pipeline_ranks - 1) * (forward + backward - 2 * weight), abs=1e-9
    )


def test_a_message_that_blocks_holds_both_ranks() -> None:
    """Two stages, one micro-batch: activations and gradient each hold sender and receiver for 1 s, and travel 2 s."""
    found = timed(
        SCHEDULES["1f1b"], [StageTimes(10, 20, 0, send=2, blocking=1), StageTimes(10, 20)], 1
    )
    assert found.step_seconds == pytest.approx(10 + 1 + 2 + 1 + 10 + 20 + 1 + 2 + 1 + 20)
    assert found.busy.tolist() == [30, 30]
    assert found.begin.tolist() == [0, 13]
    alone = timed(SCHEDULES["1f1b"], [StageTimes(10, 20, 0, send=2, blocking=1)], 3)
    assert alone.step_seconds == pytest.approx(90)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Schedule, int, int, int, list[StageTimes]]:
    schedule = draw(st.sampled_from(DRAINING))
    pipeline_ranks, micro = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    interleave = draw(st.sampled_from([each for each in (1, 2, 3) if schedule.allows(each)]))
    count = pipeline_ranks * interleave
    times = st.builds(StageTimes, TIME, TIME, TIME, st.just(draw(st.floats(0.01, 3))))
    return (
        schedule,
        pipeline_ranks,
        interleave,
        micro,
        draw(st.lists(times, min_size=count, max_size=count)),
    )


@settings(max_examples=200, deadline=None)
@given(shapes())
def test_it_agrees_with_the_event_simulator(
    shape: tuple[Schedule, int, int, int, list[StageTimes]],
) -> None:
    """Where nothing is shared: messages wait for the latency alone."""
    schedule, pipeline_ranks, interleave, micro, times = shape
    blocks = [
        block(
            forward=t.forward,
            backward=t.backward + t.weight,
            weight_seconds=t.weight,
            input=1 if index else 0,
            output=1 if index < len(times) - 1 else 0,
        )
        for index, t in enumerate(times)
    ]
    result = simulate(
        profile(blocks),
        cluster(pipeline_ranks, link=Link(bytes_per_second=1e30, latency_seconds=times[0].send)),
        pipeline(
            stages(range(len(times) + 1)),
            schedule=schedule,
            rows=micro,
            micro=micro,
            interleave=interleave,
        ),
    )
    found = timed(schedule, times, micro, interleave=interleave)
    assert found.step_seconds == pytest.approx(result.step_seconds, rel=1e-9)
    assert found.bubble == pytest.approx(result.bubble, abs=1e-9)
    compute = [
        span for span in result.spans if span.kind in ("forward", "backward", "backward_weight")
    ]
    for pipeline_rank in range(pipeline_ranks):
        mine = [span for span in compute if span.rank == pipeline_rank]
        assert found.begin[pipeline_rank] == pytest.approx(
            min(span.start for span in mine), abs=1e-9
        )
        assert found.end[pipeline_rank] == pytest.approx(max(span.end for span in mine), rel=1e-9)
        assert found.busy[pipeline_rank] == pytest.approx(
            sum(span.end - span.start for span in mine), rel=1e-9
        )


@settings(max_examples=50, deadline=None)
@given(shapes())
def test_the_step_bounds(shape: tuple[Schedule, int, int, int, list[StageTimes]]) -> None:
    """Never less than the work of a pipeline rank, or than one micro-batch through all stages and back."""
    schedule, _, interleave, micro, times = shape
    found = timed(schedule, times, micro, interleave=interleave)
    assert found.step_seconds >= found.busy.max() * (1 - 1e-12)
    assert found.step_seconds >= sum(t.forward + t.backward for t in times) * (1 - 1e-12)
    assert 0 <= found.bubble < 1


def test_orders_of_ones_own() -> None:
    """Weight-gradient passes deferred further than in ZB-H2, because one is short."""
    times = [StageTimes(1.0, 1.0, 0.5)] * 4
    orders = [zero_bubble(p, 24, warm_up=2 * (3 - p), delay=4 * p) for p in range(4)]
    assert time_orders(orders, times, chain([1, 2, 3, 4]), 24).span_seconds == pytest.approx(
        24 * 2.5
    )
    assert timed(SCHEDULES["zb-h2"], times, 24).span_seconds == pytest.approx(24 * 2.5 + 3)
    plain = SCHEDULES["1f1b"]
    same = [plain.order(4, p, 24) for p in range(4)]
    assert (
        time_orders(same, times, chain([1, 2, 3, 4]), 24).step_seconds
        == timed(plain, times, 24).step_seconds
    )


@pytest.mark.parametrize(
    ("first", "second", "waiting"),
    [("BFW", "FBW", "0, 1"), ("FBW", "BFW", "0, 1"), ("FBW", "FWB", "0, 1")],
)
def test_lists_that_wait_for_each_other_are_refused(first: str, second: str, waiting: str) -> None:
    kinds = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "W": Kind.BACKWARD_WEIGHT}
    orders = [
        Order.of([Action(kinds[letter], pipeline_rank, 0) for letter in letters])
        for pipeline_rank, letters in enumerate((first, second))
    ]
    with pytest.raises(
        DeadlockError,
        match=f"2 stages with 1 micro-batches: pipeline ranks {waiting} wait for each other",
    ):
        time_orders(orders, [StageTimes(1, 1)] * 2, chain([1, 2]), 1)


@pytest.mark.parametrize(("count", "interleave"), [(0, 1), (3, 2), (2, 0)])
def test_layers_that_cannot_be_divided_into_stages(count: int, interleave: int) -> None:
    with pytest.raises(PlanError, match="cannot be split into"):
        timed(SCHEDULES["interleaved"], [StageTimes(1, 1)] * count, 4, interleave=interleave)


def test_many_pipeline_ranks_and_micro_batches() -> None:
    times = [StageTimes(1 + pipeline_rank / 1000, 1, 1, 0.01) for pipeline_rank in range(64)]
    found = timed(SCHEDULES["zb-h1"], times, 4096)
    assert found.step_seconds == pytest.approx(4096 * 3.063, rel=0.02)
