"""A schedule as one object: in which order pipeline ranks compute, which stages they hold, what the planner may count
on.

Whoever holds a :class:`Schedule` asks it. Names are looked up where a configuration or a plan is read, and nowhere
else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from parallax.errors import PlanError, check_choice, printable
from parallax.plan.schedule.action import FORWARD, Action
from parallax.plan.schedule.order import Numbers, Order
from parallax.plan.schedule.placement import ROUND_ROBIN, Placement

# Pipeline ranks, pipeline rank, micro-batches, interleave.
Ordering = Callable[[int, int, int, int], Order]
# Pipeline ranks, pipeline rank.
Flights = Callable[[int, Numbers], Numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """What filling and draining the pipeline costs, in the formula of the search
    (:mod:`parallax.plan.search.request`).

    ``halves``: seconds of the ramp that each second of a weight half saves. ``ahead``: forwards that a pipeline rank
    runs in its first wait, for each pipeline rank after it.
    """

    halves: int = 0
    ahead: int = 1

    def left(self, weight_share: float, interleave: int) -> float:
        """How much of the other pipeline ranks' time a step pays, where ``weight_share`` of it are weight halves."""
        return max(0.0, 1 - self.halves * weight_share) / interleave


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """In which order the stages of a pipeline run their forwards and backwards, and which pipeline rank holds which
    stage.

    ``ordering(pipeline_ranks, pipeline_rank, micro_batches, interleave)`` gives the order of one pipeline rank and
    carries its timeline. ``splits``: weight halves run apart. ``interleaves``: how many virtual stages per pipeline
    rank are tried; ``interleaves_freely``: any other number goes, too; ``grouped``: micro-batches go through them in
    groups of as many as there are pipeline ranks. ``placement``: which stage sits on which pipeline rank.

    For the planner: ``ramp``; ``flights(pipeline_ranks, pipeline_rank)``, the micro-batches in flight where there are
    enough of them and a pipeline rank holds one stage; ``holds_all``: all are in flight at one time, however many;
    ``steady``: in a full pipeline one round through all stages is like the one before; ``searched``: the bounds of the
    search are made for it, and ``plan.schedule=auto`` tries it.
    """

    name: str
    ordering: Ordering
    splits: bool = False
    interleaves: tuple[int, ...] = (1,)
    interleaves_freely: bool = False
    grouped: bool = False
    placement: Placement = ROUND_ROBIN
    ramp: Ramp = Ramp()
    flights: Flights | None = None
    holds_all: bool = False
    steady: bool = False
    searched: bool = False

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], Schedule], tuple[str]]:
        """Another process has its own of that name."""
        return named, (self.name,)

    @property
    def has_virtual_stages(self) -> bool:
        """Whether pipeline ranks are meant to hold several stages."""
        return self.interleaves != (1,)

    def allows(self, interleave: int) -> bool:
        """Whether pipeline ranks may hold so many stages."""
        return interleave >= 1 and (self.interleaves_freely or interleave in self.interleaves)

    def pipeline_rank_of(self, stage: int, pipeline_ranks: int) -> int:
        """The pipeline rank that holds ``stage``."""
        return self.placement.pipeline_rank_of(stage, pipeline_ranks)

    def stages_of(
        self, pipeline_rank: int, pipeline_ranks: int, interleave: int
    ) -> tuple[int, ...]:
        """The stages of a pipeline rank, in the order of the data."""
        return self.placement.stages_of(pipeline_rank, pipeline_ranks, interleave)

    def order(
        self, pipeline_ranks: int, pipeline_rank: int, micro_batches: int, *, interleave: int = 1
    ) -> Order:
        """The forwards and backwards of one pipeline rank, as columns. Raises :class:`PlanError` where there are none,
        or where the schedule cannot have so many virtual stages per pipeline rank."""
        if not 0 <= pipeline_rank < pipeline_ranks or micro_batches < 1:
            raise PlanError(
                f"stage {pipeline_rank} of {pipeline_ranks} with {micro_batches} micro-batches: nothing to schedule"
            )
        if not self.allows(interleave):
            others = [each.name for each in SCHEDULES.values() if each.allows(interleave)]
            raise PlanError(
                f"{interleave} virtual stages per pipeline rank under schedule {printable(self.name)}: it has "
                f"{' or '.join(map(str, self.interleaves))}; {', '.join(others) or 'no schedule'} can have so many"
            )
        return self.ordering(pipeline_ranks, pipeline_rank, micro_batches, interleave)

    def compute_order(
        self, pipeline_ranks: int, pipeline_rank: int, micro_batches: int, *, interleave: int = 1
    ) -> list[Action]:
        """The forwards and backwards of one pipeline rank, as actions."""
        return self.order(
            pipeline_ranks, pipeline_rank, micro_batches, interleave=interleave
        ).actions()

    def forwards_first(self, pipeline_ranks: int, micro_batches: int, interleave: int = 1) -> bool:
        """Whether the last stage runs every forward before its first backward, so that one loss can see the outputs of
        all micro-batches."""
        return micro_batches == 1 or _forwards_first(
            self, pipeline_ranks, micro_batches, interleave
        )

    def in_flight(self, stages: int, stage: int, micro_batches: int, interleave: int = 1) -> int:
        """The most micro-batches of a stage that have gone forward at one time, but not wholly backward.

        Where several of the ``stages`` share a pipeline rank, their peaks come at different times: no smaller numbers
        would bound the bytes of the pipeline rank whatever each of its stages saves.
        """
        return _in_flight(self, stages, stage, micro_batches, interleave)

    def least_flights(self, pipeline_ranks: int, micro_batches: int) -> NDArray[np.float64]:
        """Micro-batches in flight on each pipeline rank, at least; with several virtual stages per pipeline rank there
        are more."""
        if self.holds_all or self.flights is None:
            return np.full(pipeline_ranks, float(micro_batches if self.holds_all else 1))
        return np.minimum(
            float(micro_batches), self.flights(pipeline_ranks, np.arange(pipeline_ranks))
        )


