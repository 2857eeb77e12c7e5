"""What one replica of one stage costs: seconds and bytes from a profile, for given rows and directives.

Bytes are whole: what a line through two measurements gives is rounded up. Device bytes of a rank at any time::

    static                      parameters, gradients, optimizer states, buffers, the device's reserve
  + boundary                    received and sent tensors under way
  + Σ in flight  kept           saved activations that stay, per micro-batch between forward and backward
  + offloaded and resident      bounded by the stage's swap limit
  + work                        what the running block needs for itself, recomputed activations included
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallax.plan.plan import Directive
from parallax.plan.profile import BlockCost, ModelProfile


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """One block for one micro-batch on one rank."""

    forward_seconds: float
    backward_seconds: float
    kept_bytes: int
    moved_bytes: int
    forward_work: int
    backward_work: int


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One stage on one rank: seconds and bytes that do not depend on the schedule."""

    static_bytes: int
    boundary_bytes: int
    parameter_bytes: int
    update_seconds: float
    input_bytes: float
    output_bytes: float
    blocks: tuple[BlockLoad, ...]

    @property
    def compute_seconds(self) -> float:
        """Forward and backward of one micro-batch, recomputation included."""
        return sum(block.forward_seconds + block.backward_seconds for block in self.blocks)

    @property
    def kept_bytes(self) -> int:
        """Saved activations of one micro-batch that stay on the device."""
        return sum(block.kept_bytes for block in self.blocks)

    @property
    def moved_bytes(self) -> int:
        """Saved activations of one micro-batch that are offloaded."""
        return sum(block.moved_bytes for block in self.blocks)

    @property
    def smallest_swap_limit(self) -> int:
        """What must fit at once for the backward of the largest offloaded block."""
        return max((block.moved_bytes for block in self.blocks), default=0)

    @property
    def work_bytes(self) -> int:
        """The most that a running block needs for itself."""
        return max(max(block.forward_work, block.backward_work) for block in self.blocks)

    def peak_bytes(self, in_flight: int, swap_limit: int) -> int:
        """An upper bound on the device bytes of the rank."""
        fixed = self.static_bytes + self.boundary_bytes + self.work_bytes
        return fixed + in_flight * self.kept_bytes + swap_limit


def load_block(cost: BlockCost, directive: Directive, rows: float) -> BlockLoad:
    """One block under one directive."""
    saved, stays = math.ceil(cost.moved.at(rows)), math.ceil(cost.stays.at(rows))
    forward, backward = cost.forward_seconds.at(rows), cost.backward_seconds.at(rows)
    kept, moved = saved + stays, 0
    forward_work = math.ceil(cost.forward_work.at(rows) + cost.output.at(rows))
    backward_work = math.ceil(cost.backward_work.at(rows) + cost.output.at(rows))
    if directive is Directive.OFFLOAD:
        # What has been written is free only when the block's own variables let go of it, at the block's end.
        kept, moved = stays, saved
        forward_work += saved
    elif directive is Directive.RECOMPUTE:
        kept = math.ceil(cost.input.at(rows))
        forward_work += saved + stays
        backward_work += saved + stays
        backward += forward
    kept += math.ceil(cost.by_loss.at(rows))
    return BlockLoad(forward, backward, kept, moved, forward_work, backward_work)


def load_stage(
    profile: ModelProfile, start: int, directives: Sequence[Directive], rows: float, *, reserve: int = 0
) -> StageLoad:
    """The stage that begins at block ``start`` with one directive per block, for ``rows`` rows per micro-batch
    on a device that keeps ``reserve`` bytes for itself."""
    stop = start + len(directives)
    costs = profile.blocks[start:stop]
    parameters = profile.unique_parameter_bytes(range(start, stop))
    buffers = sum(cost.buffer_bytes for cost in costs)
    entering = costs[0].input.at(rows) if start > 0 else 0.0
    leaving = costs[-1].output.at(rows) if stop < len(profile.blocks) else 0.0
    return StageLoad(
        static_bytes=math.ceil(parameters * (1 + profile.gradient_bytes + profile.optimizer_bytes)) + buffers + reserve,
        boundary_bytes=math.ceil(2 * entering + 2 * leaving),
        parameter_bytes=parameters,
        update_seconds=parameters * profile.optimizer_seconds,
        input_bytes=entering,
        output_bytes=leaving,
        blocks=tuple(load_block(cost, directive, rows) for cost, directive in zip(costs, directives)),
    )


def ring_bytes(count: float, members: int) -> float:
    """Bytes that each member of a ring all-reduce sends (Patarasuk and Yuan 2009): 2·(n−1)/n of the data."""
    return 2 * (members - 1) / members * count
