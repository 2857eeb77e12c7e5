"""What swapping takes of a simulated step: writes, reads, limits, and computing beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import BudgetExceeded
from parallax.plan.cluster import Link
from parallax.plan.plan import Directive
from tests.unit.plan.simulated import ONE_EACH, nodes, run, times
from tests.unit.plan_fakes import FREE, block, stages


def test_a_full_swap_limit_pushes_back() -> None:
    """Writing takes 3 s a micro-batch, computing 1: with memory for one, each later forward waits for a write."""
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


def test_a_read_begins_as_soon_as_the_backward_before_it_has_given_up_enough() -> None:
    """One block was counted whole until its backward ended: every step of few large blocks was predicted to stall."""
    read = Link(bytes_per_second=50)
    blocks = [block(forward=1, backward=4, moved=100)] * 2
    parts = stages([0, 2], directive="offload", limit=150)
    found = run(blocks, parts, rows=1, micro=1, write=FREE, read=read)
    # The second block's bytes have not left; half of them are used at 4, and then the first's come beside the rest.
    assert found.ranks[0].stall_seconds == 0
    assert found.step_seconds == pytest.approx(2 + 4 + 4)


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


def test_what_offloading_takes_the_computing_is_in_both_passes_of_blocks_that_offload() -> None:
    """Blocks were once predicted to compute as fast with hooks and copies as without."""
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
