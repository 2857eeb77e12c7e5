"""The best plan: stages × replicas × micro-batch × schedule × keep/recompute/offload × tier × order of the devices.

Small questions are answered exactly by the formula of :mod:`parallax.plan.request`, larger ones by the greedy rule of
:mod:`parallax.plan.quick`, with a lower bound. Either way the best few are predicted in full, by the simulator where it
can, and the prediction has the last word on time and on memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallax.errors import BudgetExceeded, InfeasiblePlan
from parallax.plan.cluster import Cluster
from parallax.plan.pipelines import EFFORT as EXACT_EFFORT
from parallax.plan.pipelines import PipelineSearch
from parallax.plan.plan import Alternative, Directive, Plan, Prediction
from parallax.plan.predict import Forecast, Pipeline, best_placement
from parallax.plan.profile import ModelProfile
from parallax.plan.quick import EFFORT as QUICK_EFFORT
from parallax.plan.quick import QuickSearch
from parallax.plan.refusal import refusal
from parallax.plan.request import AUTO, Candidate, PlanConfig, Request, merge, worst

PREDICTED = 20  # candidates that are predicted in full, best formula first
NAMED = 4  # runners-up that the plan names
TIE = 1e-6  # of the step: a gain that is none


@dataclass(frozen=True)
class _Found:
    """What a search over all orders of the devices found."""

    candidates: list[Candidate]
    compared: int
    exact: bool
    bound_seconds: float


def search(
    profile: ModelProfile,
    cluster: Cluster,
    config: PlanConfig,
    *,
    global_batch: int,
    microbatch: int | str = AUTO,
    swap: bool = True,
    runnable: bool = True,
) -> tuple[Plan, Forecast]:
    """The best plan that uses every device of ``cluster``, and the forecast of its step.

    ``microbatch`` is in rows; auto tries the halvings of the batch. ``runnable`` asks for a plan that the runtime can
    execute. Raises :class:`InfeasiblePlan`, with the smallest change found that fits, where nothing does.
    """
    request = Request(
        profile, cluster, config, global_batch=global_batch, microbatch=microbatch, swap=swap, runnable=runnable
    )
    found = find_candidates(request, PREDICTED)
    predicted: list[tuple[Pipeline, Forecast]] = []
    refused: list[Alternative] = []
    for candidate in found.candidates:
        pipeline = _pipeline(request, candidate)
        try:
            predicted.append(best_placement(profile, cluster, pipeline))
        except (InfeasiblePlan, BudgetExceeded) as error:
            refused.append(
                Alternative(description=describe(pipeline), step_seconds=candidate.score[0], reason=str(error))
            )
    if not predicted:
        raise refusal(request, [other.reason for other in refused], _fits)
    predicted.sort(key=lambda pair: pair[1].step_seconds)
    (pipeline, forecast), others = predicted[0], predicted[1:]
    plan = _plan(request, pipeline, forecast, found, [*_runners_up(predicted[0], others), *refused][:NAMED])
    return plan, forecast


def find_candidates(request: Request, most: int) -> _Found:
    """The ``most`` best pipelines by the formula over all orders of the devices, best first."""
    best: list[Candidate] = []
    compared, exact, bound = 0, True, math.inf
    orders = request.orders()
    for ordered in orders:
        shapes = list(ordered.shapes())
        quick = QuickSearch(ordered, QUICK_EFFORT / len(orders))
        best = merge(best, quick.best(shapes, most, worst(best, most)), most)
        compared += quick.compared
        thorough = PipelineSearch(ordered, EXACT_EFFORT / len(orders))
        if request.small:  # only what beats the greedy rule's best is looked for
            plain = [shape for shape in shapes if shape.interleave == 1]
            whole, alone = worst(best, 1)
            best = merge(best, thorough.best(plain, most, (whole * (1 - TIE), alone * (1 - TIE))), most)
            compared, exact = compared + thorough.compared, exact and thorough.exact and not request.mixed
        possible = [shape for shape in shapes if shape.positions >= ordered.least_positions]
        # Kinds of devices are taken in turn, never mixed, and interleaved stages are cut one way only.
        seen = request.small and thorough.exact and not request.mixed
        unseen = [shape for shape in possible if not seen or shape.interleave > 1]
        bound = min(bound, min((shape.bound[0] for shape in unseen), default=math.inf))
    first = best[0].score[0] if best else math.inf
    return _Found(best, compared, exact and first * (1 - TIE) <= bound, min(first, bound))


def _fits(request: Request) -> bool:
    """Whether a plan for this question exists, predicted in full."""
    for candidate in find_candidates(request, PREDICTED).candidates:
        try:
            best_placement(request.profile, request.cluster, _pipeline(request, candidate))
        except (InfeasiblePlan, BudgetExceeded):
            continue
        return True
    return False


def _pipeline(request: Request, candidate: Candidate) -> Pipeline:
    return Pipeline(
        schedule=candidate.shape.schedule,
        stages=candidate.stages,
        global_batch=request.global_batch,
        microbatch=candidate.shape.microbatch,
        interleave=candidate.shape.interleave,
        order=candidate.order,
    )


def describe(pipeline: Pipeline) -> str:
    """A plan in a line: ``1f1b, 2 stages × [1, 2] replicas, 8 micro-batches of 2, keep 6, offload 4``."""
    replicas = [stage.replicas for stage in pipeline.stages[: pipeline.positions]]
    shown = str(replicas[0]) if len(set(replicas)) == 1 else str(replicas)
    chosen = [directive for stage in pipeline.stages for directive in stage.directives]
    counts = ", ".join(f"{d} {chosen.count(d)}" for d in Directive if d in chosen)
    below = max(stage.optimizer_offload for stage in pipeline.stages)
    parts = [
        pipeline.schedule + (f" ({pipeline.interleave} stages each)" if pipeline.interleave > 1 else ""),
        f"{pipeline.positions} stage(s) × {shown} replica(s)",
        f"{pipeline.micro_batches} micro-batches of {pipeline.microbatch}",
        counts,
    ]
    sharded = any(stage.shard_optimizer for stage in pipeline.stages)
    parts += [f"up to {below:.0%} of optimizer states below"] if below else []
    return ", ".join(parts + (["optimizer states shared by replicas"] if sharded else []))


def _runners_up(chosen: tuple[Pipeline, Forecast], others: Sequence[tuple[Pipeline, Forecast]]) -> list[Alternative]:
    """Why each was not chosen: by how much it is slower, and which term grew most, over all positions. Those that read
    the same are named once."""
    found: dict[str, Alternative] = {}
    mine, best = _mean_terms(chosen[1]), chosen[1].step_seconds
    for pipeline, forecast in others:
        text, terms = describe(pipeline), _mean_terms(forecast)
        if text == describe(chosen[0]) or text in found:
            continue
        grown = max(terms, key=lambda term: terms[term] - mine.get(term, 0.0), default="idle")
        slower = forecast.step_seconds / best - 1 if best else 0.0
        more = terms.get(grown, 0.0) - mine.get(grown, 0.0)
        reason = f"{slower:.1%} slower: {more:+.3g} s of {grown}" if slower >= 5e-4 else "no faster"
        found[text] = Alternative(description=text, step_seconds=round(forecast.step_seconds, 6), reason=reason)
    return list(found.values())


def _mean_terms(forecast: Forecast) -> dict[str, float]:
    """Seconds by term, the mean over positions."""
    count = max(1, len(forecast.stages))
    terms: dict[str, float] = {}
    for stage in forecast.stages:
        for term, seconds in stage.seconds.items():
            terms[term] = terms.get(term, 0.0) + seconds / count
    return terms


def _plan(
    request: Request, pipeline: Pipeline, forecast: Forecast, found: _Found, others: Sequence[Alternative]
) -> Plan:
    profile, devices = request.profile, request.cluster.devices
    in_order = pipeline.order == tuple(range(len(devices)))
    return Plan(
        model=profile.model,
        fingerprint=profile.fingerprint,
        schedule=pipeline.schedule,
        global_batch=request.global_batch,
        microbatch=pipeline.microbatch,
        stages=pipeline.stages,
        tier=devices[0].tier,
        prediction=Prediction(
            step_seconds=round(forecast.step_seconds, 6),
            bubble=round(forecast.bubble, 6),
            ranks=forecast.ranks,
            stages=forecast.stages,
        ),
        candidates=found.compared,
        exact=found.exact,
        bound_seconds=round(min(found.bound_seconds, forecast.step_seconds), 6),
        interleave=pipeline.interleave,
        placement=() if in_order else pipeline.order,
        alternatives=tuple(others),
    )
