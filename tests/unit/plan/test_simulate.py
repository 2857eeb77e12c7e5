"""The simulator against timelines that can be worked out by hand."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.common.events import Span, bubble_fraction
from parallax.errors import BudgetExceeded, DeadlockError
from parallax.plan.cluster import Cluster, Link, Node
from parallax.plan.cost.collective import all_reduce_seconds
from parallax.plan.cost.stage import load_planned
from parallax.plan.plan import Directive
from parallax.plan.profile import Affine
from parallax.plan.schedule import SCHEDULES, Kind, Schedule
from parallax.plan.schedule.gpipe import gpipe
from parallax.plan.schedule.order import Order
from parallax.plan.simulation.fluid import Resource, Routine, Simulator
from parallax.plan.simulation.simulate import Simulation, simulate
from tests.unit.plan_fakes import FREE, block, cluster, profile, stages

ONE_EACH = [name for name in SCHEDULES if SCHEDULES[name].allows(1)]  # stage to a position


def run(
    blocks: list[Any],
    parts: list[Any],
    *,
    schedule: str = "gpipe",
    rows: int = 4,
    micro: int = 4,
    machines: Cluster | None = None,
    interleave: int = 1,
    placement: tuple[int, ...] = (),
    **where: Any,
) -> Simulation:
    fields = {
        k: where.pop(k) for k in ("ties", "optimizer_bytes", "optimizer_seconds") if k in where
    }
    return simulate(
        profile(blocks, **fields),
        machines or cluster(sum(part.replicas for part in parts) // interleave, **where),
        parts,
        schedule=SCHEDULES[schedule],
        rows=rows,
        micro_batches=micro,
        interleave=interleave,
        placement=placement,
    )


def nodes(
    *sizes: int, local: Link = FREE, remote: Link = FREE, over_host: bool = False, **changes: Any
) -> Cluster:
    """Nodes of so many devices; ``changes`` are those of a device, or ``speeds`` of a node."""
    speeds = changes.pop("speeds", ())
    device = replace(cluster(1).devices[0], **changes)
    hosts = tuple(
        Node(name="n", devices=(device,) * size, concurrent=1000.0, speeds=speeds) for size in sizes
    )
    return Cluster(nodes=hosts, local=local, remote=remote, local_over_host=over_host)


def times(result: Simulation, kind: str) -> dict[tuple[int, int], tuple[float, float]]:
    return {
        (s.rank, s.micro): (round(s.start, 9), round(s.end, 9))
        for s in result.spans
        if s.kind == kind
    }


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


def test_messages_wait_for_the_latency_alone_and_share_the_bandwidth() -> None:
    """Ten messages sent at once: the latency of all passes together."""
    blocks = [block(forward=0, backward=0, output=10), block(forward=0, backward=0, input=10)]
    result = run(
        blocks,
        stages([0, 1, 2]),
        rows=10,
        micro=10,
        link=Link(bytes_per_second=100, latency_seconds=5),
    )
    assert result.step_seconds == pytest.approx(2 * (10 * 10 / 100 + 5))
    one = run(
        blocks,
        stages([0, 1, 2]),
        rows=1,
        micro=1,
        link=Link(bytes_per_second=100, latency_seconds=5),
    )
    assert one.step_seconds == pytest.approx(2 * (10 / 100 + 5))


def test_a_full_swap_limit_pushes_back() -> None:
    """Writing takes 3 s a micro-batch, computing 1: with room for one, each later forward waits for a write."""
    slow = Link(bytes_per_second=100 / 3)
    blocks = [block(forward=1, backward=1, moved=100)]
    free = run(blocks, stages([0, 1], directive="offload", limit=400), write=slow)
    tight = run(blocks, stages([0, 1], directive="offload", limit=100), write=slow)
    # Writes of 0 and 1 end at 4 and 7, of 2 and 3 are spared: backwards 3 and 2 at 4 and 5, 1 at 7, 0 after its read.
    assert times(free, "backward") == {
        (0, 3): (4, 5),
        (0, 2): (5, 6),
        (0, 1): (6, 8),
        (0, 0): (8, 12),
    }
    assert free.ranks[0].stall_seconds == pytest.approx(1 + 3)
    assert free.ranks[0].offloaded_bytes == 200
    # Forwards end at 1, then at the ends of writes (4, 7, 10); the last is being written (13) when it is wanted.
    ends = [end for _, end in sorted(times(tight, "forward").values())]
    assert ends == pytest.approx([1, 4, 7, 10])
    assert tight.ranks[0].stall_seconds > 6
    waits = sum(s.wait for s in tight.spans if s.kind in ("forward", "backward"))
    assert waits == pytest.approx(tight.ranks[0].stall_seconds)
    assert tight.step_seconds == pytest.approx(8 + tight.ranks[0].stall_seconds)
    assert tight.ranks[0].offloaded_bytes == 400
    assert tight.ranks[0].tier_peak_bytes == 400


def test_a_limit_below_one_block_is_refused() -> None:
    with pytest.raises(
        BudgetExceeded, match=r"stage 0: 100 B must fit a swap limit of 99 B of which 0 B"
    ):
        run([block(moved=100)], stages([0, 1], directive="offload", limit=99))


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    micro=st.integers(1, 6),
    spare=st.integers(0, 120),
    speed=st.floats(1, 100),
    schedule=st.sampled_from(ONE_EACH),
)
def test_a_limit_of_the_largest_block_is_always_enough(
    sizes: list[int], micro: int, spare: int, speed: float, schedule: str
) -> None:
    blocks = [block(forward=1 / size, backward=size / 50, moved=size) for size in sizes] * 2
    parts = stages([0, len(sizes), 2 * len(sizes)], directive="offload", limit=max(sizes) + spare)
    write = Link(bytes_per_second=speed)
    result = run(blocks, parts, schedule=schedule, rows=micro, micro=micro, write=write)
    for rank in result.ranks:
        assert 0 <= rank.offloaded_bytes <= 2 * micro * sum(sizes)
        assert rank.stall_seconds >= 0


def test_peak_bytes_by_hand() -> None:
    """Two stages, 1F1B, two micro-batches of one row."""
    blocks = [
        block(
            parameter_bytes=100,
            buffer_bytes=7,
            moved=10,
            stays=1,
            output=4,
            forward_work=5,
            backward_work=20,
        ),
        block(
            parameter_bytes=200,
            moved=30,
            stays=2,
            input=4,
            output=3,
            forward_work=50,
            backward_work=6,
        ),
    ]
    result = run(
        blocks,
        stages([0, 1, 2]),
        schedule="1f1b",
        rows=2,
        micro=2,
        optimizer_bytes=2.0,
        reserve=1000,
    )
    # Two in flight, the second's backward has not begun.
    first = 100 * 4 + 7 + 1000 + 2 * 4 + 2 * 11 + 20 + 4
    # What a forward saves comes beside its work.
    second = 200 * 4 + 1000 + 2 * 4 + max(32 + 50 + 3, 32 + 6 + 3)
    assert [rank.peak_bytes for rank in result.ranks] == [first, second]
    moved = run(
        blocks,
        stages([0, 1, 2], directive="offload", limit=60),
        schedule="1f1b",
        rows=2,
        micro=2,
        reserve=1000,
    )
    assert moved.ranks[0].peak_bytes == 100 * 4 + 7 + 1000 + 8 + 60 + max(
        1 + 5 + 4 + 10, 2 * 1 + 20 + 4
    )
    again = run(
        blocks,
        stages([0, 1, 2], directive="recompute"),
        schedule="gpipe",
        rows=2,
        micro=2,
        reserve=1000,
    )
    assert again.ranks[1].peak_bytes == 200 * 4 + 1000 + 8 + max(
        2 * 4 + 50 + 3 + 32, 2 * 4 + 6 + 3 + 32
    )


def disagree(positions: int, position: int, micro_batches: int, interleave: int) -> Order:
    order = gpipe(positions, position, micro_batches, interleave).actions()
    return Order.of(order if position == 0 else [order[1], order[0], *order[2:]])


def backward_first(positions: int, position: int, micro_batches: int, interleave: int) -> Order:
    """The first stage wants the gradient of what it has not sent."""
    order = gpipe(positions, position, micro_batches, interleave).actions()
    return Order.of(order if position else [*order[1:], order[0]])


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


def test_replicas_reduce_over_the_ring_while_the_last_backward_runs() -> None:
    link = Link(bytes_per_second=100)
    result = run([block(parameter_bytes=800)], stages([0, 1], [2]), rows=2, micro=1, link=link)
    # 2·(2−1)/2·800 bytes from second 1 on.
    assert times(result, "reduce") == {(r, -1): (3, 1 + 8) for r in range(2)}
    assert all(s.wait == pytest.approx(6) for s in result.spans if s.kind == "reduce")


def test_tied_parameters_are_reduced_across_stages() -> None:
    blocks = [block(parameter_bytes=100), block(parameter_bytes=100)]
    tied = run(
        blocks,
        stages([0, 1, 2]),
        rows=1,
        micro=1,
        ties=((100, (0, 1)),),
        link=Link(bytes_per_second=10),
    )
    assert tied.step_seconds == pytest.approx(6 + 10)
    inside = run(
        blocks,
        stages([0, 2]),
        rows=1,
        micro=1,
        ties=((100, (0, 1)),),
        link=Link(bytes_per_second=10),
    )
    assert inside.step_seconds == pytest.approx(6)


def test_the_update_waits_for_all_ranks() -> None:
    blocks = [block(parameter_bytes=10), block(parameter_bytes=30)]
    result = run(blocks, stages([0, 1, 2]), rows=1, micro=1, optimizer_seconds=0.1)
    ends = {s.rank: s.end for s in result.spans if s.kind == "update"}
    assert ends == {0: pytest.approx(7), 1: pytest.approx(9)}


def test_a_replica_without_rows_costs_nothing_and_blocks_nobody() -> None:
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


def test_compute_is_slower_while_bytes_are_under_way() -> None:
    """A write of 2 s beside the next forward: at half the speed for 2 s, then whole."""
    slow = Link(bytes_per_second=50)
    machines = nodes(1, write=slow, read=slow, overlap_loss=0.5)
    blocks = [block(forward=3, backward=3, moved=100), block(forward=3, backward=3)]
    part = replace(stages([0, 2])[0], directives=(Directive.OFFLOAD, Directive.KEEP))
    result = run(blocks, [part], rows=1, micro=1, machines=machines)
    assert times(result, "forward") == {(0, 0): (0, 7)}  # 3, then 2 s for 1 s of work, then 2
    # The last micro-batch is read at once: 2 s of its read slow down the backward of the second block.
    assert times(result, "backward") == {(0, 0): (7, 7 + 4 + 3)}


def test_messages_to_other_nodes_share_the_way_out() -> None:
    """One rank feeds three replicas on another node: they share its card, not three links."""
    link = Link(bytes_per_second=10)
    blocks = [block(forward=0, backward=0, output=10), block(forward=1, backward=0)]
    apart = run(
        blocks, stages([0, 1, 2], [1, 3]), rows=3, micro=1, machines=nodes(1, 3, remote=link)
    )
    assert {start for start, _ in times(apart, "forward").values()} == {0, 3}
    together = run(
        blocks, stages([0, 1, 2], [1, 3]), rows=3, micro=1, machines=nodes(4, local=link)
    )
    assert {start for start, _ in times(together, "forward").values()} == {0, 1}
    gathered = run(
        [block(forward=0, backward=0, output=10), block(forward=1, backward=0)],
        stages([0, 1, 2], [3, 1]),
        rows=3,
        micro=1,
        machines=nodes(3, 1, remote=link),
    )
    assert times(gathered, "forward")[3, 0] == (3, 6)  # all come in over one card


@pytest.mark.parametrize(("over_host", "expected"), [(False, 2), (True, 3)])
def test_messages_may_share_the_wires_with_swapping(over_host: bool, expected: float) -> None:
    """A message of 1 s while a write of 2 s is under way: on shared wires it takes twice as long."""
    wire = Link(bytes_per_second=10)
    machines = nodes(2, local=wire, over_host=over_host, tier="host", write=wire, read=wire)
    blocks = [block(forward=1, backward=0, moved=20, output=10), block(forward=1, backward=0)]
    parts = [stages([0, 1], directive="offload")[0], stages([1, 2])[0]]
    parts[1] = replace(parts[1], start=1, stop=2)
    result = run(blocks, parts, rows=1, micro=1, machines=machines)
    assert times(result, "forward")[1, 0][0] == pytest.approx(expected)


def test_an_all_reduce_is_a_ring_inside_a_node_and_shares_between_nodes() -> None:
    local, remote = (
        Link(bytes_per_second=100, latency_seconds=1),
        Link(bytes_per_second=10, latency_seconds=2),
    )
    two = nodes(4, 4, local=local, remote=remote)
    assert all_reduce_seconds(800, [3], two) == 0
    assert all_reduce_seconds(800, [0, 1, 2, 3], two) == pytest.approx(2 * 3 * (1 + 2))
    assert all_reduce_seconds(800, [0, 4], two) == pytest.approx(2 * (2 + 40))
    assert all_reduce_seconds(800, range(8), two) == pytest.approx(2 * 3 * (1 + 2) + 2 * (2 + 10))
    assert all_reduce_seconds(800, [0, 1, 2, 4], two) == pytest.approx(
        2 * 2 * (1 + 800 / 3 / 100) + 2 * (2 + 40)
    )
    block_of_800 = block(parameter_bytes=800)
    result = run([block_of_800], stages([0, 1], [8]), rows=8, micro=1, machines=two)
    # From the last backward on.
    assert {end - start for start, end in times(result, "reduce").values()} == {18 + 24 - 2}


def test_placement_says_which_ranks_hold_a_position() -> None:
    """Stages of a replica next to each other: messages stay in the node, gradients do not."""
    local, remote = FREE, Link(bytes_per_second=1)
    machines = nodes(2, 2, local=local, remote=remote)
    blocks = [block(output=10), block(input=10)]
    parts = stages([0, 1, 2], [2, 2])
    far = run(blocks, parts, rows=2, micro=1, machines=machines)
    near = run(blocks, parts, rows=2, micro=1, machines=machines, placement=(0, 2, 1, 3))
    assert near.step_seconds == pytest.approx(6)
    assert far.step_seconds == pytest.approx(6 + 20)
    assert {span.rank: span.stage for span in near.spans} == {0: 0, 2: 0, 1: 1, 3: 1}


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


def test_states_on_the_host_count_in_its_tier_and_in_the_update() -> None:
    link = Link(bytes_per_second=10)
    machines = nodes(1, write=link, read=link, host_update_seconds=0.5)
    part = replace(stages([0, 1])[0], optimizer_offload=0.5)
    result = run(
        [block(parameter_bytes=100)],
        [part],
        rows=1,
        micro=1,
        machines=machines,
        optimizer_seconds=0.02,
    )
    rank = result.ranks[0]
    assert rank.memory["optimizer"] == 100
    assert rank.memory["staging"] == 100  # on the disk, they come up to be stepped
    # A share is rounded up to whole parameters, and here may be one.
    assert rank.tier_peak_bytes == 200
    assert rank.seconds["update"] == pytest.approx(50 * 0.02 + 50 * 0.5 + 5 + 5)


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(
        [(name, each) for name in SCHEDULES for each in (1, 2, 3) if SCHEDULES[name].allows(each)]
    ),
    positions=st.integers(1, 4),
    micro=st.integers(1, 9),
    rows=st.integers(1, 14),
    data=st.data(),
    gap=st.sampled_from([0.0, 0.07]),
)
def test_no_rank_peaks_above_what_is_proved(
    kind: tuple[str, int], positions: int, micro: int, rows: int, data: st.DataObject, gap: float
) -> None:
    """What a stage load promises for the micro-batches in flight holds for the list that runs."""
    schedule, interleave = kind
    micro, count = min(micro, rows), positions * interleave
    sizes = st.integers(0, 40)
    drawn = [
        block(
            moved=data.draw(sizes),
            stays=data.draw(sizes),
            by_loss=data.draw(sizes),
            input=data.draw(sizes),
            output=data.draw(sizes),
            forward_work=data.draw(sizes),
            backward_work=data.draw(sizes),
            deferred=data.draw(sizes),
            split_work=data.draw(sizes),
            weight_seconds=0.5,
        )
        for _ in range(2 * count)
    ]
    directive = st.sampled_from(list(Directive))
    parts = [
        replace(part, directives=(data.draw(directive), data.draw(directive)))
        for part in stages(range(0, 2 * count + 1, 2), limit=40 * rows)
    ]
    machines = nodes(positions, gap_share=gap, reserve_bytes=17)
    result = run(
        drawn,
        parts,
        schedule=schedule,
        rows=rows,
        micro=micro,
        machines=machines,
        interleave=interleave,
    )
    for position, rank in enumerate(result.ranks):
        bound = 0
        for index, stage in enumerate(
            SCHEDULES[schedule].stages_of(position, positions, interleave)
        ):
            part = parts[stage]
            device, split = machines.devices[position], SCHEDULES[schedule].splits
            load = load_planned(profile(drawn), part, -(-rows // micro), device=device, split=split)
            flight = SCHEDULES[schedule].in_flight(count, stage, micro, interleave)
            limit = part.swap_limit_bytes if part.offloads else 0
            bound += load.peak_bytes(flight, limit) - (17 if index else 0)
        assert sum(rank.memory.values()) == rank.peak_bytes <= bound
        assert rank.memory["reserve"] == 17


def test_what_a_split_backward_holds_by_hand() -> None:
    """ZB-H1 on two stages, one row a micro-batch: the second stage puts weight halves off by one micro-batch.

    ::

        stage 1 | F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
    """
    parts = [block(moved=100, deferred=30, split_work=7, backward_work=5, weight_seconds=1.0)] * 2
    result = run(parts, stages([0, 1, 2]), schedule="zb-h1")
    assert result.ranks[1].memory["activations"] == 30 + 100
    assert result.ranks[1].memory["workspace"] == 7
    unknown = run(
        [replace(part, deferred=Affine()) for part in parts], stages([0, 1, 2]), schedule="zb-h1"
    )
    assert unknown.ranks[1].memory["activations"] == 200


def test_what_splitting_costs_is_paid_only_where_backwards_are_split() -> None:
    parts = [block(forward=1, backward=2, weight_seconds=1.0, split_seconds=0.5)] * 2
    whole, split = (
        run(parts, stages([0, 1, 2]), schedule=s, rows=1, micro=1) for s in ("1f1b", "zb-h1")
    )
    assert whole.step_seconds == pytest.approx(6)
    # The second stage's weight half is hidden.
    assert split.step_seconds == pytest.approx(1 + 1 + 1.5 + 1.5 + 1)


def test_replicas_that_share_states_step_a_part_and_send_it() -> None:
    """A step moves three copies of a parameter and two of each of two states; four more passes are over gradients."""
    parts = [block(parameter_bytes=1000, largest_bytes=100)]
    link = Link(bytes_per_second=100, latency_seconds=1)
    fields = {
        "optimizer_bytes": 2.0,
        "optimizer_seconds": 0.011,
        "rows": 2,
        "micro": 1,
        "machines": nodes(2, local=link),
    }
    plain = run(parts, stages([0, 1], [2]), **fields)
    shared = run(
        parts, [replace(part, shard_optimizer=True) for part in stages([0, 1], [2])], **fields
    )
    assert plain.ranks[0].memory["optimizer"] == 2000
    # One may get half of the largest parameter more.
    assert shared.ranks[0].memory["optimizer"] == 2000 // 2 + 100
    stepped = 11 * (4 + 7 * 0.55) / 11
    spread = 2 * 1 + 1000 / 100
    assert plain.ranks[0].seconds["update"] == pytest.approx(11)
    assert shared.ranks[0].seconds["update"] == pytest.approx(stepped + spread)
    alone = run(
        parts,
        [replace(part, shard_optimizer=True) for part in stages([0, 1])],
        **{**fields, "machines": nodes(1)},
    )
    assert alone.ranks[0].memory["optimizer"] == 2000


def test_replicas_hold_one_copy_of_the_states_below() -> None:
    parts, kept = [block(parameter_bytes=12800, largest_bytes=128)], []
    for replicas in (1, 2, 4):
        below = [replace(part, optimizer_offload=1.0) for part in stages([0, 1], [replicas])]
        kept.append(
            run(parts, below, rows=4, micro=1, machines=nodes(replicas)).ranks[0].tier_peak_bytes
        )
    states = [25600, 25600 // 2 + 128, 25600 // 4 + 192]
    assert kept == [size + size // 128 for size in states]


def test_what_offloading_takes_the_computing_is_in_both_passes_of_blocks_that_offload() -> None:
    """Blocks were said to compute as fast with hooks and copies beside them as without."""
    blocks = [block(forward=1, backward=2, moved=1.0, offload_seconds=0.5)] * 2
    part = replace(
        stages([0, 2])[0], directives=(Directive.OFFLOAD, Directive.KEEP), swap_limit_bytes=10
    )
    result = run(blocks, [part], rows=1, micro=1)
    assert times(result, "forward")[0, 0] == (0, 2.25)
    assert times(result, "backward")[0, 0] == (2.25, 6.5)
    again = replace(part, directives=(Directive.RECOMPUTE, Directive.KEEP))
    assert times(run(blocks, [again], rows=1, micro=1), "backward")[0, 0] == (2, 7)


@pytest.mark.parametrize(("share", "seconds"), [(1.0, 4.0), (0.5, 2.0)])
def test_ranks_that_copy_slower_than_the_disk_takes_it_do_not_wait_for_each_other(
    share: float, seconds: float
) -> None:
    """Two ranks without a core for their copies each had half the rate, and then half of that, of the same disk."""
    slow = Link(bytes_per_second=0.5)
    part = replace(stages([0, 1], [2])[0], directives=(Directive.OFFLOAD,), swap_limit_bytes=10)
    machines = nodes(2, write=slow, read=FREE, tier_share=share)
    result = run(
        [block(forward=0, backward=1, moved=1.0)], [part], rows=2, micro=1, machines=machines
    )
    first = min(begin for begin, _ in times(result, "backward").values())
    last = max(end for _, end in times(result, "backward").values())
    assert (first, last) == (0, seconds + 1)


def test_all_that_swap_share_the_disk_as_far_as_they_use_it() -> None:
    device = nodes(4, write=Link(bytes_per_second=8.0), tier_share=0.5)
    assert device.while_all_swap(device.devices[0]).write.bytes_per_second == 4
    alone = nodes(1, write=Link(bytes_per_second=8.0), tier_share=0.5)
    assert alone.while_all_swap(alone.devices[0]).write.bytes_per_second == 8