@lru_cache(maxsize=4096)
def _forwards_first(
    schedule: Schedule, pipeline_ranks: int, micro_batches: int, interleave: int
) -> bool:
    last = pipeline_ranks * interleave - 1
    pipeline_rank = schedule.pipeline_rank_of(last, pipeline_ranks)
    found = schedule.order(pipeline_ranks, pipeline_rank, micro_batches, interleave=interleave)
    kinds = found.kinds[found.stages == last]
    return bool((kinds[:micro_batches] == FORWARD).all())


@lru_cache(maxsize=4096)
def _in_flight(
    schedule: Schedule, stages: int, stage: int, micro_batches: int, interleave: int
) -> int:
    if stages % interleave or not 0 <= stage < stages:
        raise PlanError(
            f"stage {stage} of {stages}, {interleave} per pipeline rank: there is no such stage"
        )
    pipeline_ranks = stages // interleave
    if schedule.holds_all:
        return micro_batches
    if interleave == 1 and schedule.flights is not None:  # as the docstrings of these orders say
        return min(micro_batches, int(schedule.flights(pipeline_ranks, np.asarray(stage))))
    few = micro_batches
    if schedule.steady:  # a full pipeline stays as full as it is: the first few rounds say it
        few = min(micro_batches, 8 * stages + micro_batches % stages)
    pipeline_rank = schedule.pipeline_rank_of(stage, pipeline_ranks)
    found = schedule.order(pipeline_ranks, pipeline_rank, few, interleave=interleave)
    kinds = found.kinds[found.stages == stage]
    return int(np.cumsum((kinds == FORWARD).astype(int) - (kinds == kinds.max())).max())


_NAME = re.compile(r"[\w.:-]{1,200}")
SCHEDULES: dict[str, Schedule] = {}
"""All that are known, by name: the built-in ones, and those that were registered."""


def named(name: str) -> Schedule:
    """The schedule that a file calls ``name``. Nothing is imported: one that is not known here can be shown and
    compared, and says so where its order is asked for. Raises :class:`PlanError` for what can be no name."""
    if name not in SCHEDULES and not _NAME.fullmatch(str(name)):
        raise PlanError(f"plan schedule {printable(str(name))}: known are {', '.join(SCHEDULES)}")
    return SCHEDULES.get(name) or _unknown(name)


@lru_cache(maxsize=64)
def _unknown(name: str) -> Schedule:
    return Schedule(name=name, ordering=partial(_refuse, name))


def _refuse(name: str, *asked: int) -> Order:
    del asked
    if ":" not in name:
        check_choice("plan.schedule", name, SCHEDULES)
    raise PlanError(
        f"plan.schedule={printable(name)}: it is not known here; call parallax.register_schedule"
    )
