"""Predict the seconds of an all-reduce, and of broadcasts from every rank, from the links between the ranks.

Inside a node, and between single ranks of several nodes, an all-reduce is a ring: 2·(n − 1) messages of 1/n of the
bytes, one after the other (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", section 3). If nodes hold several of the ranks, a flat ring would send everything over each node's
slowest link. Instead, the ranks of a node first reduce-scatter among themselves. Then each rank all-reduces its shard
with its counterparts on the other nodes over its own network card. Finally the ranks of a node all-gather (Mikami et
al. 2018, "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", section 3.2; Cho et al. 2019,
"BlueConnect", section 3). If the ranks of a node share one network card, this has no advantage, because a flat ring
crosses each node's network link only once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from parallax.plan.cluster import Cluster, Link
from parallax.plan.profile import ModelProfile


def exchange_seconds(
    profile: ModelProfile, trained_bytes: float, ranks: Sequence[int], cluster: Cluster
) -> float:
    """Return the seconds per step that the replicas on ``ranks`` need to sum gradients and to exchange weights, if they
    take local steps or are asynchronous.

    ``trained_bytes``: the bytes of their trained parameters. If weights are averaged while local steps run, the average
    counts as completely hidden, because the duration of these steps is not known here.
    """
    summed = max(
        all_reduce_seconds(trained_bytes * profile.gradient_bytes, group, cluster)
        for group in groups_of(profile, ranks)
    )
    return summed + sum(averaging_parts(profile, trained_bytes, ranks, cluster, math.inf))


def groups_of(profile: ModelProfile, ranks: Sequence[int]) -> list[Sequence[int]]:
    """Return the groups of the replicas on ``ranks`` that sum their gradients in every step."""
    size = profile.summing(len(ranks))
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def averaging_parts(
    profile: ModelProfile,
    trained_bytes: float,
    ranks: Sequence[int],
    cluster: Cluster,
    step_seconds: float,
) -> tuple[float, float]:
    """Return the seconds per step in which the replicas on ``ranks`` exchange weights: the seconds inside the nodes,
    and the seconds between the nodes. Both are 0 if replicas sum their gradients in every step.

    With local steps, weights are averaged once per round, so each number is the seconds of one average divided by the
    steps of a round. Each replica of a group all-reduces a part of the weights with its counterparts in the other
    groups, and then sends the result to the replicas of its own group.

    If the profile has a ``fragment_delay``, local steps of ``step_seconds`` each run while a fragment of the weights is
    averaged. The seconds that overlap with these steps are left out, but only up to the steps between the averages of
    two fragments.

    For asynchronous replicas, the results are the seconds in which the first replica, which has the optimizer states,
    receives the gradients of the other replicas and sends them weights, one replica after another.
    """
    if profile.staleness:
        return _owner_parts(profile, trained_bytes, ranks, cluster)
    if not profile.local_steps:
        return 0.0, 0.0
    count, first = profile.fragments, groups_of(profile, ranks)
    size = trained_bytes * profile.synced_bytes / count
    inside, across = all_reduce_parts(size, [group[0] for group in first], cluster)
    link = link_among(first[0], cluster)
    inside += _half_ring(size, len(first[0]), link)
    per_step = count / profile.local_steps
    if delay := min(profile.fragment_delay, 1 / per_step):
        whole = inside + across
        per_step *= max(0.0, whole - delay * step_seconds) / whole if whole else 0.0
    return inside * per_step, across * per_step


def _owner_parts(
    profile: ModelProfile, trained_bytes: float, ranks: Sequence[int], cluster: Cluster
) -> tuple[float, float]:
    size, nodes = trained_bytes * profile.synced_bytes, cluster.node_of
    away = sum(nodes[rank] != nodes[ranks[0]] for rank in ranks[1:])
    inside, across = (
        2 * link.latency_seconds + size / link.bytes_per_second
        for link in (cluster.local, cluster.remote)
    )
    return (len(ranks) - 1 - away) * inside, away * across


def all_reduce_seconds(count: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """Return the seconds of an all-reduce of ``count`` bytes over ``ranks`` if their links have no other traffic."""
    return sum(all_reduce_parts(count, ranks, cluster))


def all_reduce_parts(count: float, ranks: Sequence[int], cluster: Cluster) -> tuple[float, float]:
    """Return the seconds that an all-reduce of ``count`` bytes spends inside the nodes, and the seconds between the
    nodes.

    If nodes hold different numbers of the ranks, the node with the most ranks is the slowest inside, and the node with
    the fewest ranks has the largest shards to send over the network.
    """
    if len(ranks) < 2 or count <= 0:
        return 0.0, 0.0
    members = Counter(cluster.node_of[rank] for rank in ranks)
    if cluster.remote_ways and len(members) > 1:
        return 0.0, 2 * _half_ring(count, len(ranks), cluster.remote)
    inside = max(_inside(count, number, cluster, node) for node, number in members.items())
    across = 2 * _half_ring(count / min(members.values()), len(members), cluster.remote)
    return inside, across


def _inside(count: float, members: int, cluster: Cluster, node: int) -> float:
    """Return the seconds of an all-reduce of ``count`` bytes between ``members`` devices of a node: computed from the
    node's measurements if there are any, otherwise from the link."""
    if measured := cluster.nodes[node].reduce_seconds:
        byte = measured[min(members, len(measured)) - 1]
        return 2 * (members - 1) * cluster.local.latency_seconds + count * byte
    return 2 * _half_ring(count, members, cluster.local)


def broadcast_seconds(count: float, members: int, link: Link) -> float:
    """Return the seconds in which each of ``members`` ranks, one after another, broadcasts its shard over ``link``.

    The shards of all ranks together have ``count`` bytes. Messages are forwarded from rank to rank in a pipeline.
    """
    return (
        members * link.latency_seconds + count / link.bytes_per_second
        if members > 1 and count > 0
        else 0.0
    )


def link_among(ranks: Sequence[int], cluster: Cluster) -> Link:
    """Return the slowest link between any two of the ranks."""
    return cluster.local if len({cluster.node_of[rank] for rank in ranks}) < 2 else cluster.remote


def _half_ring(count: float, members: int, link: Link) -> float:
    """Return the seconds of a reduce-scatter or an all-gather of ``count`` bytes over ``members`` ranks.

    The time is that of ``members`` − 1 messages, one after another, each with 1/``members`` of the bytes.
    """
    return (members - 1) * (link.latency_seconds + count / members / link.bytes_per_second)
