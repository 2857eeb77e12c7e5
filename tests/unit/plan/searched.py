"""Models and machines to search plans for, and what holds of every plan."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from parallax.plan.cluster import Cluster, Link
from parallax.plan.cost.traffic import TIER_FLOOR
from parallax.plan.plan import Plan
from parallax.plan.profile import Affine, ModelProfile
from tests.unit.plan_fakes import FREE, block, cluster, profile

SIZES = [
    (1, 1),
    (2, 2),
    (2, 3),
    (3, 2),
    (3, 4),
    (4, 2),
    (4, 3),
    (4, 4),
    (5, 2),
    (5, 3),
    (6, 2),
    (6, 4),
    (8, 2),
    (8, 4),
]
"""Blocks and devices of cases that are small enough to look at every plan."""


def random_case(r: random.Random, count: int, devices: int) -> tuple[ModelProfile, Cluster, int]:
    blocks: list[Any] = []
    for i in range(count):
        if blocks and r.random() < 0.3:
            blocks.append(r.choice(blocks))
            continue
        line = lambda top: Affine(r.choice([0, r.uniform(0, top)]), r.uniform(0, top))  # noqa: E731
        backward, size = r.uniform(0.1, 4), r.randrange(1, 300)
        frozen = random.Random(size + 2).choice([0, 0, 0, 0, size // 2, size])
        blocks.append(
            block(
                f"b{i}",
                forward := r.uniform(0.1, 2),
                backward,
                weight_seconds=r.choice([0, backward / 2]),
                split_seconds=r.choice([0, backward / 10]),
                offload_seconds=r.choice([0, 0, backward / 5]),
                skipped_seconds=forward * r.choice([0, 0, 0.3, 1]),
                deferred=line(600),
                split_work=line(100),
                parameter_bytes=size,
                frozen_bytes=frozen,
                largest_bytes=min(size - frozen, r.choice([0, r.randrange(1, size + 1)])),
                moved=line(600),
                stays=line(20),
                input=line(40),
                output=line(40),
                forward_work=line(50),
                backward_work=line(100),
            )
        )
    ends = count > 1 and blocks[0] is blocks[-1]
    kinds = {"ties": blocks[0].trained_bytes, "frozen_ties": blocks[0].frozen_bytes}
    ties = {
        kind: ((size, (0, count - 1)),) if ends and size else () for kind, size in kinds.items()
    }
    machines = cluster(
        devices,
        int(10 ** r.uniform(3.2, 4.1)),
        concurrent=r.choice([1, 2, 100]),
        link=Link(bytes_per_second=10 ** r.uniform(1, 4), latency_seconds=r.choice([0, 0.1])),
        write=Link(bytes_per_second=10 ** r.uniform(2, 4), latency_seconds=r.choice([0, 0.3])),
        read=Link(bytes_per_second=10 ** r.uniform(2, 4)),
        tier=r.choice([TIER_FLOOR, TIER_FLOOR + 2000, 2 * TIER_FLOOR, 2 * TIER_FLOOR]),
        reserve=r.choice([0, 100]),
        gap_share=r.choice([0.0, 0.1]),
        host_update_seconds=r.choice([0.0, 0.02]),
        tier_name=r.choice(["host", "host", "disk"]),
    )
    return profile(blocks, **ties, optimizer_seconds=0.01), machines, r.choice([1, 3, 4, 6])


def check(plan: Plan, machines: Cluster) -> None:
    assert plan.world_size == len(machines.devices)
    for rank, device in zip(plan.prediction.ranks, machines.devices):
        assert rank.peak_bytes <= rank.budget_bytes == device.memory_bytes
        assert rank.tier_peak_bytes <= device.tier_bytes
    for stage in plan.stages:
        assert stage.tier_bytes <= machines.devices[0].tier_bytes


def layers(count: int, seed: int | None = None, **fields: Any) -> ModelProfile:
    r = random.Random(seed)
    factor = (lambda: 1.0) if seed is None else (lambda: r.uniform(0.5, 2))
    return profile(
        [
            block(
                f"layer{i}",
                1e-3 * factor(),
                2e-3 * factor(),
                **{
                    "parameter_bytes": int(4e6 * factor()),
                    "moved": 1e6 * factor(),
                    "stays": 1e4,
                    "input": 1e5,
                    "output": 1e5,
                    "forward_work": 1e5 * factor(),
                    "backward_work": 2e5 * factor(),
                    **fields,
                },
            )
            for i in range(count)
        ]
    )


def two_kinds(slow: int, fast: int) -> Cluster:
    """Devices of half the speed and half the memory before devices of full speed."""
    small = cluster(slow, 40 * 10**6, speed=0.5).nodes[0]
    large = cluster(fast, 80 * 10**6).nodes[0]
    return Cluster(
        nodes=(replace(small, name="slow"), replace(large, name="fast")), local=FREE, remote=FREE
    )
