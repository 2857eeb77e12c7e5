"""Correct a profile with the measurements of a run that was planned with it.

The planner's spans and the executor's spans have the same format. So a stage's measured compute seconds can be divided
by its predicted compute seconds. The forward and backward of each block are scaled by this ratio of the block's stage.
The distribution of the error within a stage remains unknown, but the stage as a whole becomes exact. Contention does
not distort the ratio, because ranks that share cores slow each other down in predicted and in measured spans. But
corrected seconds change which ranks compute at the same time. So, if the cluster is known, the corrected profile
predicts the same plan again and is corrected by the remaining error, several times.

Some actions give no ratio: those whose seconds are a negligible part of a step, and those so short that most of their
time is dispatch. Their errors are part of the error of the whole step, which is corrected at the end.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from parallax.common.events import Span, busy_by_rank
from parallax.errors import PlanError
from parallax.plan.cluster import Cluster
from parallax.plan.plan import Directive, Plan, StagePlan
from parallax.plan.profile import Affine, ModelProfile
from parallax.plan.simulation.simulate import simulate

ROUNDS = 8  # the most predictions to bring the error below ENOUGH
ENOUGH = 0.005
NARROWEST, WIDEST = 0.02, 50.0  # a ratio beyond these is taken for a measurement error
LEAST_SHARE = 0.01  # share of a step: fewer measured seconds give no ratio
ACTION_SECONDS = 5e-5  # dispatch of an action: one that takes no longer gives no ratio
UNCERTAIN = 1.5  # limits a rank's factor, relative to the slowness in its spans

COMPUTE = ("forward", "backward")
# The term of each kind of action.
TERMS = {"forward": "forward", "backward": "backward", "backward_weight": "backward"}
Busy = Mapping[tuple[int, str], float]


def calibrate(
    profile: ModelProfile,
    predicted: Iterable[Span],
    measured: Iterable[Span],
    plan: Plan,
    cluster: Cluster | None = None,
) -> ModelProfile:
    """Return ``profile``, corrected until its prediction for ``plan`` agrees with the ``measured`` spans.

    ``predicted`` are the spans that ``profile`` predicts. Both sequences have the spans of every rank for one or more
    steps under ``plan``. Without ``cluster`` the ratios are applied once. Raises :class:`PlanError` if the spans or the
    profile belong to another plan.
    """
    before, after = list(predicted), list(measured)
    _check(profile, plan, before, after)
    profile = _corrected(profile, before, after, plan)
    if cluster is None:
        return profile
    goal = step_seconds(after)
    best, smallest = profile, float("inf")
    for _ in range(ROUNDS):
        before = list(simulate(profile, cluster, plan).spans)
        off = abs(step_seconds(before) / goal - 1)
        if off < smallest:
            best, smallest = profile, off
        if off < ENOUGH:
            break
        profile = _corrected(profile, before, after, plan)
    return _stretched(best, cluster, plan, goal)


def step_seconds(spans: Sequence[Span]) -> float:
    """Return the seconds of a step in ``spans``, from its first start to its last end, as the median over the steps."""
    steps: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        steps[span.step].append(span)
    return statistics.median(
        max(s.end for s in step) - min(s.start for s in step) for step in steps.values()
    )


def seconds_by_term(spans: Iterable[Span]) -> dict[int, dict[str, float]]:
    """Return, for each rank in ``spans``, the seconds of one step by term.

    The terms are forward, backward (including recomputed forwards), stall (waiting for swapped data), read (waiting for
    rows), receive (waiting for messages of other stages), reduce, update, and idle (the rest).
    """
    found: dict[int, dict[str, float]] = {}
    listed = list(spans)
    length = max((span.end for span in listed), default=0.0) - min(
        (span.start for span in listed), default=0.0
    )
    for span in listed:
        terms = found.setdefault(
            span.rank,
            dict.fromkeys((*COMPUTE, "stall", "read", "receive", "reduce", "update", "idle"), 0.0),
        )
        lasted = span.end - span.start
        if span.kind in TERMS:
            terms[TERMS[span.kind]] += lasted - span.wait
            terms["stall"] += span.wait - span.read
            terms["read"] += span.read
        elif span.kind in ("reduce", "update"):
            terms[span.kind] += lasted
        elif span.kind.startswith("receive"):
            terms["receive"] += lasted
    for terms in found.values():
        terms["idle"] = max(0.0, length - sum(terms.values()))
    return found


def _corrected(
    profile: ModelProfile, before: Sequence[Span], after: Sequence[Span], plan: Plan
) -> ModelProfile:
    """Return ``profile`` after one correction by the ratios of measured to predicted seconds. ``before``: the predicted
    spans. ``after``: the measured spans."""
    was, now = _busy(before, plan), _evident(after, plan)
    blocks = list(profile.blocks)
    for index, stage in enumerate(plan.stages):
        forward = _ratio(now, was, (index, "forward"))
        backward = _ratio(now, was, (index, "backward"))
        again = _recomputed_share(profile, plan, stage)
        backward = _within((backward - again * forward) / (1 - again))
        for i in range(stage.start, stage.stop):
            block = blocks[i]
            blocks[i] = replace(
                block,
                forward_seconds=scaled(block.forward_seconds, forward),
                backward_seconds=scaled(block.backward_seconds, backward),
                weight_seconds=scaled(block.weight_seconds, backward),
                split_seconds=scaled(block.split_seconds, backward),
                offload_seconds=scaled(block.offload_seconds, backward),
                skipped_seconds=scaled(block.skipped_seconds, forward),
                received_seconds=scaled(block.received_seconds, backward),
                norm_seconds=scaled(block.norm_seconds, backward),
                gathered_seconds=block.gathered_seconds * forward,  # it follows the last forward
            )
    update = 1.0
    if (spent := _update(after))[0, "update"] >= LEAST_SHARE * step_seconds(after):
        update = _ratio(spent, _update(before), (0, "update"))
    return replace(
        profile, blocks=tuple(blocks), optimizer_seconds=profile.optimizer_seconds * update
    )


def _stretched(profile: ModelProfile, cluster: Cluster, plan: Plan, goal: float) -> ModelProfile:
    """Return the profile, scaled until the predicted step takes ``goal`` seconds, the measured time.

    So measured time outside blocks, such as messages and dispatch, is distributed over the blocks.
    """
    best, smallest = profile, float("inf")
    for _ in range(ROUNDS):
        ratio = goal / step_seconds(simulate(profile, cluster, plan).spans)
        if abs(1 / ratio - 1) < smallest:
            best, smallest = profile, abs(1 / ratio - 1)
        if smallest < ENOUGH:
            break
        profile = times(profile, _within(ratio))
    return best


def times(profile: ModelProfile, ratio: float) -> ModelProfile:
    """Return the profile with all seconds multiplied by ``ratio``."""
    blocks = tuple(
        replace(
            block,
            forward_seconds=scaled(block.forward_seconds, ratio),
            backward_seconds=scaled(block.backward_seconds, ratio),
            weight_seconds=scaled(block.weight_seconds, ratio),
            split_seconds=scaled(block.split_seconds, ratio),
            skipped_seconds=scaled(block.skipped_seconds, ratio),
            received_seconds=scaled(block.received_seconds, ratio),
            norm_seconds=scaled(block.norm_seconds, ratio),
            gathered_seconds=block.gathered_seconds * ratio,
        )
        for block in profile.blocks
    )
    return replace(profile, blocks=blocks, optimizer_seconds=profile.optimizer_seconds * ratio)


def scaled(line: Affine, ratio: float) -> Affine:
    """Return ``line`` with all costs multiplied by ``ratio``."""
    return line.scaled(ratio)


def _busy(spans: Sequence[Span], plan: Plan) -> Busy:
    """Return the compute seconds of a step for each (stage, kind of action), as the median over the steps.

    Waits for swapping are excluded. Reading rows counts as computing, so that the corrected profile predicts the step
    of the run. If a replicated stage has several backwards in a step, the last one is excluded, because it also waits
    for the gradients of the replicas.
    """
    lists: defaultdict[tuple[int, int, int, str], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in TERMS:
            lists[span.stage, span.rank, span.step, TERMS[span.kind]].append(span)
    totals: defaultdict[tuple[int, str], defaultdict[int, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for (stage, _, step, kind), found in lists.items():
        found.sort(key=lambda span: span.end)
        reducing = kind == "backward" and plan.stages[stage].replicas > 1 and len(found) > 1
        totals[stage, kind][step] += sum(
            s.end - s.start - s.wait + s.read for s in (found[:-1] if reducing else found)
        )
    return {key: statistics.median(steps.values()) for key, steps in totals.items()}


def _evident(spans: Sequence[Span], plan: Plan) -> Busy:
    """Return the results of :func:`_busy` that are long enough to be measured reliably."""
    steps = len({span.step for span in spans})
    actions = Counter((span.stage, TERMS[span.kind]) for span in spans if span.kind in TERMS)
    least = LEAST_SHARE * step_seconds(spans)
    return {
        key: seconds
        for key, seconds in _busy(spans, plan).items()
        if seconds >= max(least, ACTION_SECONDS * actions[key] / steps)
    }


def evident_factors(
    factors: Mapping[int, float], predicted: Sequence[Span], measured: Sequence[Span]
) -> dict[int, float]:
    """Return ``factors`` (rank → slow-down of a slow rank), each limited by the slow-down that the measured spans show.

    The slow-down in the spans is the ratio of the rank's measured to its predicted compute seconds, divided by the same
    ratio of the ranks without a factor. A result is at most ``UNCERTAIN`` times this slow-down. Ranks whose spans show
    no slow-down are omitted.
    """
    was, now = busy_by_rank(predicted), busy_by_rank(measured)
    others = [rank for rank in now if rank not in factors and was.get(rank, 0.0) > 0]
    usual = sum(now[rank] for rank in others) / max(1e-12, sum(was[rank] for rank in others))
    found = {}
    for rank, factor in factors.items():
        if not others or usual <= 0 or was.get(rank, 0.0) <= 0:
            continue
        shown = now.get(rank, 0.0) / was[rank] / usual
        if shown > 1.0:
            found[rank] = min(factor, UNCERTAIN * shown)
    return found


def _update(spans: Iterable[Span]) -> Busy:
    """Return the seconds of an optimizer update without waits, as the median over the steps.

    In each step the shortest update of any rank is used: that of the rank that begins its update last, and so waits for
    no other rank.
    """
    steps: defaultdict[int, list[float]] = defaultdict(list)
    for span in spans:
        if span.kind == "update":
            steps[span.step].append(span.end - span.start)
    return {(0, "update"): statistics.median(map(min, steps.values())) if steps else 0.0}


def _ratio(now: Busy, was: Busy, key: tuple[int, str]) -> float:
    """Return the ratio of measured (``now``) to predicted (``was``) seconds; 1 if either is missing.

    ``key`` is a pair (stage, kind of action). The ratio is limited to the range from ``NARROWEST`` to ``WIDEST``.
    """
    measured, predicted = now.get(key, 0.0), was.get(key, 0.0)
    return _within(measured / predicted) if measured > 0 and predicted > 0 else 1.0


def _within(ratio: float) -> float:
    return min(WIDEST, max(NARROWEST, ratio))


def _recomputed_share(profile: ModelProfile, plan: Plan, stage: StagePlan) -> float:
    """Return the fraction of a stage's predicted backward that recomputes forwards."""
    rows = -(-plan.microbatch // stage.replicas)
    blocks = profile.blocks[stage.start : stage.stop]
    again = sum(
        max(0.0, block.forward_seconds.at(rows) - block.skipped_seconds.at(rows))
        for block, directive in zip(blocks, stage.directives)
        if directive is Directive.RECOMPUTE
    )
    backward = sum(block.backward_seconds.at(rows) for block in blocks)
    return again / (again + backward) if again > 0 and backward > 0 else 0.0


def _check(
    profile: ModelProfile, plan: Plan, before: Sequence[Span], after: Sequence[Span]
) -> None:
    if profile.fingerprint != plan.fingerprint or len(profile.blocks) != plan.blocks:
        raise PlanError(
            f"the profile is of {profile.model} ({profile.fingerprint}, {len(profile.blocks)} blocks), the plan of "
            f"{plan.model} ({plan.fingerprint}, {plan.blocks} blocks): calibrate with the profile of the same run"
        )
    for name, spans in (("predicted", before), ("measured", after)):
        seen = {span.stage for span in spans if span.kind in COMPUTE}
        if seen != set(range(len(plan.stages))):
            raise PlanError(
                f"the {name} spans are of stages {sorted(seen)}, the plan has stages 0 to {len(plan.stages) - 1}: "
                "calibrate with the spans of a run under this plan"
            )
