"""Every shape of a question, the likely best first: solved by the greedy rule, timed, and left out where it cannot win.

The formula ranks shapes of the same kind well and different kinds badly: what a zero-bubble schedule fills depends on
which blocks keep their activations, what a message costs on where replicas lie. So each shape that may win is timed on
its action lists, in more than one way. Left out is what its lower bound rules out, and what by the formula takes more
than :data:`NEAR` times the best; the bound of all is proved afterwards, by :meth:`Survey._prove`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parallax.errors import BudgetExceeded, InfeasiblePlan
from parallax.plan.plan import Directive, Pipeline
from parallax.plan.search.ample import with_ample_memory
from parallax.plan.search.bounds import StepBound
from parallax.plan.search.greedy import GreedySearch, Solved
from parallax.plan.search.request import Candidate, Request, Shape
from parallax.plan.simulation.predict import (
    Forecast,
    block_passes,
    placements,
    predict,
    quick_seconds,
)

# Pipeline ranks filled after which no more shapes are looked at, once one has been found.
EFFORT = 40_000
AGAIN_EFFORT = 1.1  # times that, after which the best shapes are not looked at again
PROOF_EFFORT = 0.3  # of that spent on the bound
AGAIN = 24  # of the shapes of the best pipelines, how many are solved in more ways
ALIKE = 0.99  # weights of pipeline ranks above which they are taken as equal
REBALANCED = 8  # numbers of pipeline ranks whose best pipeline is tried with uneven replicas
NEAR = 1.1  # pipelines up to so many times the best one's seconds are kept: the simulator may change their order

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Timed:
    """A pipeline and the seconds of its step by the longest path, and the least that a forecast finds."""

    seconds: float
    least: float
    pipeline: Pipeline
    candidate: Candidate


@dataclass(slots=True)
class _Open:
    """A shape and what is known of the slowest pipeline rank of its pipelines, plainly and by weight."""

    shape: Shape
    bound: float
    least_cost: float = 0.0
    least_weighted: float = 0.0


class Forecasts:
    """Forecasts of one question's pipelines, each made once, with the swap limits that are the fastest (``known``).
    ``refused`` are those that do not fit after all, and why; ``effort`` counts the passes of blocks that were
    simulated."""

    def __init__(self, request: Request) -> None:
        self._profile, self._cluster = request.profile, request.cluster
        self.known: dict[Pipeline, Forecast] = {}
        self.refused: dict[Pipeline, str] = {}
        self._seconds: dict[Pipeline, float] = {}
        self.effort = 0

    def seconds(self, pipeline: Pipeline) -> float:
        """Of a step; infinite where the pipeline does not fit."""
        if pipeline not in self._seconds:
            try:
                forecast = predict(self._profile, self._cluster, pipeline)
            except (InfeasiblePlan, BudgetExceeded) as error:
                self.refused[pipeline] = str(error)
                self._seconds[pipeline] = math.inf
                return math.inf
            self.effort += block_passes(pipeline) if forecast.spans else 0
            best, forecast = with_ample_memory(self._profile, self._cluster, pipeline, forecast)
            self.known[best] = replace(forecast, spans=())
            self._seconds[pipeline] = forecast.step_seconds
        return self._seconds[pipeline]

    def least(self) -> float:
        return min((forecast.step_seconds for forecast in self.known.values()), default=math.inf)


class _Looker:
    """Solves the shapes of one request, one at a time."""

    def __init__(self, request: Request, forecasts: Forecasts) -> None:
        self._forecasts = forecasts
        self.request, self.quick, self.bound = request, GreedySearch(request), StepBound(request)

    def look(self, shape: Shape) -> _Found:
        """The pipelines of a shape that may take less than the best that is forecast: with all directives, and, where
        that makes blocks offload, without: what leaves the device may be waited for longer than the greedy rule
        knows."""
        found = _Found(self.request, self._forecasts)
        ceiling = self._ceiling(shape, found)
        solved = self._solve(shape, found)
        allowed, ways = self.request.allowed_in(shape), list[list[Directive]]()
        if solved is not None and solved.candidate is not None:
            rest: list[Directive] = [d for d in allowed if d is not Directive.OFFLOAD]
            ways = (
                [rest] if rest and any(stage.offloads for stage in solved.candidate.stages) else []
            )
        elif shape.interleave > 1:  # what two stages of a pipeline rank need together may not fit
            ways = [[directive] for directive in allowed if len(allowed) > 1]
        others = [self._solve(shape, found, way) for way in ways]
        found.least_cost = (
            solved.least_cost if solved is not None else 0.0 if any(others) else ceiling
        )
        if found.timed and self.bound.weights(shape)[0] < ALIKE:
            self._weigh(shape, found, NEAR)
        return found

    def look_again(self, shape: Shape) -> _Found:
        """The pipelines of one of the best shapes with one directive for all blocks: where more leaves the device than
        must, there is room to read ahead; and with states shared by replicas or not, cut evenly and by weight."""
        found = _Found(self.request, self._forecasts)
        allowed, weights = self.request.allowed_in(shape), self.bound.weights(shape)
        for directive in allowed:
            if directive is not Directive.KEEP and len(allowed) > 1:
                self._solve(shape, found, [directive])
        for sharded in (False, True):
            self._solve(shape, found, sharded=sharded)
            if weights[0] < ALIKE:
                self._solve(shape, found, sharded=sharded, weights=weights)
        return found

    def prove(self, shape: Shape) -> _Found:
        """What a cut says of a shape that was not looked at, or was left out by the formula."""
        found = _Found(self.request, self._forecasts)
        self._weigh(shape, found, 1.0)
        return found

    def _weigh(self, shape: Shape, found: _Found, near: float) -> None:
        """Cut by weights: what is found matters to pipelines that take up to ``near`` times the best."""
        ceiling = self.bound.weighted_ceiling(shape, found.best * near)
        solved = self._solve(shape, found, ceiling=ceiling, weights=self.bound.weights(shape))
        found.least_weighted = solved.least_cost if solved is not None else ceiling

    def _solve(
        self,
        shape: Shape,
        found: _Found,
        allowed: Sequence[Directive] | None = None,
        *,
        ceiling: float | None = None,
        sharded: bool | None = None,
        weights: Sequence[float] = (),
    ) -> Solved | None:
        ceiling = self._ceiling(shape, found) if ceiling is None else ceiling
        solved = self.quick.solve(shape, ceiling, allowed, sharded, weights)
        found.compared += 1
        if solved is not None and solved.candidate is not None:
            found.add(solved.candidate)
        return solved

    def _ceiling(self, shape: Shape, found: _Found) -> float:
        return self.bound.ceiling(shape, found.best * NEAR)

    def rebalance(self, candidate: Candidate) -> _Found:
        """The candidate with devices moved to its slowest pipeline ranks."""
        found = _Found(self.request, self._forecasts)
        for other in self.quick.rebalance(candidate):
            found.compared += 1
            found.add(other)
        return found


class _Found:
    """What is found of one shape: pipelines, of which those are forecast that the longest path alone does not rule out,
    in how many ways it was cut (``compared``), and the least cost of its slowest pipeline rank, plainly and by
    weight."""

    def __init__(self, request: Request, forecasts: Forecasts) -> None:
        self._request, self._forecasts, self.best = request, forecasts, forecasts.least()
        self.timed: list[Timed] = []
        self.compared = 0
        self.least_cost = self.least_weighted = 0.0

    def add(self, candidate: Candidate) -> None:
        """Time a candidate in all its placements."""
        for timed in timed_placements(self._request, candidate):
            if timed.seconds <= self.best * NEAR:
                self.timed.append(timed)
            if timed.least < self.best:
                self.best = min(self.best, self._forecasts.seconds(timed.pipeline))


class Survey:
    """The shapes of one request. ``found`` are pipelines, ``compared`` counts what was solved, no even pipeline takes
    less than ``bound_seconds``. ``effort`` is in pipeline ranks filled."""

    def __init__(
        self,
        request: Request,
        forecasts: Forecasts,
        *,
        effort: float = EFFORT,
        progress: Progress = lambda text: None,
    ) -> None:
        self.request, self.forecasts, self._effort, self._progress = (
            request,
            forecasts,
            effort,
            progress,
        )
        self.found: list[Timed] = []
        self.compared = 0
        self._looker = _Looker(request, forecasts)
        self._open: list[_Open] = []

    def run(self) -> None:
        """Look at every shape that may take less than the best that is forecast."""
        least, looker = self.request.least_pipeline_ranks, self._looker
        shapes = [
            s
            for s in self.request.shapes()
            if s.pipeline_ranks >= least and looker.quick.has_replicas(s)
        ]
        ordered = sorted(shapes, key=looker.bound.likely)
        leading = {
            shape.pipeline_ranks: shape for shape in reversed(ordered)
        }.values()  # of each number of pipeline ranks
        first = dict.fromkeys([*sorted(leading, key=looker.bound.likely), *ordered])
        self._open = [_Open(shape, looker.bound.seconds(shape)) for shape in first]
        self._look_at_all()
        near = self.forecasts.least() * NEAR
        best = dict.fromkeys(t.candidate.shape for t in self._fastest_first() if t.seconds <= near)
        for shape in list(best)[:AGAIN]:
            if looker.quick.looks <= AGAIN_EFFORT * self._effort:
                self._take(looker.look_again(shape))
        fastest: dict[int, Timed] = {}
        for timed in self._fastest_first():
            fastest.setdefault(timed.pipeline.pipeline_ranks, timed)
        for timed in list(fastest.values())[:REBALANCED]:
            self._take(looker.rebalance(timed.candidate))
        if not self.request.small:  # these are answered exactly
            self._prove()

    def _fastest_first(self) -> list[Timed]:
        return sorted(self.found, key=lambda timed: timed.seconds)

    def _look_at_all(self) -> None:
        """The likely best of each number of pipeline ranks, then all that may be better, the likely best first."""
        left = [entry for entry in self._open if not self._too_large(entry)]
        for number, entry in enumerate(left):
            best = self.forecasts.least()
            if self.found and self._looker.quick.looks > self._effort:
                return
            if entry.bound >= best:
                continue
            done = number + len(self._open) - len(left)
            self._progress(
                f"searching plans: {done} of {len(self._open)} shapes, the best takes {best:.4g} s"
            )
            look = self._looker.look(entry.shape)
            entry.least_cost, entry.least_weighted = look.least_cost, look.least_weighted
            self._take(look)

    def _prove(self) -> None:
        """Raise the least of all bounds for as long as that costs little: of each shape that it may be by a cut that
        says whether it can be as fast as the best."""
        quick = self._looker.quick
        most, proved = quick.looks + PROOF_EFFORT * self._effort, set[int]()
        by_bound = [(self._bound_of(entry), number) for number, entry in enumerate(self._open)]
        heapq.heapify(by_bound)
        while by_bound and quick.looks < most:
            least, number = heapq.heappop(by_bound)
            entry, best = self._open[number], self.forecasts.least()
            known = (
                number in proved
                or entry.least_weighted
                or not self._looker.bound.weighs(entry.shape)
            )
            if known or not least < best < math.inf:
                return
            self._progress(f"proving the plan: at most {best / least - 1:.1%} above the best")
            look = self._looker.prove(entry.shape)
            entry.least_weighted = look.least_weighted
            proved.add(number)
            self._take(look)
            heapq.heappush(by_bound, (self._bound_of(entry), number))

    def _take(self, found: _Found) -> None:
        self.found += found.timed
        self.compared += found.compared

    def _too_large(self, entry: _Open) -> bool:
        """Whether even the leanest shape with as many pipeline ranks does not fit."""
        if entry.shape.pipeline_ranks not in self._held:
            return False
        if not self._held[entry.shape.pipeline_ranks]:
            entry.least_cost = math.inf
        return not self._held[entry.shape.pipeline_ranks]

    @cached_property
    def _held(self) -> dict[int, bool]:
        quick = self._looker.quick
        return {
            lean.pipeline_ranks: quick.holds(lean)
            for lean in quick.leanest([entry.shape for entry in self._open])
        }

    def _bound_of(self, entry: _Open) -> float:
        return self._looker.bound.seconds(entry.shape, entry.least_cost, entry.least_weighted)

    @property
    def bound_seconds(self) -> float:
        """No even pipeline takes less; infinite where there is no shape."""
        return min(map(self._bound_of, self._open), default=math.inf)


def timed_placements(request: Request, candidate: Candidate) -> list[Timed]:
    """A candidate in all its placements, timed."""
    pipelines = placements(request.cluster, as_pipeline(request, candidate))
    return [
        Timed(*quick_seconds(request.profile, request.cluster, p), p, candidate) for p in pipelines
    ]


def as_pipeline(request: Request, candidate: Candidate) -> Pipeline:
    """A candidate as what is predicted."""
    return Pipeline(
        schedule=candidate.shape.schedule,
        stages=candidate.stages,
        global_batch=request.global_batch,
        microbatch=candidate.shape.microbatch,
        interleave=candidate.shape.interleave,
        placement=candidate.order,
    )
