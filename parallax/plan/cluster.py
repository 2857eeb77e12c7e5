"""What the machines have: data only. Devices are numbered through the nodes; device i is rank i's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from parallax.errors import PlanError
from parallax.units import format_bytes


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
    """A device and its share of the tiers below: its budget, and the tier that takes what it offloads.

    On a CPU-only machine the device is a process with ``memory_bytes`` of RAM and the tier below is the disk.
    ``reserve_bytes`` of the memory are taken by what is no tensor of the model (context, libraries); of all bytes that
    come and go, the allocator loses ``gap_share`` to rounding and gaps. ``speed`` is relative to the device that the
    profile is for; while its links carry bytes, ``overlap_loss`` of it is lost. ``price_per_hour`` in any currency.
    ``host_update_seconds`` is the host optimizer's time for one byte of parameters; 0 where none runs there.
    """

    kind: str
    memory_bytes: int
    tier: str
    tier_bytes: int
    write: Link
    read: Link
    reserve_bytes: int = 0
    gap_share: float = 0.0
    speed: float = 1.0
    overlap_loss: float = 0.0
    price_per_hour: float = 0.0
    host_update_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host. ``concurrent`` devices can compute at full speed together: fewer than there are when CPU ranks share
    cores. Where it was measured, ``speeds[k − 1]`` is the speed of each of k that compute at once; it falls before the
    cores run out, because they share memory too."""

    name: str
    devices: tuple[Device, ...]
    concurrent: float
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, the link between two devices of one node, and each device's link to other nodes. ``local_over_host``: the
    devices of a node talk over the same wires as they swap over (PCIe without NVLink)."""

    nodes: tuple[Node, ...]
    local: Link
    remote: Link
    local_over_host: bool = False

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlanError("the cluster has no devices: set cluster.devices to 1 or more")
        links = [("local", self.local), ("remote", self.remote)]
        for i, device in enumerate(self.devices):
            links += [(f"device {i} write", device.write), (f"device {i} read", device.read)]
            if device.memory_bytes <= 0 or device.tier_bytes < 0:
                raise PlanError(
                    f"device {i}: memory {format_bytes(device.memory_bytes)} and {device.tier} "
                    f"{format_bytes(device.tier_bytes)} must be above zero"
                )
            if device.reserve_bytes < 0 or not 0 <= device.gap_share < 1 or not 0 <= device.overlap_loss < 1:
                raise PlanError(
                    f"device {i}: a reserve of {device.reserve_bytes} bytes must not be below zero; gaps of "
                    f"{device.gap_share} and an overlap loss of {device.overlap_loss} must be shares below 1"
                )
            if not 0 < device.speed < float("inf") or not 0 <= device.price_per_hour < float("inf"):
                raise PlanError(
                    f"device {i}: speed={device.speed} must be above zero and finite, and "
                    f"price_per_hour={device.price_per_hour} not below zero"
                )
        for name, link in links:
            if not 0 < link.bytes_per_second < float("inf") or not 0 <= link.latency_seconds < float("inf"):
                raise PlanError(
                    f"{name} link: {link.bytes_per_second} bytes/s must be above zero and finite, and "
                    f"{link.latency_seconds} s of latency not below zero"
                )
        for node in self.nodes:
            if not 0 < node.concurrent < float("inf"):
                raise PlanError(f"node {node.name}: concurrent={node.concurrent} must be above zero and finite")
            if not all(0 < speed <= 1 for speed in node.speeds):
                raise PlanError(f"node {node.name}: speeds {node.speeds} must be above 0 and at most 1")

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices; the index is the rank."""
        return tuple(device for node in self.nodes for device in node.devices)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The node index of each device."""
        return tuple(n for n, node in enumerate(self.nodes) for _ in node.devices)

    def link(self, a: int, b: int) -> Link:
        """The link between two devices."""
        nodes = self.node_of
        return self.local if nodes[a] == nodes[b] else self.remote
