"""Clusters from the catalog: what is counted, linked, paid, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from parallax.common.units import parse_bytes
from parallax.errors import ConfigError
from parallax.plan.analytic.catalog import (
    ALLOCATOR_BYTES,
    FORWARD_GAP_TENSORS,
    GAP_TENSORS,
    UPDATE_BYTES,
    CatalogClusterConfig,
)
from parallax.plan.analytic.hardware import DEVICE_KINDS, LINK_KINDS


@pytest.mark.parametrize(
    ("counts", "nodes"),
    [
        ({}, [8]),
        ({"nodes": 3}, [8, 8, 8]),
        ({"nodes": 2, "devices_per_node": 4}, [4, 4]),
        ({"devices": 1}, [1]),
        ({"devices": 8}, [8]),
        ({"devices": 20}, [8, 8, 4]),
        ({"devices": 12, "nodes": 3}, [4, 4, 4]),
    ],
    ids=str,
)
def test_devices_are_spread_over_nodes(counts: dict[str, Any], nodes: list[int]) -> None:
    cluster = CatalogClusterConfig(**counts).build()
    assert [len(node.devices) for node in cluster.nodes] == nodes
    assert len({node.name for node in cluster.nodes}) == len(nodes)
    assert all(node.concurrent == len(node.devices) for node in cluster.nodes)


def test_a_device_is_its_kind_with_its_share_of_the_host() -> None:
    config = CatalogClusterConfig(device="a100-80", host_memory="800GiB", price_per_hour=2.5)
    device, kind = config.build(weight_bytes=2).devices[0], DEVICE_KINDS["a100-80"]
    assert (device.kind, device.memory_bytes) == (kind.name, kind.memory_bytes)
    assert device.context_bytes == kind.context_bytes
    assert device.reserve_bytes == ALLOCATOR_BYTES
    assert (device.tier, device.tier_bytes) == ("host", 100 * 2**30)
    assert device.write == LINK_KINDS["pcie4"].link()
    assert (device.price_per_hour, device.speed) == (2.5, 1.0)
    # Eight devices step on one host: 28 bytes for each parameter of two.
    assert device.host_update_seconds == pytest.approx(UPDATE_BYTES / 2 * 8 / config.host_bandwidth)


def test_links() -> None:
    dgx, pcie = (
        CatalogClusterConfig(device="h100").build(),
        CatalogClusterConfig(device="l4").build(),
    )
    assert dgx.local == LINK_KINDS["nvlink4"].link()
    assert dgx.remote == LINK_KINDS["infiniband-hdr"].link()
    assert not dgx.local_over_host
    assert pcie.local_over_host, "neighbours and host are on the same wires"
    assert CatalogClusterConfig(device="h100", local="pcie5").build().local_over_host


@pytest.mark.parametrize(
    ("tier", "expected"), [("auto", "host"), ("disk", "disk"), ("none", "none")]
)
def test_tiers(tier: str, expected: str) -> None:
    device = CatalogClusterConfig(disk="8TiB").build(tier=tier).devices[0]
    assert device.tier == expected
    assert device.tier_bytes == {"host": 2**37, "disk": 2**40, "none": 0}[expected]
    assert (device.host_update_seconds > 0) == (expected == "host")
    assert CatalogClusterConfig(device="cpu-core").build().devices[0].tier == "disk"


def test_two_kinds_of_device() -> None:
    config = CatalogClusterConfig(
        device=["a100-80", "v100"], nodes=[1, 2], devices_per_node=[8, 4], price_per_hour=[4.0, 1.0]
    )
    cluster = config.build(dtype="fp16")
    assert [device.kind for device in cluster.devices] == ["a100-80"] * 8 + ["v100"] * 8
    assert cluster.devices[-1].speed == pytest.approx(125 / 312)
    assert sum(device.price_per_hour for device in cluster.devices) == 40
    assert cluster.local == LINK_KINDS["nvlink2"].link(), "the slower of both"
    assert config.kind.name == "a100-80"


def test_forwards_leave_fewer_holes_in_memory() -> None:
    gaps = [
        CatalogClusterConfig(device=device).build(trains=trains).devices[0].gap_tensors
        for device in ("rtx4090", "cpu-core")
        for trains in (True, False)
    ]
    assert gaps == [GAP_TENSORS, FORWARD_GAP_TENSORS, 0, 0]


def test_a_budget() -> None:
    config = CatalogClusterConfig(device_memory="40GiB")
    assert {device.memory_bytes for device in config.build().devices} == {parse_bytes("40GiB", "")}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"device": "a100-8"},
            "cluster.device=a100-8: accepted are v100, .*did you mean 'a100-80'",
        ),
        ({"remote": "infiniband"}, "cluster.remote=infiniband: accepted are auto"),
        ({"nodes": 0}, "cluster.nodes=0: accepted are numbers above 0"),
        ({"nodes": "many"}, "cluster.nodes=many: accepted are auto or a whole number"),
        ({"devices_per_node": 0}, "cluster.devices_per_node=0"),
        (
            {"devices": 5, "nodes": 2},
            "cluster.devices=5: must be spread evenly over cluster.nodes=2",
        ),
        ({"devices": 32, "nodes": 2}, "cluster.devices=32: .* up to cluster.devices_per_node=8"),
        (
            {"device": ["v100", "l4"], "devices": 4},
            "2 kinds of device are counted by cluster.nodes",
        ),
        ({"device": ["v100", "l4"], "nodes": [1, 2, 3]}, "one value, or one for each of 2 kinds"),
        ({"device_memory": "100MiB"}, "context and libraries alone take 500.0 MiB of a100-80"),
        ({"host_memory": "much"}, "cluster.host_memory=much: accepted are bytes"),
        ({"price_per_hour": -1.0}, "cluster.price_per_hour=-1.0"),
        ({"host_bandwidth": 0.0}, "cluster.host_bandwidth=0.0"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CatalogClusterConfig(**fields)
