"""Device bytes of the groups in which a rank talks from device to device."""

from __future__ import annotations

from collections.abc import Sequence

from parallax.plan.cluster import Device
from parallax.plan.plan import StagePlan
from parallax.plan.profile import ModelProfile

Beside = tuple[int, int]
"""How many ranks have the stage before a stage, and the one after it."""


def way_bytes(
    profile: ModelProfile,
    device: Device,
    parts: Sequence[tuple[int, int]],
    replicas: int,
    beside: Beside | None = None,
) -> int:
    """What the ways to other stages take on a rank that has the blocks of ``parts``, each from its first to behind its
    last: two for every rank of the stages ``beside`` each part, which have as many replicas where nobody says, a group
    for each parameter that other stages have too, and one of the replicas that gather what a loss of all rows is of."""
    if not (device.collective_bytes or device.edge_bytes):
        return 0
    blocks, count = {block for part in parts for block in range(*part)}, len(profile.blocks)
    before, after = beside or (replicas, replicas)
    ranks = sum((start > 0) * before + (stop < count) * after for start, stop in parts)
    shared = sum(
        1 for _, users in profile.ties if 0 < sum(user in blocks for user in users) < len(users)
    )
    gathers = profile.gathered_rows > 0 and replicas > 1 and any(stop == count for _, stop in parts)
    return (shared + gathers) * device.collective_bytes + 2 * ranks * device.edge_bytes


def beside(stages: Sequence[StagePlan], index: int) -> Beside:
    """Those of one of the ``stages`` of a plan."""
    before = stages[index - 1].replicas if index else 0
    return before, stages[index + 1].replicas if index + 1 < len(stages) else 0
