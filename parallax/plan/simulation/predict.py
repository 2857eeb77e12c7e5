"""Predict the seconds and bytes of every rank of a pipeline, by term.

Small pipelines are predicted by the event simulator, which simulates every action, swapping, and shared cores and
links. For large pipelines, such as a thousand ranks with a thousand micro-batches, the longest path through the same
action lists is computed instead. The cost of swapping and of all-reduces is then an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from parallax.common.events import Span
from parallax.common.units import format_bytes
from parallax.errors import InfeasiblePlan
from parallax.plan.cluster import Cluster, Device, Link
from parallax.plan.cost.collective import (
    all_reduce_seconds,
    averaging_parts,
    broadcast_seconds,
    groups_of,
    link_among,
)
from parallax.plan.cost.communicators import beside
from parallax.plan.cost.forward import forward_memory, task_costs
from parallax.plan.cost.passes import Passes
from parallax.plan.cost.peak import with_kept
from parallax.plan.cost.stage import StageLoad, load_planned, rank_memory
from parallax.plan.cost.traffic import buffer_bytes, copying_seconds, leaving_bytes
from parallax.plan.edge import Edge
from parallax.plan.plan import Pipeline, RankPrediction, StagePrediction
from parallax.plan.profile import ModelProfile
from parallax.plan.simulation.longest_path import StageTimes, Timeline, time_schedule
from parallax.plan.simulation.simulate import simulate

MANY_MICRO_BATCHES = 512  # steps with at most this many micro-batches are timed completely
SETTLED_ROUNDS = 8  # rounds through all stages after which all rounds are equal
SIMULATED_BLOCKS = (
    20_000  # forwards and backwards of blocks, over all ranks: the event simulator's limit
)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The prediction of one step.

    ``bubble`` is the fraction of the step in which the pipeline is idle. ``ranks`` has an entry per rank, and
    ``stages`` an entry per pipeline rank. ``spans`` has the time span of every action; it is empty if the event
    simulator did not run.
    """

    step_seconds: float
    bubble: float
    ranks: tuple[RankPrediction, ...]
    stages: tuple[StagePrediction, ...]
    spans: tuple[Span, ...] = ()


def predict(profile: ModelProfile, cluster: Cluster, pipeline: Pipeline) -> Forecast:
    """Return the predicted time and memory of a step of the pipeline's task.

    ``profile`` has the costs of training, from which those of the task are derived. Raises the errors of
    :func:`predict_costs`.
    """
    return predict_costs(task_costs(profile, pipeline.task), cluster, pipeline)


def predict_costs(profile: ModelProfile, cluster: Cluster, pipeline: Pipeline) -> Forecast:
    """Return the predicted time and memory of a step of ``pipeline``.

    ``profile`` has the costs of the pipeline's task. Raises :class:`InfeasiblePlan` if a rank would exceed its device,
    and ``BudgetExceeded`` if a swap limit cannot hold one block.
    """
    few = block_passes(pipeline) <= SIMULATED_BLOCKS
    found = (_simulated if few else _timed)(profile, cluster, pipeline)
    for rank, prediction in enumerate(found.ranks):
        if prediction.peak_bytes > prediction.budget_bytes:
            raise InfeasiblePlan(
                f"rank {rank} peaks at {format_bytes(prediction.peak_bytes)} of {format_bytes(prediction.budget_bytes)}"
            )
    return found


def placements(cluster: Cluster, pipeline: Pipeline) -> list[Pipeline]:
    """Return ``pipeline`` under each placement to try.

    If equally many replicas of several stages run on several nodes with equal devices, there are two placements. Either
    the replicas of a stage are adjacent, so that they reduce over fast links, or the stages of a replica are adjacent,
    so that they send over fast links. Otherwise, only ``pipeline`` itself is returned.
    """
    replicas, pipeline_ranks = pipeline.stages[0].replicas, pipeline.pipeline_ranks
    even = all(stage.replicas == replicas for stage in pipeline.stages)
    if (
        not even
        or replicas == 1
        or pipeline_ranks == 1
        or len(cluster.nodes) == 1
        or len(set(cluster.devices)) > 1
    ):
        return [pipeline]
    order = pipeline.placement or range(pipeline.world_size)
    placement = tuple(
        order[k * pipeline_ranks + p] for p in range(pipeline_ranks) for k in range(replicas)
    )
    return [pipeline, replace(pipeline, placement=placement)]


