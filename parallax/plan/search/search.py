"""Find the fastest plan.

The search covers stages × replicas × micro-batch × schedule × keep/recompute/offload × tier × order of the devices.
Small requests are solved exactly under the formula of :mod:`parallax.plan.search.request`. Larger requests are solved
by the greedy rule of :mod:`parallax.plan.search.greedy`, with a lower bound. In both cases the best candidates are
predicted in full, by the event simulator if possible, and this prediction decides.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallax.common.units import format_seconds, plural
from parallax.errors import InfeasiblePlan
from parallax.plan.cluster import Cluster
from parallax.plan.config import AUTO, PlanConfig
from parallax.plan.cost.forward import task_costs
from parallax.plan.cost.offload_tier import with_offload_bytes
from parallax.plan.plan import Alternative, Directive, Pipeline, Plan, Prediction
from parallax.plan.profile import ModelProfile
from parallax.plan.schedule.breadth_first import BREADTH_FIRST
from parallax.plan.search.candidates import EFFORT as CANDIDATE_EFFORT
from parallax.plan.search.candidates import (
    CandidateSearch,
    Forecasts,
    Progress,
    Timed,
    timed_placements,
)
from parallax.plan.search.exact import EFFORT as EXACT_EFFORT
from parallax.plan.search.exact import ExactSearch, worst
from parallax.plan.search.greedy import GreedySearch
from parallax.plan.search.refusal import refusal
from parallax.plan.search.request import Candidate, Request
from parallax.plan.simulation.predict import Forecast, predict_costs
from parallax.plan.task import PlanTask
from parallax.plan.updates import Updates

PREDICTED = 8  # pipelines that are predicted in full even if they cannot win
EFFORT = 300_000  # simulated block passes after which no more pipelines are predicted
CANDIDATES = 20  # pipelines that the exact search returns
NAMED = 4  # alternatives that the plan lists
CPUS = ("cpu", "cpu-core")  # kinds of devices that read inputs from host memory directly
TIE = 1e-6  # relative gain in step seconds that counts as none
FEW_DEVICES = 4  # devices up to which plans for every smaller count are searched
MOST_TRIED = 2  # device counts tried on larger clusters if no plan fits the first
AS_FAST = 1.01  # factor of the shortest step up to which fewer devices are preferred


@dataclass(frozen=True)
class SearchResult:
    """The pipelines found over all orders of the devices.

    ``timed``          pipelines with quick predictions; those of the ``candidates`` are included
    ``candidates``     the pipelines with the best scores by the formula, best first
    ``compared``       number of evaluated pipelines
    ``exact``          whether no other pipeline has a better score by the formula
    ``bound_seconds``  a lower bound on the seconds of a step
    """

    timed: list[Timed]
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
    gather_loss: bool = False,
    updates: Updates = Updates.SYNCHRONOUS,
    spare: bool = False,
    task: PlanTask = PlanTask.TRAINING,
    progress: Progress = lambda text: None,
) -> tuple[Plan, Forecast]:
    """Return the fastest plan of ``task`` for ``cluster``, and the forecast of its step.

    ``profile``      costs of the model in training, also for other tasks
    ``config``       the user's constraints on the plan
    ``microbatch``   rows of a micro-batch; auto tries the batch, its repeated halves, and the sizes that divide the
                     batch evenly over the replicas
    ``swap``         whether the plan may offload
    ``gather_loss``  whether the plan must compute one loss over all rows of the batch
    ``updates``      recorded in the plan; ``profile`` already has its costs
    ``spare``        whether the plan may leave devices unused. It then uses the fewest of the first devices, of a few
                     numbers that are tried, with which the step is at most 1% longer than the shortest one found.
    ``progress``     function that receives status messages

    Every replica gets rows, unless no device count to try allows this. If no plan fits, :class:`InfeasiblePlan` is
    raised, with the smallest change found that fits.
    """
    whole = Request(
        task_costs(profile, task),
        cluster,
        config,
        global_batch=global_batch,
        microbatch=microbatch,
        swap=swap,
        gather_loss=gather_loss,
        updates=updates if task.trains else Updates.SYNCHRONOUS,
        task=task,
    )
    devices = len(cluster.devices)
    counts = _device_counts(config, devices) if spare else [devices]
    requests = (whole.changed(cluster=cluster.first(n), order=None) for n in counts)
    answers: list[_Answer] = []
    for request in filter(has_rows_for_all, requests):
        answers.append(_Answer.of(request, progress))
        if devices > FEW_DEVICES and (answers[-1].predicted or len(answers) == MOST_TRIED):
            break
    answers = answers or [_Answer.of(whole.changed(idle=True), progress)]
    found = [answer for answer in answers if answer.predicted]
    if not found:
        raise refusal(answers[0].request, list(answers[0].reasons.values()), _fits)
    least = min(answer.step_seconds for answer in found)
    fewest = min(
        (answer for answer in found if answer.step_seconds <= least * AS_FAST),
        key=lambda answer: len(answer.request.devices),
    )
    plan, forecast = fewest.plan()
    return replace(plan, spare_devices=devices - plan.world_size), forecast


def _device_counts(config: PlanConfig, devices: int) -> list[int]:
    """Return the numbers of devices to try: every number that the configured stages and replicas allow, largest first.

    If there are many, the most promising numbers come first: the largest and, for each number of stages, the largest
    one that this number of stages divides. All others follow.
    """
    if config.ranks is not None:
        return [devices]
    step = 1 if config.replicas == AUTO else int(str(config.replicas))
    least = max(step, 1 if config.stages == AUTO else int(config.stages))
    counts = [n for n in range(devices, least - 1, -1) if n % step == 0] or [devices]
    if len(counts) <= FEW_DEVICES or config.replicas != AUTO:
        return counts
    even = {stages * (devices // stages) for stages in range(2, devices // 2 + 1)}
    return [counts[0], *sorted(even.intersection(counts[1:]), reverse=True), *counts[1:]]


def has_rows_for_all(request: Request) -> bool:
    """Return whether some pipeline gives rows to every device."""
    quick = GreedySearch(request)
    return any(quick.has_replicas(shape) for shape in request.shapes())


@dataclass(frozen=True)
class _Answer:
    """The result of a search for one number of devices.

    ``predicted`` has the best pipelines with their forecasts, best first. ``reasons`` maps the description of each
    pipeline that does not fit to the reason.
    """

    request: Request
    found: SearchResult
    predicted: list[tuple[Pipeline, Forecast]]
    reasons: dict[str, str]

    @classmethod
    def of(cls, request: Request, progress: Progress) -> _Answer:
        """Return the best pipelines of a request.

        In evaluation and inference, weights stay on the device if this is about as fast as fetching them.
        """
        found = cls._searched(request, progress)
        free = not request.task.trains and request.config.parameters == AUTO
        if not free or not found.predicted or not _fetches(found.predicted[0][0]):
            return found
        kept = request.changed(config=replace(request.config, parameters="device"))
        resident = cls._searched(kept, progress)
        if not resident.predicted or resident.step_seconds > found.step_seconds * AS_FAST:
            return found
        both = replace(
            resident.found,
            compared=resident.found.compared + found.found.compared,
            exact=False,
            bound_seconds=found.found.bound_seconds,
        )
        return replace(resident, found=both)

    @classmethod
    def _searched(cls, request: Request, progress: Progress) -> _Answer:
        forecasts = Forecasts(request)
        found = find_candidates(request, CANDIDATES, forecasts, progress=progress)
        predicted = _predict(found.timed, forecasts, progress)
        if predicted and _reads_weights_often(request, predicted[0][0]):
            grouped = request.changed(config=replace(request.config, schedule=BREADTH_FIRST.name))
            others = Forecasts(grouped)
            more = find_candidates(grouped, CANDIDATES, others, progress=progress)
            predicted += _predict(more.timed, others, progress)
            predicted.sort(key=lambda pair: pair[1].step_seconds)
            found = replace(found, compared=found.compared + more.compared, exact=False)
        reasons = {describe(pipeline): reason for pipeline, reason in forecasts.refused.items()}
        return cls(request, found, predicted, reasons)

    @property
    def step_seconds(self) -> float:
        return self.predicted[0][1].step_seconds

    def plan(self) -> tuple[Plan, Forecast]:
        """Return the best pipeline as a plan, and its forecast."""
        request, best = self.request, self.predicted[0]
        pipeline, forecast = _with_inputs_ahead(request.profile, request.cluster, best[0])
        refused = [
            Alternative(description=text, step_seconds=0.0, reason=reason)
            for text, reason in self.reasons.items()
        ]
        others = [*_runners_up(best, self.predicted[1:]), *refused][:NAMED]
        return _plan(request, pipeline, forecast, self.found, others), forecast


def _fetches(pipeline: Pipeline) -> bool:
    return any(stage.parameter_offload for stage in pipeline.stages)


def _reads_weights_often(request: Request, pipeline: Pipeline) -> bool:
    """Return whether ``pipeline`` reads offloaded weights once per micro-batch although another schedule may avoid it.

    The result is False unless the configuration leaves the choice of a schedule to the planner.
    """
    config = request.config
    free = config.schedule == config.interleave == AUTO and config.activations != Directive.OFFLOAD
    return free and any(
        stage.parameter_offload and pipeline.visits(index).again
        for index, stage in enumerate(pipeline.stages)
    )


def find_candidates(
    request: Request,
    most: int,
    forecasts: Forecasts | None = None,
    *,
    progress: Progress = lambda text: None,
) -> SearchResult:
    """Return the pipelines that may be the best, over all orders of the devices.

    For small requests, the result includes the ``most`` pipelines with the best scores by the formula, found exactly.
    ``forecasts`` collects the full predictions made on the way; the caller may use them afterwards.
    """
    timed: list[Timed] = []
    best: list[Candidate] = []
    compared, exact, bound = 0, True, math.inf
    orders, forecasts = request.orders(), forecasts or Forecasts(request)
    for ordered in orders:
        searched = CandidateSearch(
            ordered, forecasts, effort=CANDIDATE_EFFORT / len(orders), progress=progress
        )
        searched.run()
        timed += searched.found
        compared += searched.compared
        best = sorted(
            [*best, *(other.candidate for other in searched.found)], key=lambda c: c.score
        )[:most]
        if not request.small:
            exact, bound = False, min(bound, searched.bound_seconds)
            continue
        thorough = ExactSearch(ordered, EXACT_EFFORT / len(orders))
        shapes = list(ordered.shapes())
        whole, alone = worst(best, 1)  # search only for pipelines that beat the best greedy one
        better = thorough.best(
            [shape for shape in shapes if shape.interleave == 1],
            most,
            (whole * (1 - TIE), alone * (1 - TIE)),
        )
        best = sorted([*best, *better], key=lambda c: c.score)[:most]
        timed += [other for candidate in better for other in timed_placements(ordered, candidate)]
        compared += thorough.compared
        # Each order keeps equal devices together, and interleaved stages have a single partition.
        seen = thorough.exact and not request.mixed
        exact = exact and seen
        possible = [
            shape for shape in shapes if shape.pipeline_ranks >= ordered.least_pipeline_ranks
        ]
        unseen = [shape for shape in possible if not seen or shape.interleave > 1]
        bound = min(bound, min((shape.bound[0] for shape in unseen), default=math.inf))
    first = best[0].score[0] if best else math.inf
    return SearchResult(
        timed,
        best,
        compared,
        exact and first * (1 - TIE) <= bound,
        min(first, bound) if request.small else bound,
    )


def _predict(
    timed: Sequence[Timed], forecasts: Forecasts, progress: Progress
) -> list[tuple[Pipeline, Forecast]]:
    """Return the forecasts of the pipelines that may be the best, best first.

    The full prediction finds waits that the quick one does not include. So every pipeline that seems faster than the
    best forecast is predicted, and at least :data:`PREDICTED` pipelines, until :data:`EFFORT` is spent.
    """
    best = forecasts.least()
    for other in sorted(timed, key=lambda other: other.least):
        enough = other.least >= best and len(forecasts.known) >= PREDICTED
        if enough or (forecasts.known and forecasts.effort > EFFORT):
            break
        progress(f"predicting plans: {len(forecasts.known)} done, best step {best:.4g} s")
        best = min(best, forecasts.seconds(other.pipeline))
    return sorted(forecasts.known.items(), key=lambda pair: pair[1].step_seconds)


def _with_inputs_ahead(
    profile: ModelProfile, cluster: Cluster, pipeline: Pipeline
) -> tuple[Pipeline, Forecast]:
    """Return ``pipeline`` with its forecast, which includes the time spans of actions that the search has discarded.

    On accelerators, the returned pipeline also copies the inputs of the next micro-batch ahead, if they fit the memory.
    """
    ahead = replace(pipeline.stages[0], inputs_ahead=True)
    accelerated = all(device.kind not in CPUS for device in cluster.devices)
    if accelerated and pipeline.micro_batches(pipeline.global_batch) > 1:
        changed = replace(pipeline, stages=(ahead, *pipeline.stages[1:]))
        with contextlib.suppress(InfeasiblePlan):
            return changed, predict_costs(profile, cluster, changed)
    return pipeline, predict_costs(profile, cluster, pipeline)


def _fits(request: Request) -> bool:
    """Return whether the request has a plan that fits according to the full prediction.

    Pipeline shapes that need the least memory are tried first, because they are the most likely to fit.
    """
    forecasts = Forecasts(request)
    for ordered in request.orders():
        quick = GreedySearch(ordered)
        for shape in quick.leanest(list(ordered.shapes())):
            solved = quick.solve(shape)
            if solved is None or solved.candidate is None:
                continue
            if any(
                forecasts.seconds(each.pipeline) < math.inf
                for each in timed_placements(ordered, solved.candidate)
            ):
                return True
    if request.small:
        for timed in find_candidates(request, CANDIDATES, forecasts).timed:
            forecasts.seconds(timed.pipeline)
    return bool(forecasts.known)


_LONG = (
    24  # characters of a list of replicas; of a longer one only the least and the most are shown
)


def describe(pipeline: Pipeline) -> str:
    """Return a description of ``pipeline`` in one line.

    For example: ``1f1b, 2 stages × [1, 2] replicas, 8 micro-batches of 2, keep 6, offload 4``.
    """
    replicas = [stage.replicas for stage in pipeline.stages[: pipeline.pipeline_ranks]]
    shown = str(replicas[0]) if len(set(replicas)) == 1 else str(replicas)
    if len(shown) > _LONG:
        shown = f"{min(replicas)} to {max(replicas)}"
    chosen = [directive for stage in pipeline.stages for directive in stage.directives]
    counts = ", ".join(f"{d} {chosen.count(d)}" for d in Directive if d in chosen)
    offloaded = max(stage.optimizer_offload for stage in pipeline.stages)
    parts = [
        str(pipeline.schedule)
        + (f" ({pipeline.interleave} stages each)" if pipeline.interleave > 1 else ""),
        f"{plural(pipeline.pipeline_ranks, 'stage')} × {shown} replica{'s' if shown != '1' else ''}",
        f"{plural(pipeline.micro_batches(pipeline.global_batch), 'micro-batch')} of {pipeline.microbatch}",
        counts,
    ]
    if not pipeline.task.trains:
        fetched = max(stage.parameter_offload for stage in pipeline.stages)
        parts[-1:] = [f"up to {fetched:.0%} of parameters offloaded"] if fetched else []
    sharded = any(stage.shard_optimizer for stage in pipeline.stages)
    parts += [f"up to {offloaded:.0%} of optimizer states offloaded"] if offloaded else []
    return ", ".join(parts + (["optimizer states sharded over replicas"] if sharded else []))


def _runners_up(
    chosen: tuple[Pipeline, Forecast], others: Sequence[tuple[Pipeline, Forecast]]
) -> list[Alternative]:
    """Return the alternatives to the chosen plan with reasons: how much slower each is, and which term grew most.

    Terms are averaged over all pipeline ranks. Alternatives with equal descriptions are listed once.
    """
    found: dict[str, Alternative] = {}
    mine, best = _mean_terms(chosen[1]), chosen[1].step_seconds
    for pipeline, forecast in others:
        text, terms = describe(pipeline), _mean_terms(forecast)
        if text == describe(chosen[0]) or text in found:
            continue
        grown = max(terms, key=lambda term: terms[term] - mine.get(term, 0.0), default="idle")
        slower = forecast.step_seconds / best - 1 if best else 0.0
        more = terms.get(grown, 0.0) - mine.get(grown, 0.0)
        longer = f"{slower:.1%} slower: {format_seconds(more)} more of {grown}"
        reason = longer if slower >= 5e-4 else "no faster"
        found[text] = Alternative(
            description=text, step_seconds=round(forecast.step_seconds, 6), reason=reason
        )
    return list(found.values())


def _mean_terms(forecast: Forecast) -> dict[str, float]:
    """Return the seconds of each term, averaged over pipeline ranks."""
    count = max(1, len(forecast.stages))
    terms: dict[str, float] = {}
    for stage in forecast.stages:
        for term, seconds in stage.seconds.items():
            terms[term] = terms.get(term, 0.0) + seconds / count
    return terms


def _exchanged_bytes(profile: ModelProfile, pipeline: Pipeline) -> float:
    every = 1 if profile.staleness else profile.local_steps
    if not every:
        return 0.0
    stages = (range(stage.start, stage.stop) for stage in pipeline.stages)
    trained = sum(profile.unique_trained_bytes(blocks) for blocks in stages)
    return trained * profile.synced_bytes / every


def _plan(
    request: Request,
    pipeline: Pipeline,
    forecast: Forecast,
    found: SearchResult,
    others: Sequence[Alternative],
) -> Plan:
    profile, devices = request.profile, request.cluster.devices
    in_order = pipeline.placement in ((), tuple(range(len(devices))))
    return Plan(
        model=profile.model,
        fingerprint=profile.fingerprint,
        schedule=pipeline.schedule,
        global_batch=request.global_batch,
        microbatch=pipeline.microbatch,
        stages=with_offload_bytes(profile, pipeline.stages, pipeline.pipeline_ranks),
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
        placement=() if in_order else pipeline.placement,
        task=request.task,
        gather_loss=request.gather_loss,
        local_steps=profile.local_steps,
        local_groups=profile.local_groups,
        fragments=profile.fragments,
        fragment_delay=profile.fragment_delay,
        staleness=profile.staleness,
        exchanged_bytes=_exchanged_bytes(profile, pipeline),
        updates=request.updates,
        alternatives=tuple(others),
    )
