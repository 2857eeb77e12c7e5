"""The row contract: which rows of the global batch each micro-batch, and each replica of a stage, holds.

A batch of B rows is cut into M micro-batches at ⌊B·m/M⌋; replica k of r holds rows [⌊b·k/r⌋, ⌊b·(k+1)/r⌋) of a
micro-batch of b rows. Nothing needs to divide evenly: intervals may differ by one row, or be empty.
"""

from __future__ import annotations

Interval = tuple[int, int]


def micro_batch_count(rows: int, micro_batch: int) -> int:
    """Micro-batches for ``rows`` rows of at most ``micro_batch`` each."""
    return max(1, -(-rows // micro_batch))


def micro_batch_rows(rows: int, micro_batches: int, micro: int) -> Interval:
    """The rows of the global batch in one micro-batch.

    >>> [micro_batch_rows(7, 3, m) for m in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    return rows * micro // micro_batches, rows * (micro + 1) // micro_batches


def fewest_rows(rows: int, micro_batches: int) -> int:
    """Rows of the smallest of the micro-batches that ``rows`` rows are cut into.

    >>> fewest_rows(7, 3)
    2
    """
    return rows // micro_batches


def replica_rows(rows: int, replicas: int, replica: int) -> Interval:
    """The rows of a micro-batch of ``rows`` rows that one replica holds.

    >>> [replica_rows(5, 2, k) for k in range(2)]
    [(0, 2), (2, 5)]
    """
    return rows * replica // replicas, rows * (replica + 1) // replicas


def overlap(a: Interval, b: Interval) -> Interval:
    """The rows in both intervals; empty when the first is not below the second."""
    return max(a[0], b[0]), min(a[1], b[1])


def peers(rows: int, mine: int, replica: int, theirs: int) -> list[tuple[int, Interval]]:
    """The replicas of a neighbour stage that share rows with mine, and the shared rows counted from my first.

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
