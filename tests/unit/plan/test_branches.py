"""The longest path of blocks that depend on each other: without transfers, with them, and in a sentence."""

from __future__ import annotations

import pytest

from parallax.plan.branches import branch_bound
from parallax.plan.cluster import Link

FORK = [(), ((0, 8.0),), ((0, 8.0),), ((1, 4.0), (2, 4.0))]  # a diamond


def test_a_chain_has_no_branches() -> None:
    link = Link(bytes_per_second=1.0)
    found = branch_bound([1.0, 2.0, 3.0], [(), ((0, 8.0),), ((1, 8.0),)], 1, link)
    assert found.chain_seconds == found.path_seconds == found.linked_seconds == 6.0


def test_a_diamond_takes_its_longer_side() -> None:
    found = branch_bound([1.0, 5.0, 3.0, 1.0], FORK, 1, Link(bytes_per_second=1e9))
    assert found.chain_seconds == 10.0
    assert found.path_seconds == 7.0
    assert found.linked_seconds == pytest.approx(7.0)


def test_transfers_of_the_shorter_side_count_both_ways_and_by_rows() -> None:
    found = branch_bound([1.0, 5.0, 3.0, 1.0], FORK, 2, Link(bytes_per_second=16.0))
    # The shorter side: 1 s, 2 × 1 s for 16 bytes, 3 s, 2 × 0.5 s for 8 bytes, 1 s.
    assert found.path_seconds == 7.0
    assert found.linked_seconds == pytest.approx(1 + 2 + 3 + 1 + 1)
