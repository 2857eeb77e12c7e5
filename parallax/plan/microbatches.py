"""Choose candidate micro-batch sizes, in rows.

The rank with the most rows determines the cost of a micro-batch, and the batch size determines the number of
micro-batches. So of two sizes that give the fullest rank equally many rows, the larger one is better; of two that need
equally many micro-batches, the smaller one. For a batch of B rows over r replicas, about 2·√(B / r) sizes remain.
"""

from __future__ import annotations

AUTO = "auto"
MOST_SIZES = 48  # rows per micro-batch that are tried one by one; beyond them every next has fewer rows by RATIO
RATIO = 1.1


def sizes(global_batch: int, microbatch: int | str) -> list[int]:
    """Return the micro-batch sizes to try, in rows: the configured one, or the batch halved repeatedly down to one
    row."""
    if microbatch != AUTO:
        return [min(global_batch, int(microbatch))]
    found = [global_batch]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def balanced_sizes(global_batch: int, replicas: int, step: int = 1) -> list[int]:
    """Return micro-batch sizes, in rows, with which each of ``replicas`` has at least one row. For every number of rows
    of a rank, the number of micro-batches is the smallest that ``step`` divides, and the size the smallest for that
    number."""
    found: list[int] = []
    rows = -(-global_batch // replicas)
    while rows > 0:
        count = -(-global_batch // (rows * replicas))
        count = -(-count // step) * step
        size = max(replicas, -(-global_batch // count))
        if size > global_batch or -(-global_batch // size) % step:
            rows -= 1
            continue
        found.append(size)
        following = -(-size // replicas)
        rows = (
            min(rows, following) - 1
            if len(found) < MOST_SIZES
            else min(following - 1, int(following / RATIO))
        )
    return found
