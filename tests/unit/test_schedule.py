"""The lists that both interpreters run."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError, PlanError
from parallax.plan.schedule import ORDERS, Action, Kind, actions, compute_order, evaluation_actions, in_flight
from parallax.plan.simulate import simulate
from tests.unit.plan_fakes import block, cluster, profile, stages

SHAPES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (4, 2), (4, 4), (4, 9), (5, 3)]
OPPOSITE = {Kind.SEND_ACTIVATION: (Kind.RECEIVE_ACTIVATION, 1), Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, -1)}


@pytest.mark.parametrize("schedule", list(ORDERS))
@pytest.mark.parametrize(("count", "micro"), SHAPES)
def test_every_micro_batch_goes_forward_before_it_goes_backward(schedule: str, count: int, micro: int) -> None:
    for stage in range(count):
        order = compute_order(schedule, count, stage, micro)
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert sorted(a.micro for a in order if a.kind is kind) == list(range(micro))
        for m in range(micro):
            assert order.index(Action(Kind.FORWARD, stage, m)) < order.index(Action(Kind.BACKWARD, stage, m))


@pytest.mark.parametrize(("count", "micro"), SHAPES)
def test_in_flight(count: int, micro: int) -> None:
    for stage in range(count):
        assert in_flight("1f1b", count, stage, micro) == min(micro, count - stage)
        assert in_flight("gpipe", count, stage, micro) == micro


@pytest.mark.parametrize("schedule", list(ORDERS))
@pytest.mark.parametrize(("count", "micro"), SHAPES)
def test_sends_and_receives_of_neighbours_match_in_order(schedule: str, count: int, micro: int) -> None:
    lists = [actions(schedule, count, s, micro) for s in range(count)]
    for stage, (sent, (received, step)) in itertools.product(range(count), OPPOSITE.items()):
        out = [a.micro for a in lists[stage] if a.kind is sent]
        neighbour = lists[stage + step] if 0 <= stage + step < count else []
        assert out == [a.micro for a in neighbour if a.kind is received]
    assert not [a for a in lists[0] if a.kind in (Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT)]
    assert not [a for a in lists[-1] if a.kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT)]


@pytest.mark.parametrize("schedule", list(ORDERS))
@pytest.mark.parametrize(("count", "micro"), SHAPES)
def test_what_surrounds_compute(schedule: str, count: int, micro: int) -> None:
    for stage in range(count):
        listed = actions(schedule, count, stage, micro, offload=True)
        assert [a.kind for a in listed[-2:]] == [Kind.REDUCE, Kind.UPDATE]
        compute = [a for a in listed if a.kind in (Kind.FORWARD, Kind.BACKWARD)]
        for before, action in zip([None, *compute], compute):
            place = listed.index(action)
            if action.kind is Kind.FORWARD:
                assert listed[place - 1] == Action(Kind.OFFLOAD, stage, action.micro)
                continue
            fetch = listed.index(Action(Kind.FETCH, stage, action.micro))
            assert before is not None
            assert listed.index(before) < fetch < place
            between = listed[fetch + 1 : place]
            assert all(a.kind is Kind.RECEIVE_GRADIENT for a in between)  # reading overlaps with the wait only
        assert len([a for a in listed if a.kind is Kind.FETCH]) == micro
        plain = [a for a in listed if a.kind not in (Kind.OFFLOAD, Kind.FETCH)]
        assert plain == actions(schedule, count, stage, micro)


def test_evaluation_only_goes_forward() -> None:
    listed = [str(a) for a in evaluation_actions(3, 1, 2)]
    one = ["receive_activation(1, {0})", "forward(1, {0})", "send_activation(1, {0})"]
    assert listed == [text.format(m) for m in range(2) for text in one]
    assert [str(a) for a in evaluation_actions(1, 0, 2)] == ["forward(0, 0)", "forward(0, 1)"]


@pytest.mark.parametrize("schedule", list(ORDERS))
def test_the_picture_is_what_the_simulator_does(schedule: str) -> None:
    """One column of the docstring's picture is one unit of time."""
    picture = re.findall(r"stage (\d) \| (.+)", ORDERS[schedule].__doc__ or "")
    drawn = {}
    for stage, row in picture:
        for column, cell in enumerate(row.split()):
            if cell != "..":
                drawn[int(stage), cell] = column
    result = simulate(
        profile([block(forward=1, backward=1)] * 2),
        cluster(2),
        stages([0, 1, 2]),
        schedule=schedule,
        rows=4,
        micro_batches=4,
    )
    found = {
        (span.stage, f"{span.kind[0].upper()}{span.micro}"): round(span.start, 6)
        for span in result.spans
        if span.kind in ("forward", "backward")
    }
    assert found == drawn


@pytest.mark.parametrize(("stage", "count", "micro"), [(2, 2, 1), (-1, 2, 1), (0, 1, 0)])
def test_nothing_to_schedule(stage: int, count: int, micro: int) -> None:
    with pytest.raises(PlanError, match="nothing to schedule"):
        actions("gpipe", count, stage, micro)


def test_an_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gpipe'"):
        compute_order("gpip", 1, 0, 1)


@settings(max_examples=150, deadline=None)
@given(
    schedule=st.sampled_from(list(ORDERS)),
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    micro=st.integers(1, 8),
    rows=st.integers(1, 12),
    directive=st.sampled_from(["keep", "offload", "recompute"]),
    limit=st.integers(300, 2000),
    concurrent=st.sampled_from([1.0, 2.0, 50.0]),
)
def test_no_shape_deadlocks(
    schedule: str, replicas: list[int], micro: int, rows: int, directive: str, limit: int, concurrent: float
) -> None:
    micro = min(micro, rows)
    blocks = [block(forward=f, moved=20, input=4, output=4) for f in (1, 2, 0.5)] * len(replicas)
    slow = cluster(sum(replicas), concurrent=concurrent).devices[0].write
    assert slow.seconds(1) > 0
    result = simulate(
        profile(blocks),
        cluster(sum(replicas), concurrent=concurrent, write=type(slow)(bytes_per_second=50.0)),
        stages([3 * s for s in range(len(replicas) + 1)], replicas, directive, limit),
        schedule=schedule,
        rows=rows,
        micro_batches=micro,
    )
    assert {span.kind for span in result.spans} >= {"forward", "backward", "update"}
    assert result.step_seconds > 0
