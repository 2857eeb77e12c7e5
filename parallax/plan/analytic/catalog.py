"""Describe clusters that are not available, built from the devices in :mod:`parallax.plan.analytic.hardware`.

Such a cluster has one or more sorts of nodes; all devices of a sort are of one kind. The configuration adds the numbers
that are not in data sheets: counts, links, the hosts' memory and disk, and the price of a device per hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallax.common.units import format_bytes, parse_bytes
from parallax.errors import ConfigError, check_choice, check_count, check_positive
from parallax.plan.analytic.hardware import (
    DEVICE_KINDS,
    LINK_KINDS,
    DeviceKind,
    collective_bytes,
    device_kind,
    edge_bytes,
    link_kind,
)
from parallax.plan.cluster import Cluster, Device, Link, Node, with_buckets
from parallax.plan.tier import AUTO, DISK, ROOM_KEYS, check_tier, tier_named, usual_tier

UPDATE_BYTES = 28
"""Bytes that AdamW in fp32 on the host moves for one parameter: it reads weight, gradient and two moments, and writes
all but the gradient."""
ALLOCATOR_BYTES = 256 * 2**20
"""Bytes that PyTorch's caching allocator reserves for any model: small segments and workspaces of libraries."""
GAP_TENSORS = 113.0
"""Bytes of holes that PyTorch's caching allocator reserves beyond its tensors, as a multiple of the tensor between two
layers. A transformer's layer saves sixteen tensors of this size.

A request that is larger than a hole gets new memory, and a smaller one splits the hole. Holes do not grow with the
micro-batches in flight, because each micro-batch reuses the holes of the previous one. A replay of a step's tensors by
the allocator's rules left holes of 7 to 55 such tensors. Published runs of another engine reserved 62 to 92 of them
beyond the planner's tensors, mostly for gradients that this engine converts to full precision module by module
(``benchmarks/validation``). Parallax converts gradients in buckets, but its holes were never measured on such devices,
so the number covers those runs."""
GAP_LIMIT = 0.29
"""Upper bound on the bytes of holes, as a fraction of the transient bytes, which are held only for a part of the step.
The smaller one of this bound and :data:`GAP_TENSORS` counts.

In a convolutional net, the tensor between two layers is larger than most tensors that a layer saves, so 113 of them
would exceed all activations. But holes are memory that transient tensors had before, so the transient bytes bound them.
The published runs reserved 0.09 to 0.24 of the transient bytes in addition, converted gradients included. With 95 %
confidence, a further stage stays below 0.286 (Student's prediction limit, as for :data:`GAP_TENSORS`). The tensors of
32 steps (ResNets, an EfficientNet and transformers, with all directives) were replayed by the allocator's rules. The
memory reserved beyond static and transient bytes was at most :data:`ALLOCATOR_BYTES` and 0.07 of the planner's
transient bytes, which include an upper bound on the workspace."""
FORWARD_GAP_TENSORS = 8.0
""":data:`GAP_TENSORS` for plans that run forwards only.

Nothing is saved and no gradient is converted: a block's tensors are freed at its end, and the next block reuses their
memory. The planner's workspace of a forward includes holes within a block: it counts every tensor that the block would
save in training, and its temporary tensors, as if none were freed before the block's end. There are also holes between
blocks of several kinds, and between micro-batches of several sizes. About 60 forwards of transformers were measured on
an H200 (torch's caching allocator, fused and plain attention, up to 152 000 classes, bf16 and fp32, micro-batches of
equal and of several sizes). The memory reserved beyond parameters and kept outputs was at most this workspace and 4.9
tensors. With tensors below 4 MiB, it was at most the workspace and 57 MiB, which :data:`ALLOCATOR_BYTES` covers. In
most forwards it was less than the workspace."""


