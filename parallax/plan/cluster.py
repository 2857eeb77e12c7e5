"""The capacities and speeds of the machines, as data for the planner.

Devices are numbered across nodes. Rank i runs on device i unless a plan places it elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parallax.common.units import format_bytes
from parallax.errors import PlanError
from parallax.plan.tier import HOST, Tier, tier_named

# Bytes of gradients that replicas sum at one time. A smaller all-reduce takes as long as its launch; a larger one makes
# the last all-reduce of a backward, which overlaps with no compute, needlessly long.
LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 4 * 2**20, 64 * 2**20
_EXCHANGES = 8  # most numbers of replicas whose exchanges are stored
_LATENCIES = 16  # a bucket takes this many latencies of its link


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection on which a message takes ``latency_seconds`` + bytes / ``bytes_per_second``."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, count: float) -> float:
        """Return the seconds of a message of ``count`` bytes if the link has no other traffic."""
        return self.latency_seconds + count / self.bytes_per_second if count > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device and its share of the offload tier. On a CPU-only machine the device is a process with its RAM, and the
    tier is the disk.

    ``memory_bytes``         bytes of device memory for its rank, with ``context_bytes`` and ``reserve_bytes`` included
    ``tier``                 name of the offload tier (:mod:`parallax.plan.tier`)
    ``tier_bytes``           bytes of the offload tier for this device
    ``write``                link from the device to the offload tier
    ``read``                 link from the offload tier to the device
    ``reserve_bytes``        bytes that the allocator holds for library workspaces and other data than tensors
    ``context_bytes``        bytes outside the allocator: driver context and code of libraries
    ``collective_bytes``     bytes, on each rank, of a process group for all-reduces between devices; 0 if tensors pass
                             through the host
    ``edge_bytes``           bytes, on both ranks, of a connection in one direction between two ranks; 0 if tensors pass
                             through the host
    ``gap_share``            fraction of all transient bytes that the allocator loses to rounding and gaps
    ``gap_tensors``          further bytes that the allocator loses, as a multiple of the largest tensor between two
                             blocks
    ``gap_limit``            largest fraction of all transient bytes that the loss by ``gap_tensors`` may be
    ``kept_share``           fraction of transient bytes that the allocator keeps in freed blocks if the budget allows
                             it
    ``speed``                speed relative to the device of the profile
    ``overlap_loss``         fraction of ``speed`` lost while the device's links transfer bytes
    ``tier_share``           fraction of a shared tier's bandwidth that the copies of this device can use; less than 1
                             if the device's cores copy slower than the tier
    ``host_link``            link to the host's memory if host memory is not the offload tier; otherwise None
    ``host_bytes``           bytes of the host's memory for this device
    ``price_per_hour``       price of an hour, in any currency
    ``host_update_seconds``  seconds of the host optimizer per byte of parameters; 0 without host optimizer
    ``exchanges``            seconds of an exchange of a few numbers between 1, 2, … replicas on such devices; for more
                             replicas they grow like the messages of a ring (:func:`with_buckets`)
    ``bucket_bytes``         bytes of the buckets in which replicas sum gradients (:func:`with_buckets`)
    """

    kind: str
    memory_bytes: int
    tier: str
    tier_bytes: int
    write: Link
    read: Link
    reserve_bytes: int = 0
    context_bytes: int = 0
    collective_bytes: int = 0
    edge_bytes: int = 0
    gap_share: float = 0.0
    gap_tensors: float = 0.0
    gap_limit: float = 1.0
    kept_share: float = 0.0
    speed: float = 1.0
    overlap_loss: float = 0.0
    tier_share: float = 1.0
    host_link: Link | None = None
    host_bytes: int = 0
    price_per_hour: float = 0.0
    host_update_seconds: float = 0.0
    exchanges: tuple[float, ...] = ()
    bucket_bytes: int = LEAST_BUCKET_BYTES

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes that each process uses whatever the plan is."""
        return self.reserve_bytes + self.context_bytes

    def exchange_seconds(self, replicas: int) -> float | None:
        """Return the seconds of an all-reduce of a few numbers between ``replicas`` replicas; None for a single one."""
        if replicas < 2:
            return None
        if len(self.exchanges) < 2:
            return 0.0
        known = min(replicas, len(self.exchanges))
        return self.exchanges[known - 1] * (replicas - 1) / (known - 1)

    @property
    def swaps_to(self) -> Tier:
        """Return the device's offload tier. Raises :class:`PlanError` for a name that is not registered."""
        return tier_named(self.tier)

    def offloading_to_host(self) -> Device | None:
        """Return the same device with host memory as its offload tier.

        The result is None if host memory is the tier already, or if the size of host memory is unknown.
        """
        if self.host_link is None or not self.host_bytes:
            return None
        return replace(
            self,
            tier=HOST.name,
            tier_bytes=self.host_bytes,
            write=self.host_link,
            read=self.host_link,
            overlap_loss=0.0,
            tier_share=1.0,
            host_link=None,
            host_bytes=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host with its devices.

    ``concurrent`` is the number of devices that can compute at full speed together; it is smaller than the number of
    devices if CPU ranks share cores. The remaining fields are measurements; an empty tuple means not measured.

    ``speeds[k − 1]``          speed of each of k devices that compute at once, relative to one device alone. It
                               decreases with k even if each device has its own cores, because devices share memory
                               bandwidth.
    ``sum_seconds[k − 1]``     seconds of an all-reduce of a few numbers between k devices that have just computed. Each
                               step ends with such an all-reduce.
    ``exchange_seconds[k − 1]`` seconds of each all-reduce of a few numbers in a series, such as those of BatchNorm
                               statistics, between k devices that compute for a millisecond before each
    ``reduce_seconds[k − 1]``  seconds per byte of gradients in an all-reduce between k devices
    """

    name: str
    devices: tuple[Device, ...]
    concurrent: float
    speeds: tuple[float, ...] = ()
    sum_seconds: tuple[float, ...] = ()
    exchange_seconds: tuple[float, ...] = ()
    reduce_seconds: tuple[float, ...] = ()

    def speed(self, computing: int) -> float:
        """Return the speed of each device if ``computing`` devices compute at once, relative to the speed of one device
        alone."""
        if self.speeds:
            known = self.speeds[min(computing, len(self.speeds)) - 1]
            return known * min(1.0, len(self.speeds) / computing)
        return min(1.0, self.concurrent / computing)

    @property
    def capacity(self) -> float:
        """Return the largest total speed that the node's devices reach when several compute at once, relative to the
        speed of one device alone."""
        return max(count * self.speed(count) for count in range(1, len(self.devices) + 1))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes and the links between their devices.

    ``local`` is the link between two devices of one node. ``remote`` is the link of each device to other nodes.
    ``local_over_host``: messages between devices of a node use the same wires as offloading (PCIe without NVLink).
    ``remote_ways``: how many devices of a node can send to other nodes at full speed at once; 0 if each device has its
    own network card.
    """

    nodes: tuple[Node, ...]
    local: Link
    remote: Link
    local_over_host: bool = False
    remote_ways: float = 0.0

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlanError("the cluster has no devices: set cluster.devices to 1 or more")
        _check_link("local", self.local)
        _check_link("remote", self.remote)
        if not 0 <= self.remote_ways < float("inf"):
            raise PlanError(f"remote_ways={self.remote_ways} must be finite and not below zero")
        seen: set[Device] = set()
        for i, device in enumerate(self.devices):
            if device not in seen:
                seen.add(device)
                _check_device(f"device {i}", device)
        for node in self.nodes:
            if not node.devices:
                raise PlanError(
                    f"node {node.name} has no devices: leave it out, or give it one or more"
                )
            if not 0 < node.concurrent < float("inf"):
                raise PlanError(
                    f"node {node.name}: concurrent={node.concurrent} must be above zero and finite"
                )
            if not all(0 < speed <= 1 for speed in node.speeds):
                raise PlanError(
                    f"node {node.name}: speeds {node.speeds} must be above 0 and at most 1"
                )
            for key in ("sum_seconds", "reduce_seconds", "exchange_seconds"):
                if not all(0 <= seconds < float("inf") for seconds in getattr(node, key)):
                    raise PlanError(
                        f"node {node.name}: {key} {getattr(node, key)} must be finite and not below zero"
                    )

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return all devices, ordered by rank."""
        return tuple(device for node in self.nodes for device in node.devices)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Return the node index of each device."""
        return tuple(n for n, node in enumerate(self.nodes) for _ in node.devices)

    def with_devices(self, devices: Iterable[Device]) -> Cluster:
        """Return the same cluster with its devices replaced by ``devices``, which has one device for each rank."""
        left = iter(devices)
        nodes = [
            replace(node, devices=tuple(itertools.islice(left, len(node.devices))))
            for node in self.nodes
        ]
        return replace(self, nodes=tuple(nodes))

    def first(self, count: int) -> Cluster:
        """Return the cluster of the first ``count`` devices."""
        left, nodes = count, list[Node]()
        for node in self.nodes:
            devices = node.devices[: max(0, left)]
            left -= len(devices)
            if devices:
                nodes.append(
                    replace(
                        node,
                        devices=devices,
                        speeds=node.speeds[: len(devices)],
                        sum_seconds=node.sum_seconds[: len(devices)],
                        exchange_seconds=node.exchange_seconds[: len(devices)],
                        reduce_seconds=node.reduce_seconds[: len(devices)],
                    )
                )
        return replace(self, nodes=tuple(nodes))

    def slowed(self, factors: Mapping[int, float]) -> Cluster:
        """Return the same cluster with slower devices.

        ``factors`` maps a rank to the factor by which its device is slower.
        """
        return self.with_devices(
            replace(device, speed=device.speed / factors.get(rank, 1.0))
            for rank, device in enumerate(self.devices)
        )

    def while_all_swap(self, device: Device) -> Device:
        """Return ``device`` with the offload bandwidth that remains for it while all devices of its node swap.

        Devices of a node share the bandwidth of a disk. Each device has its own link to host memory, so that bandwidth
        does not change.
        """
        if not device.swaps_to.shared:
            return device
        sharing = max(1.0, max(len(node.devices) for node in self.nodes) * device.tier_share)
        write, read = (
            replace(link, bytes_per_second=link.bytes_per_second / sharing)
            for link in (device.write, device.read)
        )
        return replace(device, write=write, read=read)

    def agreement_seconds(self, count: int) -> float:
        """Return the seconds of an all-reduce of a few numbers between the first ``count`` devices: the largest
        measurement of any of their nodes, or 0 if there is none."""
        return self._largest(count, [node.sum_seconds for node in self.nodes])

    def exchange_seconds(self, count: int) -> float:
        """Return the seconds of one of many such all-reduces in close succession, between which the devices compute
        little: at least the latencies of a ring."""
        link = self.local if count <= len(self.nodes[0].devices) else self.remote
        measured = self._largest(count, [node.exchange_seconds for node in self.nodes])
        return max(2 * (count - 1) * link.latency_seconds, measured)

    def _largest(self, count: int, measured: Sequence[tuple[float, ...]]) -> float:
        found = 0.0
        for node, seconds in zip(self.nodes, measured):
            here = min(count, len(node.devices), len(seconds))
            if here > 0:
                found = max(found, seconds[here - 1])
            count -= len(node.devices)
        return found

    def link(self, a: int, b: int) -> Link:
        """Return the link between the devices ``a`` and ``b``."""
        nodes = self.node_of
        return self.local if nodes[a] == nodes[b] else self.remote


def with_buckets(cluster: Cluster) -> Cluster:
    """Return the cluster with gradient buckets whose size suits the slowest link between replicas, and with the seconds
    of small all-reduces between replicas.

    The size is the bytes that this link carries in 16 times its latency, in whole MiB, but at least 4 MiB and at most
    64 MiB. A small all-reduce takes the measured seconds, or the latencies of a ring.
    """
    link = cluster.local if len(cluster.nodes) == 1 else cluster.remote
    mebibytes = int(_LATENCIES * link.latency_seconds * link.bytes_per_second) // 2**20
    size = max(LEAST_BUCKET_BYTES, min(MOST_BUCKET_BYTES, mebibytes * 2**20))
    count = min(_EXCHANGES, len(cluster.devices))
    exchanges = tuple(cluster.exchange_seconds(n + 1) for n in range(count))
    return cluster.with_devices(
        replace(each, bucket_bytes=size, exchanges=exchanges) for each in cluster.devices
    )


def _check_device(name: str, device: Device) -> None:
    if not 0 < device.memory_bytes < float("inf") or not 0 <= device.tier_bytes < float("inf"):
        raise PlanError(
            f"{name}: memory {format_bytes(device.memory_bytes)} and {device.tier} "
            f"{format_bytes(device.tier_bytes)} must be above zero"
        )
    for key in (
        *("reserve_bytes", "context_bytes", "collective_bytes", "edge_bytes", "host_bytes"),
        *("gap_tensors", "gap_limit", "price_per_hour", "host_update_seconds"),
    ):
        if not 0 <= getattr(device, key) < float("inf"):
            raise PlanError(
                f"{name}: {key}={getattr(device, key)} must be finite and not below zero"
            )
    for key in ("gap_share", "kept_share", "overlap_loss"):
        if not 0 <= getattr(device, key) < 1:
            raise PlanError(
                f"{name}: {key}={getattr(device, key)} must be a share from 0 to below 1"
            )
    if not all(0 <= seconds < float("inf") for seconds in device.exchanges):
        raise PlanError(f"{name}: exchanges={device.exchanges} must be finite and not below zero")
    if type(device.bucket_bytes) is not int or device.bucket_bytes < LEAST_BUCKET_BYTES:
        raise PlanError(
            f"{name}: bucket_bytes={device.bucket_bytes} must be whole and at least {LEAST_BUCKET_BYTES}"
        )
    if not 0 < device.tier_share <= 1:
        raise PlanError(
            f"{name}: tier_share={device.tier_share} must be a share above 0 and at most 1"
        )
    if not 0 < device.speed < float("inf"):
        raise PlanError(f"{name}: speed={device.speed} must be above zero and finite")
    _check_link(f"{name} write", device.write)
    _check_link(f"{name} read", device.read)
    if device.host_link is not None:
        _check_link(f"{name} host", device.host_link)


def _check_link(name: str, link: Link) -> None:
    if not 0 < link.bytes_per_second < float("inf") or not 0 <= link.latency_seconds < float("inf"):
        raise PlanError(
            f"{name} link: {link.bytes_per_second} bytes/s must be above zero and finite, and "
            f"{link.latency_seconds} s of latency not below zero"
        )
