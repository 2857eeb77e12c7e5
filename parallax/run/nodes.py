"""Join the nodes of a run to one cluster: the devices of each node, and the links between nodes.

::

    every node    its devices, memory, tiers, and how its ranks slow each other down ──┐
    neighbours    bandwidth and latency of the link between them ─────────────────────┴──> one Cluster, on all ranks
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from parallax.common.files import existing_parent
from parallax.machine.accelerators import (
    OwnDevice,
    RanksDevices,
    accelerator_named,
    find_own_device,
    present_devices,
    select_device,
    set_ranks_devices,
    unset_variables,
)
from parallax.machine.host import cpu_model
from parallax.machine.local import (
    ClusterConfig,
    DeviceChoice,
    build_cluster,
    choose_devices,
    chosen_kind,
    probe_together,
    requested_link,
)
from parallax.machine.probes import measure_probes
from parallax.mesh import RankDevices
from parallax.nodes.fitness import from_hosts
from parallax.nodes.links import RemoteLink, probe_links
from parallax.nodes.places import Nodes
from parallax.nodes.together import all_gather_result
from parallax.plan.cluster import Cluster, Device, Link, Node, with_buckets
from parallax.swap.config import SwapConfig

Kind = tuple[str, ...]
"""The properties of a device. Measurements on one device hold for all devices with equal properties."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The cluster of all nodes. ``kinds``: the kind of each node's devices. ``device_bytes``: the memory of one device
    of each node. In ``cluster``, nodes with the same kind of devices all have the smallest memory among them."""

    cluster: Cluster
    kinds: tuple[Kind, ...]
    device_bytes: tuple[int, ...]

    def at_speeds(self, seconds: Sequence[float]) -> Joined:
        """Return the cluster with device speeds relative to the first node. ``seconds``: the time that each node needs
        for the same work."""
        nodes = tuple(
            replace(
                node,
                devices=tuple(replace(each, speed=seconds[0] / taken) for each in node.devices),
            )
            for node, taken in zip(self.cluster.nodes, seconds)
        )
        return replace(self, cluster=replace(self.cluster, nodes=nodes))


@dataclass(frozen=True, slots=True)
class _Offer:
    """The devices that one node contributes, as a cluster of only that node."""

    cluster: Cluster
    kind: Kind


def node_devices(config: ClusterConfig, nodes: Nodes) -> DeviceChoice:
    """Return the devices of this rank's node: one for each of its ranks."""
    return choose_devices(replace(config, devices=nodes.local_count))


def share_devices(config: ClusterConfig, nodes: Nodes, *, select: bool) -> None:
    """Exchange the devices of all ranks, so that this process can plan for all devices of its node. Every rank of
    torch's default group must call this function. ``select``: first select this rank's device, by the rank's index on
    its host."""
    kind, local_rank = chosen_kind(config), os.environ.get("LOCAL_RANK")

    def own() -> OwnDevice | None:
        if select and kind != "cpu":
            # Torch's allocator reads its variables at the first use of a device.
            os.environ.update(unset_variables(kind))
        count = len(present_devices(kind)) if kind != "cpu" else 0
        if not count:
            return None
        if select:
            return find_own_device(kind, select_device(kind, int(local_rank or 0)).index)
        selected = torch.accelerator.current_device_index()
        chosen = bool(selected) or local_rank is None
        return find_own_device(kind, selected if chosen else int(local_rank or 0) % count)

    mine = nodes.hosts[nodes.rank]
    here = [rank for rank, host in enumerate(nodes.hosts) if host == mine]
    set_ranks_devices(RanksDevices.collect(all_gather_result(own), here))


def measured_cluster(
    config: ClusterConfig, choice: DeviceChoice, swap: SwapConfig, scratch: Path | None
) -> Cluster:
    """Return this machine as a cluster, with its measured bandwidths."""
    folder = existing_parent(swap_folder(swap, scratch))
    return build_cluster(
        config,
        choice,
        tier=swap.tier,
        probes=measure_probes(folder),
        together=probe_together(choice),
        copying_threads=swap.threads,
    )


