"""Predict the peak device bytes of a rank in one step, by term.

Saved and freed bytes depend only on the order of the rank's actions, not on their times, so one traversal of the list
computes the peak. If copies are slower than predicted, offloaded activations may fill the swap limit, so the peak
includes the whole limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from parallax.plan.cluster import Device
from parallax.plan.cost.passes import Bytes, Passes
from parallax.plan.cost.stage import StageLoad, passing_bytes, rank_gaps, rank_memory
from parallax.plan.schedule.action import COMPUTE, Action

# malloc keeps several times the workspace of one block, because the next block allocates other sizes.
_BLOCKS_KEPT = 6


def peak_memory(
    listed: Sequence[Action],
    passes: Callable[[Action], Passes],
    stages: Sequence[tuple[StageLoad, int]],
) -> dict[str, int]:
    """Return the device bytes by term at the moment in a rank's action list at which their sum is largest.

    ``listed`` is the action list. ``passes(action)`` returns the costs of the action's stage. ``stages`` has a pair for
    each stage of the rank: the stage's costs for its largest micro-batch, and its swap limit in bytes.
    """
    kept = loss = 0
    most = Bytes()
    for action in listed:
        if action.kind in COMPUTE:
            rise = passes(action).rises[action.kind]
            if kept + rise.most.total > most.total:
                most = Bytes(kept + rise.most.kept, loss + rise.most.loss, rise.most.work)
            kept, loss = kept + rise.left.kept, loss + rise.left.loss
    terms = rank_memory([(largest, 0, limit) for largest, limit in stages])
    terms |= {"activations": most.kept - most.loss, "loss": most.loss, "workspace": most.work}
    terms["allocator"] = rank_gaps(load for load, _ in stages).lost(passing_bytes(terms))
    return terms


def with_kept(
    terms: dict[str, int], device: Device, work_bytes: int
) -> tuple[dict[str, int], bool]:
    """Return the bytes of a rank's peak by term, and whether the allocator must return freed memory to the system at
    once.

    If the freed memory that the allocator keeps for reuse fits the budget beside ``terms``, it is added to them.
    Otherwise ``terms`` are returned unchanged, and an allocator that usually keeps freed memory must return all of it
    at once. ``work_bytes``: the largest :attr:`~parallax.plan.cost.stage.StageLoad.reused_bytes` of the rank's stages.
    """
    if bytes_above_budget(terms, device, work_bytes) > 0:
        return terms, device.kept_share > 0
    kept = _kept_bytes(terms, device, work_bytes)
    return {**terms, "allocator": terms["allocator"] + kept}, False


def bytes_above_budget(terms: dict[str, int], device: Device, work_bytes: int) -> int:
    """Return by how many bytes a rank's peak would exceed its budget if the allocator kept freed memory for reuse;
    negative if the peak fits.

    ``terms`` are the bytes of the peak by term, without the freed memory (see :func:`with_kept`).
    """
    return sum(terms.values()) + _kept_bytes(terms, device, work_bytes) - device.memory_bytes


def _kept_bytes(terms: dict[str, int], device: Device, work_bytes: int) -> int:
    """Return the bytes of freed memory that malloc keeps and of gaps between allocations, for a peak with these
    ``terms``.

    The formula was fitted to measurements. ``work_bytes``: see :func:`with_kept`.
    """
    work = min(work_bytes, terms["workspace"])  # at the peak
    freed = passing_bytes(terms) + _BLOCKS_KEPT * work + terms["staging"] / 4
    return math.ceil(device.kept_share * freed)
