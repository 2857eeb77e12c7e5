"""Runs the ranks' action lists on predicted costs: the timeline, the bubble, the peak of every tier, deadlocks.

Each rank is a coroutine that walks through its list block by block (:mod:`.rank`), with the same rules for swapping as
the swap manager (:mod:`.swapping`), over cores, links and tiers that all ranks share (:mod:`.network`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallax.common.events import Span, bubble_fraction
from parallax.errors import PlanError
from parallax.plan.cluster import Cluster
from parallax.plan.plan import StagePlan
from parallax.plan.profile import ModelProfile
from parallax.plan.schedule import Schedule
from parallax.plan.schedule.lists import actions
from parallax.plan.simulation.rank import Rank, RankTrace, World


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One step: its seconds, the bubble, one trace per rank, and every action as a span."""

    step_seconds: float
    bubble: float
    ranks: tuple[RankTrace, ...]
    spans: tuple[Span, ...]


def simulate(
    profile: ModelProfile,
    cluster: Cluster,
    stages: Sequence[StagePlan],
    *,
    schedule: Schedule,
    rows: int,
    micro_batches: int,
    interleave: int = 1,
    placement: Sequence[int] = (),
) -> Simulation:
    """One training step over ``rows`` rows in ``micro_batches``; traces are those of ranks 0, 1, …

    Ranks whose allocator gives freed memory back at once take as much longer as the profile says.
    Each of stages / ``interleave`` pipeline ranks holds ``interleave`` stages; ``placement`` lists the ranks pipeline
    rank by pipeline rank, replica by replica, where they are not in order. Raises :class:`DeadlockError`, and
    :class:`BudgetExceeded` where a swap limit cannot hold one block.
    """
    if interleave < 1 or len(stages) % interleave:
        raise PlanError(
            f"{len(stages)} stages cannot be split into {interleave} virtual stages per pipeline rank"
        )
    how = schedule, rows, micro_batches, interleave, placement
    found = _simulate(profile, cluster, stages, *how)
    freeing = [n for n, rank in enumerate(found.ranks) if rank.returns_freed]
    if not freeing or profile.freeing_slowdown <= 1:
        return found
    slower = cluster.slowed(dict.fromkeys(freeing, profile.freeing_slowdown))
    return _simulate(profile, slower, stages, *how)


def _simulate(
    profile: ModelProfile,
    cluster: Cluster,
    stages: Sequence[StagePlan],
    schedule: Schedule,
    rows: int,
    micro_batches: int,
    interleave: int,
    placement: Sequence[int],
) -> Simulation:
    pipeline_ranks = len(stages) // interleave
    world = World(
        profile,
        cluster,
        stages,
        schedule=schedule,
        rows=rows,
        micro_batches=micro_batches,
        pipeline_ranks=pipeline_ranks,
        placement=placement,
    )
    ranks = []
    for pipeline_rank in range(pipeline_ranks):
        offload = any(stages[stage].offloads for stage in world.stages_of(pipeline_rank))
        listed = actions(
            schedule,
            pipeline_ranks,
            pipeline_rank,
            micro_batches,
            interleave=interleave,
            offload=offload,
        )
        ranks += [
            Rank(world, pipeline_rank, replica, listed)
            for replica in range(stages[pipeline_rank].replicas)
        ]
    simulator = world.network.simulator
    for rank in ranks:
        simulator.spawn(rank.describe, rank.run())
    seconds = simulator.run()
    spans = tuple(span for rank in ranks for span in rank.spans)
    traces = tuple(rank.trace(seconds) for rank in sorted(ranks, key=lambda rank: rank.rank))
    return Simulation(
        step_seconds=seconds, bubble=bubble_fraction(spans), ranks=traces, spans=spans
    )
