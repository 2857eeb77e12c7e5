"""Choose candidate micro-batch sizes, in rows.

The rank with the most rows determines the cost of a micro-batch, and the batch size determines the number of
micro-batches. If two sizes give that rank equally many rows, the larger one is better. If two sizes need equally many
micro-batches, the smaller one is better. For a batch of B rows over r replicas, about 2·√(B / r) sizes remain.
"""

from __future__ import annotations

AUTO = "auto"
MOST_SIZES = 48  # sizes that are tried without gaps
RATIO = 1.1  # least ratio of two consecutive sizes after that


def sizes(global_batch: int, microbatch: int | str) -> list[int]:
    """Return the micro-batch sizes to try, in rows.

    If ``microbatch`` is a number, it is the only size. If it is auto, the sizes are the batch and its repeated halves
    down to one row.
    """
    if microbatch != AUTO:
        return [min(global_batch, int(microbatch))]
    found = [global_batch]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def balanced_sizes(global_batch: int, replicas: int, step: int = 1) -> list[int]:
    """Return the micro-batch sizes, in rows, that are worth trying with ``replicas`` replicas, largest first.

    A size is worth trying if no smaller size gives as few micro-batches, and if it gives a multiple of ``step``
    micro-batches. From one size to the next, the rows of a micro-batch on one replica decrease, from an even share of
    the batch down to one row. After ``MOST_SIZES`` sizes, they decrease at least by the factor ``RATIO``.
    """
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
