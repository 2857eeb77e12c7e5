"""Who holds which rows."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from parallax.plan.rows import micro_batch_count, micro_batch_rows, overlap, peers, replica_rows

ROWS, PARTS = st.integers(0, 200), st.integers(1, 20)


@given(rows=ROWS, parts=PARTS)
def test_parts_cover_all_rows_and_differ_by_one_at_most(rows: int, parts: int) -> None:
    for partition in (micro_batch_rows, replica_rows):
        bounds = [partition(rows, parts, i) for i in range(parts)]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == rows
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
        sizes = {b - a for a, b in bounds}
        assert max(sizes) - min(sizes) <= 1


@given(rows=ROWS, mine=PARTS, theirs=PARTS)
def test_channels_carry_every_row_once_and_both_ends_agree(
    rows: int, mine: int, theirs: int
) -> None:
    sent = {}
    for replica in range(mine):
        low, high = replica_rows(rows, mine, replica)
        shared = peers(rows, mine, replica, theirs)
        covered = [i for _, (a, b) in shared for i in range(low + a, low + b)]
        assert covered == list(range(low, high))
        assert all(a < b for _, (a, b) in shared)
        sent |= {(replica, other): b - a for other, (a, b) in shared}
    received = {}
    for other in range(theirs):
        received |= {
            (replica, other): b - a for replica, (a, b) in peers(rows, theirs, other, mine)
        }
    assert sent == received


@given(rows=st.integers(1, 500), size=st.integers(1, 60))
def test_no_micro_batch_is_larger_than_requested(rows: int, size: int) -> None:
    count = micro_batch_count(rows, size)
    assert max(b - a for a, b in (micro_batch_rows(rows, count, m) for m in range(count))) <= size


def test_uneven_and_empty() -> None:
    assert [replica_rows(2, 3, k) for k in range(3)] == [(0, 0), (0, 1), (1, 2)]
    assert peers(2, 3, 0, 1) == []
    assert peers(0, 1, 0, 2) == []
    assert micro_batch_count(0, 4) == 1
    assert overlap((0, 3), (5, 9)) == (5, 3)
