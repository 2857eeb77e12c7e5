"""Rows per micro-batch that are worth trying.

What a micro-batch costs is what it costs the rank with most of its rows, and a step takes as many of them as the batch
needs. So of two sizes that give the fullest rank as many rows the larger one is better, and of two that need as many
micro-batches the smaller one: of a batch of B rows over r replicas about 2·√(B / r) sizes are left.
"""

from __future__ import annotations

AUTO = "auto"
MOST_SIZES = 48  # rows per micro-batch that are tried one by one; beyond them every next has fewer rows by RATIO
RATIO = 1.1


def sizes(global_batch: int, microbatch: int | str) -> list[int]:
    """Rows per micro-batch to try: the one asked for, or the batch's halvings down to one row."""
    if microbatch != AUTO:
        return [min(global_batch, int(microbatch))]
    found = [global_batch]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def dealt(global_batch: int, replicas: int, step: int = 1) -> list[int]:
    """Rows per micro-batch such that each of ``replicas`` has a row or more: of every number of rows for a rank the
    fewest micro-batches, of which ``step`` divides the number, with as few rows as these then need."""
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
