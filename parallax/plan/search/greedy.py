"""A good pipeline of a thousand blocks on a thousand devices, and how far from the best it can be at most.

For given pipeline ranks and replicas the slowest pipeline rank decides. Whether every pipeline rank can stay within T
seconds is answered by filling them from the last with as many blocks as fit; bisection finds the least such T. Replica
counts are even to begin with; then devices move from the pipeline rank with the most slack to the slowest for as long
as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from parallax.plan.cluster import Device
from parallax.plan.config import AUTO
from parallax.plan.cost.collective import all_reduce_seconds
from parallax.plan.cost.states import OffloadFractions, Sizes, StateLoad
from parallax.plan.plan import Directive, StagePlan
from parallax.plan.schedule import Schedule
from parallax.plan.schedule.gpipe import GPIPE
from parallax.plan.schedule.one_forward import ONE_FORWARD_ONE_BACKWARD as PLAIN
from parallax.plan.search.cuts import BlockChain, even_cuts, furthest
from parallax.plan.search.exact_stage import StageChoice, judge_stage
from parallax.plan.search.greedy_stage import (
    GreedyStage,
    GreedyStages,
    Part,
    PipelineRankKind,
)
from parallax.plan.search.request import Candidate, Request, Shape

MOST_MEMORY = 2**60  # no device will have as much
TOLERANCE = 1.002  # of the slowest pipeline rank's seconds, where bisection stops
ROUNDS = 14  # of bisection
MOVES = 12  # devices moved between pipeline ranks of the best candidates


@dataclass(frozen=True, slots=True)
class _PipelineRankPlace:
    """One pipeline rank: its parts, their blocks per stage of the pipeline, and what was found for it."""

    parts: tuple[Part, ...]
    lane: GreedyStage


class Way(NamedTuple):
    """Directives that blocks may have, and whether replicas must (or must not) share states."""

    allowed: tuple[Directive, ...]
    sharded: bool | None = None


class _Cut(NamedTuple):
    """Pipeline ranks filled within a ceiling: none where that failed, and then any ceiling below ``next_ceiling`` fails
    alike."""

    places: list[_PipelineRankPlace]
    next_ceiling: float = math.inf


@dataclass(frozen=True, slots=True)
class Solved:
    """The greedy answer for one shape, none where rounding says that a stage does not fit after all. The slowest
    pipeline rank cannot cost less than ``least_cost`` seconds per micro-batch times its weight, the blocks being
    alike."""

    candidate: Candidate | None
    least_cost: float


class GreedySearch:
    """Shapes of one request by the greedy rule, one at a time. ``looks`` counts the pipeline ranks filled."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.looks = 0
        self._chain = BlockChain.of(request.profile)
        self._lanes: dict[tuple[object, ...], GreedyStages] = {}
        self._stated: dict[
            tuple[object, ...], dict[Sizes, list[tuple[OffloadFractions, StateLoad, float]]]
        ] = {}
        self._flights: dict[tuple[Schedule, int, int, int], list[int]] = {}

    def solve(
        self,
        shape: Shape,
        ceiling: float = math.inf,
        allowed: Sequence[Directive] | None = None,
        sharded: bool | None = None,
        weights: Sequence[float] = (),
    ) -> Solved | None:
        """The pipeline with replicas as even as they can be whose slowest pipeline rank is the fastest; None where
        nothing fits, or that pipeline rank would cost more than ``ceiling`` seconds per micro-batch. Blocks have one of
        the ``allowed`` directives; ``sharded`` says whether replicas share states (None: where that costs less). What
        pipeline ranks cost is compared times their ``weights`` (none: all alike)."""
        if shape.pipeline_ranks < self.request.least_pipeline_ranks:
            return None
        replicas = self._even(shape)
        way = Way(tuple(allowed or self.request.allowed_in(shape)), sharded)
        return self._solve(shape, replicas, ceiling, way, tuple(weights)) if replicas else None

    def rebalance(self, candidate: Candidate) -> Iterator[Candidate]:
        """Move devices to the slowest pipeline rank, one after the other, for as long as the score falls."""
        if (
            self.request.config.replicas != AUTO
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
                found = self._solve(shape, tuple(moved), ceiling, self._any(shape))
                if found is not None and found.candidate is not None:
                    return found.candidate
        return None

    def leanest(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Of all shapes those that can need the least memory, the leanest first: with fewer rows to a micro-batch no
        more rows are in flight, and under 1F1B no more micro-batches than under any other schedule. (For one loss all
        are in flight, and under 1F1B that is one.)"""
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
        """Whether the devices can hold a pipeline of this shape with even replicas at all."""
        replicas = self._even(shape)
        return bool(replicas) and self._holds(shape, replicas, 0)

    def least_memory(self, shapes: Sequence[Shape]) -> int | None:
        """The fewest bytes with which devices that have less could hold a pipeline, by the greedy rule; None where no
        memory helps. Only shapes that do with less than the best so far are looked at closely."""
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
        """Whether a pipeline with these replicas can be held where every device has ``memory`` bytes or more."""
        if shape.interleave > 1:
            return self._holds_dealt(shape, replicas, memory)
        flights, firsts = self._in_flight(shape), list(accumulate(replicas, initial=0))
        way = self._any(shape)
        stop, length = len(self.request.profile.blocks), 1
        for pipeline_rank in reversed(range(shape.pipeline_ranks)):
            lanes = self._lanes_of(shape, firsts[pipeline_rank], replicas[pipeline_rank], way)
            device = self.request.device(firsts[pipeline_rank], firsts[pipeline_rank + 1])
            flight, budget = flights[pipeline_rank], max(memory, device.memory_bytes)

            def fits(
                start: int,
                stop: int = stop,
                lanes: GreedyStages = lanes,
                flight: int = flight,
                budget: int = budget,
            ) -> bool:
                return lanes.least_bytes(((start, stop, flight),)) <= budget

            start = (
                0 if pipeline_rank == 0 else furthest(fits, pipeline_rank, stop - 1, stop - length)
            )
            if not fits(start):
                return False
            stop, length = start, stop - start
        return True

    def has_replicas(self, shape: Shape) -> bool:
        """Whether there are replicas for a pipeline of this shape that are worth trying."""
        return bool(self._even(shape))

    def _even(self, shape: Shape) -> tuple[int, ...]:
        """Replicas of each pipeline rank; none where that leaves ranks without rows, or the numbers are not worth
        trying."""
        asked, devices, pipeline_ranks = (
            self.request.config.replicas,
            len(self.request.devices),
            shape.pipeline_ranks,
        )
        if isinstance(asked, list | tuple):
            return tuple(int(count) for count in asked)
        least, rest = divmod(devices, pipeline_ranks)
        if (shape.interleave > 1 and rest) or (
            asked == AUTO and not self.request.has_rows(shape, least + (rest > 0))
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
        way: Way,
        weights: tuple[float, ...] = (),
    ) -> Solved | None:
        """The least slowest pipeline rank with these replicas."""
        weights = weights or (1.0,) * shape.pipeline_ranks
        solve = self._deal if shape.interleave > 1 else self._cut
        best = solve(shape, replicas, ceiling, way, weights).places
        if not best:
            return None
        low = shape.bound[1] / (self.request.count(shape) + shape.pipeline_ranks) * min(weights)
        high = _slowest(best, weights)
        for _ in range(ROUNDS if shape.interleave == 1 else 0):
            if high <= low * TOLERANCE:
                break
            middle = (low + high) / 2
            found = solve(shape, replicas, middle, way, weights)
            if found.places:
                best, high = found.places, _slowest(found.places, weights)
            else:
                low = min(high, found.next_ceiling)
        candidate = self._candidate(shape, replicas, best, way)
        return Solved(candidate, low)

    def _cut(
        self,
        shape: Shape,
        replicas: tuple[int, ...],
        ceiling: float,
        way: Way,
        weights: Sequence[float],
    ) -> _Cut:
        """Pipeline ranks filled from the last, none of which costs more than ``ceiling`` seconds over its weight."""
        self.looks += shape.pipeline_ranks
        flights, firsts = self._in_flight(shape), list(accumulate(replicas, initial=0))
        places: list[_PipelineRankPlace] = []
        stop, length, dearer = len(self.request.profile.blocks), 1, math.inf
        for pipeline_rank in reversed(range(shape.pipeline_ranks)):
            lanes = self._lanes_of(shape, firsts[pipeline_rank], replicas[pipeline_rank], way)
            flight, weight = flights[pipeline_rank], weights[pipeline_rank]

            def lane_from(
                start: int,
                stop: int = stop,
                lanes: GreedyStages = lanes,
                flight: int = flight,
                weight: float = weight,
            ) -> GreedyStage | None:
                nonlocal dearer
                least = lanes.least_seconds(start, stop) * weight
                lane = lanes.find(((start, stop, flight),)) if least <= ceiling else None
                cost = lane.cost * weight if lane is not None else least
                if cost > ceiling:
                    dearer = min(dearer, cost)
                    return None
                return lane

            def works(
                start: int, lane_from: Callable[[int], GreedyStage | None] = lane_from
            ) -> bool:
                return lane_from(start) is not None

            start = (
                0 if pipeline_rank == 0 else furthest(works, pipeline_rank, stop - 1, stop - length)
            )
            lane = lane_from(start)
            if lane is None:
                return _Cut([], dearer)
            places.append(_PipelineRankPlace(((start, stop, flight),), lane))
            stop, length = start, stop - start
        return _Cut(places[::-1])

    def _deal(
        self,
        shape: Shape,
        replicas: tuple[int, ...],
        ceiling: float,
        way: Way,
        weights: Sequence[float],
    ) -> _Cut:
        """Stages of nearly equal seconds, dealt out to the pipeline ranks in turn."""
        places = []
        for (parts, lanes, _), weight in zip(self._dealt(shape, replicas, way), weights):
            lane = lanes.find(parts)
            if lane is None or lane.cost * weight > ceiling:
                return _Cut([])
            places.append(_PipelineRankPlace(parts, lane))
        return _Cut(places)

    def _holds_dealt(self, shape: Shape, replicas: tuple[int, ...], memory: int) -> bool:
        return all(
            lanes.least_bytes(parts) <= max(memory, device.memory_bytes)
            for parts, lanes, device in self._dealt(shape, replicas, self._any(shape))
        )

    def _dealt(
        self, shape: Shape, replicas: tuple[int, ...], way: Way
    ) -> Iterator[tuple[tuple[Part, ...], GreedyStages, Device]]:
        """What each pipeline rank holds, and where."""
        stages = shape.pipeline_ranks * shape.interleave
        cuts = even_cuts(
            [0.0, *accumulate(self._lanes_of(shape, 0, replicas[0], way).seconds.tolist())], stages
        )
        flights, firsts = self._in_flight(shape), list(accumulate(replicas, initial=0))
        for pipeline_rank in range(shape.pipeline_ranks):
            mine = shape.stages_of(pipeline_rank)
            parts = tuple((cuts[stage], cuts[stage + 1], flights[stage]) for stage in mine)
            first, stop = firsts[pipeline_rank], firsts[pipeline_rank + 1]
            yield (
                parts,
                self._lanes_of(shape, first, replicas[pipeline_rank], way),
                self.request.device(first, stop),
            )

    def _in_flight(self, shape: Shape) -> list[int]:
        """Micro-batches in flight of every stage."""
        key = shape.schedule, shape.pipeline_ranks, shape.interleave, self.request.count(shape)
        if key not in self._flights:
            schedule, pipeline_ranks, interleave, micro_batches = key
            self._flights[key] = [
                schedule.in_flight(pipeline_ranks * interleave, stage, micro_batches, interleave)
                for stage in range(pipeline_ranks * interleave)
            ]
        return self._flights[key]

    def _any(self, shape: Shape) -> Way:
        return Way(tuple(self.request.allowed_in(shape)))

    def _states_below(self, shape: Shape, way: Way) -> tuple[OffloadFractions, ...]:
        found = self.request.states_below(shape)
        return tuple(b for b in found if way.sharded is None or b.sharded == way.sharded) or tuple(
            found
        )

    def _lanes_of(self, shape: Shape, first: int, replicas: int, way: Way) -> GreedyStages:
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
        )
        key = kind, shape.interleave > 1, way
        if key not in self._lanes:
            below = self._states_below(shape, way)
            self._lanes[key] = GreedyStages(
                self.request.profile,
                self._chain,
                kind,
                allowed=way.allowed,
                host_states=below,
                stated=self._stated.setdefault((device, link, replicas, below), {}),
            )
        return self._lanes[key]

    def _candidate(
        self,
        shape: Shape,
        replicas: tuple[int, ...],
        places: Sequence[_PipelineRankPlace],
        way: Way,
    ) -> Candidate | None:
        """The pipeline with its score; None where rounding says that a stage does not fit after all."""
        stages: dict[int, StagePlan] = {}
        slowest = total = tail = work = 0.0
        firsts = list(accumulate(replicas, initial=0))
        for pipeline_rank, place in enumerate(places):
            first, stop = firsts[pipeline_rank], firsts[pipeline_rank + 1]
            choices = self._choices(shape, place, first, replicas[pipeline_rank], way)
            if not choices:
                return None
            for stage, choice in zip(shape.stages_of(pipeline_rank), choices):
                stages[stage] = choice.plan
            seconds = sum(choice.seconds for choice in choices)
            gradients = (
                sum(choice.trained_bytes for choice in choices)
                * self.request.profile.gradient_bytes
            )
            reduce = all_reduce_seconds(
                gradients, self.request.order[first:stop], self.request.cluster
            )
            slowest, total = max(slowest, seconds), total + seconds
            tail = max(tail, sum(choice.tail_seconds for choice in choices) + reduce)
            work += seconds * replicas[pipeline_rank]
        score = self.request.score(shape, slowest, total, tail, work)
        plans = tuple(stages[stage] for stage in range(len(stages)))
        return Candidate(score, shape, plans, self.request.order)

    def _choices(
        self, shape: Shape, place: _PipelineRankPlace, first: int, replicas: int, way: Way
    ) -> list[StageChoice]:
        """The stages of one pipeline rank, each proved on its own share of the device."""
        device = self.request.device(first, first + replicas)
        directives = place.lane.directives(place.parts, way.allowed)
        found = []
        for (start, _, flight), chosen in zip(place.parts, directives):
            where = self.request.flight(shape, first, first + replicas, flight)
            choice = judge_stage(
                self.request.profile, device, start, chosen, where, place.lane.below
            )
            if choice is None:
                return []
            found.append(choice)
        once = device.fixed_bytes + (replicas > 1) * device.collective_bytes
        if len(found) > 1 and sum(choice.peak_bytes - once for choice in found) > (
            device.memory_bytes - once
        ):
            return []
        return found


def _slowest(places: Sequence[_PipelineRankPlace], weights: Sequence[float]) -> float:
    return max(place.lane.cost * weight for place, weight in zip(places, weights))
