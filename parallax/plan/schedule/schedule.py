"""A schedule as one object: the order of each pipeline rank's actions, its stages, and properties for the planner.

Only the code that reads configurations and plans looks up schedules by name. All other code uses a :class:`Schedule`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from parallax.errors import PlanError, check_choice, printable
from parallax.plan.schedule.action import FORWARD, Action
from parallax.plan.schedule.order import Numbers, Order
from parallax.plan.schedule.placement import ROUND_ROBIN, Placement

# Pipeline ranks, pipeline rank, micro-batches, interleave.
Ordering = Callable[[int, int, int, int], Order]
# The same, and the micro-batches of a group; 0: all.
Grouping = Callable[[int, int, int, int, int], Order]
# Pipeline ranks, pipeline rank.
InFlightCount = Callable[[int, Numbers], Numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """The time to fill and drain a pipeline, in the search's formula for the seconds of a step.

    The formula is in :mod:`parallax.plan.search.request`.

    ``weight_savings``  seconds by which each second of a weight-gradient pass shortens this time
    ``drains``          whether the pipeline drains between steps
    ``ahead``           number of further forwards, per later pipeline rank, that a pipeline rank can run while its
                        first micro-batch is on the later pipeline ranks
    """

    weight_savings: int = 0
    ahead: int = 1
    drains: bool = True

    def left(self, weight_share: float, interleave: int) -> float:
        """Return the time to fill and drain the pipeline, as a fraction of the seconds per micro-batch of all pipeline
        ranks except the slowest.

        ``weight_share`` is the fraction of these seconds in weight-gradient passes. ``interleave`` is the number of
        virtual stages per pipeline rank, which divides the time.
        """
        if not self.drains:
            return 0.0
        return max(0.0, 1 - self.weight_savings * weight_share) / interleave


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """The order in which the stages of a pipeline run forwards and backwards, and the pipeline rank of each stage.

    ``ordering``            function of (pipeline_ranks, pipeline_rank, micro_batches, interleave) that returns the
                            order of one pipeline rank; its docstring shows the timeline
    ``grouping``            function used instead of ``ordering`` if a stage computes a group of micro-batches before
                            the next stage of the same pipeline rank computes. It has the size of a group as a fifth
                            argument. By default each block is then a virtual stage.
    ``group``               number of micro-batches in a group of ``grouping``; 0 for all of them (:meth:`with_group`)
    ``continues``           the next step begins before this step has ended, which needs delayed updates
    ``splits``              backwards are split into input-gradient and weight-gradient passes
    ``interleaves``         the numbers of virtual stages per pipeline rank to try
    ``interleaves_freely``  other numbers of virtual stages are allowed, too
    ``grouped``             virtual stages compute groups of as many micro-batches as there are pipeline ranks
    ``placement``           the pipeline rank of each stage

    Properties that only the planner reads:

    ``ramp``             the time to fill and drain the pipeline
    ``in_flight_count``  function of (pipeline_ranks, pipeline_rank) that returns the micro-batches in flight with one
                         stage per pipeline rank and enough micro-batches
    ``holds_all``        all micro-batches are in flight at one time
    ``steady``           while the pipeline is full, each round of as many micro-batches as there are stages has the
                         same order of actions, so :meth:`in_flight` computes only the first rounds
    ``searched``         the bounds of the search are valid for this schedule, and ``plan.schedule=auto`` tries it
    """

    name: str
    ordering: Ordering | None = None
    grouping: Grouping | None = None
    group: int = 0
    continues: bool = False
    splits: bool = False
    interleaves: tuple[int, ...] = (1,)
    interleaves_freely: bool = False
    grouped: bool = False
    placement: Placement = ROUND_ROBIN
    ramp: Ramp = Ramp()
    in_flight_count: InFlightCount | None = None
    holds_all: bool = False
    steady: bool = False
    searched: bool = False

    def __str__(self) -> str:
        return f"{self.name} in groups of {self.group}" if self.group else self.name

    def __reduce__(self) -> tuple[Callable[[str, int], Schedule], tuple[str, int]]:
        """Pickle the schedule by name, so that the receiving process uses its own object of that name."""
        return named, (self.name, self.group)

    def with_group(self, group: int) -> Schedule:
        """Return the same schedule with groups of ``group`` micro-batches; 0 means one group of all.

        Raises :class:`PlanError` if the schedule has no groups.
        """
        if group == self.group:
            return self
        if self.grouping is None:
            raise PlanError(
                f"groups of {group} micro-batches under schedule {printable(self.name)}: only breadth-first has groups"
            )
        return _grouped(self, group)

    def run_length(self, micro_batches: int) -> int:
        """Return how many micro-batches a stage computes before another stage of the same pipeline rank computes."""
        return 1 if self.grouping is None else min(self.group or micro_batches, micro_batches)

    @property
    def has_virtual_stages(self) -> bool:
        """Return whether pipeline ranks hold several stages by default."""
        return self.interleaves != (1,)

    def allows(self, interleave: int) -> bool:
        """Return whether pipeline ranks may hold ``interleave`` stages."""
        return interleave >= 1 and (self.interleaves_freely or interleave in self.interleaves)

    def pipeline_rank_of(self, stage: int, pipeline_ranks: int) -> int:
        """Return the pipeline rank that holds ``stage``."""
        return self.placement.pipeline_rank_of(stage, pipeline_ranks)

    def stages_of(
        self, pipeline_rank: int, pipeline_ranks: int, interleave: int
    ) -> tuple[int, ...]:
        """Return the ``interleave`` stages of a pipeline rank, in the order of the data."""
        return self.placement.stages_of(pipeline_rank, pipeline_ranks, interleave)

    def order(
        self, pipeline_ranks: int, pipeline_rank: int, micro_batches: int, *, interleave: int = 1
    ) -> Order:
        """Return the forwards and backwards of one pipeline rank, as columns.

        Raises :class:`PlanError` if there is no such pipeline rank or no micro-batch, or if the schedule does not allow
        ``interleave`` virtual stages per pipeline rank.
        """
        if not 0 <= pipeline_rank < pipeline_ranks or micro_batches < 1:
            raise PlanError(
                f"stage {pipeline_rank} of {pipeline_ranks} with {micro_batches} micro-batches: nothing to schedule"
            )
        if not self.allows(interleave):
            others = [each.name for each in SCHEDULES.values() if each.allows(interleave)]
            raise PlanError(
                f"{interleave} virtual stages per pipeline rank under schedule {printable(self.name)}: it has "
                f"{' or '.join(map(str, self.interleaves))}; {', '.join(others) or 'no schedule'} allows this number"
            )
        if self.grouping is not None:
            return self.grouping(
                pipeline_ranks, pipeline_rank, micro_batches, interleave, self.group
            )
        assert self.ordering is not None
        return self.ordering(pipeline_ranks, pipeline_rank, micro_batches, interleave)

    def compute_order(
        self, pipeline_ranks: int, pipeline_rank: int, micro_batches: int, *, interleave: int = 1
    ) -> list[Action]:
        """Return the forwards and backwards of one pipeline rank, as a list of actions. The arguments and errors are
        those of :meth:`order`."""
        return self.order(
            pipeline_ranks, pipeline_rank, micro_batches, interleave=interleave
        ).actions()

    def forwards_first(self, pipeline_ranks: int, micro_batches: int, interleave: int = 1) -> bool:
        """Return whether the last stage runs every forward before its first backward.

        Only then can one loss be computed from the outputs of all micro-batches. ``interleave``: the number of stages
        per pipeline rank.
        """
        return micro_batches == 1 or _forwards_first(
            self, pipeline_ranks, micro_batches, interleave
        )

    def in_flight(self, stages: int, stage: int, micro_batches: int, interleave: int = 1) -> int:
        """Return the largest number of a stage's micro-batches that are in flight at one time, with ``interleave``
        stages per pipeline rank.

        In flight means that the forward has run and the backward is not complete. Stages that share a pipeline rank
        reach their peaks at different times, so the sum of their numbers is more than the pipeline rank ever holds.
        Still, each number is needed for a bound on memory that is valid for all activation sizes of the stages.
        """
        return _in_flight(self, stages, stage, micro_batches, interleave)

    def least_in_flight(self, pipeline_ranks: int, micro_batches: int) -> NDArray[np.float64]:
        """Return a lower bound on the micro-batches in flight on each pipeline rank.

        The bound is for one stage per pipeline rank; with several virtual stages the number is larger.
        """
        if self.holds_all or self.in_flight_count is None:
            return np.full(pipeline_ranks, float(micro_batches if self.holds_all else 1))
        return np.minimum(
            float(micro_batches), self.in_flight_count(pipeline_ranks, np.arange(pipeline_ranks))
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
    if (
        interleave == 1 and schedule.in_flight_count is not None
    ):  # see the docstrings of these orders
        return min(micro_batches, int(schedule.in_flight_count(pipeline_ranks, np.asarray(stage))))
    few = micro_batches
    if schedule.steady:  # every round of a full pipeline is equal: the first few are enough
        few = min(micro_batches, 8 * stages + micro_batches % stages)
    pipeline_rank = schedule.pipeline_rank_of(stage, pipeline_ranks)
    found = schedule.order(pipeline_ranks, pipeline_rank, few, interleave=interleave)
    kinds = found.kinds[found.stages == stage]
    return int(np.cumsum((kinds == FORWARD).astype(int) - (kinds == kinds.max())).max())


_NAME = re.compile(r"[\w.:-]{1,200}")
SCHEDULES: dict[str, Schedule] = {}
"""The built-in and registered schedules, by name."""


def named(name: str, group: int = 0) -> Schedule:
    """Return the schedule that a file calls ``name``, with groups of ``group`` micro-batches. Nothing is imported.

    If no such schedule is registered, the result can be shown and compared, but computing its order raises
    :class:`PlanError`. An invalid name raises :class:`PlanError`, too.
    """
    if name not in SCHEDULES and not _NAME.fullmatch(str(name)):
        raise PlanError(f"plan schedule {printable(str(name))}: known are {', '.join(SCHEDULES)}")
    return (SCHEDULES.get(name) or _unknown(name)).with_group(group)


@lru_cache(maxsize=256)
def _grouped(schedule: Schedule, group: int) -> Schedule:
    return replace(schedule, group=group)


@lru_cache(maxsize=64)
def _unknown(name: str) -> Schedule:
    return Schedule(name=name, ordering=partial(_refuse, name))


def _refuse(name: str, *arguments: int) -> Order:
    del arguments
    if ":" not in name:
        check_choice("plan.schedule", name, SCHEDULES)
    raise PlanError(
        f"plan.schedule={printable(name)}: it is not registered; call parallax.register_schedule"
    )
