"""What the machines have: data only. Devices are numbered through the nodes; device i is rank i's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from parallax.common.units import format_bytes
from parallax.errors import PlanError
from parallax.plan.tier import Tier, tier_named

# Bytes of gradients that replicas sum at one time. With fewer an all-reduce takes as long as its launch; with more, the
# last one of a backward, which nothing hides, grows for nothing.
LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 4 * 2**20, 64 * 2**20
_LATENCIES = 16  # the latency of a link is to be so small a part of what a bucket takes on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way for bytes: seconds = ``latency_seconds`` + bytes / ``bytes_per_second``."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, count: float) -> float:
        """Seconds that ``count`` bytes take when nothing else uses the link."""
        return self.latency_seconds + count / self.bytes_per_second if count > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device and its share of the tiers below: its budget, and the name of the tier that takes what it offloads.

    On a CPU-only machine the device is a process with ``memory_bytes`` of RAM and the tier below is the disk.
    ``reserve_bytes`` of the memory are taken by what the allocator holds that is no tensor of the model (workspaces of
    libraries), ``context_bytes`` by the driver's context and its libraries' code, beside the allocator. A group of
    ranks that sum tensors from device to device takes ``collective_bytes`` on each of them, and each way between
    two ranks ``edge_bytes`` on both; 0 where tensors go through the host. Of all bytes that come and go, the
    allocator loses ``gap_share`` to rounding and gaps, and ``gap_tensors`` times the largest tensor between two
    blocks; where the budget has room, it keeps up to ``kept_share`` more in freed blocks. ``speed`` is relative
    to the device that the profile is for; while its links carry bytes, ``overlap_loss`` of it is lost. Its copies take
    up to ``tier_share`` of a tier that the node shares: less than all where it has no core to copy as fast as the tier
    takes it. ``price_per_hour`` is in any currency.
    ``host_update_seconds`` is the host optimizer's time for one byte of parameters; 0 where none runs there.
    Gradients of replicas are summed in buckets of ``bucket_bytes``, which follow from the links
    (:func:`with_buckets`).
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
    kept_share: float = 0.0
    speed: float = 1.0
    overlap_loss: float = 0.0
    tier_share: float = 1.0
    price_per_hour: float = 0.0
    host_update_seconds: float = 0.0
    bucket_bytes: int = LEAST_BUCKET_BYTES

    @property
    def fixed_bytes(self) -> int:
        """What each process takes, whatever it does."""
        return self.reserve_bytes + self.context_bytes

    @property
    def swaps_to(self) -> Tier:
        """The tier; raises :class:`PlanError` where nobody has registered one of that name."""
        return tier_named(self.tier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host. ``concurrent`` devices can compute at full speed together: fewer than there are when CPU ranks share
    cores. Where it was measured, ``speeds[k − 1]`` is the speed of each of k that compute at once; it falls before the
    cores run out, because they share memory too."""

    name: str
    devices: tuple[Device, ...]
    concurrent: float
    speeds: tuple[float, ...] = ()

    def speed(self, computing: int) -> float:
        """The speed of each of ``computing`` devices that compute at once; it never rises with their number."""
        if self.speeds:
            known = self.speeds[min(computing, len(self.speeds)) - 1]
            return known * min(1.0, len(self.speeds) / computing)
        return min(1.0, self.concurrent / computing)

    @property
    def capacity(self) -> float:
        """How many devices' worth of computing the node does at most."""
        return max(count * self.speed(count) for count in range(1, len(self.devices) + 1))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, the link between two devices of one node, and each device's link to other nodes. ``local_over_host``: the
    devices of a node talk over the same wires as they swap over (PCIe without NVLink). ``remote_ways``: how many
    devices of a node can talk to other nodes at full speed together, where they share the node's network; 0 where each
    has a network card of its own."""

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

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices; the index is the rank."""
        return tuple(device for node in self.nodes for device in node.devices)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The node index of each device."""
        return tuple(n for n, node in enumerate(self.nodes) for _ in node.devices)

    def with_devices(self, devices: Iterable[Device]) -> Cluster:
        """The cluster with as many other devices, in their order."""
        left = iter(devices)
        nodes = [
            replace(node, devices=tuple(itertools.islice(left, len(node.devices))))
            for node in self.nodes
        ]
        return replace(self, nodes=tuple(nodes))

    def first(self, count: int) -> Cluster:
        """The cluster of the first ``count`` devices alone."""
        left, nodes = count, list[Node]()
        for node in self.nodes:
            devices = node.devices[: max(0, left)]
            left -= len(devices)
            if devices:
                nodes.append(replace(node, devices=devices, speeds=node.speeds[: len(devices)]))
        return replace(self, nodes=tuple(nodes))

    def slowed(self, factors: Mapping[int, float]) -> Cluster:
        """The cluster, where some devices take ``factors`` times as long for the same work."""
        return self.with_devices(
            replace(device, speed=device.speed / factors.get(rank, 1.0))
            for rank, device in enumerate(self.devices)
        )

    def while_all_swap(self, device: Device) -> Device:
        """The device as it is while all of its node's swap: a disk is shared, a way to the host's memory is not."""
        if not device.swaps_to.shared:
            return device
        sharing = max(1.0, max(len(node.devices) for node in self.nodes) * device.tier_share)
        write, read = (
            replace(link, bytes_per_second=link.bytes_per_second / sharing)
            for link in (device.write, device.read)
        )
        return replace(device, write=write, read=read)

    def link(self, a: int, b: int) -> Link:
        """The link between two devices."""
        nodes = self.node_of
        return self.local if nodes[a] == nodes[b] else self.remote


def with_buckets(cluster: Cluster) -> Cluster:
    """The same cluster, whose replicas sum gradients in buckets that suit the link between all of them: as large as
    what it carries in some of its latencies, in whole MiB."""
    link = cluster.local if len(cluster.nodes) == 1 else cluster.remote
    mebibytes = int(_LATENCIES * link.latency_seconds * link.bytes_per_second) // 2**20
    size = max(LEAST_BUCKET_BYTES, min(MOST_BUCKET_BYTES, mebibytes * 2**20))
    return cluster.with_devices(replace(each, bucket_bytes=size) for each in cluster.devices)


def _check_device(name: str, device: Device) -> None:
    if not 0 < device.memory_bytes < float("inf") or not 0 <= device.tier_bytes < float("inf"):
        raise PlanError(
            f"{name}: memory {format_bytes(device.memory_bytes)} and {device.tier} "
            f"{format_bytes(device.tier_bytes)} must be above zero"
        )
    for key in (
        *("reserve_bytes", "context_bytes", "collective_bytes", "edge_bytes"),
        *("gap_tensors", "price_per_hour", "host_update_seconds"),
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


def _check_link(name: str, link: Link) -> None:
    if not 0 < link.bytes_per_second < float("inf") or not 0 <= link.latency_seconds < float("inf"):
        raise PlanError(
            f"{name} link: {link.bytes_per_second} bytes/s must be above zero and finite, and "
            f"{link.latency_seconds} s of latency not below zero"
        )
