"""The forwards and backwards of one pipeline rank in order, as arrays, and functions that build such orders.

An order is three columns of numbers rather than a list of objects, so that thousands of pipeline ranks can be simulated
without making millions of objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parallax.plan.schedule.action import COMPUTE, FORWARD, Action

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The forwards and backwards of one pipeline rank, as three columns of equal length: the kind (an index into
    ``COMPUTE``), the stage and the micro-batch of each action."""

    kinds: Numbers
    stages: Numbers
    micros: Numbers

    @classmethod
    def of(cls, listed: Iterable[Action]) -> Order:
        """Return the order with the forwards and backwards of the list ``listed``."""
        rows = [(COMPUTE.index(action.kind), action.stage, action.micro) for action in listed]
        kinds, stages, micros = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return cls(kinds, stages, micros)

    def forwards(self) -> Order:
        """Return the forwards alone, in the same order."""
        mine = self.kinds == FORWARD
        return Order(self.kinds[mine], self.stages[mine], self.micros[mine])

    def actions(self) -> list[Action]:
        columns = zip(self.kinds.tolist(), self.stages.tolist(), self.micros.tolist())
        return [Action(COMPUTE[kind], stage, micro) for kind, stage, micro in columns]


def weave(
    warm_up: int, forward: tuple[Numbers, Numbers], backward: tuple[Numbers, Numbers]
) -> Order:
    """Return ``warm_up`` forwards, then forwards and backwards in turn, and at the end the remaining backwards.

    ``forward`` and ``backward`` are pairs of columns (stages, micro-batches) of equal length.
    """
    count = np.arange(len(forward[0]))
    return by_rounds([count - warm_up, count], [forward, backward])


def by_rounds(rounds: list[Numbers], columns: list[tuple[Numbers, Numbers]]) -> Order:
    """Return all actions of a pipeline rank, sorted by the numbers in ``rounds``. Actions with equal numbers are sorted
    by kind.

    Both lists have one entry for each kind of action, in the order of ``COMPUTE``. An entry of ``rounds`` has a number
    for each action of this kind, and an entry of ``columns`` has the stages and the micro-batches of these actions.
    Every kind has equally many actions.
    """
    place = np.argsort(np.concatenate(rounds), kind="stable")
    kinds = np.repeat(np.arange(len(rounds)), len(rounds[0]))
    stages, micros = (np.concatenate(parts) for parts in zip(*columns))
    return Order(kinds[place], stages[place], micros[place])
