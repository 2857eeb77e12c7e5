"""Simulate the ranks' action lists with predicted costs, to find the timeline, the bubble, the peaks, and deadlocks.

Each rank is a coroutine that executes its list block by block (:mod:`.rank`), with the swap manager's rules
(:mod:`.swapping`), over cores, links and tiers that all ranks share (:mod:`.network`).
"""

from __future__ import annotations

from dataclasses import dataclass

from parallax.common.events import Span, bubble_fraction, idle_fraction
from parallax.plan.cluster import Cluster
from parallax.plan.lists import task_actions
from parallax.plan.plan import Pipeline
from parallax.plan.profile import ModelProfile
from parallax.plan.simulation.rank import Rank, RankTrace, World

SETTLED_STEPS = 4  # overlapping steps after which all steps are equal


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of simulating one step: the last of several, if steps overlap.

    ``bubble`` is the fraction of the step in which the pipeline is idle. ``ranks`` has one trace for each rank, and
    ``spans`` has the time span of every action.
    """

    step_seconds: float
    bubble: float
    ranks: tuple[RankTrace, ...]
    spans: tuple[Span, ...]


def simulate(profile: ModelProfile, cluster: Cluster, pipeline: Pipeline) -> Simulation:
    """Simulate one step of ``pipeline`` and return the result, with traces in the order of the ranks.

    Ranks whose allocator returns freed memory to the system at once are slowed by the profile's ``freeing_slowdown``.
    Raises :class:`DeadlockError`, and :class:`BudgetExceeded` if a swap limit cannot hold one block.
    """
    found = _simulate(profile, cluster, pipeline)
    factors = {
        rank: profile.slowdown(-(-pipeline.microbatch // pipeline.stages[pipeline_rank].replicas))
        for pipeline_rank in range(pipeline.pipeline_ranks)
        for rank in pipeline.ranks(pipeline_rank)
        if found.ranks[rank].returns_freed
    }
    if all(factor == 1 for factor in factors.values()):
        return found
    return _simulate(profile, cluster.slowed(factors), pipeline)


def _simulate(profile: ModelProfile, cluster: Cluster, pipeline: Pipeline) -> Simulation:
    world = World(profile, cluster, pipeline)
    ranks: list[Rank] = []
    steps = SETTLED_STEPS if pipeline.overlaps(len(world.rows)) else 1
    for pipeline_rank in range(pipeline.pipeline_ranks):
        listed = task_actions(pipeline, pipeline_rank, len(world.rows), steps)
        replicas = range(pipeline.stages[pipeline_rank].replicas)
        ranks += [Rank(world, pipeline_rank, replica, listed, steps) for replica in replicas]
    simulator = world.network.simulator
    for rank in ranks:
        simulator.spawn(rank.describe, rank.run())
    seconds = simulator.run() - max(rank.began for rank in ranks)
    spans = tuple(span for rank in ranks for span in rank.spans)
    bubble = bubble_fraction(spans) if steps == 1 else idle_fraction(spans, seconds)
    traces = tuple(rank.trace(seconds) for rank in sorted(ranks, key=lambda rank: rank.rank))
    return Simulation(step_seconds=seconds, bubble=bubble, ranks=traces, spans=spans)
