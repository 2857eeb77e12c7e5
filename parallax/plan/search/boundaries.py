"""Data on a chain of blocks for the search: kinds of blocks, prefix sums, and stage boundaries."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from parallax.plan.cost.states import tied_bytes
from parallax.plan.profile import BlockCost, ModelProfile


def even_boundaries(sums: Sequence[float], stages: int) -> list[int]:
    """Return the boundaries of ``stages`` stages of nearly equal seconds: the first block of each stage, then the block
    count.

    ``sums`` are prefix sums: the seconds of the first 0, 1, … blocks.
    """
    blocks, boundaries = len(sums) - 1, [0]
    for stage in range(1, stages):
        ideal = bisect_left(sums, sums[-1] * stage / stages)
        boundaries.append(min(max(ideal, boundaries[-1] + 1), blocks - (stages - stage)))
    return [*boundaries, blocks]


def furthest(works: Callable[[int], bool], low: int, high: int, guess: int) -> int:
    """Return the smallest number from ``low`` to ``high`` for which ``works`` returns True; ``high`` if there is none.

    If ``works`` returns True for a number, it must return True for all larger numbers. The search starts at ``guess``.
    """
    start = min(max(guess, low), high)
    step = 1
    if works(start):
        while start > low and works(max(low, start - step)):
            start, step = max(low, start - step), step * 2
        found, fails = start, max(low - 1, start - step)
    else:
        fails = start
        while start < high and not works(start):
            fails, start, step = start, min(high, start + step), step * 2
        found = start
    while found - fails > 1:
        middle = (found + fails) // 2
        if works(middle):
            found = middle
        else:
            fails = middle
    return found


def block_kinds(profile: ModelProfile) -> tuple[tuple[int, ...], list[BlockCost]]:
    """Return two results: for each block, the index of its kind, and the list of the kinds' costs, which these indices
    refer to.

    Blocks that differ at most in their names and in the numbers and bytes of their parameters and buffers are of one
    kind.
    """
    numbers: dict[BlockCost, int] = {}
    nameless = [
        replace(
            block,
            name="",
            parameters=0,
            parameter_bytes=0,
            frozen_bytes=0,
            largest_bytes=0,
            buffer_bytes=0,
        )
        for block in profile.blocks
    ]
    kinds = tuple(numbers.setdefault(cost, len(numbers)) for cost in nameless)
    return kinds, list(numbers)


@dataclass(frozen=True)
class BlockChain:
    """The data of a chain of blocks that depend neither on rows nor on devices.

    ``kinds``           the kind of each block, an index into ``costs`` (:func:`block_kinds`)
    ``costs``           the cost of each kind
    ``block_bytes``     bytes of the parameters of each block
    ``untied_bytes``    bytes of the parameters of each block that no other block uses
    ``largest_bytes``   bytes of the largest parameter of each block
    ``parameter_sums``  prefix sums of the bytes of parameters: entry n is for the first n blocks
    ``trained_sums``    prefix sums of the bytes of trained parameters
    ``buffer_sums``     prefix sums of the bytes of buffers
    """

    kinds: NDArray[np.int32]
    costs: Sequence[BlockCost]
    block_bytes: NDArray[np.int64]
    untied_bytes: NDArray[np.int64]
    largest_bytes: NDArray[np.int64]
    parameter_sums: NDArray[np.int64]
    trained_sums: NDArray[np.int64]
    buffer_sums: NDArray[np.int64]

    @classmethod
    def of(cls, profile: ModelProfile) -> BlockChain:
        numbers, costs = block_kinds(profile)
        blocks = profile.blocks
        parameters = np.array([block.parameter_bytes for block in blocks], dtype=np.int64)
        return cls(
            kinds=np.array(numbers, dtype=np.int32),
            costs=costs,
            block_bytes=parameters,
            untied_bytes=parameters
            - np.array(
                [tied_bytes(profile.shared, i, i + 1) for i in range(len(blocks))], dtype=np.int64
            ),
            largest_bytes=np.array(
                [block.largest_parameter_bytes for block in blocks], dtype=np.int64
            ),
            parameter_sums=np.concatenate([[0], np.cumsum(parameters)]),
            trained_sums=np.cumsum([0, *(block.trained_bytes for block in blocks)]),
            buffer_sums=np.cumsum([0, *(block.buffer_bytes for block in blocks)]),
        )