@dataclass(frozen=True, kw_only=True)
class CatalogClusterConfig:
    """Machines to plan for that are not available here. A setting whose value is a list has one entry for each sort of
    nodes.

    ``device``: a kind of device such as a100-80.
    ``nodes``: number of nodes, with ``devices_per_node`` devices each.
    ``devices``: total number of devices. If ``nodes`` is auto, they fill as many nodes as they need; otherwise they are
        spread evenly over the nodes.
    ``device_memory``: the budget of each device, including context and libraries (auto: all memory of the kind).
    ``host_memory`` and ``disk``: bytes of each node's offload tiers.
    ``local``: the link between devices of a node.
    ``remote``: the link of each device to other nodes.
    ``host``: the link of a device to its host (auto: that of the kind of device).
    ``host_bandwidth``: bytes per second of a node's memory, for the host optimizer.
    ``price_per_hour``: price of a device per hour, in any currency.
    """

    name: str = "catalog"
    device: str | list[str] = "a100-80"
    nodes: int | str | list[int] = AUTO
    devices_per_node: int | list[int] = 8
    devices: int | str = AUTO
    device_memory: int | str = AUTO
    host_memory: int | str = "1TiB"
    disk: int | str = "1TiB"
    local: str = AUTO
    remote: str = "infiniband-hdr"
    host: str = AUTO
    host_bandwidth: float = 200e9
    price_per_hour: float | list[float] = 0.0

    def __post_init__(self) -> None:
        for kind in _listed(self.device):
            check_choice("cluster.device", kind, DEVICE_KINDS)
        for key in ("local", "remote", "host"):
            check_choice(f"cluster.{key}", getattr(self, key), [AUTO, *LINK_KINDS])
        for key in ("nodes", "devices"):
            for count in _listed(getattr(self, key)):
                check_count(f"cluster.{key}", count)
        for count in _listed(self.devices_per_node):
            check_positive("cluster.devices_per_node", count)
        for key in ROOM_KEYS:
            parse_bytes(getattr(self, key), f"cluster.{key}")
        for kind in _listed(self.device):
            self._memory(device_kind(kind))
        for price in _listed(self.price_per_hour):
            check_positive("cluster.price_per_hour", price, zero=True)
        check_positive("cluster.host_bandwidth", self.host_bandwidth)
        for key in ("nodes", "devices_per_node", "price_per_hour"):
            if len(_listed(getattr(self, key))) not in (1, self.sorts):
                raise ConfigError(
                    f"cluster.{key}={getattr(self, key)}: one value, or one for each of {self.sorts} kinds of device"
                )
        self._counts()

    @property
    def sorts(self) -> int:
        """Return the number of sorts of nodes."""
        return len(_listed(self.device))

    @property
    def kind(self) -> DeviceKind:
        """Return the kind of device of the first sort of nodes, for which the profile is computed."""
        return device_kind(_listed(self.device)[0])

    def build(
        self, *, dtype: str = "bf16", tier: str = AUTO, weight_bytes: int = 4, trains: bool = True
    ) -> Cluster:
        """Return the cluster for the planner.

        ``dtype``         the dtype of matrix products in which the speeds of different devices are compared
        ``tier``          the offload tier (a name, or auto)
        ``weight_bytes``  bytes of one parameter, from which the host optimizer's seconds per byte are computed
        ``trains``        whether the plans train; without backwards the allocator loses fewer bytes to gaps
        """
        check_tier("swap.tier", tier)
        nodes: list[Node] = []
        kinds = [device_kind(name) for name in _listed(self.device)]
        for sort, (kind, counts) in enumerate(zip(kinds, self._counts())):
            speed = kind.peak(dtype) / self.kind.peak(dtype)
            for count in counts:
                price = _entry(self.price_per_hour, sort)
                device = self._device(kind, count, tier, weight_bytes)
                device = replace(device, speed=speed, price_per_hour=price)
                if not trains:
                    gaps = min(device.gap_tensors, FORWARD_GAP_TENSORS)
                    device = replace(device, gap_tensors=gaps, gap_limit=1.0)
                nodes.append(
                    Node(name=f"node{len(nodes)}", devices=(device,) * count, concurrent=count)
                )
        links = [self._link("local", kind.device_link) for kind in kinds]
        found = Cluster(
            nodes=tuple(nodes),
            local=min(links, key=lambda link: link.bytes_per_second),
            remote=link_kind(self.remote).link(),
            local_over_host=any(
                self._link_name("local", kind.device_link)
                == self._link_name("host", kind.host_link)
                for kind in kinds
            ),
        )
        return with_buckets(found)

    def _counts(self) -> list[list[int]]:
        """Return the number of devices of every node, as one list for each sort of nodes."""
        if self.devices == AUTO:
            nodes = [_entry(self.nodes, sort) for sort in range(self.sorts)]
            return [
                [_entry(self.devices_per_node, sort)] * (1 if count == AUTO else count)
                for sort, count in enumerate(nodes)
            ]
        if self.sorts > 1:
            raise ConfigError(
                f"cluster.devices={self.devices}: {self.sorts} kinds of device are counted by cluster.nodes and "
                "cluster.devices_per_node"
            )
        devices, most, nodes = (
            int(self.devices),
            _entry(self.devices_per_node, 0),
            _entry(self.nodes, 0),
        )
        if nodes == AUTO:
            return [[min(most, devices - first) for first in range(0, devices, most)]]
        if devices % nodes or devices > nodes * most:
            raise ConfigError(
                f"cluster.devices={devices}: must be spread evenly over cluster.nodes={nodes}, with up to "
                f"cluster.devices_per_node={most} on each"
            )
        return [[devices // nodes] * nodes]

    def _device(self, kind: DeviceKind, count: int, tier: str, weight_bytes: int) -> Device:
        """Return one of the ``count`` devices of a node, with its share of the host's memory, disk and bandwidth.

        For a CPU, the bytes of a caching allocator and of NCCL's buffers are 0.
        """
        caching = kind.host_link != DISK.link
        offload_tier = usual_tier(device_is_ram=not caching) if tier == AUTO else tier_named(tier)
        link = (
            link_kind(offload_tier.link).link()
            if offload_tier.link
            else self._link("host", kind.host_link)
        )
        tier_bytes = (
            parse_bytes(getattr(self, offload_tier.key), f"cluster.{offload_tier.key}")
            if offload_tier.exists
            else 0
        )
        return Device(
            kind=kind.name,
            memory_bytes=self._memory(kind),
            tier=offload_tier.name,
            tier_bytes=tier_bytes // count,
            write=link,
            read=link,
            reserve_bytes=caching * ALLOCATOR_BYTES,
            context_bytes=kind.context_bytes,
            collective_bytes=caching * collective_bytes(),
            edge_bytes=caching * edge_bytes(),
            gap_tensors=caching * GAP_TENSORS,
            gap_limit=GAP_LIMIT,
            host_update_seconds=UPDATE_BYTES / weight_bytes * count / self.host_bandwidth
            if offload_tier.steps
            else 0.0,
        )

    def _memory(self, kind: DeviceKind) -> int:
        """Return the memory budget of one device."""
        if self.device_memory == AUTO:
            return kind.memory_bytes
        requested = parse_bytes(self.device_memory, "cluster.device_memory")
        if requested <= kind.context_bytes:
            raise ConfigError(
                f"cluster.device_memory={self.device_memory}: context and libraries alone take "
                f"{format_bytes(kind.context_bytes)} of {kind.name}, which has {format_bytes(kind.memory_bytes)}; use "
                "cluster.device_memory=auto"
            )
        return requested

    def _link(self, key: str, usual: str) -> Link:
        return link_kind(self._link_name(key, usual)).link()

    def _link_name(self, key: str, usual: str) -> str:
        name: str = getattr(self, key)
        return usual if name == AUTO else name


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _entry(value: Any, sort: int) -> Any:
    """Return the entry of ``value`` for one sort of nodes. A ``value`` that is not a list is valid for all sorts."""
    listed = _listed(value)
    return listed[sort if len(listed) > 1 else 0]
