"""The resources that simulated ranks share: cores, offload tiers, links, and barriers.

A message to another node occupies two links: the sender's outgoing link and the receiver's incoming link. Each is
shared fairly with its other traffic, and the message arrives when the slower of the two is done. Inside a node each
ordered pair of devices has its own link, unless messages between devices use the same wires as swapping. While a rank's
transfers run, its device may compute more slowly (``Device.overlap_loss``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from parallax.plan.cluster import Cluster
from parallax.plan.cost.collective import (
    all_reduce_parts,
    averaging_parts,
    broadcast_seconds,
    link_among,
)
from parallax.plan.profile import ModelProfile
from parallax.plan.simulation.fluid import Resource, Routine, Signal, Simulator, Transfer


def at_once() -> Routine:
    """Do no work. This is the default routine of a barrier."""
    yield from ()


class Core:
    """The compute of one rank, which has a share of its node's cores and is slower while the rank's links transfer
    bytes."""

    def __init__(self, simulator: Simulator, cores: Resource, loss: float) -> None:
        self._simulator, self._cores, self._loss = simulator, cores, loss
        self._carried = 0
        self._working = Transfer(done=True)

    def compute(self, seconds: float) -> Signal:
        """Start to compute for ``seconds``; return the signal of the end.

        A rank computes one piece of work at a time.
        """
        self._working = self._simulator.work(seconds, self._cores, self._factor)
        return self._working

    def carry(self, change: int) -> None:
        """Add ``change`` to the number of this rank's running transfers."""
        self._carried += change
        if self._loss:
            self._simulator.rescale(self._working, self._cores, self._factor)

    @property
    def _factor(self) -> float:
        return 1.0 - self._loss if self._carried else 1.0


class _Message:
    """A message in transit; not a coroutine, because a simulation has hundreds of thousands of messages."""

    __slots__ = ("_arrived", "_cores", "_latency", "_left", "_simulator")

    def __init__(
        self, simulator: Simulator, arrived: Signal, cores: tuple[Core, Core], latency: float
    ) -> None:
        self._simulator, self._arrived, self._cores, self._latency = (
            simulator,
            arrived,
            cores,
            latency,
        )
        self._left = 0

    def send(self, seconds: float, resources: Sequence[Resource]) -> None:
        """Occupy all ``resources`` for ``seconds`` (longer if they are shared), then wait for the latency."""
        if seconds <= 0:
            self._travel()
            return
        self._left = len(resources)
        for core in self._cores:
            core.carry(1)
        for resource in resources:
            self._simulator.work(seconds, resource).then = self._through

    def _through(self) -> None:
        self._left -= 1
        if not self._left:
            for core in self._cores:
                core.carry(-1)
            self._travel()

    def _travel(self) -> None:
        if self._latency > 0:
            self._simulator.timer(self._latency).then = self._arrive
        else:
            self._arrive()

    def _arrive(self) -> None:
        self._simulator.set(self._arrived)


