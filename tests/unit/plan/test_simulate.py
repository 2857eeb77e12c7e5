"""The simulator against timelines that can be worked out by hand."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest

from parallax.common.events import Span, bubble_fraction
from parallax.errors import DeadlockError
from parallax.plan.cluster import Link, with_buckets
from parallax.plan.lists import actions
from parallax.plan.plan import Directive
from parallax.plan.schedule import SCHEDULES, Kind, Schedule
from parallax.plan.schedule.gpipe import gpipe
from parallax.plan.schedule.order import Order
from parallax.plan.simulation.fluid import Resource, Routine, Simulator
from parallax.plan.simulation.predict import quick_seconds
from parallax.plan.simulation.rank import Rank, World
from tests.unit.plan.simulated import ONE_EACH, nodes, run, times
from tests.unit.plan_fakes import block, cluster, pipeline, profile, stages


@pytest.mark.parametrize("schedule", ONE_EACH)
@pytest.mark.parametrize(
    ("count", "micro"), [(1, 1), (1, 4), (2, 1), (2, 4), (3, 5), (4, 4), (4, 16), (5, 2)]
)
def test_bubble_of_equal_stages(schedule: str, count: int, micro: int) -> None:
    """GPipe, Huang et al. 2019, section 2.3: (S − 1) / (M + S − 1)."""
    result = run(
        [block(forward=1, backward=2)] * count,
        stages(range(count + 1)),
        schedule=schedule,
        rows=micro,
        micro=micro,
    )
    assert result.bubble == pytest.approx((count - 1) / (micro + count - 1), abs=1e-9)
    assert result.step_seconds == pytest.approx(3 * (micro + count - 1), abs=1e-9)


def test_two_stages_by_hand() -> None:
    """Two micro-batches, link of 1 s per message.

    ::

        stage 0 | F0 F1 .. .. .. .. B1 B1 .. B0 B0
        stage 1 | .. .. F0 F1 B1 B1 B0 B0
    """
    blocks = [block(forward=1, backward=2, output=10), block(forward=1, backward=2, input=10)]
    result = run(blocks, stages([0, 1, 2]), rows=2, micro=2, link=Link(bytes_per_second=10))
    assert times(result, "forward") == {
        (0, 0): (0, 1),
        (0, 1): (1, 2),
        (1, 0): (2, 3),
        (1, 1): (3, 4),
    }
    assert times(result, "backward") == {
        (1, 1): (4, 6),
        (1, 0): (6, 8),
        (0, 1): (7, 9),
        (0, 0): (9, 11),
    }
    waits = {(s.rank, s.micro): s.wait for s in result.spans if s.kind == "receive_gradient"}
    assert waits[0, 1] == pytest.approx(5)
    assert result.step_seconds == pytest.approx(11)
    assert result.bubble == pytest.approx(1 - 12 / 22)


def test_three_ranks_on_two_cores_share_them_fairly() -> None:
    result = run([block(forward=2, backward=2)], stages([0, 1], [3]), rows=3, micro=1, concurrent=2)
    assert times(result, "forward") == {(r, 0): (0, 3) for r in range(3)}
    assert result.step_seconds == pytest.approx(6)


def test_work_speeds_up_when_a_neighbour_ends() -> None:
    simulator, core, ends = Simulator(), Resource(1.0), {}

    def work(name: str, seconds: float) -> Routine:
        yield simulator.work(seconds, core)
        ends[name] = simulator.now

    for name, seconds in (("short", 1.0), ("long", 3.0)):
        simulator.spawn(lambda: "work", work(name, seconds))
    assert simulator.run() == pytest.approx(4)
    assert ends == {"short": pytest.approx(2), "long": pytest.approx(4)}


def disagree(pipeline_ranks: int, pipeline_rank: int, micro_batches: int, interleave: int) -> Order:
    order = gpipe(pipeline_ranks, pipeline_rank, micro_batches, interleave).actions()
    return Order.of(order if pipeline_rank == 0 else [order[1], order[0], *order[2:]])


def backward_first(
    pipeline_ranks: int, pipeline_rank: int, micro_batches: int, interleave: int
) -> Order:
    """The first stage wants the gradient of what it has not sent."""
    order = gpipe(pipeline_ranks, pipeline_rank, micro_batches, interleave).actions()
    return Order.of(order if pipeline_rank else [*order[1:], order[0]])


def test_a_deadlock_names_ranks_and_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "wrong", Schedule(name="wrong", ordering=backward_first))
    with pytest.raises(DeadlockError) as error:
        run([block()] * 2, stages([0, 1, 2]), schedule="wrong", rows=2, micro=2)
    assert "rank 0 in receive_gradient(0, 1)" in str(
        error.value
    ) or "rank 0 in receive_gradient(0, 0)" in str(error.value)
    assert "rank 1 in receive_activation(1, 0)" in str(error.value)


def test_a_channel_is_first_in_first_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "wrong", Schedule(name="wrong", ordering=disagree))
    with pytest.raises(
        DeadlockError,
        match=r"rank 1 waits for receive_activation\(1, 1\), but rank 0 sends micro-batch 0",
    ):
        run([block()] * 2, stages([0, 1, 2]), schedule="wrong", rows=2, micro=2)


@pytest.mark.parametrize(("replicas", "expected"), [([1, 2], 3 + 1.5), ([2, 1], 1.5 + 3)])
def test_stages_of_different_replica_counts(replicas: list[int], expected: float) -> None:
    """One micro-batch of two rows: the replicated stage works on one row each, at half the seconds."""
    blocks = [block(forward=0.5, backward=1, output=8), block(forward=0.5, backward=1, input=8)]
    result = run(blocks, stages([0, 1, 2], replicas), rows=2, micro=1)
    assert result.step_seconds == pytest.approx(expected)
    assert len(result.ranks) == 3


def test_the_update_waits_for_all_ranks() -> None:
    blocks = [block(parameter_bytes=10), block(parameter_bytes=30)]
    result = run(blocks, stages([0, 1, 2]), rows=1, micro=1, optimizer_seconds=0.1)
    ends = {s.rank: s.end for s in result.spans if s.kind == "update"}
    assert ends == {0: pytest.approx(7), 1: pytest.approx(9)}


def test_a_replica_without_rows_costs_nothing_and_blocks_no_rank() -> None:
    result = run(
        [block(moved=5, output=2), block(input=2)], stages([0, 1, 2], [3, 1]), rows=2, micro=1
    )
    busy: dict[int, float] = defaultdict(float)
    for span in result.spans:
        if span.kind in ("forward", "backward"):
            busy[span.rank] += span.end - span.start - span.wait
    assert busy[0] == 0
    assert busy[1] == busy[2] == pytest.approx(3)


def test_spans_are_those_of_a_measured_run() -> None:
    result = run([block()] * 2, stages([0, 1, 2], [1, 2]), rows=4, micro=2)
    assert all(
        type(span) is Span and span.step == 0 and span.end >= span.start for span in result.spans
    )
    assert {span.kind for span in result.spans} <= {str(kind) for kind in Kind}
    assert all(type(span.kind) is str for span in result.spans)
    assert {span.rank: span.stage for span in result.spans} == {0: 0, 1: 1, 2: 1}
    assert bubble_fraction(list(result.spans)) == result.bubble
    assert max(span.end for span in result.spans) == pytest.approx(result.step_seconds)


def test_a_split_backward_sends_its_gradient_before_its_weight_half() -> None:
    """Two micro-batches under ZB-H1.

    ::

        stage 0 | F0 F1 .. B0 W0 .. B1 W1
        stage 1 | .. F0 B0 F1 B1 W0 W1
    """
    blocks = [block(forward=1, backward=2, weight_seconds=1)] * 2
    result = run(blocks, stages([0, 1, 2]), schedule="zb-h1", rows=2, micro=2)
    assert times(result, "backward") == {
        (0, 0): (3, 4),
        (0, 1): (5, 6),
        (1, 0): (2, 3),
        (1, 1): (4, 5),
    }
    assert times(result, "backward_weight") == {
        (0, 0): (4, 5),
        (0, 1): (6, 7),
        (1, 0): (5, 6),
        (1, 1): (6, 7),
    }
    assert result.bubble == pytest.approx(1 - 12 / 14)
    assert [rank.seconds["backward"] for rank in result.ranks] == [4, 4]


@pytest.mark.parametrize("directive", ["offload", "recompute"])
def test_only_blocks_that_keep_their_activations_split_their_backward(directive: str) -> None:
    """What was brought back or recomputed for the input half is not held until a weight half."""
    mixed = replace(stages([0, 2])[0], directives=(Directive(directive), Directive.KEEP))
    blocks = [block(forward=1, backward=2, weight_seconds=1, moved=10)] * 2
    result = run(blocks, [mixed], schedule="zb-h1", rows=1, micro=1)
    again = 1 if directive == "recompute" else 0
    assert times(result, "backward") == {(0, 0): (2, 2 + 3 + again)}
    assert times(result, "backward_weight") == {(0, 0): (5 + again, 6 + again)}


def test_the_weight_gradient_pass_moves_the_gradients_that_it_computes() -> None:
    """Of two blocks of 10 bytes only the first has a product: half of the gradients are computed later. A forward and a
    backward read the weights while they compute, and each pass writes its gradients, at 10 bytes per second. It then
    waits for the stored gradients, to which it adds them; a single micro-batch has none."""
    parts = [
        block(parameter_bytes=10, weight_seconds=1),
        block(parameter_bytes=10),
    ]
    offloaded = replace(stages([0, 2])[0], parameter_offload=1.0)
    slow = cluster(1, write=Link(bytes_per_second=10))
    fields = {"rows": 2, "micro": 2, "machines": slow}
    split = run(parts, [offloaded], schedule="zb-h1", **fields)
    assert times(split, "forward") == {(0, 0): (0, 2), (0, 1): (8, 10)}
    assert times(split, "backward") == {(0, 0): (2, 6), (0, 1): (10, 14)}
    assert times(split, "backward_weight") == {(0, 0): (6, 8), (0, 1): (14, 16)}
    assert split.ranks[0].seconds["stall"] == pytest.approx(2 * (1 + 1))
    whole = run(parts, [offloaded], schedule="1f1b", **fields)
    assert times(whole, "backward") == {(0, 0): (2, 8), (0, 1): (10, 16)}
    once = run(parts, [offloaded], rows=1, micro=1, machines=slow)
    assert times(once, "backward") == {(0, 0): (2, 6)}
    assert once.ranks[0].seconds["stall"] == 0


def test_the_speed_of_a_node_falls_as_it_was_measured() -> None:
    """Three replicas; the third has two rows of four, and its backward runs alone."""
    machines = nodes(3, speeds=(1.0, 0.9, 0.6))
    result = run(
        [block(forward=1, backward=1)], stages([0, 1], [3]), rows=4, micro=1, machines=machines
    )
    assert times(result, "forward") == {
        (r, 0): (0, round(end / 0.6, 9)) for r, end in enumerate((1, 1, 2))
    }
    assert times(result, "backward")[2, 0] == (round(2 / 0.6, 9), round(2 / 0.6 + 2, 9))
    crowded = run(
        [block(forward=1, backward=1)],
        stages([0, 1], [6]),
        rows=6,
        micro=1,
        machines=nodes(6, speeds=(1.0, 0.8)),
    )
    assert crowded.step_seconds == pytest.approx(2 / (0.8 * 2 / 6))


def test_ranks_agree_before_they_update() -> None:
    """A step takes the all-reduce of its last numbers, between as many ranks as the plan has."""
    machines = nodes(3, sum_seconds=(0.25, 0.5, 4.0))
    blocks = [block(forward=1, backward=1)] * 2
    for parts, agreed in ((stages([0, 2], [1]), 0.25), (stages([0, 1, 2], [1, 1]), 0.5)):
        result = run(blocks, parts, rows=1, micro=1, machines=machines)
        assert result.step_seconds == pytest.approx(4 + agreed)
        assert quick_seconds(
            profile(blocks), machines, pipeline(parts, rows=1, micro=1)
        ).likely == pytest.approx(4 + agreed)


def test_the_terms_of_a_rank_are_its_step() -> None:
    link = Link(bytes_per_second=100)
    blocks = [block(parameter_bytes=800, moved=10), block(parameter_bytes=800, moved=10)]
    part = replace(
        stages([0, 2], [2])[0],
        directives=(Directive.OFFLOAD, Directive.RECOMPUTE),
        swap_limit_bytes=10,
    )
    slow = Link(bytes_per_second=5)
    result = run(blocks, [part], rows=4, micro=2, link=link, write=slow, optimizer_seconds=0.01)
    for rank in result.ranks:
        assert sum(rank.seconds.values()) == pytest.approx(result.step_seconds)
        assert rank.seconds["forward"] == pytest.approx(4)
        assert rank.seconds["backward"] == pytest.approx(8)
        assert rank.seconds["recompute"] == pytest.approx(2)
        assert rank.seconds["stall"] == pytest.approx(rank.stall_seconds)
        assert rank.seconds["update"] == pytest.approx(16)
        assert rank.seconds["stall"] > 0
        assert rank.seconds["reduce"] > 0


def test_what_splitting_costs_is_paid_only_where_backwards_are_split() -> None:
    parts = [block(forward=1, backward=2, weight_seconds=1.0, split_seconds=0.5)] * 2
    whole, split = (
        run(parts, stages([0, 1, 2]), schedule=s, rows=1, micro=1) for s in ("1f1b", "zb-h1")
    )
    assert whole.step_seconds == pytest.approx(6)
    # The second stage's weight half is hidden.
    assert split.step_seconds == pytest.approx(1 + 1 + 1.5 + 1.5 + 1)


def test_a_list_may_hold_the_actions_of_two_steps() -> None:
    """All ranks meet before they update, so two steps take twice as long as one, and neither takes messages,
    activations or reductions of the other for its own."""
    parts = stages([0, 1, 2], [1, 2], "offload")
    shape = pipeline(parts, schedule="1f1b", rows=6, micro=3)
    blocks = [block(moved=4, input=2, output=2, parameters=3, parameter_bytes=12)] * 2

    def run_steps(steps: int) -> tuple[float, Counter[tuple[int, int]]]:
        link = Link(bytes_per_second=8.0)
        world = World(profile(blocks), cluster(3, link=link, write=link), shape)
        ranks = []
        for pipeline_rank, part in enumerate(parts):
            once = actions(shape, pipeline_rank, 3)
            listed = [replace(each, step=step) for step in range(steps) for each in once]
            ranks += [Rank(world, pipeline_rank, k, listed) for k in range(part.replicas)]
        simulator = world.network.simulator
        for rank in ranks:
            simulator.spawn(rank.describe, rank.run())
        seconds = simulator.run()
        return seconds, Counter((span.rank, span.step) for rank in ranks for span in rank.spans)

    once, spans = run_steps(1)
    twice, both = run_steps(2)
    assert twice == pytest.approx(2 * once)
    assert both == {(rank, step): spans[rank, 0] for rank in range(3) for step in range(2)}


def test_replicas_wait_for_statistics_of_each_other_without_a_core() -> None:
    """Two replicas on one core: computing takes turns, and the exchange of statistics does not."""
    cost = block(forward=2, backward=3, norm_seconds=1.0)
    cost = replace(cost, norms=5)
    where: dict[str, Any] = {"rows": 2, "micro": 1, "concurrent": 1, "exchanges": (0.0, 0.1)}
    shared = run([cost], stages([0, 1], [2]), **where).step_seconds
    assert shared == pytest.approx(2 * (2 + 3 + 1) + 2 * 5 * 0.1)
    again = run([cost], stages([0, 1], [2], directive="recompute"), **where).step_seconds
    assert again == pytest.approx(2 * (2 + 3 + 1 + 2.5) + 3 * 5 * 0.1)
    assert run([cost], stages([0, 1], [1]), **where).step_seconds == pytest.approx(2 * 5)


def test_inputs_that_need_no_gradient_have_one_in_a_later_stage() -> None:
    costs = [block(forward=1, backward=1, received_seconds=0.5) for _ in range(2)]
    together = run(costs, stages([0, 2]), rows=1, micro=1).step_seconds
    assert together == pytest.approx(4)
    assert run(costs, stages([0, 1, 2]), rows=1, micro=1).step_seconds == pytest.approx(4.5)


def test_small_all_reduces_take_the_measured_seconds_or_the_latencies_of_a_ring() -> None:
    link = Link(bytes_per_second=1e9, latency_seconds=0.5)
    device = with_buckets(nodes(3, local=link, exchange_seconds=(0.1, 0.2, 4.0))).devices[0]
    assert [device.exchange_seconds(n) for n in (1, 2, 3, 4)] == [None, 1.0, 4.0, 6.0]
    assert nodes(3).devices[0].exchange_seconds(2) == 0.0
