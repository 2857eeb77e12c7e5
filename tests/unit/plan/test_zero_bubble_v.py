"""ZB-V: no bubble, the memory of 1F1B, and nothing sent at the turn."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from parallax.errors import ConfigError, PlanError
from parallax.plan.cluster import Link
from parallax.plan.config import PlanConfig
from parallax.plan.lists import actions
from parallax.plan.schedule import SCHEDULES, Kind
from parallax.plan.simulation.longest_path import StageTimes
from parallax.plan.simulation.simulate import Simulation, simulate
from tests.unit.plan.simulated import timed
from tests.unit.plan_fakes import block, cluster, pipeline, profile, stages

ZB_V, PLAIN = SCHEDULES["zb-v"], SCHEDULES["1f1b"]
FULL = [(2, 3), (2, 8), (3, 5), (4, 7), (4, 16), (6, 11)]  # pipeline ranks, micro-batches enough


def simulated(pipeline_ranks: int, micro: int, *, schedule: Any = ZB_V, **link: Any) -> Simulation:
    """Two blocks of equal thirds to each pipeline rank."""
    each = 2 if schedule is ZB_V else 1
    blocks = [
        block(forward=1, backward=2, weight_seconds=1, moved=10, input=1, output=1)
        for _ in range(2 * pipeline_ranks)
    ]
    return simulate(
        profile(blocks),
        cluster(pipeline_ranks, **link),
        pipeline(
            stages(range(0, 2 * pipeline_ranks + 1, 2 // each)),
            schedule=schedule,
            rows=micro,
            micro=micro,
            interleave=each,
        ),
    )


@pytest.mark.parametrize(("pipeline_ranks", "micro"), FULL)
def test_no_pipeline_rank_waits_where_all_passes_take_equally_long(
    pipeline_ranks: int, micro: int
) -> None:
    """Qi et al. 2024: what is left is that pipeline ranks begin one forward of a stage after the other."""
    found = simulated(pipeline_ranks, micro)
    assert found.step_seconds == pytest.approx(6 * micro + pipeline_ranks - 1)
    assert found.bubble == pytest.approx((pipeline_ranks - 1) / (6 * micro + pipeline_ranks - 1))
    for rank in range(pipeline_ranks):
        spans = [
            s
            for s in found.spans
            if s.rank == rank and s.kind in ("forward", "backward", "backward_weight")
        ]
        assert all(a.end == pytest.approx(b.start) for a, b in itertools.pairwise(spans))
    found = timed(ZB_V, [StageTimes(1, 1, 1)] * (2 * pipeline_ranks), micro, interleave=2)
    assert found.span_seconds == pytest.approx(6 * micro)
    plain = simulated(pipeline_ranks, micro, schedule=PLAIN)
    assert plain.bubble == pytest.approx((pipeline_ranks - 1) / (micro + pipeline_ranks - 1))


@pytest.mark.parametrize(("pipeline_ranks", "micro"), FULL)
@pytest.mark.parametrize(
    ("forward", "backward", "weight"), [(1, 1.1, 0.6), (1, 2, 0.5), (1, 1, 0.9)]
)
def test_what_is_left_of_the_ramp(
    pipeline_ranks: int, micro: int, forward: float, backward: float, weight: float
) -> None:
    """(p − 1)·(T_B − T_W) where a weight half is shorter; times are those of a pipeline rank, of which a stage has
    half."""
    half_times = StageTimes(forward / 2, backward / 2, weight / 2)
    found = timed(ZB_V, [half_times] * (2 * pipeline_ranks), micro, interleave=2)
    idle = found.span_seconds - micro * (forward + backward + weight)
    assert idle == pytest.approx((pipeline_ranks - 1) * (backward - weight))


@pytest.mark.parametrize(("pipeline_ranks", "micro"), [(2, 1), (3, 2), *FULL])
def test_every_pipeline_rank_holds_what_the_first_of_1f1b_does(
    pipeline_ranks: int, micro: int
) -> None:
    found, plain = (
        simulated(pipeline_ranks, micro),
        simulated(pipeline_ranks, micro, schedule=PLAIN),
    )
    most = plain.ranks[0].memory["activations"]
    assert most == 20 * min(micro, pipeline_ranks)
    held = [rank.memory["activations"] for rank in found.ranks]
    assert max(held) <= 20 * pipeline_ranks
    if micro >= 2 * pipeline_ranks - 1:
        assert held == [most] * pipeline_ranks


@pytest.mark.parametrize("pipeline_ranks", [1, 2, 4])
def test_nothing_is_sent_at_the_turn(pipeline_ranks: int) -> None:
    shape = pipeline(stages(range(2 * pipeline_ranks + 1)), schedule=ZB_V, interleave=2)
    sent = {
        (a.kind, a.stage)
        for pipeline_rank in range(pipeline_ranks)
        for a in actions(shape, pipeline_rank, 8)
        if a.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
    }
    turn, last = pipeline_ranks - 1, 2 * pipeline_ranks - 1
    assert sent == {(Kind.SEND_ACTIVATION, s) for s in range(last) if s != turn} | {
        (Kind.SEND_GRADIENT, s + 1) for s in range(last) if s != turn
    }


def test_messages_take_time_everywhere_but_at_the_turn() -> None:
    """One micro-batch through two pipeline ranks: up, round the turn and down, and back again."""
    found = simulated(2, 1, link=Link(bytes_per_second=0.5))
    assert found.step_seconds == pytest.approx(4 * 1 + 4 * 1 + 2 * (2 + 2) + 1 + 1)


def test_where_its_stages_sit() -> None:
    assert [ZB_V.pipeline_rank_of(stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [ZB_V.stages_of(pipeline_rank, 3, 2) for pipeline_rank in range(3)] == [
        (0, 5),
        (1, 4),
        (2, 3),
    ]
    shape = pipeline(stages(range(7)), schedule=ZB_V, interleave=2)
    assert [edge.sender for edge in shape.edges() if shape.is_local(edge)] == [2]
    assert [PLAIN.pipeline_rank_of(stage, 3) for stage in range(3)] == [0, 1, 2]


def test_it_has_two_stages_to_a_pipeline_rank() -> None:
    with pytest.raises(
        ConfigError, match=r"plan.interleave=4: plan.schedule=zb-v has 2 stages per device"
    ):
        PlanConfig(schedule="zb-v", interleave=4)
    with pytest.raises(
        PlanError, match="1 virtual stages per pipeline rank under schedule zb-v: it has 2"
    ):
        ZB_V.order(2, 0, 4)
    assert PlanConfig(schedule="zb-v", interleave=2).schedules == [ZB_V]
    assert ZB_V not in PlanConfig().schedules + PlanConfig(interleave=2).schedules
