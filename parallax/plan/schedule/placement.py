"""Which stage sits on which position, where positions hold several stages."""

from __future__ import annotations

from typing import Protocol


class Placement(Protocol):
    """Stages are numbered along the data. The first ``positions`` of them sit on positions 0, 1, … in every placement,
    so a position is named by its first stage."""

    def position_of(self, stage: int, positions: int) -> int:
        """The position that holds ``stage``."""

    def stages_of(self, position: int, positions: int, interleave: int) -> tuple[int, ...]:
        """The ``interleave`` stages of a position, in the order of the data: the inverse."""


class RoundRobin:
    """Stage s sits on position s mod positions: whatever passes the last position goes on at the first one."""

    def position_of(self, stage: int, positions: int) -> int:
        return stage % positions

    def stages_of(self, position: int, positions: int, interleave: int) -> tuple[int, ...]:
        """Every ``positions``-th."""
        return tuple(range(position, positions * interleave, positions))


class BackAndForth:
    """Stages go up through the positions and come down again, so that two stages make a V and the stages at a turn are
    neighbours on one position."""

    def position_of(self, stage: int, positions: int) -> int:
        """Counted up on the way up, and down on the way down."""
        way, place = divmod(stage, positions)
        return positions - 1 - place if way % 2 else place

    def stages_of(self, position: int, positions: int, interleave: int) -> tuple[int, ...]:
        return tuple(
            way * positions + (positions - 1 - position if way % 2 else position)
            for way in range(interleave)
        )


ROUND_ROBIN, BACK_AND_FORTH = RoundRobin(), BackAndForth()
