"""The edges of a pipeline: which stage sends to which, and what crosses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Edge(NamedTuple):
    """Stage ``sender`` sends the outputs of block ``block``, its last, to stage ``receiver`` for every micro-batch, and
    gets their gradients back."""

    sender: int
    receiver: int
    block: int


def chain(stops: Sequence[int]) -> tuple[Edge, ...]:
    """Return the edges of stages that form a chain. ``stops``: of each stage, the first block after it.

    >>> chain([2, 5, 6])
    (Edge(sender=0, receiver=1, block=1), Edge(sender=1, receiver=2, block=4))
    """
    return tuple(Edge(stage, stage + 1, stop - 1) for stage, stop in enumerate(stops[:-1]))
