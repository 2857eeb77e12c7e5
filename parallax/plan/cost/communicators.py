"""Device bytes of the groups in which a rank talks from device to device."""

from __future__ import annotations

from collections.abc import Sequence

from parallax.plan.cluster import Device
from parallax.plan.plan import Pipeline
from parallax.plan.profile import ModelProfile

Beside = tuple[int, int]
"""How many ranks have the stage that sends to a stage, and the one that it sends to."""


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


def beside(pipeline: Pipeline, stage: int) -> Beside:
    """Those of one stage of a pipeline."""
    entering, leaving = pipeline.entering(stage), pipeline.leaving(stage)
    return (
        pipeline.stages[entering.sender].replicas if entering is not None else 0,
        pipeline.stages[leaving.receiver].replicas if leaving is not None else 0,
    )
