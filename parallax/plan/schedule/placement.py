"""Which stage sits on which pipeline rank, where pipeline ranks hold several stages."""

from __future__ import annotations

from typing import Protocol


class Placement(Protocol):
    """Stages are numbered along the data. The first ``pipeline_ranks`` of them sit on pipeline ranks 0, 1, … in every
    placement, so a pipeline rank is named by its first stage."""

    def pipeline_rank_of(self, stage: int, pipeline_ranks: int) -> int:
        """The pipeline rank that holds ``stage``."""

    def stages_of(
        self, pipeline_rank: int, pipeline_ranks: int, interleave: int
    ) -> tuple[int, ...]:
        """The ``interleave`` stages of a pipeline rank, in the order of the data: the inverse."""


class RoundRobin:
    """Stage s sits on pipeline rank s mod pipeline ranks: whatever passes the last pipeline rank goes on at the first
    one."""

    def pipeline_rank_of(self, stage: int, pipeline_ranks: int) -> int:
        return stage % pipeline_ranks

    def stages_of(
        self, pipeline_rank: int, pipeline_ranks: int, interleave: int
    ) -> tuple[int, ...]:
        """Every ``pipeline_ranks``-th."""
        return tuple(range(pipeline_rank, pipeline_ranks * interleave, pipeline_ranks))


class BackAndForth:
    """Stages go up through the pipeline ranks and come down again, so that two stages make a V and the stages at a turn
    are neighbours on one pipeline rank."""

    def pipeline_rank_of(self, stage: int, pipeline_ranks: int) -> int:
        """Counted up on the way up, and down on the way down."""
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
