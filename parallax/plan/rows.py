"""Assign rows of the global batch to micro-batches, and rows of a micro-batch to the replicas of a stage.

A batch of B rows is partitioned into M micro-batches: micro-batch m has the rows from ⌊B·m/M⌋ to ⌊B·(m+1)/M⌋. A
micro-batch of b rows is partitioned over r replicas in the same way: replica k has the rows from ⌊b·k/r⌋ to
⌊b·(k+1)/r⌋. Nothing needs to divide evenly: intervals may differ by one row, or be empty.
"""

from __future__ import annotations

Interval = tuple[int, int]


def micro_batch_count(rows: int, micro_batch: int) -> int:
    """Return how many micro-batches of at most ``micro_batch`` rows cover ``rows`` rows."""
    return max(1, -(-rows // micro_batch))


def micro_batch_rows(rows: int, micro_batches: int, micro: int) -> Interval:
    """Return the interval of the global batch's rows that micro-batch ``micro`` holds.

    >>> [micro_batch_rows(7, 3, m) for m in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    return rows * micro // micro_batches, rows * (micro + 1) // micro_batches


def fewest_rows(rows: int, micro_batches: int) -> int:
    """Return the number of rows of the smallest micro-batch.

    >>> fewest_rows(7, 3)
    2
    """
    return rows // micro_batches


def replica_rows(rows: int, replicas: int, replica: int) -> Interval:
    """Return the interval of a micro-batch's ``rows`` rows that one replica holds.

    >>> [replica_rows(5, 2, k) for k in range(2)]
    [(0, 2), (2, 5)]
    """
    return rows * replica // replicas, rows * (replica + 1) // replicas


def overlap(a: Interval, b: Interval) -> Interval:
    """Return the intersection of the intervals of rows ``a`` and ``b``. The intersection is empty if its start is not
    less than its end."""
    return max(a[0], b[0]), min(a[1], b[1])


def peers(rows: int, mine: int, replica: int, theirs: int) -> list[tuple[int, Interval]]:
    """Return the replicas of an adjacent stage that have rows of ``replica``, each with the interval of these rows.

    ``rows`` is the number of rows of the micro-batch. ``mine`` is the replica count of the stage of ``replica``, and
    ``theirs`` that of the adjacent stage. Intervals are counted from the first row of ``replica``.

    >>> peers(6, 1, 0, 2)  # one replica here, two there
    [(0, (0, 3)), (1, (3, 6))]
    >>> peers(6, 2, 1, 3)  # rows 3..6 here, thirds there
    [(1, (0, 1)), (2, (1, 3))]
    """
    own = replica_rows(rows, mine, replica)
    shared = []
    for other in range(theirs):
        low, high = overlap(own, replica_rows(rows, theirs, other))
        if low < high:
            shared.append((other, (low - own[0], high - own[0])))
    return shared
