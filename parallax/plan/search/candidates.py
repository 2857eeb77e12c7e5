"""Evaluate the shapes of a search request, likely best first, and skip shapes that cannot win.

A shape is a schedule, a micro-batch size, and a number of pipeline ranks. The formula for a step's time
(:mod:`parallax.plan.search.request`) ranks shapes of the same kind well and different kinds badly. One reason is that
the bubble that a zero-bubble schedule fills depends on which blocks keep their activations. Another is that the cost of
a message depends on the placement of replicas. So each shape that may win is solved by the greedy rule in several
variants, and the resulting pipelines are timed action by action. A shape is skipped if its lower bound rules it out, or
if by the formula it needs more than :data:`NEAR` times the best time. Afterwards :meth:`CandidateSearch._prove`
tightens the lower bound over all shapes.

Blocks are partitioned into stages by one of two criteria: the largest cost of a pipeline rank is as small as possible,
or its largest weighted cost is. The weighted cost is cost · weight (:meth:`.StepBound.seconds` and
:meth:`.StepBound.weights`).
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
    predict_costs,
    quick_seconds,
)

# Pipeline ranks filled after which no more shapes are evaluated, if one has been found.
EFFORT = 40_000
AGAIN_EFFORT = 1.1  # factor of the effort above which the best shapes are not evaluated again
PROOF_EFFORT = 0.3  # fraction of the effort that may be spent on the bound
AGAIN = 24  # shapes of the best pipelines that are solved in more variants
ALIKE = 0.99  # smallest weight above which pipeline ranks count as equal
REBALANCED = 8  # numbers of pipeline ranks whose best pipeline is tried with uneven replicas
NEAR = 1.1  # factor of the best seconds up to which pipelines are kept: the simulator decides

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Timed:
    """A pipeline with two quick predictions of the seconds of its step.

    ``seconds`` is the longest path through all actions and messages. ``least`` is a lower bound on what the full
    simulation will predict.
    """

    seconds: float
    least: float
    pipeline: Pipeline
    candidate: Candidate


@dataclass(slots=True)
class _Open:
    """A pipeline shape with the lower bounds that are known for it, in seconds.

    ``bound`` is for a step. ``least_cost`` and ``least_weighted`` are those of :meth:`StepBound.seconds`.
    """

    shape: Shape
    bound: float
    least_cost: float = 0.0
    least_weighted: float = 0.0


class Forecasts:
    """The full predictions (forecasts) of the pipelines of one search request. Each is computed once.

    ``known`` maps pipelines to their forecasts. These are the pipelines that :func:`with_ample_memory` returned, not
    those that it was given.
    ``refused`` maps each pipeline that does not fit to the reason. ``effort`` counts the simulated forwards and
    backwards of single blocks.
    """

    def __init__(self, request: Request) -> None:
        self._profile, self._cluster = request.profile, request.cluster
        self.known: dict[Pipeline, Forecast] = {}
        self.refused: dict[Pipeline, str] = {}
        self._seconds: dict[Pipeline, float] = {}
        self.effort = 0

    def seconds(self, pipeline: Pipeline) -> float:
        """Return the predicted seconds of a step; infinite if the pipeline does not fit."""
        if pipeline not in self._seconds:
            try:
                forecast = predict_costs(self._profile, self._cluster, pipeline)
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


class _Evaluator:
    """Evaluates the pipeline shapes of one search request, one at a time."""

    def __init__(self, request: Request, forecasts: Forecasts) -> None:
        self._forecasts = forecasts
        self.request, self.quick, self.bound = request, GreedySearch(request), StepBound(request)

    def evaluate(self, shape: Shape) -> _Found:
        """Return pipelines of ``shape`` that may be faster than the best forecast.

        Blocks may keep, offload or recompute their activations, as the request allows. If some offload, the shape is
        also solved without offloading, because a backward may wait longer for offloaded activations than the greedy
        rule predicts.
        """
        found = _Found(self.request, self._forecasts)
        ceiling = self._ceiling(shape, found)
        solved = self._solve(shape, found)
        allowed, variants = self.request.allowed, list[list[Directive]]()
        if solved is not None and solved.candidate is not None:
            rest: list[Directive] = [d for d in allowed if d is not Directive.OFFLOAD]
            variants = (
                [rest] if rest and any(stage.offloads for stage in solved.candidate.stages) else []
            )
        elif (
            shape.interleave > 1
        ):  # the mixed directives of two stages on one pipeline rank may not fit together
            variants = [[directive] for directive in allowed if len(allowed) > 1]
        others = [self._solve(shape, found, variant) for variant in variants]
        found.least_cost = (
            solved.least_cost if solved is not None else 0.0 if any(others) else ceiling
        )
        if found.timed and self.bound.weights(shape)[0] < ALIKE:
            self._weigh(shape, found, NEAR)
        return found

    def evaluate_again(self, shape: Shape) -> _Found:
        """Return more pipelines of ``shape``, one of the shapes with the fastest pipelines so far.

        In the first variants, all blocks recompute or all blocks offload their activations. Offloading all blocks can
        be faster than a mixture, because offloading more blocks than necessary leaves memory for prefetching. In the
        other variants, optimizer states are sharded or unsharded, and blocks are partitioned by cost or by weighted
        cost (cost · weight of a pipeline rank).
        """
        found = _Found(self.request, self._forecasts)
        allowed, weights = self.request.allowed, self.bound.weights(shape)
        for directive in allowed:
            if directive is not Directive.KEEP and len(allowed) > 1:
                self._solve(shape, found, [directive])
        for sharded in (False, True):
            self._solve(shape, found, sharded=sharded)
            if weights[0] < ALIKE:
                self._solve(shape, found, sharded=sharded, weights=weights)
        return found

    def prove(self, shape: Shape) -> _Found:
        """Return the pipeline and the lower bound that a single partition by weighted cost finds for ``shape``."""
        found = _Found(self.request, self._forecasts)
        self._weigh(shape, found, 1.0)
        return found

    def _weigh(self, shape: Shape, found: _Found, near: float) -> None:
        """Partition the blocks such that the largest product of a pipeline rank's cost and weight is as small as
        possible, and add the resulting pipeline and lower bound to ``found``.

        The partition may miss pipelines whose step takes more than ``near`` times as long as the best one.
        """
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
        """Return pipelines like ``candidate`` with devices moved to the slowest pipeline ranks."""
        found = _Found(self.request, self._forecasts)
        for other in self.quick.rebalance(candidate):
            found.compared += 1
            found.add(other)
        return found


class _Found:
    """The results for one pipeline shape.

    ``best``            seconds of the fastest step predicted so far, over all shapes
    ``timed``           pipelines that may be among the best, by the quick predictions
    ``compared``        number of partitions tried
    ``least_cost``      lower bound on the cost of the slowest pipeline rank (:meth:`StepBound.seconds`)
    ``least_weighted``  lower bound on the largest product of cost and weight of a pipeline rank (the same method)
    """

    def __init__(self, request: Request, forecasts: Forecasts) -> None:
        self._request, self._forecasts, self.best = request, forecasts, forecasts.least()
        self.timed: list[Timed] = []
        self.compared = 0
        self.least_cost = self.least_weighted = 0.0

    def add(self, candidate: Candidate) -> None:
        """Time ``candidate`` under each placement of its ranks to try, and predict it in full under the placements that
        may be faster than ``best``."""
        if not self._request.executes(candidate.shape, candidate.stages):
            return
        for timed in timed_placements(self._request, candidate):
            if timed.seconds <= self.best * NEAR:
                self.timed.append(timed)
            if timed.least < self.best:
                self.best = min(self.best, self._forecasts.seconds(timed.pipeline))


class CandidateSearch:
    """The search over the pipeline shapes of one search request.

    ``found`` has the pipelines found. ``compared`` is the number of partitions tried. The argument ``effort`` limits
    the number of pipeline ranks that the greedy search fills.
    """

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
        self._evaluator = _Evaluator(request, forecasts)
        self._open: list[_Open] = []

    def run(self) -> None:
        """Evaluate every pipeline shape that may be faster than the best forecast."""
        least, evaluator = self.request.least_pipeline_ranks, self._evaluator
        shapes = [
            s
            for s in self.request.shapes()
            if s.pipeline_ranks >= least and evaluator.quick.has_replicas(s)
        ]
        ordered = sorted(shapes, key=evaluator.bound.likely)
        # The likely best of each number of pipeline ranks come first.
        leading = {shape.pipeline_ranks: shape for shape in reversed(ordered)}.values()
        first = dict.fromkeys([*sorted(leading, key=evaluator.bound.likely), *ordered])
        self._open = [_Open(shape, evaluator.bound.seconds(shape)) for shape in first]
        self._evaluate_all()
        near = self.forecasts.least() * NEAR
        best = dict.fromkeys(t.candidate.shape for t in self._fastest_first() if t.seconds <= near)
        for shape in list(best)[:AGAIN]:
            if evaluator.quick.filled <= AGAIN_EFFORT * self._effort:
                self._add(evaluator.evaluate_again(shape))
        fastest: dict[int, Timed] = {}
        for timed in self._fastest_first():
            fastest.setdefault(timed.pipeline.pipeline_ranks, timed)
        for timed in list(fastest.values())[:REBALANCED]:
            self._add(evaluator.rebalance(timed.candidate))
        if not self.request.small:  # small requests are solved exactly
            self._prove()

    def _fastest_first(self) -> list[Timed]:
        return sorted(self.found, key=lambda timed: timed.seconds)

    def _evaluate_all(self) -> None:
        """Evaluate every pipeline shape whose lower bound is below the best forecast, until the effort is spent.

        The order is that of ``_open``: first the likely best shape of each number of pipeline ranks, then all others,
        likely best first.
        """
        left = [entry for entry in self._open if not self._too_large(entry)]
        for number, entry in enumerate(left):
            best = self.forecasts.least()
            if self.found and self._evaluator.quick.filled > self._effort:
                return
            if entry.bound >= best:
                continue
            done = number + len(self._open) - len(left)
            self._progress(
                f"searching plans: {done} of {len(self._open)} shapes, best step {best:.4g} s"
            )
            found = self._evaluator.evaluate(entry.shape)
            entry.least_cost, entry.least_weighted = found.least_cost, found.least_weighted
            self._add(found)

    def _prove(self) -> None:
        """Raise the lower bound over all pipeline shapes, until the effort for proofs is spent.

        Each round takes the shape with the smallest bound and partitions its blocks by weighted cost
        (:meth:`_Evaluator.prove`). The result shows whether the shape can be as fast as the best pipeline.
        """
        quick = self._evaluator.quick
        most, proved = quick.filled + PROOF_EFFORT * self._effort, set[int]()
        by_bound = [(self._bound_of(entry), number) for number, entry in enumerate(self._open)]
        heapq.heapify(by_bound)
        while by_bound and quick.filled < most:
            least, number = heapq.heappop(by_bound)
            entry, best = self._open[number], self.forecasts.least()
            known = (
                number in proved
                or entry.least_weighted
                or not self._evaluator.bound.weighs(entry.shape)
            )
            if known or not least < best < math.inf:
                return
            self._progress(f"proving the plan: at most {best / least - 1:.1%} slower than the best")
            found = self._evaluator.prove(entry.shape)
            entry.least_weighted = found.least_weighted
            proved.add(number)
            self._add(found)
            heapq.heappush(by_bound, (self._bound_of(entry), number))

    def _add(self, found: _Found) -> None:
        self.found += found.timed
        self.compared += found.compared

    def _too_large(self, entry: _Open) -> bool:
        """Return whether no pipeline with as many pipeline ranks as ``entry`` fits the memory.

        Only the shape that needs the least memory is tested.
        """
        if entry.shape.pipeline_ranks not in self._held:
            return False
        if not self._held[entry.shape.pipeline_ranks]:
            entry.least_cost = math.inf
        return not self._held[entry.shape.pipeline_ranks]

    @cached_property
    def _held(self) -> dict[int, bool]:
        quick = self._evaluator.quick
        return {
            lean.pipeline_ranks: quick.holds(lean)
            for lean in quick.leanest([entry.shape for entry in self._open])
        }

    def _bound_of(self, entry: _Open) -> float:
        return self._evaluator.bound.seconds(entry.shape, entry.least_cost, entry.least_weighted)

    @property
    def bound_seconds(self) -> float:
        """A lower bound on the step seconds of every pipeline with nearly equal replica counts; infinite if no pipeline
        is possible."""
        return min(map(self._bound_of, self._open), default=math.inf)


def timed_placements(request: Request, candidate: Candidate) -> list[Timed]:
    """Return the pipelines of ``candidate``, one for each placement of its ranks to try, with quick predictions."""
    pipelines = placements(request.cluster, as_pipeline(request, candidate))
    return [
        Timed(*quick_seconds(request.profile, request.cluster, p), p, candidate) for p in pipelines
    ]


def as_pipeline(request: Request, candidate: Candidate) -> Pipeline:
    """Return the pipeline that ``candidate`` describes."""
    return Pipeline(
        schedule=candidate.shape.schedule,
        stages=candidate.stages,
        global_batch=request.global_batch,
        microbatch=candidate.shape.microbatch,
        interleave=candidate.shape.interleave,
        placement=candidate.order,
        task=request.task,
    )
