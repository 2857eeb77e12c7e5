"""Greedy search: find a good pipeline of up to a thousand blocks on a thousand devices, and a bound on the best one.

For given pipeline ranks and replicas, the slowest pipeline rank determines the step. To test whether every pipeline
rank can stay within T seconds, the search fills each with as many blocks as fit, beginning with the last pipeline rank.
Bisection finds the smallest such T. Replica counts are even at first. Then devices move from the pipeline rank with the
most slack to the slowest one as long as the score improves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from parallax.plan.cluster import Device
from parallax.plan.config import AUTO
from parallax.plan.cost.collective import exchange_seconds
from parallax.plan.cost.stage import passing_bytes, rank_gaps, rank_memory
from parallax.plan.cost.states import OffloadFractions, Sizes, StateLoad
from parallax.plan.plan import Directive, StagePlan, Visits
from parallax.plan.schedule import Schedule
from parallax.plan.schedule.gpipe import GPIPE
from parallax.plan.schedule.one_forward import ONE_FORWARD_ONE_BACKWARD as PLAIN
from parallax.plan.search.boundaries import BlockChain, even_boundaries, furthest
from parallax.plan.search.exact_stage import StageChoice, evaluate_stage
from parallax.plan.search.greedy_stage import (
    GreedyStage,
    GreedyStages,
    Part,
    PipelineRankKind,
)
from parallax.plan.search.request import Candidate, Request, Shape

MOST_MEMORY = 2**60  # more bytes than any device has
TOLERANCE = 1.002  # ratio of upper to lower bound at which bisection stops
ROUNDS = 14  # of the bisection, at most
MOVES = 12  # most devices moved between pipeline ranks of a candidate


@dataclass(frozen=True, slots=True)
class _PipelineRankPlace:
    """One pipeline rank: the blocks of each of its stages, and which of them the greedy rule recomputes or offloads."""

    parts: tuple[Part, ...]
    fitted: GreedyStage


class StageOptions(NamedTuple):
    """The directives (keep, offload, recompute) that blocks may have, and whether replicas shard optimizer states.

    ``sharded`` is True if replicas must shard them, False if they must not, and None if they may.
    """

    allowed: tuple[Directive, ...]
    sharded: bool | None = None


class _Filled(NamedTuple):
    """The result of filling pipeline ranks with blocks such that no rank costs more than a ceiling.

    ``places`` is empty if the ceiling is too low. Then every ceiling below ``next_ceiling`` is too low, too.
    """

    places: list[_PipelineRankPlace]
    next_ceiling: float = math.inf


@dataclass(frozen=True, slots=True)
class Solved:
    """The greedy result for one pipeline shape.

    ``candidate`` is None if the greedy rule found a pipeline, but a stage of it does not fit when its bytes are
    computed exactly. If all blocks are equal, ``least_cost`` is a lower bound on the largest product of cost and weight
    of a pipeline rank. The cost is in seconds per micro-batch.
    """

    candidate: Candidate | None
    least_cost: float


class GreedySearch:
    """Solves the pipeline shapes of one search request by a greedy rule, one at a time.

    ``filled`` counts how often a pipeline rank was filled with blocks.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.filled = 0
        self._chain = BlockChain.of(request.profile)
        self._fitters: dict[tuple[object, ...], GreedyStages] = {}
        self._stated: dict[
            tuple[object, ...],
            dict[tuple[Sizes, Visits], list[tuple[OffloadFractions, StateLoad, float]]],
        ] = {}
        self._known_in_flight: dict[tuple[Schedule, int, int, int], list[int]] = {}

    def solve(
        self,
        shape: Shape,
        ceiling: float = math.inf,
        allowed: Sequence[Directive] | None = None,
        sharded: bool | None = None,
        weights: Sequence[float] = (),
    ) -> Solved | None:
        """Return the pipeline of ``shape`` whose slowest pipeline rank takes the least time. Replicas are as even as
        possible.

        The result is None if nothing fits, or if the slowest pipeline rank would cost more than ``ceiling`` seconds per
        micro-batch.

        ``allowed``  the directives (keep, offload, recompute) that blocks may have; None means those of the request
        ``sharded``  whether replicas shard optimizer states; None means the cheaper of both
        ``weights``  factors by which the costs of the pipeline ranks are multiplied before they are compared; an empty
                     sequence means 1 for each
        """
        if shape.pipeline_ranks < self.request.least_pipeline_ranks:
            return None
        replicas = self._even(shape)
        options = StageOptions(tuple(allowed or self.request.allowed), sharded)
        return self._solve(shape, replicas, ceiling, options, tuple(weights)) if replicas else None

    def rebalance(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield candidates as long as the score falls. Each has one more device on the slowest pipeline rank of the
        previous candidate."""
        if (
            self.request.config.replicas != AUTO
            or self.request.even
            or candidate.shape.interleave > 1
            or candidate.shape.pipeline_ranks == 1
        ):
            return
        for _ in range(MOVES):
            found = self._moved(candidate)
            if found is None or found.score >= candidate.score:
                return
            candidate = found
            yield candidate

    def _moved(self, candidate: Candidate) -> Candidate | None:
        replicas, shape = [stage.replicas for stage in candidate.stages], candidate.shape
        times = [
            self._seconds_of(candidate, pipeline_rank) for pipeline_rank in range(len(replicas))
        ]
        slowest = max(range(len(times)), key=times.__getitem__)
        donors = sorted(
            range(len(times)), key=lambda p: times[p] * replicas[p] / max(1, replicas[p] - 1)
        )
        for donor in [p for p in donors if replicas[p] > 1 and p != slowest][:2]:
            moved = list(replicas)
            moved[donor], moved[slowest] = moved[donor] - 1, moved[slowest] + 1
            if self.request.has_rows(shape, moved[slowest]):
                ceiling = candidate.score[1] / self.request.count(shape)
                found = self._solve(shape, tuple(moved), ceiling, self._any_options())
                if found is not None and found.candidate is not None:
                    return found.candidate
        return None

    def leanest(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the pipeline shapes that may need the least memory, smallest first.

        For each number of pipeline ranks, this is the shape of 1F1B with the smallest micro-batches. Smaller
        micro-batches never increase the rows in flight, and no schedule has fewer micro-batches in flight than 1F1B.
        With one loss over all rows, all rows are in flight in any case, and GPipe is used instead.
        """
        smallest: dict[tuple[Schedule, int, int], Shape] = {}
        fewest = GPIPE if self.request.gather_loss else PLAIN
        for shape in [shape for shape in shapes if shape.schedule is fewest] or shapes:
            key = shape.schedule, shape.pipeline_ranks, shape.interleave
            if self._even(shape) and (
                key not in smallest or shape.microbatch < smallest[key].microbatch
            ):
                smallest[key] = shape
        return sorted(
            smallest.values(), key=lambda shape: (-shape.pipeline_ranks, shape.microbatch)
        )

    def holds(self, shape: Shape) -> bool:
        """Return whether a pipeline of this shape, with nearly equal replica counts, fits the memory of the devices."""
        replicas = self._even(shape)
        return bool(replicas) and self._holds(shape, replicas, 0)

    def least_memory(self, shapes: Sequence[Shape]) -> int | None:
        """Return the fewest bytes per device with which the greedy rule finds a pipeline; None if no memory suffices.

        Devices that have more bytes than the result may use all of them. Bisection runs only for shapes that fit in
        less memory than the best shape so far.
        """
        best = MOST_MEMORY
        for shape in self.leanest(shapes):
            replicas = self._even(shape)
            if not replicas or not self._holds(shape, replicas, best - 1):
                continue
            low, best = 0, best - 1
            while best - low > 1:
                middle = (low + best) // 2
                if self._holds(shape, replicas, middle):
                    best = middle
                else:
                    low = middle
        return best if best < MOST_MEMORY else None

    def _holds(self, shape: Shape, replicas: tuple[int, ...], memory: int) -> bool:
        """Return whether a pipeline of ``shape`` with these ``replicas`` per pipeline rank fits if every device has at
        least ``memory`` bytes."""
        if shape.interleave > 1:
            return self._holds_even(shape, replicas, memory)
        in_flight_by_stage, firsts = self._in_flight(shape), list(accumulate(replicas, initial=0))
        options = self._any_options()
        stop, length = len(self.request.profile.blocks), 1
        for pipeline_rank in reversed(range(shape.pipeline_ranks)):
            fitter = self._fitter(shape, firsts[pipeline_rank], replicas[pipeline_rank], options)
            device = self.request.device(firsts[pipeline_rank], firsts[pipeline_rank + 1])
            in_flight, budget = in_flight_by_stage[pipeline_rank], max(memory, device.memory_bytes)

            def fits(
                start: int,
                stop: int = stop,
                fitter: GreedyStages = fitter,
                in_flight: int = in_flight,
                budget: int = budget,
            ) -> bool:
                return fitter.least_bytes(((start, stop, in_flight),)) <= budget

            start = (
                0 if pipeline_rank == 0 else furthest(fits, pipeline_rank, stop - 1, stop - length)
            )
            if not fits(start):
                return False
            stop, length = start, stop - start
        return True

    def has_replicas(self, shape: Shape) -> bool:
        """Return whether there are replica counts worth trying for ``shape``."""
        return bool(self._even(shape))

    def _even(self, shape: Shape) -> tuple[int, ...]:
        """Return the number of replicas of each pipeline rank, as even as possible. A configured list is returned
        unchanged.

        The result is empty if a replica would have no rows, or if virtual stages would have unequal numbers of
        replicas.
        """
        requested, devices, pipeline_ranks = (
            self.request.config.replicas,
            len(self.request.devices),
            shape.pipeline_ranks,
        )
        if isinstance(requested, list | tuple):
            return tuple(int(count) for count in requested)
        least, rest = divmod(devices, pipeline_ranks)
        if (shape.interleave > 1 and rest) or (
            requested == AUTO and not self.request.has_rows(shape, least + (rest > 0))
        ):
            return ()
        return tuple(
            least + (pipeline_rank >= pipeline_ranks - rest)
            for pipeline_rank in range(pipeline_ranks)
        )

    def _seconds_of(self, candidate: Candidate, pipeline_rank: int) -> float:
        stage = candidate.stages[pipeline_rank]
        rows = -(-candidate.shape.microbatch // stage.replicas)
        return self.request.seconds(rows, stage.start, stage.stop)

    def _solve(
        self,
        shape: Shape,
        replicas: tuple[int, ...],
        ceiling: float,
        options: StageOptions,
        weights: tuple[float, ...] = (),
    ) -> Solved | None:
        """Return the pipeline with these ``replicas`` whose slowest pipeline rank takes the least time; None if nothing
        fits.

        ``replicas`` has the replica count of each pipeline rank. The other arguments are those of :meth:`solve`.
        """
        weights = weights or (1.0,) * shape.pipeline_ranks
        solve = self._assign_evenly if shape.interleave > 1 else self._fill
        best = solve(shape, replicas, ceiling, options, weights).places
        if not best:
            return None
        low = shape.bound[1] / (self.request.count(shape) + shape.pipeline_ranks) * min(weights)
        high = _slowest(best, weights)
        for _ in range(ROUNDS if shape.interleave == 1 else 0):
            if high <= low * TOLERANCE:
                break
            middle = (low + high) / 2
            found = solve(shape, replicas, middle, options, weights)
            if found.places:
                best, high = found.places, _slowest(found.places, weights)
            else:
                low = min(high, found.next_ceiling)
        candidate = self._candidate(shape, replicas, best, options)
        return Solved(candidate, low)

    def _fill(
        self,
        shape: Shape,
        replicas: tuple[int, ...],
        ceiling: float,
        options: StageOptions,
        weights: Sequence[float],
    ) -> _Filled:
        """Fill pipeline ranks with as many blocks as fit, beginning with the last pipeline rank, and return the result.

        ``replicas`` has the replica count of each pipeline rank. No pipeline rank may cost more than ``ceiling``
        seconds divided by its weight.
        """
        self.filled += shape.pipeline_ranks
        in_flight_by_stage, firsts = self._in_flight(shape), list(accumulate(replicas, initial=0))
        places: list[_PipelineRankPlace] = []
        stop, length, dearer = len(self.request.profile.blocks), 1, math.inf
        for pipeline_rank in reversed(range(shape.pipeline_ranks)):
            fitter = self._fitter(shape, firsts[pipeline_rank], replicas[pipeline_rank], options)
            in_flight, weight = in_flight_by_stage[pipeline_rank], weights[pipeline_rank]

            def fit_from(
                start: int,
                stop: int = stop,
                fitter: GreedyStages = fitter,
                in_flight: int = in_flight,
                weight: float = weight,
            ) -> GreedyStage | None:
                nonlocal dearer
                least = fitter.least_seconds(start, stop) * weight
                fitted = fitter.find(((start, stop, in_flight),)) if least <= ceiling else None
                cost = fitted.cost * weight if fitted is not None else least
                if cost > ceiling:
                    dearer = min(dearer, cost)
                    return None
                return fitted

            def works(start: int, fit_from: Callable[[int], GreedyStage | None] = fit_from) -> bool:
                return fit_from(start) is not None

            start = (
                0 if pipeline_rank == 0 else furthest(works, pipeline_rank, stop - 1, stop - length)
            )
            fitted = fit_from(start)
            if fitted is None:
                return _Filled([], dearer)
            places.append(_PipelineRankPlace(((start, stop, in_flight),), fitted))
            stop, length = start, stop - start
        return _Filled(places[::-1])

    def _assign_evenly(
        self,
        shape: Shape,
        replicas: tuple[int, ...],
        ceiling: float,
        options: StageOptions,
        weights: Sequence[float],
    ) -> _Filled:
        """Partition the blocks into stages of nearly equal seconds, and return the pipeline ranks on which the schedule
        places these stages.

        The result is empty if a pipeline rank does not fit its memory, or costs more than ``ceiling`` divided by its
        weight.
        """
        places = []
        for (parts, fitter, _), weight in zip(self._even_parts(shape, replicas, options), weights):
            fitted = fitter.find(parts)
            if fitted is None or fitted.cost * weight > ceiling:
                return _Filled([])
            places.append(_PipelineRankPlace(parts, fitted))
        return _Filled(places)

    def _holds_even(self, shape: Shape, replicas: tuple[int, ...], memory: int) -> bool:
        return all(
            fitter.least_bytes(parts) <= max(memory, device.memory_bytes)
            for parts, fitter, device in self._even_parts(shape, replicas, self._any_options())
        )

    def _even_parts(
        self, shape: Shape, replicas: tuple[int, ...], options: StageOptions
    ) -> Iterator[tuple[tuple[Part, ...], GreedyStages, Device]]:
        """Yield, for each pipeline rank, the blocks of its stages, the object that chooses their directives, and the
        device. All stages take nearly equal seconds."""
        stages = shape.pipeline_ranks * shape.interleave
        boundaries = even_boundaries(
            [0.0, *accumulate(self._fitter(shape, 0, replicas[0], options).seconds.tolist())],
            stages,
        )
        in_flight_by_stage, firsts = self._in_flight(shape), list(accumulate(replicas, initial=0))
        for pipeline_rank in range(shape.pipeline_ranks):
            mine = shape.stages_of(pipeline_rank)
            parts = tuple(
                (boundaries[stage], boundaries[stage + 1], in_flight_by_stage[stage])
                for stage in mine
            )
            first, stop = firsts[pipeline_rank], firsts[pipeline_rank + 1]
            yield (
                parts,
                self._fitter(shape, first, replicas[pipeline_rank], options),
                self.request.device(first, stop),
            )

    def _in_flight(self, shape: Shape) -> list[int]:
        """Return the largest number of micro-batches in flight on each stage of ``shape``."""
        key = shape.schedule, shape.pipeline_ranks, shape.interleave, self.request.count(shape)
        if key not in self._known_in_flight:
            schedule, pipeline_ranks, interleave, micro_batches = key
            self._known_in_flight[key] = [
                schedule.in_flight(pipeline_ranks * interleave, stage, micro_batches, interleave)
                for stage in range(pipeline_ranks * interleave)
            ]
        return self._known_in_flight[key]

    def _any_options(self) -> StageOptions:
        return StageOptions(tuple(self.request.allowed))

    def _offload_fractions(self, options: StageOptions) -> tuple[OffloadFractions, ...]:
        found = self.request.host_states
        return tuple(
            b for b in found if options.sharded is None or b.sharded == options.sharded
        ) or tuple(found)

    def _fitter(
        self, shape: Shape, first: int, replicas: int, options: StageOptions
    ) -> GreedyStages:
        device = self.request.device(first, first + replicas)
        link = self.request.link(first, first + replicas)
        kind = PipelineRankKind(
            device,
            link,
            rows=-(-shape.microbatch // replicas),
            replicas=replicas,
            micro_batches=self.request.count(shape),
            split=shape.split,
            beside=self.request.beside(shape),
            visits=self.request.visits(shape),
            boundaries_held=self.request.boundaries_held(shape),
        )
        key = kind, shape.interleave > 1, options
        if key not in self._fitters:
            offload = self._offload_fractions(options)
            self._fitters[key] = GreedyStages(
                self.request.profile,
                self._chain,
                kind,
                allowed=options.allowed,
                host_states=offload,
                stated=self._stated.setdefault((device, link, replicas, offload, kind.visits), {}),
            )
        return self._fitters[key]

    def _candidate(
        self,
        shape: Shape,
        replicas: tuple[int, ...],
        places: Sequence[_PipelineRankPlace],
        options: StageOptions,
    ) -> Candidate | None:
        """Return the pipeline that ``places`` describes, with its score; None if a stage does not fit when its bytes
        are computed exactly.
        """
        stages: dict[int, StagePlan] = {}
        slowest = total = tail = work = 0.0
        firsts = list(accumulate(replicas, initial=0))
        for pipeline_rank, place in enumerate(places):
            first, stop = firsts[pipeline_rank], firsts[pipeline_rank + 1]
            choices = self._choices(shape, place, first, replicas[pipeline_rank], options)
            if not choices:
                return None
            for stage, choice in zip(shape.stages_of(pipeline_rank), choices):
                stages[stage] = choice.plan
            seconds = sum(choice.seconds for choice in choices)
            reduce = exchange_seconds(
                self.request.profile,
                sum(choice.trained_bytes for choice in choices),
                self.request.order[first:stop],
                self.request.cluster,
            )
            slowest, total = max(slowest, seconds), total + seconds
            tail = max(tail, sum(choice.tail_seconds for choice in choices) + reduce)
            work += seconds * replicas[pipeline_rank]
        score = self.request.score(shape, slowest, total, tail, work)
        plans = tuple(stages[stage] for stage in range(len(stages)))
        return Candidate(score, shape, plans, self.request.order)

    def _choices(
        self,
        shape: Shape,
        place: _PipelineRankPlace,
        first: int,
        replicas: int,
        options: StageOptions,
    ) -> list[StageChoice]:
        """Return the stages of the pipeline rank ``place``, verified to fit the memory of its devices together.

        ``first`` is the pipeline rank's first device. The list is empty if the stages do not fit.
        """
        device = self.request.device(first, first + replicas)
        directives = place.fitted.directives(place.parts, options.allowed)
        found = []
        for (start, _, in_flight), chosen in zip(place.parts, directives):
            where = self.request.setting(shape, first, first + replicas, in_flight)
            choice = evaluate_stage(
                self.request.profile, device, start, chosen, where, place.fitted.offload
            )
            if choice is None:
                return []
            found.append(choice)
        return found if len(found) == 1 else _within(found, place.parts, device)


def _within(
    choices: Sequence[StageChoice], parts: Sequence[Part], device: Device
) -> list[StageChoice]:
    """Return the stages of one pipeline rank with swap limits that together fit its device; empty if there are none.

    Each stage gets the smallest limit that it needs. The remaining bytes are divided in proportion to these limits.
    """
    loads, flights = [choice.load for choice in choices], [in_flight for _, _, in_flight in parts]
    least = [load.smallest_swap_limit for load in loads]
    terms = rank_memory(list(zip(loads, flights, least)))
    needed = sum(terms.values())
    if needed > device.memory_bytes:
        return []
    spare = rank_gaps(loads).more(passing_bytes(terms), device.memory_bytes - needed)
    share = 1 + spare / max(1, sum(least))
    return [
        replace(
            choice,
            plan=replace(
                choice.plan,
                swap_limit_bytes=min(int(limit * share), in_flight * load.moved_bytes),
            ),
        )
        for choice, load, in_flight, limit in zip(choices, loads, flights, least)
    ]


def _slowest(places: Sequence[_PipelineRankPlace], weights: Sequence[float]) -> float:
    return max(place.fitted.cost * weight for place, weight in zip(places, weights))
