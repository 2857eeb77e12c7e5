"""Lower bounds on the time of a micro-batch if parallel branches of a model ran on several devices.

A plan runs the blocks of a model one after another. Blocks that do not depend on each other, such as the branches of an
Inception module, could run at the same time on other devices. But even on any number of devices, a micro-batch takes at
least as long as the longest path of blocks that depend on each other::

             ┌─ 1 × 1 ──────────┐            one block after another: the sum over all blocks
    stem ────┼─ 1 × 1 ── 3 × 3 ─┼── concat   branches in parallel: the longest path from stem to concat
             └─ pool ── 1 × 1 ──┘

Transfers make the path longer. Of the blocks that read a block's result, only one stays on the device of that block:
the reader with the longest path behind it. Every other reader receives the result over the link and sends a gradient
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallax.common.units import format_seconds
from parallax.plan.cluster import Link
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile

_WORTH_A_LINE = 0.95  # a longest path above this share of all blocks is that of a chain
_WORTH_IT = 0.05  # a smaller share of a step is less than the error of its prediction

Reads = Sequence[Sequence[tuple[int, float]]]
"""For each block, the earlier blocks whose results it uses, with bytes for one row."""


@dataclass(frozen=True, slots=True)
class BranchBound:
    """The seconds of forward and backward of one micro-batch under three assumptions.

    ``chain_seconds``   all blocks run one after another
    ``path_seconds``    branches run in parallel, and transfers take no time: the longest path of dependent blocks
    ``linked_seconds``  branches run in parallel, with the seconds of transfers included
    """

    chain_seconds: float
    path_seconds: float
    linked_seconds: float


def branch_bound(costs: Sequence[float], reads: Reads, rows: int, link: Link) -> BranchBound:
    """Return the seconds of a micro-batch of ``rows`` rows, with and without parallel branches.

    ``costs`` has, for each block, the seconds of its forward and backward together. ``reads`` has, for each block, the
    earlier blocks whose results it uses, with the bytes of each result for one row. ``link`` carries tensors between
    branches.
    """
    free = Link(bytes_per_second=float("inf"))
    paths = (_longest(costs, reads, rows, each) for each in (free, link))
    return BranchBound(sum(costs), *paths)


def _longest(costs: Sequence[float], reads: Reads, rows: int, link: Link) -> float:
    behind, stays = (
        list(costs),
        [-1] * len(costs),
    )  # for each block: the longest path behind it, and the reader that stays on its device
    for block in range(len(costs) - 1, -1, -1):
        for earlier, _ in reads[block]:
            if costs[earlier] + behind[block] > behind[earlier] or stays[earlier] < 0:
                behind[earlier], stays[earlier] = costs[earlier] + behind[block], block
    ends: list[float] = []
    for block, seconds in enumerate(costs):
        near = max(
            (b for b, _ in reads[block] if stays[b] == block), key=ends.__getitem__, default=-1
        )
        ready = [
            ends[b] + (0.0 if b == near else 2 * link.seconds(size * rows))
            for b, size in reads[block]
        ]
        ends.append(seconds + max(ready, default=0.0))
    return max(ends)


def explain_branches(plan: Plan, profile: ModelProfile, link: Link) -> str:
    """Return a sentence on how much time ``plan`` could save with parallel branches on several devices.

    ``link`` carries tensors between these devices. The result is empty if the plan is not for training, if the model
    has no branches, or if the longest path takes nearly as long as all blocks.
    """
    if not plan.task.trains or not any(profile.reads):
        return ""
    rows = plan.microbatch
    costs = [b.forward_seconds.at(rows) + b.backward_seconds.at(rows) for b in profile.blocks]
    found = branch_bound(costs, profile.reads, rows, link)
    share = found.path_seconds / found.chain_seconds
    if share > _WORTH_A_LINE:
        return ""
    count, step = plan.micro_batches(plan.global_batch), plan.prediction.step_seconds
    path, linked = count * found.path_seconds, count * found.linked_seconds
    best = max(linked, count * found.chain_seconds / plan.world_size)
    saved = 1 - best / step if step > 0 else 0.0
    rate = link.bytes_per_second / 1e9
    devices = f"{plan.world_size} device{'s' if plan.world_size > 1 else ''}"
    verdict = f"saves at most {saved:.0%}" if saved >= _WORTH_IT else "not worth it"
    return (
        f"branches: the longest path of blocks that depend on each other takes {share:.0%} of the seconds of all "
        f"blocks. With each branch on a device of its own a step would take {format_seconds(path)} at best, "
        f"{format_seconds(linked)} with transfers of {rate:.3g} GB/s. On {devices} it would take "
        f"{format_seconds(best)} at best, and this plan takes {format_seconds(step)}: {verdict}."
    )
