"""The pipeline rank of each stage, where pipeline ranks hold several stages."""

from __future__ import annotations

from typing import Protocol


class Placement(Protocol):
    """Stages are numbered along the data. The first ``pipeline_ranks`` of them are on pipeline ranks 0, 1, … in every
    placement, so a pipeline rank has the number of its first stage."""

    def pipeline_rank_of(self, stage: int, pipeline_ranks: int) -> int:
        """Return the pipeline rank that holds ``stage``."""

    def stages_of(
        self, pipeline_rank: int, pipeline_ranks: int, interleave: int
    ) -> tuple[int, ...]:
        """Return the ``interleave`` stages of a pipeline rank, in the order of the data."""


class RoundRobin:
    """Stage s is on pipeline rank s mod pipeline ranks: the last pipeline rank sends to the first one."""

    def pipeline_rank_of(self, stage: int, pipeline_ranks: int) -> int:
        return stage % pipeline_ranks

    def stages_of(
        self, pipeline_rank: int, pipeline_ranks: int, interleave: int
    ) -> tuple[int, ...]:
        return tuple(range(pipeline_rank, pipeline_ranks * interleave, pipeline_ranks))


class BackAndForth:
    """Stages are numbered up and then down the pipeline ranks, so that two stages per pipeline rank form a V and the
    two stages at a turn are on one pipeline rank."""

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
