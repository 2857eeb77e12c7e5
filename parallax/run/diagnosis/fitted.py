"""A run as the simulator models it: its plan's inputs, corrected cause by cause by what was measured."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parallax.common.events import COMPUTES, Span
from parallax.plan.cluster import Cluster, Link
from parallax.plan.plan import Pipeline, Plan
from parallax.plan.profile import Affine, ModelProfile
from parallax.plan.simulation.calibrate import calibrate
from parallax.plan.simulation.predict import predict
from parallax.run.diagnosis.measured import Measured

SLOW = 2.0  # times as long as the other replicas of its stage, from which a rank is slow
PREDICTED_SLOW = (
    2.5  # the same beside ranks of other stages: predictions of two stages differ in their errors
)
_FASTEST = 0.75  # times the prediction: other ranks that are faster still count as that fast
_LATER = 1.2  # times its own prediction that a slow rank takes at least
_SLOWEST_TIER = 1 / 512  # of the bandwidth that the plan assumed
_HALVINGS, _OVERLAP_HALVINGS = 12, 5
_UNPREDICTED = 0.03  # of a step: less stalling than that needs no explanation


@dataclass(frozen=True, kw_only=True)
class FittedRun:
    """The model of a run. ``profile``: with the measured seconds of the blocks. ``cluster``: as planned, but that
    computing may lose less speed during transfers. ``slow``: rank → how many times as long as others it takes.
    ``tier_speed``: bandwidth of the offload tier, as a share of the planned one. ``scale``: measured seconds for a
    modelled one, the error that is left."""

    measured: Measured
    profile: ModelProfile
    cluster: Cluster
    slow: Mapping[int, float]
    tier_speed: float
    scale: float = 1.0

    @property
    def plan(self) -> Plan:
        return self.measured.plan

    @cached_property
    def as_run(self) -> Cluster:
        """The cluster with its slow ranks and its slow tier."""
        return with_tier_speed(self.cluster.slowed(self.slow), self.tier_speed)

    def seconds(
        self,
        *,
        profile: ModelProfile | None = None,
        cluster: Cluster | None = None,
        plan: Pipeline | None = None,
        reads: Sequence[float] | None = None,
        fetch: float | None = None,
    ) -> float:
        """Return the modelled seconds from one step to the next; what is not given is as in the run. ``reads``: seconds
        of reading inside of a step by rank; ``fetch``: of waiting for rows before it."""
        reads = self.measured.read_seconds if reads is None else reads
        fetch = max(self.measured.fetch_seconds) if fetch is None else fetch
        plan = plan or self.plan
        with_rows = with_reads(profile or self.profile, plan, reads)
        inside = predict(with_rows, cluster or self.as_run, plan).step_seconds
        gaps = self.measured.period - self.measured.seconds - max(self.measured.fetch_seconds)
        return self.scale * (inside + fetch) + gaps


def fit(measured: Measured, profile: ModelProfile, cluster: Cluster) -> FittedRun:
    """Return the model of a run that was planned with ``profile`` and ``cluster``."""
    plan = measured.plan
    cluster = _with_measured_overlap(measured, profile, cluster)
    before = predict(profile, cluster, plan)
    slow = slow_ranks(before.spans, measured.spans, plan)
    slowed = cluster.slowed(slow)
    predicted = predict(profile, slowed, plan).spans if slow else before.spans
    corrected = calibrate(profile, predicted, measured.spans, plan)
    corrected = replace(corrected, disturbance=1.0)
    speed = _tier_speed(measured, corrected, slowed)
    found = FittedRun(
        measured=measured, profile=corrected, cluster=cluster, slow=slow, tier_speed=speed
    )
    gaps = measured.period - measured.seconds - max(measured.fetch_seconds)
    modelled = found.seconds() - gaps
    return replace(found, scale=(measured.period - gaps) / modelled)


def _with_measured_overlap(measured: Measured, profile: ModelProfile, cluster: Cluster) -> Cluster:
    """Return the cluster with a smaller loss of speed during transfers, if ranks that swap computed for less long than
    predicted: the profile, measured without transfers, is not the one that is wrong then."""
    if not any(rank.offloaded_bytes for rank in measured.plan.prediction.ranks):
        return cluster
    goal = sum(busy_by_rank(measured.spans).values())

    def losing(share: float) -> Cluster:
        devices = cluster.devices
        return cluster.with_devices(
            replace(each, overlap_loss=each.overlap_loss * share) for each in devices
        )

    def busy(share: float) -> float:
        spans = predict(profile, losing(share), measured.plan).spans
        return sum(busy_by_rank(spans).values())

    if goal >= busy(1.0):
        return cluster
    low, high = 0.0, 1.0
    for _ in range(_OVERLAP_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if busy(middle) > goal else (middle, high)
    return losing(low)


def slow_ranks(
    predicted: Sequence[Span], measured: Sequence[Span], plan: Pipeline
) -> dict[int, float]:
    """Return rank → factor of the ranks that take much longer than predicted, beside the other replicas of their stage
    or, without these, beside all other ranks."""
    was, now = busy_by_rank(predicted), busy_by_rank(measured)
    ratios = {rank: now[rank] / was[rank] for rank in now if was.get(rank, 0.0) > 0}
    found = {}
    for rank, ratio in ratios.items():
        stage = plan.coordinate(rank).pipeline_rank
        peers = [r for r in plan.ranks(stage) if r != rank and r in ratios]
        others = peers or [r for r in ratios if r != rank]
        if not others:
            continue
        usual = statistics.median_low([ratios[other] for other in others])
        factor = ratio / max(usual, _FASTEST)
        if factor >= (SLOW if peers else PREDICTED_SLOW) and ratio >= _LATER:
            found[rank] = round(factor, 2)
    return found


def busy_by_rank(spans: Sequence[Span]) -> dict[int, float]:
    """Return the seconds that each rank computed in a step, without waits: the median over the steps."""
    found: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.kind in COMPUTES:
            found[span.rank][span.step] += span.end - span.start - span.wait
    return {rank: statistics.median(steps.values()) for rank, steps in found.items()}


def with_tier_speed(cluster: Cluster, share: float) -> Cluster:
    """Return the cluster with the bandwidth of every offload tier times ``share``."""

    def slower(link: Link) -> Link:
        return replace(link, bytes_per_second=link.bytes_per_second * share)

    return cluster.with_devices(
        replace(device, write=slower(device.write), read=slower(device.read))
        for device in cluster.devices
    )


def with_reads(profile: ModelProfile, plan: Pipeline, reads: Sequence[float]) -> ModelProfile:
    """Return the profile in which the first and the last block also read rows, as the slowest of their ranks does."""
    stages = len(plan.stages)
    both = stages > 1 and plan.pipeline_rank(0) == plan.pipeline_rank(stages - 1)
    count = plan.micro_batches(plan.global_batch) * (2 if both else 1)
    first, last = (
        max((reads[rank] for rank in plan.ranks(stage) if rank < len(reads)), default=0.0) / count
        for stage in (0, stages - 1)
    )
    if not first and not last:
        return profile
    blocks = list(profile.blocks)
    blocks[0] = replace(blocks[0], forward_seconds=_later(blocks[0].forward_seconds, first))
    if stages > 1:
        blocks[-1] = replace(blocks[-1], forward_seconds=_later(blocks[-1].forward_seconds, last))
    return replace(profile, blocks=tuple(blocks))


def _later(cost: Affine, seconds: float) -> Affine:
    points = tuple((rows, value + seconds) for rows, value in cost.points)
    floor = cost.floor + seconds if cost.floor else 0.0
    return Affine(cost.fixed + seconds, cost.per_row, floor, points)


def _tier_speed(measured: Measured, profile: ModelProfile, cluster: Cluster) -> float:
    """Return the share of the planned bandwidth at which the simulated ranks stall as long as the measured ones."""
    stalls = _stalls(measured)
    if not stalls:
        return 1.0
    rank = max(stalls, key=lambda each: stalls[each])
    reads, goal = measured.read_seconds, stalls[rank]

    def stalled(share: float) -> float:
        slower = with_tier_speed(cluster, share)
        found = predict(with_reads(profile, measured.plan, reads), slower, measured.plan)
        return found.ranks[rank].stall_seconds

    if goal - stalled(1.0) < _UNPREDICTED * measured.seconds:
        return 1.0
    low, high = _SLOWEST_TIER, 1.0
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if stalled(middle) > goal else (low, middle)
    return high


def _stalls(measured: Measured) -> dict[int, float]:
    """Return the seconds that each rank waited for swapped data in a step, if it offloads anything."""
    if not any(rank.offloaded_bytes for rank in measured.plan.prediction.ranks):
        return {}
    waits: defaultdict[int, float] = defaultdict(float)
    steps = len({span.step for span in measured.spans})
    for span in measured.spans:
        if span.kind in COMPUTES:
            waits[span.rank] += span.wait / steps
    return {r: max(0.0, seconds - measured.read_seconds[r]) for r, seconds in waits.items()}
