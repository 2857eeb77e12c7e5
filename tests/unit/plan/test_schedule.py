"""The lists that both interpreters run."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError, PlanError
from parallax.plan.cluster import Link
from parallax.plan.config import PlanConfig
from parallax.plan.lists import actions, evaluation_actions
from parallax.plan.plan import Directive, Pipeline
from parallax.plan.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Listing,
    Schedule,
    named,
    register_schedule,
)
from parallax.plan.schedule.gpipe import gpipe
from parallax.plan.schedule.one_forward import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD
from parallax.plan.search.search import search
from parallax.plan.simulation.simulate import simulate
from tests.unit.plan.simulated import DRAINING
from tests.unit.plan_fakes import block, cluster, pipeline, profile, stages

SHAPES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (4, 2), (4, 4), (4, 9), (5, 3)]
KINDS = [(s, each) for s in DRAINING for each in (1, 2, 3) if s.allows(each)]
SENDS = {
    Kind.SEND_ACTIVATION: (Kind.RECEIVE_ACTIVATION, 1),
    Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, -1),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("schedule", "interleave"), KINDS)
@pytest.mark.parametrize(("count", "micro"), SHAPES)
def test_every_micro_batch_goes_forward_before_it_goes_backward(
    schedule: Schedule, interleave: int, count: int, micro: int
) -> None:
    kinds = [Kind.FORWARD, Kind.BACKWARD, *([Kind.BACKWARD_WEIGHT] if schedule.splits else [])]
    for pipeline_rank in range(count):
        listed = schedule.compute_order(count, pipeline_rank, micro, interleave=interleave)
        assert len(listed) == len(kinds) * micro * interleave
        for stage, m in itertools.product(
            schedule.stages_of(pipeline_rank, count, interleave), range(micro)
        ):
            places = [listed.index(Action(kind, stage, m)) for kind in kinds]
            assert places == sorted(places)


def shape_of(
    schedule: Schedule, pipeline_ranks: int, interleave: int = 1, directive: str = "keep"
) -> Pipeline:
    """Stages of one block each."""
    bounds = range(pipeline_ranks * interleave + 1)
    return pipeline(stages(bounds, None, directive), schedule=schedule, interleave=interleave)


@pytest.mark.parametrize(("count", "micro"), SHAPES)
def test_in_flight(count: int, micro: int) -> None:
    for stage in range(count):
        assert SCHEDULES["1f1b"].in_flight(count, stage, micro) == min(micro, count - stage)
        assert SCHEDULES["gpipe"].in_flight(count, stage, micro) == micro
        assert SCHEDULES["interleaved"].in_flight(count, stage, micro) == min(micro, count - stage)
        # Qi et al. 2024, section 2: the memory of 1F1B's first stage on all stages, and about twice that.
        assert SCHEDULES["zb-h1"].in_flight(count, stage, micro) == min(micro, count)
        assert SCHEDULES["zb-h2"].in_flight(count, stage, micro) == min(micro, 2 * count - 1)


def test_in_flight_of_stages_that_share_a_pipeline_rank() -> None:
    """Narayanan et al. 2021, section 2.2: the first pipeline rank warms up with 2·(p − 1) + (v − 1)·p = 10 forwards, so
    11 are in flight; its stages have their own peaks one action apart."""
    assert [INTERLEAVED.in_flight(8, stage, 16, 2) for stage in (0, 4)] == [8, 4]
    assert [INTERLEAVED.in_flight(8, stage, 16, 2) for stage in (3, 7)] == [5, 1]
    assert [INTERLEAVED.in_flight(8, stage, 3, 2) for stage in (0, 4)] == [3, 3]
    with pytest.raises(
        PlanError, match="stage 3 of 3, 2 per pipeline rank: there is no such stage"
    ):
        INTERLEAVED.in_flight(3, 3, 4, 2)


@pytest.mark.sampled
@pytest.mark.parametrize(("schedule", "interleave"), KINDS)
@pytest.mark.parametrize(("count", "micro"), SHAPES)
def test_sends_and_receives_of_neighbours_match_in_order(
    schedule: Schedule, interleave: int, count: int, micro: int
) -> None:
    """Per pair of pipeline ranks and direction, whatever stages the messages are for: channels are FIFO."""
    shape = shape_of(schedule, count, interleave)
    lists = [actions(shape, pipeline_rank, micro) for pipeline_rank in range(count)]
    for (pipeline_rank, listed), (sent, (received, step)) in itertools.product(
        enumerate(lists), SENDS.items()
    ):
        out = [(a.stage + step, a.micro) for a in listed if a.kind is sent]
        for other in range(count):
            mine = [each for each in out if schedule.pipeline_rank_of(each[0], count) == other]
            assert mine == [
                (a.stage, a.micro)
                for a in lists[other]
                if a.kind is received
                and schedule.pipeline_rank_of(a.stage - step, count) == pipeline_rank
            ]
            assert not mine or other != pipeline_rank  # what stays on a pipeline rank is not sent
    everything = [a for listed in lists for a in listed]
    last = count * interleave - 1
    assert not [
        a
        for a in everything
        if a.stage == 0 and a.kind in (Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT)
    ]
    assert not [
        a
        for a in everything
        if a.stage == last and a.kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT)
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(("schedule", "interleave"), KINDS)
@pytest.mark.parametrize(("count", "micro"), SHAPES)
def test_what_surrounds_compute(
    schedule: Schedule, interleave: int, count: int, micro: int
) -> None:
    offloading = shape_of(schedule, count, interleave, "offload")
    for pipeline_rank in range(count):
        listed = actions(offloading, pipeline_rank, micro)
        assert listed[-2:] == [
            Action(Kind.REDUCE, pipeline_rank),
            Action(Kind.UPDATE, pipeline_rank),
        ]
        compute = [
            a for a in listed if a.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        ]
        for before, action in zip([None, *compute], compute):
            place = listed.index(action)
            if action.kind is Kind.BACKWARD:
                fetch = listed.index(Action(Kind.FETCH, action.stage, action.micro))
                assert before is not None
                assert listed.index(before) < fetch < place
                between = listed[fetch + 1 : place]
                # Reading overlaps with the wait only.
                assert all(a.kind is Kind.RECEIVE_GRADIENT for a in between)
        assert len([a for a in listed if a.kind is Kind.FETCH]) == micro * interleave
        plain = [a for a in listed if a.kind is not Kind.FETCH]
        assert plain == actions(shape_of(schedule, count, interleave), pipeline_rank, micro)


def test_the_first_of_a_group_is_back_when_its_last_has_left() -> None:
    """Groups are as large as there are pipeline ranks, or a little larger where those do not divide the
    micro-batches."""
    forwards = [
        (a.stage, a.micro)
        for a in INTERLEAVED.compute_order(2, 0, 4, interleave=2)
        if a.kind == "forward"
    ]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    uneven = [
        a.micro for a in INTERLEAVED.compute_order(2, 0, 5, interleave=2) if a.kind == "forward"
    ]
    assert uneven == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]


@pytest.mark.parametrize(
    "schedule", [s for s in SCHEDULES.values() if not s.has_virtual_stages], ids=str
)
def test_not_every_schedule_has_several_stages_to_a_pipeline_rank(schedule: Schedule) -> None:
    with pytest.raises(PlanError, match=r"it has 1; interleaved.* allows this number"):
        schedule.compute_order(2, 0, 4, interleave=2)


def test_evaluation_only_goes_forward() -> None:
    listed = [str(a) for a in evaluation_actions(shape_of(ONE_FORWARD_ONE_BACKWARD, 3), 1, 2)]
    one = ["receive_activation(1, {0})", "forward(1, {0})", "send_activation(1, {0})"]
    assert listed == [text.format(m) for m in range(2) for text in one]
    assert [str(a) for a in evaluation_actions(shape_of(ONE_FORWARD_ONE_BACKWARD, 1), 0, 2)] == [
        "forward(0, 0)",
        "forward(0, 1)",
    ]


LETTERS = {"forward": "F", "backward": "B", "backward_weight": "W"}


@pytest.mark.parametrize("schedule", DRAINING, ids=str)
def test_the_picture_is_what_the_simulator_does(schedule: Schedule) -> None:
    """One column of the docstring's picture is one unit of time; small letters are those of a pipeline rank's second
    stage."""
    picture = re.findall(
        r"stage (\d) \| (.+)", (schedule.ordering or schedule.grouping).__doc__ or ""
    )
    drawn = {
        (int(stage), cell): column
        for stage, row in picture
        for column, cell in enumerate(row.split())
        if cell != ".."
    }
    pipeline_ranks, interleave = len(picture), 2 if any(cell.islower() for _, cell in drawn) else 1
    weight = 1 if any(cell[0] == "W" for _, cell in drawn) else 0
    micro = 1 + max(int(cell[1:]) for _, cell in drawn)
    count = pipeline_ranks * interleave
    result = simulate(
        profile([block(forward=1, backward=1 + weight, weight_seconds=weight)] * count),
        cluster(pipeline_ranks),
        pipeline(
            stages(range(count + 1)),
            schedule=schedule,
            rows=micro,
            micro=micro,
            interleave=interleave,
        ),
    )
    found = {}
    for span in result.spans:
        if span.kind in LETTERS:
            letter = (
                LETTERS[span.kind] if span.stage < pipeline_ranks else LETTERS[span.kind].lower()
            )
            found[span.rank, f"{letter}{span.micro}"] = round(span.start, 6)
    assert found == drawn


@pytest.mark.parametrize(("stage", "count", "micro"), [(2, 2, 1), (-1, 2, 1), (0, 1, 0)])
def test_nothing_to_schedule(stage: int, count: int, micro: int) -> None:
    with pytest.raises(PlanError, match="nothing to schedule"):
        actions(shape_of(SCHEDULES["gpipe"], count), stage, micro)


def test_an_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gpipe'"):
        named("gpip").compute_order(1, 0, 1)


def test_an_unknown_schedule_of_a_file_can_be_shown_but_not_run() -> None:
    theirs = named("their_module:listing")
    assert str(theirs) == "their_module:listing"
    assert theirs is named("their_module:listing")
    assert not theirs.has_virtual_stages
    with pytest.raises(PlanError, match=r"call parallax\.register_schedule"):
        theirs.order(2, 0, 4)
    with pytest.raises(PlanError, match="known are gpipe, 1f1b"):
        named("no name")


def test_another_process_finds_its_own_by_name() -> None:
    for schedule in (*SCHEDULES.values(), named("their_module:listing")):
        assert pickle.loads(pickle.dumps(schedule)) is schedule
        assert copy.deepcopy(schedule) is schedule


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=str)
@pytest.mark.parametrize("pipeline_ranks", [1, 2, 3, 5])
def test_stages_sit_where_their_pipeline_rank_says(schedule: Schedule, pipeline_ranks: int) -> None:
    for each in (count for count in (1, 2, 3) if schedule.allows(count)):
        found = {
            stage: pipeline_rank
            for pipeline_rank in range(pipeline_ranks)
            for stage in schedule.stages_of(pipeline_rank, pipeline_ranks, each)
        }
        assert sorted(found) == list(range(pipeline_ranks * each))
        assert all(
            schedule.pipeline_rank_of(stage, pipeline_ranks) == found[stage] for stage in found
        )
        assert [found[stage] for stage in range(pipeline_ranks)] == list(range(pipeline_ranks))


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    micro=st.integers(1, 8),
    rows=st.integers(1, 12),
    directives=st.lists(st.sampled_from(list(Directive)), min_size=3, max_size=3),
    limit=st.integers(300, 2000),
    concurrent=st.sampled_from([1.0, 2.0, 50.0]),
)
def test_no_shape_deadlocks(
    kind: tuple[Schedule, int],
    replicas: list[int],
    micro: int,
    rows: int,
    directives: list[Directive],
    limit: int,
    concurrent: float,
) -> None:
    """Whatever the shape, the step ends, and every stage has seen every micro-batch once."""
    schedule, interleave = kind
    micro, count = min(micro, rows), len(replicas) * interleave
    blocks = [
        block(forward=f, weight_seconds=0.3, moved=20, input=4, output=4) for f in (1, 2, 0.5)
    ] * count
    counts = [replicas[schedule.pipeline_rank_of(s, len(replicas))] for s in range(count)]
    parts = stages([3 * s for s in range(count + 1)], counts, limit=limit)
    shape = pipeline(
        [replace(part, directives=tuple(directives)) for part in parts],
        schedule=schedule,
        rows=rows,
        micro=micro,
        interleave=interleave,
    )
    micro = shape.micro_batches(rows)
    result = simulate(
        profile(blocks),
        cluster(sum(replicas), concurrent=concurrent, write=Link(bytes_per_second=50.0)),
        shape,
    )
    seen = Counter((span.kind, span.rank, span.stage, span.micro) for span in result.spans)
    wanted = {Kind.FORWARD, Kind.BACKWARD, *([Kind.BACKWARD_WEIGHT] if schedule.splits else [])}
    first = 0
    for pipeline_rank, number in enumerate(replicas):
        for rank, stage, m in itertools.product(
            range(first, first + number),
            schedule.stages_of(pipeline_rank, len(replicas), interleave),
            range(micro),
        ):
            assert all(seen[kind, rank, stage, m] == 1 for kind in wanted)
        first += number
    computed = [key for key in seen if key[0] in wanted]
    assert len(computed) == len(wanted) * sum(replicas) * interleave * micro
    assert result.step_seconds > 0


# ---- schedules of one's own


@pytest.fixture
def known() -> Iterator[None]:
    """Schedules registered by a test are forgotten after it."""
    before = dict(SCHEDULES)
    yield
    SCHEDULES.clear()
    SCHEDULES.update(before)


def one_at_a_time(pipeline_ranks: int, pipeline_rank: int, micro_batches: int) -> list[Action]:
    del pipeline_ranks
    pairs = (
        (Action(Kind.FORWARD, pipeline_rank, m), Action(Kind.BACKWARD, pipeline_rank, m))
        for m in range(micro_batches)
    )
    return [action for pair in pairs for action in pair]


@pytest.mark.usefixtures("known")
def test_a_schedule_of_ones_own() -> None:
    register_schedule("mine", one_at_a_time)
    assert [str(a) for a in SCHEDULES["mine"].compute_order(2, 1, 2)] == [
        "forward(1, 0)",
        "backward(1, 0)",
        "forward(1, 1)",
        "backward(1, 1)",
    ]
    assert SCHEDULES["mine"].in_flight(3, 0, 100) == 1
    with pytest.raises(PlanError, match="the name is registered already"):
        register_schedule("mine", one_at_a_time)


def forgets(pipeline_ranks: int, pipeline_rank: int, micro_batches: int) -> list[Action]:
    return one_at_a_time(pipeline_ranks, pipeline_rank, micro_batches)[:-1]


def repeats(pipeline_ranks: int, pipeline_rank: int, micro_batches: int) -> list[Action]:
    return one_at_a_time(pipeline_ranks, pipeline_rank, micro_batches) * 2


def backward_first(pipeline_ranks: int, pipeline_rank: int, micro_batches: int) -> list[Action]:
    return one_at_a_time(pipeline_ranks, pipeline_rank, micro_batches)[::-1]


def crossed(pipeline_ranks: int, pipeline_rank: int, micro_batches: int) -> list[Action]:
    """The first stage wants its gradient before it sends the next micro-batch, the last wants both first."""
    if pipeline_rank == pipeline_ranks - 1:
        return gpipe(pipeline_ranks, pipeline_rank, micro_batches, 1).actions()
    return one_at_a_time(pipeline_ranks, pipeline_rank, micro_batches)


def late(pipeline_ranks: int, pipeline_rank: int, micro_batches: int) -> list[Action]:
    """The first stage wants all its gradients before it sends the last micro-batch, the last stage wants that first."""
    forwards = [Action(Kind.FORWARD, pipeline_rank, m) for m in range(micro_batches)]
    backwards = [Action(Kind.BACKWARD, pipeline_rank, m) for m in range(micro_batches)]
    if pipeline_rank == pipeline_ranks - 1:
        return [*forwards, *backwards]
    return [*forwards[:-1], *backwards[:-1], forwards[-1], backwards[-1]]


def turned(pipeline_ranks: int, pipeline_rank: int, micro_batches: int) -> list[Action]:
    """The last stage takes micro-batches in reverse."""
    listed = gpipe(pipeline_ranks, pipeline_rank, micro_batches, 1).actions()
    return (
        [replace(a, micro=micro_batches - 1 - a.micro) for a in listed]
        if pipeline_rank == pipeline_ranks - 1
        else listed
    )


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("listing", "message"),
    [
        (forgets, r"backward\(0, 0\) missing"),
        (repeats, "an action missing, unknown or duplicated"),
        (backward_first, "runs backward before its forward"),
        (crossed, "backwards have another order"),
        (turned, "forwards have another order"),
        (late, "wait for each other"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(listing: Listing, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        register_schedule("mine", listing)
    assert "mine" not in SCHEDULES


def split_from(ranks: int, micro_batches: int) -> Listing:
    """GPipe, with separate weight-gradient passes from this number of ranks and micro-batches on."""

    def listing(pipeline_ranks: int, pipeline_rank: int, count: int) -> list[Action]:
        kinds = [Kind.FORWARD, Kind.BACKWARD]
        if pipeline_ranks >= ranks and count >= micro_batches:
            kinds.append(Kind.BACKWARD_WEIGHT)
        return [Action(kind, pipeline_rank, micro) for kind in kinds for micro in range(count)]

    return listing


@pytest.mark.usefixtures("known")
def test_a_schedule_that_splits_only_larger_pipelines() -> None:
    register_schedule("two", split_from(2, 1))
    two = SCHEDULES["two"]
    assert two.splits
    assert not any(
        action.kind is Kind.BACKWARD_WEIGHT for action in actions(shape_of(two, 1), 0, 3)
    )
    register_schedule("seven", split_from(1, 7))
    seven = SCHEDULES["seven"]
    assert not seven.splits
    assert actions(shape_of(seven, 2), 0, 6)
    with pytest.raises(
        PlanError, match=r"splits backwards on 2 ranks with 7 .*none of up to 4 with up to 6"
    ):
        actions(shape_of(seven, 2), 0, 7)


@pytest.mark.usefixtures("known")
def test_a_schedule_of_ones_own_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    config = PlanConfig(schedule="own_schedule:halved")
    assert config.schedule not in SCHEDULES  # a setting is only a name
    (schedule,) = config.schedules
    assert schedule.in_flight(2, 0, 8) == 4
    plan, forecast = search(
        profile([block() for _ in range(4)]),
        cluster(2),
        PlanConfig(schedule="own_schedule:halved"),
        global_batch=8,
    )
    assert plan.schedule is schedule
    assert forecast.spans
    with pytest.raises(ConfigError, match="module own_schedule has no quartered"):
        PlanConfig(schedule="own_schedule:quartered").load_schedule()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pipeline_ranks", [1, 2, 3])
def test_which_schedules_let_one_loss_see_all_micro_batches(name: str, pipeline_ranks: int) -> None:
    schedule = SCHEDULES[name]
    each = schedule.interleaves[0]
    assert schedule.forwards_first(pipeline_ranks, 1, each)
    assert schedule.forwards_first(pipeline_ranks, 6, each) is (name in ("gpipe", "breadth-first"))