class Network:
    """The resources that all ranks of a cluster share."""

    def __init__(self, cluster: Cluster) -> None:
        self.simulator = Simulator()
        self._cluster = cluster
        cores = [Resource(node.concurrent, node.speeds) for node in cluster.nodes]
        self.cores = [
            Core(self.simulator, cores[node], device.overlap_loss)
            for node, device in zip(cluster.node_of, cluster.devices)
        ]
        self._links: defaultdict[tuple[str, int, int], Resource] = defaultdict(
            lambda: Resource(1.0)
        )
        self._gates: dict[str, tuple[int, Signal]] = {}

    def tier(self, rank: int) -> Resource:
        """Return the link between a rank and its offload tier.

        Ranks of a node share a disk, but each device has its own link to host memory.
        """
        device = self._cluster.devices[rank]
        if device.swaps_to.shared:
            key = f"tier {device.tier}", self._cluster.node_of[rank], 0
            if key not in self._links:
                self._links[key] = Resource(1.0 / device.tier_share)
            return self._links[key]
        return self._links["host", rank, 0]

    def deliver(self, arrived: Signal, sender: int, receiver: int, count: float) -> None:
        """Send a message of ``count`` bytes from the rank ``sender`` to the rank ``receiver``, and set ``arrived`` when
        it has arrived.

        Messages that run at the same time share the bandwidth. Each has the full latency.
        """
        link = self._cluster.link(sender, receiver)
        cores = self.cores[sender], self.cores[receiver]
        message = _Message(self.simulator, arrived, cores, link.latency_seconds)
        message.send(count / link.bytes_per_second, self._between(sender, receiver))

    def all_reduce(self, ranks: Sequence[int], count: float) -> Routine:
        """Simulate an all-reduce of ``count`` bytes over ``ranks``: first inside the nodes, then between the nodes."""
        yield from self._together(ranks, *all_reduce_parts(count, ranks, self._cluster))

    def average(
        self,
        profile: ModelProfile,
        ranks: Sequence[int],
        trained_bytes: int,
        step_seconds: float,
    ) -> Routine:
        """Simulate the exchange of weights between the replicas on ``ranks``, which take local steps of
        ``step_seconds`` or are asynchronous.

        With local steps, weights are averaged once per round. So the links are occupied for the seconds of one average
        divided by the steps of a round. The seconds that overlap with local steps are left out.
        """
        parts = averaging_parts(profile, trained_bytes, ranks, self._cluster, step_seconds)
        yield from self._together(ranks, *parts)

    def broadcast(self, ranks: Sequence[int], count: float) -> Routine:
        """Simulate broadcasts in which each of ``ranks`` sends its shard to the others. The shards together have
        ``count`` bytes.
        """
        link = link_among(ranks, self._cluster)
        seconds = broadcast_seconds(count, len(ranks), link)
        inside = len({self._cluster.node_of[rank] for rank in ranks}) < 2
        yield from self._together(ranks, seconds * inside, seconds * (not inside))

    def _together(self, ranks: Sequence[int], inside: float, across: float) -> Routine:
        """Occupy the links inside the nodes for ``inside`` seconds, then the links between nodes for ``across``
        seconds."""
        nodes = self._cluster.node_of
        ring = [(a, b) for a, b in zip(ranks, [*ranks[1:], *ranks[:1]]) if nodes[a] == nodes[b]]
        yield from self._occupy(
            ranks, [resource for pair in ring for resource in self._between(*pair)], inside
        )
        yield from self._occupy(
            ranks,
            [self._remote(direction, rank) for rank in ranks for direction in ("out", "in")],
            across,
        )

    def meet(self, gate: str, size: int, then: Callable[[], Routine] = at_once) -> Signal:
        """Arrive at the barrier ``gate``, which opens after ``size`` arrivals; return the signal of its opening.

        The last arrival starts the routine ``then``, and the barrier opens when this routine ends.
        """
        arrived, opened = self._gates.get(gate, (0, Signal()))
        self._gates[gate] = (arrived + 1, opened)
        if arrived + 1 == size:
            self.simulator.spawn(lambda: f"gate {gate}", self._open(opened, then))
        return opened

    def _open(self, opened: Signal, then: Callable[[], Routine]) -> Routine:
        yield from then()
        self.simulator.set(opened)

    def _occupy(
        self, ranks: Sequence[int], resources: Sequence[Resource], seconds: float
    ) -> Routine:
        """Occupy all ``resources`` for ``seconds`` at full bandwidth, or longer if they are shared.

        Meanwhile each of ``ranks`` has one more running transfer, which may slow its compute down.
        """
        if seconds <= 0:
            return
        for rank in ranks:
            self.cores[rank].carry(1)
        yield from [self.simulator.work(seconds, resource) for resource in dict.fromkeys(resources)]
        for rank in ranks:
            self.cores[rank].carry(-1)

    def _between(self, sender: int, receiver: int) -> list[Resource]:
        nodes = self._cluster.node_of
        if nodes[sender] != nodes[receiver]:
            return [self._remote("out", sender), self._remote("in", receiver)]
        if self._cluster.local_over_host:
            return [self._links["host", sender, 0], self._links["host", receiver, 0]]
        return [self._links["local", sender, receiver]]

    def _remote(self, direction: str, rank: int) -> Resource:
        """Return a rank's link to other nodes (``direction`` is out) or from them (in).

        All ranks of a node may share this link.
        """
        if not self._cluster.remote_ways:
            return self._links[direction, rank, 0]
        key = f"node {direction}", self._cluster.node_of[rank], 0
        if key not in self._links:
            self._links[key] = Resource(self._cluster.remote_ways)
        return self._links[key]