class QuickSeconds(NamedTuple):
    """Seconds of a step by the longest path, without the details of swapping and reducing.

    ``likely`` assumes that every backward waits for the offload tier. ``least`` is a lower bound on the event
    simulator's result, because waits for the tier may coincide with idle time, and some micro-batches may have fewer
    rows.
    """

    likely: float
    least: float


def quick_seconds(profile: ModelProfile, cluster: Cluster, pipeline: Pipeline) -> QuickSeconds:
    """Return the seconds of a step by the longest path, without checking any memory budget."""
    loads = stage_loads(profile, cluster, pipeline)
    ties = _tie_seconds(profile, cluster, pipeline)
    stalls = [_stall(cluster, pipeline, {stage: load}) for stage, load in enumerate(loads)]
    likely = _finish(profile, cluster, pipeline, loads, ties, stalls)[1]
    # The longest path assumes that every micro-batch has as many rows as the largest.
    count = _count(pipeline)
    even = pipeline.global_batch / (count * -(-pipeline.global_batch // count))
    if not any(stalls) and not any(load.states.ahead_seconds for load in loads):
        return QuickSeconds(likely, even * likely)
    each = [stall + load.compute_seconds for stall, load in zip(stalls, loads)]
    slowest = max(
        sum(each[stage] for stage in pipeline.stages_of(pipeline_rank))
        for pipeline_rank in range(pipeline.pipeline_ranks)
    )
    least = _finish(profile, cluster, pipeline, loads, ties, [0.0] * len(loads), hidden=True)[1]
    return QuickSeconds(likely, even * min(likely, max(least, count * slowest)))


def _count(pipeline: Pipeline) -> int:
    """Return the number of micro-batches in a step."""
    return pipeline.micro_batches(pipeline.global_batch)


def block_passes(pipeline: Pipeline) -> int:
    """Return the number of forwards and backwards of single blocks in a step, over all ranks."""
    blocks = sum(stage.replicas * (stage.stop - stage.start) for stage in pipeline.stages)
    return 2 * _count(pipeline) * blocks


def _in_flight(pipeline: Pipeline, stage: int) -> int:
    """Return the largest number of micro-batches of a stage that are between forward and backward at one time."""
    count = len(pipeline.stages)
    return pipeline.schedule.in_flight(count, stage, _count(pipeline), pipeline.interleave)


def _simulated(profile: ModelProfile, cluster: Cluster, pipeline: Pipeline) -> Forecast:
    simulation = simulate(profile, cluster, pipeline)
    ranks = tuple(
        RankPrediction(
            peak_bytes=trace.peak_bytes,
            budget_bytes=device.memory_bytes,
            tier_peak_bytes=trace.tier_peak_bytes,
            offloaded_bytes=trace.offloaded_bytes,
            stall_seconds=round(trace.stall_seconds, 6),
            returns_freed=trace.returns_freed,
        )
        for trace, device in zip(simulation.ranks, cluster.devices)
    )
    fullest = [
        max(
            (simulation.ranks[rank] for rank in pipeline.ranks(pipeline_rank)),
            key=lambda trace: trace.peak_bytes,
        )
        for pipeline_rank in range(pipeline.pipeline_ranks)
    ]
    return Forecast(
        step_seconds=simulation.step_seconds,
        bubble=simulation.bubble,
        ranks=ranks,
        stages=tuple(
            StagePrediction(memory=trace.memory, seconds=_rounded(trace.seconds))
            for trace in fullest
        ),
        spans=simulation.spans,
    )


def _finish(
    profile: ModelProfile,
    cluster: Cluster,
    pipeline: Pipeline,
    loads: Sequence[StageLoad],
    ties: dict[int, float],
    stalls: Sequence[float],
    *,
    hidden: bool = False,
) -> tuple[Timeline, float, list[float], list[float]]:
    """Return the timeline, the second at which the step ends, and each pipeline rank's seconds of reduction and update.

    ``ties`` has, for each pipeline rank, the seconds of reducing the gradients of parameters that it shares with
    others. ``stalls`` has, for each stage, the seconds that one backward waits for the offload tier; if no backward
    runs, one forward waits for them. With ``hidden``, forwards do not wait for transfers of offloaded optimizer states.
    """
    pipeline_ranks = range(pipeline.pipeline_ranks)
    times = [
        _stage_times(cluster, pipeline, stage, load, stalls[stage])
        for stage, load in enumerate(loads)
    ]
    timeline = _timeline(pipeline, times)
    gathering = _gathering_seconds(cluster, pipeline, loads[-1])  # all wait for the loss
    if not pipeline.task.trains:
        nothing = [0.0] * pipeline.pipeline_ranks
        return timeline, timeline.step_seconds + gathering, nothing, nothing
    mine = [_at(pipeline, p, loads) for p in pipeline_ranks]
    exposed = [
        _exposed_reduction(profile, cluster, pipeline.ranks(p), list(mine[p].values()))
        + ties.get(p, 0.0)
        for p in pipeline_ranks
    ]
    updates = [
        _update_seconds(profile, cluster, pipeline, p, mine[p], hidden) for p in pipeline_ranks
    ]
    if pipeline.overlaps(
        _count(pipeline)
    ):  # ranks do not wait, and the agreement overlaps with passes
        busy = [_count(pipeline) * load.compute_seconds for load in loads]
        step = max(map(sum, zip(busy, exposed, updates)))
        begin, end = np.zeros_like(timeline.begin), np.full_like(timeline.end, step)
        return replace(timeline, begin=begin, end=end), step, exposed, updates
    reduced = max(float(end) + reduce for end, reduce in zip(timeline.end, exposed))
    # No rank updates before all have reduced, and have agreed on the gradient's norm.
    agreed = reduced + cluster.agreement_seconds(pipeline.world_size)
    return (timeline, agreed + max(updates) + gathering, exposed, updates)


def _timed(profile: ModelProfile, cluster: Cluster, pipeline: Pipeline) -> Forecast:
    pipeline_ranks, micro_batches = range(pipeline.pipeline_ranks), _count(pipeline)
    loads, ties = stage_loads(profile, cluster, pipeline), _tie_seconds(profile, cluster, pipeline)
    stalls = [_stall(cluster, pipeline, {stage: load}) for stage, load in enumerate(loads)]
    timeline, step, exposed, updates = _finish(profile, cluster, pipeline, loads, ties, stalls)
    mine = [_at(pipeline, p, loads) for p in pipeline_ranks]
    stages, ranks = [], {}
    for pipeline_rank in pipeline_ranks:
        own = list(mine[pipeline_rank].values())
        terms = _compute_terms(own, micro_batches)
        terms |= {"stall": _stall(cluster, pipeline, mine[pipeline_rank]) * micro_batches}
        terms |= {"reduce": exposed[pipeline_rank], "update": updates[pipeline_rank]}
        terms["idle"] = max(0.0, step - sum(terms.values()))
        memories = {
            rank: with_kept(
                _memory(profile, pipeline, mine[pipeline_rank], cluster.devices[rank]),
                cluster.devices[rank],
                max(load.reused_bytes for load in own),
            )
            for rank in pipeline.ranks(pipeline_rank)
        }
        fullest = max(
            (terms for terms, _ in memories.values()), key=lambda terms: sum(terms.values())
        )
        stages.append(StagePrediction(memory=fullest, seconds=_rounded(terms)))
        flights = [_in_flight(pipeline, stage) for stage in mine[pipeline_rank]]
        moved = [load.moved_bytes for load in own]
        for rank in pipeline.ranks(pipeline_rank):
            ranks[rank] = RankPrediction(
                peak_bytes=sum(memories[rank][0].values()),
                budget_bytes=cluster.devices[rank].memory_bytes,
                tier_peak_bytes=sum(f * m for f, m in zip(flights, moved))
                + sum(load.host_state_bytes for load in own),
                offloaded_bytes=micro_batches * sum(moved),
                stall_seconds=round(terms["stall"], 6),
                returns_freed=memories[rank][1],
            )
    return Forecast(
        step_seconds=step,
        bubble=timeline.bubble,
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        stages=tuple(stages),
    )


def _at(pipeline: Pipeline, pipeline_rank: int, loads: Sequence[StageLoad]) -> dict[int, StageLoad]:
    """Return a dict from each stage of a pipeline rank to the stage's cost."""
    return {stage: loads[stage] for stage in pipeline.stages_of(pipeline_rank)}


def _timeline(pipeline: Pipeline, times: Sequence[StageTimes]) -> Timeline:
    """Return the timeline of the whole step.

    A round is as many micro-batches as there are stages. In a full pipeline each round takes equally long, so only some
    rounds of a long step are computed.
    """

    def timed(micro_batches: int) -> Timeline:
        return time_schedule(
            pipeline.schedule,
            times,
            pipeline.edges(),
            micro_batches,
            interleave=pipeline.interleave,
            backwards=pipeline.task.trains,
        )

    count, stages = _count(pipeline), len(pipeline.stages)
    settled = SETTLED_ROUNDS * stages + count % stages
    if count <= max(MANY_MICRO_BATCHES, settled + stages):
        return timed(count)
    before, after = timed(settled), timed(settled + stages)
    rounds = (count - settled) // stages
    return Timeline(
        before.begin,
        before.end + rounds * (after.end - before.end),
        before.busy + rounds * (after.busy - before.busy),
    )


def stage_loads(profile: ModelProfile, cluster: Cluster, pipeline: Pipeline) -> list[StageLoad]:
    """Return the cost of each stage on the slowest of its ranks."""
    loads = []
    for index, stage in enumerate(pipeline.stages):
        pipeline_rank = pipeline.pipeline_rank(index)
        device = min(
            (cluster.devices[rank] for rank in pipeline.ranks(pipeline_rank)),
            key=lambda device: device.speed,
        )
        split = pipeline.schedule.splits
        loads.append(
            load_planned(
                profile,
                stage,
                -(-pipeline.microbatch // stage.replicas),
                device=device,
                split=split,
                beside=beside(pipeline, index),
                visits=pipeline.visits(index),
                boundaries_held=pipeline.boundaries_held,
            )
        )
    return loads


def _stage_times(
    cluster: Cluster, pipeline: Pipeline, index: int, load: StageLoad, stall: float
) -> StageTimes:
    weight = Passes(load, pipeline.stages[index].directives, True).weight_seconds
    edge = pipeline.leaving(index)
    forward = sum(block.forward_seconds for block in load.blocks)
    backward = sum(block.backward_seconds for block in load.blocks) - weight
    trains = pipeline.task.trains
    return StageTimes(
        forward=forward if trains else forward + stall,
        backward=backward + stall if trains else backward,
        weight=weight,
        send=_link(cluster, pipeline, edge).seconds(load.output_bytes) if edge is not None else 0.0,
    )


def _link(cluster: Cluster, pipeline: Pipeline, edge: Edge) -> Link:
    """Return the slowest link that messages of ``edge`` use, if the replicas of the two stages are paired in order."""
    ours, theirs = pipeline.ranks(edge.sender), pipeline.ranks(edge.receiver)
    shared = max(len(ours), len(theirs))
    pairs = {
        (ours[k * len(ours) // shared], theirs[k * len(theirs) // shared]) for k in range(shared)
    }
    apart = any(cluster.node_of[a] != cluster.node_of[b] for a, b in pairs)
    return cluster.remote if apart else cluster.local


def _stall(cluster: Cluster, pipeline: Pipeline, loads: Mapping[int, StageLoad]) -> float:
    """Return the seconds per micro-batch that the stages of one pipeline rank wait for the offload tier.

    This is the time by which copies take longer than compute. If the swap limit is too small to prefetch, it is at
    least the time of the reads in a backward. The seconds of adding gradients to those in the tier are included.
    ``loads`` has the cost of each stage.
    """
    pipeline_rank = pipeline.pipeline_rank(next(iter(loads)))
    device = cluster.while_all_swap(cluster.devices[pipeline.ranks(pipeline_rank)[0]])
    leaving = reading = 0.0
    for stage, load in loads.items():
        limit, flight, moved = (
            pipeline.stages[stage].swap_limit_bytes,
            _in_flight(pipeline, stage),
            load.moved_bytes,
        )
        leaves = float(leaving_bytes(moved, flight, limit))
        leaving += leaves
        if leaves and limit < buffer_bytes(load.smallest_swap_limit, flight * moved):
            reading += device.read.seconds(leaves)
    copying = float(copying_seconds(device, np.array(leaving))) + sum(
        load.states.streaming_seconds for load in loads.values()
    )
    adding = sum(load.states.adding_seconds for load in loads.values())
    return adding + max(reading, copying - sum(load.compute_seconds for load in loads.values()))


def _exposed_reduction(
    profile: ModelProfile, cluster: Cluster, ranks: Sequence[int], loads: Sequence[StageLoad]
) -> float:
    """Return the seconds of gradient reduction that do not overlap with the last backward of the step.

    ``ranks`` are the ranks of one pipeline rank, and ``loads`` are the costs of its stages, in the order of the data.
    The last backward is that of the first of these stages.
    """
    gradients = sum(load.trained_bytes for load in loads) * profile.gradient_bytes
    hidden = sum(block.backward_seconds for block in loads[0].blocks)
    groups = groups_of(profile, ranks)
    seconds = max(all_reduce_seconds(gradients, group, cluster) for group in groups)
    return max(0.0, seconds - hidden)


def _update_seconds(
    profile: ModelProfile,
    cluster: Cluster,
    pipeline: Pipeline,
    pipeline_rank: int,
    loads: Mapping[int, StageLoad],
    hidden: bool,
) -> float:
    """Return the seconds of the optimizer's step on one pipeline rank.

    The seconds include the broadcast of new parameters if states are sharded, and the exchange of weights between
    replicas (:func:`.averaging_parts`). They also include the time that the next forward waits for transfers of
    offloaded states, unless ``hidden`` is True. ``loads`` has the cost of each stage of the pipeline rank.
    """
    ranks = pipeline.ranks(pipeline_rank)
    first = groups_of(profile, ranks)[0]
    seconds = 0.0 if hidden else StageLoad.waiting_seconds(loads.values())
    count = pipeline.micro_batches(pipeline.global_batch)
    computing = count * sum(load.compute_seconds for load in loads.values())
    for stage, load in loads.items():
        seconds += load.states.update_seconds
        if pipeline.stages[stage].shard_optimizer:
            link = link_among(first, cluster)
            seconds += broadcast_seconds(load.trained_bytes, len(first), link)
        seconds += sum(averaging_parts(profile, load.trained_bytes, ranks, cluster, computing))
    return seconds


def _gathering_seconds(cluster: Cluster, pipeline: Pipeline, last: StageLoad) -> float:
    """Return the seconds of sending the outputs among the replicas of the last stage and of computing one loss over all
    rows; 0 if each micro-batch has its own loss."""
    ranks = pipeline.ranks(pipeline.pipeline_rank(len(pipeline.stages) - 1))
    return last.gathered_seconds + all_reduce_seconds(last.gathered_bytes, ranks, cluster)


def _tie_seconds(profile: ModelProfile, cluster: Cluster, pipeline: Pipeline) -> dict[int, float]:
    """Return, for each pipeline rank, the seconds of reducing the gradients of parameters that several of them hold."""
    found: dict[int, float] = {}
    for size, users in profile.ties:
        holders = sorted(
            {
                pipeline.pipeline_rank(index)
                for index, stage in enumerate(pipeline.stages)
                if any(stage.start <= user < stage.stop for user in users)
            }
        )
        if len(holders) > 1:
            held = [groups_of(profile, pipeline.ranks(holder))[0] for holder in holders]
            ranks = [rank for each in held for rank in each]
            seconds = all_reduce_seconds(size * profile.gradient_bytes, ranks, cluster)
            found |= {holder: found.get(holder, 0.0) + seconds for holder in holders}
    return found


def _memory(
    profile: ModelProfile, pipeline: Pipeline, loads: Mapping[int, StageLoad], device: Device
) -> dict[str, int]:
    """Return the device bytes of a rank by term, over all its stages."""
    if not pipeline.task.trains:
        return forward_memory(profile, pipeline, loads, device)
    plans = pipeline.stages
    return rank_memory(
        [
            (
                load,
                _in_flight(pipeline, stage),
                plans[stage].swap_limit_bytes if plans[stage].offloads else 0,
            )
            for stage, load in loads.items()
        ]
    )


def _compute_terms(loads: Sequence[StageLoad], micro_batches: int) -> dict[str, float]:
    blocks = [block for load in loads for block in load.blocks]
    again = micro_batches * sum(block.recompute_seconds for block in blocks)
    return {
        "forward": micro_batches * sum(block.forward_seconds for block in blocks)
        + sum(load.gathered_seconds for load in loads),
        "backward": micro_batches * sum(block.backward_seconds for block in blocks) - again,
        "recompute": again,
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {term: round(value, 6) for term, value in seconds.items()}
