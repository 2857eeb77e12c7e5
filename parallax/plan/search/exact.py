"""Enumerate all pipelines that may be the best, from the last stage to the first.

The last stage comes first because under 1F1B the micro-batches in flight depend on the number of later stages. Partial
pipelines, which have only the last stages so far, are dropped in two cases. One is that another partial pipeline is no
worse in four numbers: the slowest stage, the sum of all stages, the seconds after the last micro-batch, and the work.
The other is that no completion can beat the best known pipelines. The result is exact under the formula of
:mod:`parallax.plan.search.request`.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from parallax.plan.cluster import Device
from parallax.plan.cost.collective import exchange_seconds
from parallax.plan.plan import Directive
from parallax.plan.search.exact_stage import ExactStageFitter, StageChoice
from parallax.plan.search.request import WORST, Candidate, Request, Score, Shape

EFFORT = 400_000  # partial pipelines evaluated, and choices kept, after which a search ends: about ten seconds
ROW_EFFORT = 5  # cost of a kept choice, in evaluated partial pipelines


@dataclass(frozen=True, slots=True)
class _Partial:
    """The last stages of a pipeline, with the four numbers that the formula for a step's time needs, in seconds.

    ``slowest``  of the slowest stage, per micro-batch
    ``total``    sum over the stages, per micro-batch
    ``tail``     after the last micro-batch
    ``work``     sum over all replicas of the stages, per micro-batch
    """

    slowest: float
    total: float
    tail: float
    work: float
    stages: tuple[StageChoice, ...]

    def no_worse(self, other: _Partial) -> bool:
        return (
            self.slowest <= other.slowest
            and self.total <= other.total
            and self.tail <= other.tail
            and self.work <= other.work
        )


class ExactSearch:
    """Enumerates the pipelines of one search request.

    ``compared`` counts the complete pipelines that were compared. ``exact`` becomes False if the search exceeds its
    effort limit.
    """

    def __init__(self, request: Request, effort: float = EFFORT) -> None:
        self.request, self._effort = request, effort
        self.compared = self._evaluated = 0
        self._fitters: dict[tuple[Device, bool, bool], ExactStageFitter] = {}
        self._reduce = lru_cache(maxsize=None)(self._find_reduce)

    @property
    def exact(self) -> bool:
        """Whether every possibility was evaluated."""
        return not self._exhausted and all(fitter.exact for fitter in self._fitters.values())

    @property
    def _exhausted(self) -> bool:
        return (
            self._evaluated + ROW_EFFORT * sum(fitter.effort for fitter in self._fitters.values())
            > self._effort
        )

    def best(self, shapes: Sequence[Shape], most: int, limit: Score = WORST) -> list[Candidate]:
        """Return the ``most`` best pipelines of ``shapes`` that score below ``limit``, best first.

        The score is the step's time by the formula. The search first tries only pipelines that keep all activations,
        because this is cheap and lowers the limit for all other pipelines.
        """
        if Directive.KEEP in self.request.allowed:
            limit = min(limit, worst(self._best(shapes, most, limit, plain=True), most))
        self.compared = 0
        return self._best(shapes, most, limit, plain=False)

    def _best(
        self, shapes: Sequence[Shape], most: int, limit: Score, *, plain: bool
    ) -> list[Candidate]:
        best: list[Candidate] = []
        for shape in sorted(shapes, key=lambda shape: shape.bound):
            limit = min(limit, worst(best, most))
            if shape.bound >= limit or self._exhausted:
                break
            for partial in self._pipelines(shape, limit, plain):
                plans = tuple(choice.plan for choice in partial.stages)
                if not self.request.executes(shape, plans):
                    continue
                score = self.request.score(
                    shape, partial.slowest, partial.total, partial.tail, partial.work
                )
                candidate = Candidate(score, shape, plans, self.request.order)
                insort(best, candidate, key=lambda candidate: candidate.score)
                self.compared += 1
        return best[:most]

    def least_memory(self, shapes: Sequence[Shape]) -> float:
        """Return the smallest memory per device, in bytes, with which some pipeline of ``shapes`` fits."""
        least = math.inf
        # The shapes that need least memory come first.
        for shape in sorted(shapes, key=lambda shape: (shape.microbatch, -shape.pipeline_ranks)):
            least = min(least, self._least_peak(shape, least))
        return least

    def _least_peak(self, shape: Shape, limit: float) -> float:
        """Return the smallest memory per device for one pipeline shape; infinite if it is ``limit`` or more."""
        request = self.request
        best = {(len(request.profile.blocks), len(request.devices)): 0.0}
        for stage in reversed(range(shape.pipeline_ranks)):
            in_flight = self._in_flight(shape, stage)
            grown: dict[tuple[int, int], float] = {}
            for (stop, left), peak in best.items():
                for replicas in request.replica_choices(shape, stage, left):
                    where = request.setting(shape, left - replicas, left, in_flight)
                    fitter = self._fitter(shape, left - replicas, left, False)
                    for start in [0] if stage == 0 else range(stage, stop):
                        needed = max(peak, fitter.least_bytes(start, stop, where))
                        place = start, left - replicas
                        if needed < min(limit, grown.get(place, math.inf)):
                            grown[place] = needed
            best = grown
        return best.get((0, 0), math.inf)

    def _pipelines(self, shape: Shape, limit: Score, plain: bool) -> list[_Partial]:
        """Return the pipelines over all devices that may score below ``limit``. With ``plain``, all blocks keep their
        activations.

        A pipeline is omitted if another one is no worse in every number of :class:`_Partial`.
        """
        request = self.request
        fronts = {
            (len(request.profile.blocks), len(request.devices)): [_Partial(0.0, 0.0, 0.0, 0.0, ())]
        }
        for stage in reversed(range(shape.pipeline_ranks)):
            in_flight = self._in_flight(shape, stage)
            grown: dict[tuple[int, int], list[_Partial]] = {}
            for (stop, left), partials in fronts.items():
                for replicas in request.replica_choices(shape, stage, left):
                    if self._exhausted:
                        return []
                    where = request.setting(shape, left - replicas, left, in_flight)
                    fitter = self._fitter(shape, left - replicas, left, plain)
                    speed = request.device(left - replicas, left).speed
                    for start in [0] if stage == 0 else range(stage, stop):
                        place = start, left - replicas
                        least = request.seconds(where.rows, start, stop) / speed
                        self._evaluated += len(partials)
                        hopeful = [
                            p
                            for p in partials
                            if self._best_score(shape, stage, place, p, least, replicas) < limit
                        ]
                        for choice in fitter.fit(start, stop, where) if hopeful else ():
                            front = grown.setdefault(place, [])
                            for partial in hopeful:
                                seconds = choice.seconds
                                hope = self._best_score(
                                    shape, stage, place, partial, seconds, replicas
                                )
                                if hope < limit:
                                    _insert(front, self._prepend(choice, partial, left))
            fronts = grown
        return fronts.get((0, 0), [])

    def _in_flight(self, shape: Shape, stage: int) -> int:
        return shape.schedule.in_flight(shape.pipeline_ranks, stage, self.request.count(shape))

    def _best_score(
        self,
        shape: Shape,
        stage: int,
        place: tuple[int, int],
        after: _Partial,
        seconds: float,
        replicas: int,
    ) -> Score:
        """Return the best score that a pipeline can have if it ends with a given stage, followed by the stages of
        ``after``.

        The given stage has the index ``stage`` and ``replicas`` replicas, and takes ``seconds`` per micro-batch.
        ``place`` has its first block and its first device. The stages before it are not chosen yet.
        """
        slowest, work = max(seconds, after.slowest), seconds * replicas + after.work
        return self.request.bound(
            shape, stage, *place, slowest, seconds + after.total, after.tail, work
        )

    def _prepend(self, choice: StageChoice, partial: _Partial, left: int) -> _Partial:
        replicas = choice.plan.replicas
        reduce = self._reduce(choice.trained_bytes, left - replicas, left)
        return _Partial(
            max(choice.seconds, partial.slowest),
            choice.seconds + partial.total,
            max(choice.tail_seconds + reduce, partial.tail),
            choice.seconds * replicas + partial.work,
            (choice, *partial.stages),
        )

    def _find_reduce(self, trained_bytes: int, first: int, stop: int) -> float:
        ranks = self.request.order[first:stop]
        return exchange_seconds(self.request.profile, trained_bytes, ranks, self.request.cluster)

    def _fitter(self, shape: Shape, first: int, stop: int, plain: bool) -> ExactStageFitter:
        """Return the object that chooses keep, offload or recompute for the blocks of stages on the devices ``first``
        to ``stop`` − 1.

        With ``plain``, it lets blocks keep all activations.
        """
        key = self.request.device(first, stop), plain, shape.split
        if key not in self._fitters:
            allowed = [Directive.KEEP] if plain else self.request.allowed
            states = self.request.host_states
            self._fitters[key] = ExactStageFitter(
                self.request.profile, key[0], allowed=allowed, host_states=states
            )
        return self._fitters[key]


def _insert(front: list[_Partial], new: _Partial) -> None:
    if not any(old.no_worse(new) for old in front):
        front[:] = [old for old in front if not new.no_worse(old)] + [new]


def worst(best: Sequence[Candidate], most: int) -> Score:
    """Return the score that a further candidate must beat to be among the ``most`` best. ``best`` has the candidates so
    far, best first."""
    return best[most - 1].score if len(best) >= most else WORST
