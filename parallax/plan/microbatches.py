"""The candidate rows per micro-batch.

The rank with the most rows of a micro-batch determines its cost, and the batch size determines their number. So of two
sizes that give the fullest rank equally many rows the larger one is better, and of two that need equally many
micro-batches the smaller one: of a batch of B rows over r replicas about 2·√(B / r) sizes remain.
"""

from __future__ import annotations

AUTO = "auto"
MOST_SIZES = 48  # rows per micro-batch that are tried one by one; beyond them every next has fewer rows by RATIO
RATIO = 1.1


def sizes(global_batch: int, microbatch: int | str) -> list[int]:
    """Return the rows per micro-batch to try: the user's, or the batch halved repeatedly down to one row."""
    if microbatch != AUTO:
        return [min(global_batch, int(microbatch))]
    found = [global_batch]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def balanced_sizes(global_batch: int, replicas: int, step: int = 1) -> list[int]:
    """Return rows per micro-batch such that each of ``replicas`` has a row or more: for every number of rows of a rank
    the fewest micro-batches whose number ``step`` divides, with as few rows as these need."""
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
