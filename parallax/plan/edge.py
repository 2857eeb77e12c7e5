"""The edges between pipeline stages, along which activations and gradients are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Edge(NamedTuple):
    """An edge between two stages.

    For every micro-batch, stage ``sender`` sends the outputs of its last block ``block`` to stage ``receiver``, which
    returns the gradients.
    """

    sender: int
    receiver: int
    block: int


def chain(stops: Sequence[int]) -> tuple[Edge, ...]:
    """Return the edges of a chain of stages. ``stops`` holds, for each stage, the index after its last block.

    >>> chain([2, 5, 6])
    (Edge(sender=0, receiver=1, block=1), Edge(sender=1, receiver=2, block=4))
    """
    return tuple(Edge(stage, stage + 1, stop - 1) for stage, stop in enumerate(stops[:-1]))
