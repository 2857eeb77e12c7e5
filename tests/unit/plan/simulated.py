"""Steps simulated of stages, nodes and links that are made up for a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from parallax.plan.cluster import Cluster, Link, Node
from parallax.plan.edge import chain
from parallax.plan.schedule import SCHEDULES, Schedule
from parallax.plan.simulation.longest_path import StageTimes, Timeline, time_schedule
from parallax.plan.simulation.simulate import Simulation, simulate
from tests.unit.plan_fakes import FREE, cluster, pipeline, profile

DRAINING = [each for each in SCHEDULES.values() if not each.continues]
ONE_EACH = [each.name for each in DRAINING if each.allows(1)]  # stage to a pipeline rank


def run(
    blocks: list[Any],
    parts: list[Any],
    *,
    schedule: str = "gpipe",
    rows: int = 4,
    micro: int = 4,
    machines: Cluster | None = None,
    interleave: int = 1,
    placement: tuple[int, ...] = (),
    **where: Any,
) -> Simulation:
    fields = {
        k: where.pop(k)
        for k in ("ties", "optimizer_bytes", "master_bytes", "optimizer_seconds")
        if k in where
    }
    return simulate(
        profile(blocks, **fields),
        machines or cluster(sum(part.replicas for part in parts) // interleave, **where),
        pipeline(
            parts,
            schedule=schedule,
            rows=rows,
            micro=micro,
            interleave=interleave,
            placement=placement,
        ),
    )


def timed(
    schedule: Schedule, times: Sequence[StageTimes], micro: int, *, interleave: int = 1
) -> Timeline:
    """A chain of stages, timed by the longest path."""
    edges = chain(range(1, len(times) + 1))
    return time_schedule(schedule, times, edges, micro, interleave=interleave)


def nodes(
    *sizes: int, local: Link = FREE, remote: Link = FREE, over_host: bool = False, **changes: Any
) -> Cluster:
    """Nodes of so many devices; ``changes`` are those of a device, or what was measured of a node's."""
    measured = {
        key: changes.pop(key)
        for key in ("speeds", "sum_seconds", "reduce_seconds", "exchange_seconds")
        if key in changes
    }
    device = replace(cluster(1).devices[0], **changes)
    hosts = tuple(
        Node(name="n", devices=(device,) * size, concurrent=1000.0, **measured) for size in sizes
    )
    return Cluster(nodes=hosts, local=local, remote=remote, local_over_host=over_host)


def times(result: Simulation, kind: str) -> dict[tuple[int, int], tuple[float, float]]:
    return {
        (s.rank, s.micro): (round(s.start, 9), round(s.end, 9))
        for s in result.spans
        if s.kind == kind
    }
