"""The simulator against timelines that can be worked out by hand."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import BudgetExceeded, DeadlockError
from parallax.events import Span, bubble_fraction
from parallax.plan.cluster import Link
from parallax.plan.fluid import Resource, Routine, Simulator
from parallax.plan.schedule import ORDERS, Action, Kind, gpipe
from parallax.plan.simulate import Simulation, simulate
from tests.unit.plan_fakes import block, cluster, profile, stages


def run(
    blocks: list[Any], parts: list[Any], *, schedule: str = "gpipe", rows: int = 4, micro: int = 4, **where: Any
) -> Simulation:
    fields = {k: where.pop(k) for k in ("ties", "optimizer_bytes", "optimizer_seconds") if k in where}
    machines = cluster(sum(part.replicas for part in parts), **where)
    return simulate(profile(blocks, **fields), machines, parts, schedule=schedule, rows=rows, micro_batches=micro)


def times(result: Simulation, kind: str) -> dict[tuple[int, int], tuple[float, float]]:
    return {(s.rank, s.micro): (round(s.start, 9), round(s.end, 9)) for s in result.spans if s.kind == kind}


@pytest.mark.parametrize("schedule", list(ORDERS))
@pytest.mark.parametrize(("count", "micro"), [(1, 1), (1, 4), (2, 1), (2, 4), (3, 5), (4, 4), (4, 16), (5, 2)])
def test_bubble_of_equal_stages(schedule: str, count: int, micro: int) -> None:
    """GPipe, Huang et al. 2019, section 2.3: (S − 1) / (M + S − 1)."""
    result = run(
        [block(forward=1, backward=2)] * count, stages(range(count + 1)), schedule=schedule, rows=micro, micro=micro
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
    assert times(result, "forward") == {(0, 0): (0, 1), (0, 1): (1, 2), (1, 0): (2, 3), (1, 1): (3, 4)}
    assert times(result, "backward") == {(1, 1): (4, 6), (1, 0): (6, 8), (0, 1): (7, 9), (0, 0): (9, 11)}
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
    result = run(blocks, stages([0, 1, 2]), rows=10, micro=10, link=Link(bytes_per_second=100, latency_seconds=5))
    assert result.step_seconds == pytest.approx(2 * (10 * 10 / 100 + 5))
    one = run(blocks, stages([0, 1, 2]), rows=1, micro=1, link=Link(bytes_per_second=100, latency_seconds=5))
    assert one.step_seconds == pytest.approx(2 * (10 / 100 + 5))


def test_a_full_swap_limit_pushes_back() -> None:
    """Writing takes 3 s a micro-batch, computing 1: with room for one, each later forward waits for a write."""
    slow = Link(bytes_per_second=100 / 3)
    blocks = [block(forward=1, backward=1, moved=100)]
    free = run(blocks, stages([0, 1], directive="offload", limit=400), write=slow)
    tight = run(blocks, stages([0, 1], directive="offload", limit=100), write=slow)
    # Writes of 0 and 1 end at 4 and 7, of 2 and 3 are spared: backwards 3 and 2 at 4 and 5, 1 at 7, 0 after its read.
    assert times(free, "backward") == {(0, 3): (4, 5), (0, 2): (5, 6), (0, 1): (6, 8), (0, 0): (8, 12)}
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
    with pytest.raises(BudgetExceeded, match=r"stage 0: 100 B must fit a swap limit of 99 B of which 0 B"):
        run([block(moved=100)], stages([0, 1], directive="offload", limit=99))


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    micro=st.integers(1, 6),
    spare=st.integers(0, 120),
    speed=st.floats(1, 100),
    schedule=st.sampled_from(list(ORDERS)),
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
        block(parameter_bytes=100, buffer_bytes=7, moved=10, stays=1, output=4, forward_work=5, backward_work=20),
        block(parameter_bytes=200, moved=30, stays=2, input=4, output=3, forward_work=50, backward_work=6),
    ]
    result = run(blocks, stages([0, 1, 2]), schedule="1f1b", rows=2, micro=2, optimizer_bytes=2.0, reserve=1000)
    first = 100 * 4 + 7 + 1000 + 2 * 4 + 2 * 11 + 20 + 4  # two in flight, the second's backward has not begun
    second = 200 * 4 + 1000 + 2 * 4 + max(32 + 50 + 3, 32 + 6 + 3)  # what a forward saves comes beside its work
    assert [rank.peak_bytes for rank in result.ranks] == [first, second]
    moved = run(
        blocks, stages([0, 1, 2], directive="offload", limit=60), schedule="1f1b", rows=2, micro=2, reserve=1000
    )
    assert moved.ranks[0].peak_bytes == 100 * 4 + 7 + 1000 + 8 + 60 + max(1 + 5 + 4 + 10, 2 * 1 + 20 + 4)
    again = run(blocks, stages([0, 1, 2], directive="recompute"), schedule="gpipe", rows=2, micro=2, reserve=1000)
    assert again.ranks[1].peak_bytes == 200 * 4 + 1000 + 8 + max(2 * 4 + 50 + 3 + 32, 2 * 4 + 6 + 3 + 32)


def disagree(stage_count: int, stage: int, micro_batches: int) -> list[Action]:
    order = gpipe(stage_count, stage, micro_batches)
    return order if stage == 0 else [order[1], order[0], *order[2:]]


def backward_first(stage_count: int, stage: int, micro_batches: int) -> list[Action]:
    """The first stage wants the gradient of what it has not sent."""
    order = gpipe(stage_count, stage, micro_batches)
    return order if stage else [*order[1:], order[0]]


def test_a_deadlock_names_ranks_and_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "wrong", backward_first)
    with pytest.raises(DeadlockError) as error:
        run([block()] * 2, stages([0, 1, 2]), schedule="wrong", rows=2, micro=2)
    assert "rank 0 in receive_gradient(0, 1)" in str(error.value) or "rank 0 in receive_gradient(0, 0)" in str(
        error.value
    )
    assert "rank 1 in receive_activation(1, 0)" in str(error.value)


def test_a_channel_is_first_in_first_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "wrong", disagree)
    with pytest.raises(
        DeadlockError, match=r"rank 1 waits for receive_activation\(1, 1\), but rank 0 sends micro-batch 0"
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
    assert times(result, "reduce") == {(r, -1): (3, 1 + 8) for r in range(2)}  # 2·(2−1)/2·800 bytes from second 1 on
    assert all(s.wait == pytest.approx(6) for s in result.spans if s.kind == "reduce")


def test_tied_parameters_are_reduced_across_stages() -> None:
    blocks = [block(parameter_bytes=100), block(parameter_bytes=100)]
    tied = run(blocks, stages([0, 1, 2]), rows=1, micro=1, ties=((100, (0, 1)),), link=Link(bytes_per_second=10))
    assert tied.step_seconds == pytest.approx(6 + 10)
    inside = run(blocks, stages([0, 2]), rows=1, micro=1, ties=((100, (0, 1)),), link=Link(bytes_per_second=10))
    assert inside.step_seconds == pytest.approx(6)


def test_the_update_waits_for_all_ranks() -> None:
    blocks = [block(parameter_bytes=10), block(parameter_bytes=30)]
    result = run(blocks, stages([0, 1, 2]), rows=1, micro=1, optimizer_seconds=0.1)
    ends = {s.rank: s.end for s in result.spans if s.kind == "update"}
    assert ends == {0: pytest.approx(7), 1: pytest.approx(9)}


def test_a_replica_without_rows_costs_nothing_and_blocks_nobody() -> None:
    result = run([block(moved=5, output=2), block(input=2)], stages([0, 1, 2], [3, 1]), rows=2, micro=1)
    busy: dict[int, float] = defaultdict(float)
    for span in result.spans:
        if span.kind in ("forward", "backward"):
            busy[span.rank] += span.end - span.start - span.wait
    assert busy[0] == 0
    assert busy[1] == busy[2] == pytest.approx(3)


def test_spans_are_those_of_a_measured_run() -> None:
    result = run([block()] * 2, stages([0, 1, 2], [1, 2]), rows=4, micro=2)
    assert all(type(span) is Span and span.step == 0 and span.end >= span.start for span in result.spans)
    assert {span.kind for span in result.spans} <= {str(kind) for kind in Kind}
    assert all(type(span.kind) is str for span in result.spans)
    assert {span.rank: span.stage for span in result.spans} == {0: 0, 1: 1, 2: 1}
    assert bubble_fraction(list(result.spans)) == result.bubble
    assert max(span.end for span in result.spans) == pytest.approx(result.step_seconds)