def join_nodes(
    config: ClusterConfig, swap: SwapConfig, nodes: Nodes, scratch: Path | None
) -> Joined:
    """Return the cluster of all nodes. Every rank of torch's default group must call this function. ``scratch``: the
    folder of swap files. Among nodes with the same kind of devices, every node gets the smallest capacities and speeds
    of all of them, so that a plan fits on each node.

    Raises :class:`~parallax.errors.UnfitHostError` if a setting requests more than some nodes have.
    """

    def offer() -> _Offer:
        choice = node_devices(config, nodes)
        own = measured_cluster(config, choice, swap, scratch)
        places = [
            node for node, host in zip(nodes.of, nodes.hosts) if host == nodes.hosts[nodes.rank]
        ]
        devices = tuple(d for d, node in zip(own.devices, places) if node == nodes.mine)
        kept = replace(own.nodes[0], name=nodes.names[nodes.mine], devices=devices)
        return _Offer(replace(own, nodes=(kept,)), _kind(choice))

    offers = from_hosts(offer, nodes)
    kinds = tuple(each.kind for each in offers)
    between = _between(config, nodes)
    cluster = with_buckets(
        Cluster(
            nodes=tuple(_weakest(index, offers) for index in range(len(offers))),
            local=_slowest([each.cluster.local for each in offers]),
            remote=between.link,
            local_over_host=any(each.cluster.local_over_host for each in offers),
            remote_ways=between.full_speed_ranks,
        )
    )
    least = tuple(min(device.memory_bytes for device in each.cluster.devices) for each in offers)
    return Joined(cluster, kinds, least)


def _between(config: ClusterConfig, nodes: Nodes) -> RemoteLink:
    """Return the link between nodes, from the settings or measured."""
    kind = node_devices(config, nodes).kind
    if (link := requested_link(config)) is not None:
        # A host's ranks share its network card; accelerators mostly have one each.
        return RemoteLink(link, 1.0 if kind == "cpu" else 0.0)
    device = select_device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    everyone = range(len(nodes.of))
    return probe_links(nodes, device, RankDevices.gather(device, len(everyone)).direct(everyone))


def _kind(choice: DeviceChoice) -> Kind:
    if choice.kind == "cpu":
        return "cpu", cpu_model(), str(choice.threads)
    return choice.kind, accelerator_named(choice.kind).devices()[0].name


def _weakest(index: int, offers: Sequence[_Offer]) -> Node:
    """Return the node of offer ``index``, with each capacity and speed reduced to the minimum over all nodes with the
    same kind of devices."""
    node = offers[index].cluster.nodes[0]
    alike = [each.cluster.nodes[0] for each in offers if each.kind == offers[index].kind]
    devices = [device for each in alike for device in each.devices]
    same = [each for each in alike if len(each.devices) == len(node.devices)]
    return replace(
        node,
        devices=tuple(_least(device, devices) for device in node.devices),
        concurrent=min(each.concurrent for each in same),
        speeds=tuple(map(min, zip(*(each.speeds for each in same)))),
        sum_seconds=tuple(map(max, zip(*(each.sum_seconds for each in same)))),
        reduce_seconds=tuple(map(max, zip(*(each.reduce_seconds for each in same)))),
        exchange_seconds=tuple(map(max, zip(*(each.exchange_seconds for each in same)))),
    )


def _least(device: Device, alike: Sequence[Device]) -> Device:
    hosts = [each.host_link for each in alike if each.host_link is not None]
    return replace(
        device,
        memory_bytes=min(each.memory_bytes for each in alike),
        tier_bytes=min(each.tier_bytes for each in alike),
        write=_slowest([each.write for each in alike]),
        read=_slowest([each.read for each in alike]),
        reserve_bytes=max(each.reserve_bytes for each in alike),
        context_bytes=max(each.context_bytes for each in alike),
        collective_bytes=max(each.collective_bytes for each in alike),
        edge_bytes=max(each.edge_bytes for each in alike),
        overlap_loss=max(each.overlap_loss for each in alike),
        tier_share=min(each.tier_share for each in alike),
        host_link=_slowest(hosts) if len(hosts) == len(alike) else None,
        host_bytes=min(each.host_bytes for each in alike),
        host_update_seconds=max(each.host_update_seconds for each in alike),
    )


def _slowest(links: Sequence[Link]) -> Link:
    return min(links, key=lambda link: link.bytes_per_second)


def swap_folder(swap: SwapConfig, scratch: Path | None) -> Path:
    """Return the folder of swap files: the one that the settings name, otherwise ``scratch``, or the system's temporary
    folder if ``scratch`` is None."""
    return (
        Path(swap.directory) if swap.directory != "auto" else scratch or Path(tempfile.gettempdir())
    )
