"""What an all-reduce, and a broadcast from every rank, take, from the links between their ranks.

Inside a node, and between single ranks of several nodes, it is a ring: 2·(n − 1) messages of 1/n of the bytes, one
after the other (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
section 3). Where nodes hold several of the ranks, a flat ring would send everything over each node's slowest link;
instead the node's ranks first reduce-scatter among themselves, then each reduces its own share with its counterparts of
the other nodes over its own network card, then they all-gather (Mikami et al. 2018, "Massively Distributed SGD:
ImageNet/ResNet-50 Training in a Flash", section 3.2; Cho et al. 2019, "BlueConnect", section 3). Where they share the
node's network there is nothing to win by that: a flat ring leaves each node once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from parallax.plan.cluster import Cluster, Link


def all_reduce_seconds(count: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """Seconds in which ``ranks`` sum ``count`` bytes that each of them has, with nothing else on their links."""
    return sum(all_reduce_parts(count, ranks, cluster))


def all_reduce_parts(count: float, ranks: Sequence[int], cluster: Cluster) -> tuple[float, float]:
    """Those seconds inside the nodes, and between them.

    Where nodes hold different numbers of the ranks, the fullest node is the slowest inside, and the emptiest leaves
    the largest shares to the network.
    """
    if len(ranks) < 2 or count <= 0:
        return 0.0, 0.0
    members = Counter(cluster.node_of[rank] for rank in ranks)
    if cluster.remote_ways and len(members) > 1:
        return 0.0, 2 * _half_ring(count, len(ranks), cluster.remote)
    inside = 2 * _half_ring(count, max(members.values()), cluster.local)
    across = 2 * _half_ring(count / min(members.values()), len(members), cluster.remote)
    return inside, across


def broadcast_seconds(count: float, members: int, link: Link) -> float:
    """Seconds in which each of ``members`` in turn sends its share of ``count`` bytes to the others, who pass it on as
    it comes."""
    return (
        members * link.latency_seconds + count / link.bytes_per_second
        if members > 1 and count > 0
        else 0.0
    )


def link_among(ranks: Sequence[int], cluster: Cluster) -> Link:
    """The slowest link between two of the ranks."""
    return cluster.local if len({cluster.node_of[rank] for rank in ranks}) < 2 else cluster.remote


def _half_ring(count: float, members: int, link: Link) -> float:
    """Seconds of a reduce-scatter or of an all-gather: all but one share in turn."""
    return (members - 1) * (link.latency_seconds + count / members / link.bytes_per_second)
