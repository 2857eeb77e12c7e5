"""Device bytes of a rank's process groups, if tensors are sent directly between devices."""

from __future__ import annotations

from collections.abc import Sequence

from parallax.plan.cluster import Device
from parallax.plan.plan import Pipeline
from parallax.plan.profile import ModelProfile

Beside = tuple[int, int]
"""The replica counts of the stage before a stage, and of the stage after it."""


def connection_bytes(
    profile: ModelProfile,
    device: Device,
    parts: Sequence[tuple[int, int]],
    replicas: int,
    beside: Beside | None = None,
) -> int:
    """Return the device bytes of a rank's connections to the ranks of other stages.

    ``parts`` has the blocks (first, last + 1) of each stage of the rank. For each of its stages, a rank has two
    connections to every rank of the stage before and of the stage after. It also has a process group for each parameter
    tied with another stage, and one that gathers outputs for a loss over the whole batch. ``beside`` has the replica
    counts of the stages before and after; None means ``replicas`` for both.
    """
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
    """Return the replica counts of the stages before and after ``stage``, with 0 for a stage that does not exist."""
    entering, leaving = pipeline.entering(stage), pipeline.leaving(stage)
    return (
        pipeline.stages[entering.sender].replicas if entering is not None else 0,
        pipeline.stages[leaving.receiver].replicas if leaving is not None else 0,
    )
