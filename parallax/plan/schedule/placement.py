"""Assign stages to pipeline ranks. A pipeline rank may hold several stages."""

from __future__ import annotations

from typing import Protocol


class Placement(Protocol):
    """The interface that maps stages to pipeline ranks. Stages are numbered in the order in which data passes through
    them.

    In every placement the first ``pipeline_ranks`` stages are on pipeline ranks 0, 1, …, so a pipeline rank has the
    number of its first stage.
    """

    def pipeline_rank_of(self, stage: int, pipeline_ranks: int) -> int:
        """Return the pipeline rank that holds ``stage``."""

    def stages_of(
        self, pipeline_rank: int, pipeline_ranks: int, interleave: int
    ) -> tuple[int, ...]:
        """Return the ``interleave`` stages of one pipeline rank, in the order of the data."""


class RoundRobin:
    """Places stage s on pipeline rank s mod ``pipeline_ranks``, so the last pipeline rank sends to the first one."""

    def pipeline_rank_of(self, stage: int, pipeline_ranks: int) -> int:
        return stage % pipeline_ranks

    def stages_of(
        self, pipeline_rank: int, pipeline_ranks: int, interleave: int
    ) -> tuple[int, ...]:
        return tuple(range(pipeline_rank, pipeline_ranks * interleave, pipeline_ranks))


class BackAndForth:
    """Places stages on the pipeline ranks in ascending, then in descending, then in ascending order, and so on.

    With two stages per pipeline rank the order of the data is a V. Where the direction changes, two consecutive stages
    are on one pipeline rank.
    """

    def pipeline_rank_of(self, stage: int, pipeline_ranks: int) -> int:
        way, place = divmod(stage, pipeline_ranks)
        return pipeline_ranks - 1 - place if way % 2 else place

    def stages_of(
        self, pipeline_rank: int, pipeline_ranks: int, interleave: int
    ) -> tuple[int, ...]:
        return tuple(
            way * pipeline_ranks
            + (pipeline_ranks - 1 - pipeline_rank if way % 2 else pipeline_rank)
            for way in range(interleave)
        )


ROUND_ROBIN, BACK_AND_FORTH = RoundRobin(), BackAndForth()
