"""The simulation of a run. Its inputs are the inputs of the run's plan, corrected by the run's measurements."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parallax.common.events import COMPUTES, Span, busy_by_rank
from parallax.plan.cluster import Cluster, Link
from parallax.plan.plan import Pipeline, Plan
from parallax.plan.profile import Affine, ModelProfile
from parallax.plan.simulation.calibrate import calibrate
from parallax.plan.simulation.predict import predict
from parallax.run.diagnosis.measured import Measured

SLOW = 2.0  # factor from which a rank is slow, against the other replicas of its stage
PREDICTED_SLOW = 2.5  # the same against ranks of other stages, whose predictions have other errors
_FASTEST = 0.75  # least ratio to the prediction that counts for the other ranks
_LATER = 1.2  # least ratio of a slow rank to its own prediction
_SLOWEST_TIER = 1 / 512  # smallest fraction of the planned bandwidth
_HALVINGS, _OVERLAP_HALVINGS = 12, 5
_UNPREDICTED = 0.03  # share of a step: a smaller excess of waits needs no explanation


@dataclass(frozen=True, kw_only=True)
class FittedRun:
    """The simulation of a run, fitted to its measurements.

    ``planned``     the profile with which the run was planned
    ``profile``     the same profile with the measured seconds of the blocks
    ``cluster``     the planned cluster, possibly with a smaller slowdown of computing during transfers
    ``slow``        slow rank → how many times as long as comparable ranks it computes
    ``tier_speed``  bandwidth of the offload tier, as a fraction of the planned bandwidth
    ``scale``       measured seconds per simulated second, which corrects the error that remains
    """

    measured: Measured
    planned: ModelProfile
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
        """The cluster as the measurements show it, with slow ranks and a slow offload tier."""
        return with_tier_speed(self.cluster.slowed(self.slow), self.tier_speed)

    @cached_property
    def computing(self) -> float:
        """The measured seconds of computing, divided by the predicted seconds. The prediction already includes that
        ``slow`` ranks are slow."""
        planned = busy_by_rank(predict(self.planned, self.as_run, self.plan).spans)
        return sum(busy_by_rank(self.measured.spans).values()) / max(1e-12, sum(planned.values()))

    def seconds(
        self,
        *,
        profile: ModelProfile | None = None,
        cluster: Cluster | None = None,
        plan: Pipeline | None = None,
        reads: Sequence[float] | None = None,
        fetch: float | None = None,
    ) -> float:
        """Return the simulated seconds from one step to the next. Arguments replace the run's own values. ``reads``: by
        rank, the seconds of reading rows inside a step. ``fetch``: the seconds of waiting for rows before the step."""
        reads = self.measured.read_seconds if reads is None else reads
        fetch = max(self.measured.fetch_seconds) if fetch is None else fetch
        plan = plan or self.plan
        with_rows = with_reads(profile or self.profile, plan, reads)
        inside = predict(with_rows, cluster or self.as_run, plan).step_seconds
        gaps = self.measured.period - self.measured.seconds - max(self.measured.fetch_seconds)
        return self.scale * (inside + fetch) + gaps


def fit(measured: Measured, profile: ModelProfile, cluster: Cluster) -> FittedRun:
    """Return the simulation of the ``measured`` run, which was planned with ``profile`` and ``cluster``."""
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
        measured=measured,
        planned=profile,
        profile=corrected,
        cluster=cluster,
        slow=slow,
        tier_speed=speed,
    )
    gaps = measured.period - measured.seconds - max(measured.fetch_seconds)
    modelled = found.seconds() - gaps
    return replace(found, scale=(measured.period - gaps) / modelled)


def _with_measured_overlap(measured: Measured, profile: ModelProfile, cluster: Cluster) -> Cluster:
    """Return ``cluster`` with a smaller ``overlap_loss``, the slowdown of computing during transfers, if ranks that
    swap computed for fewer seconds than predicted. The profile was measured without transfers, so the assumed slowdown
    must have been too large. The new value brings the predicted compute seconds as close as possible to the measured
    ones."""
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
    """Return, for each slow rank, how many times as long as expected it computes. A rank is slow if its ratio of
    measured to predicted compute seconds is much larger than the ratio of comparable ranks. These are the other
    replicas of its stage or, if there are none, all other ranks."""
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


def with_tier_speed(cluster: Cluster, share: float) -> Cluster:
    """Return ``cluster`` with the bandwidth of every offload tier multiplied by ``share``."""

    def slower(link: Link) -> Link:
        return replace(link, bytes_per_second=link.bytes_per_second * share)

    return cluster.with_devices(
        replace(device, write=slower(device.write), read=slower(device.read))
        for device in cluster.devices
    )


def with_host_tier(cluster: Cluster) -> Cluster | None:
    """Return ``cluster`` with devices that offload to host memory. Return None if the devices already do so, or if they
    cannot."""
    found = [device.offloading_to_host() for device in cluster.devices]
    known = [device for device in found if device is not None]
    return cluster.with_devices(known) if len(known) == len(found) else None


def with_reads(profile: ModelProfile, plan: Pipeline, reads: Sequence[float]) -> ModelProfile:
    """Return ``profile`` with the time of reading rows added to the forwards of the first and the last block.
    ``reads``: the seconds of reading in a step, by rank. In the first and in the last stage, only the replica that
    reads longest counts."""
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
    """Return the bandwidth of the offload tier as a fraction of the planned bandwidth. It is fitted to the rank that
    waits longest for swapped data, so that this rank waits as long in the simulation as measured. Return 1 if that rank
    does not wait longer than predicted."""
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
    """Return the seconds per step that each rank waited for swapped data; empty if no rank offloads anything."""
    if not any(rank.offloaded_bytes for rank in measured.plan.prediction.ranks):
        return {}
    waits: defaultdict[int, float] = defaultdict(float)
    steps = len({span.step for span in measured.spans})
    for span in measured.spans:
        if span.kind in COMPUTES:
            waits[span.rank] += span.wait / steps
    return {r: max(0.0, seconds - measured.read_seconds[r]) for r, seconds in waits.items()}
