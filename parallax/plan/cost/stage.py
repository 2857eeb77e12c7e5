"""What one replica of one stage costs: seconds and bytes from a profile, for given rows and directives.

Bytes are whole: what a line through two measurements gives is rounded up. Device bytes of a rank at any time::

    static                      parameters, gradients, optimizer states, master copies, buffers, the device's reserve
  + boundary                    received and sent tensors under way; outputs that are gathered for one loss
  + Σ in flight  kept           saved activations that stay, per micro-batch between forward and backward; where
                                backwards are split, what is held until the weight half counts like them
  + offloaded and resident      bounded by the stage's swap limit
  + work                        what the running block needs for itself, recomputed activations included; or what the
                                loss of all rows needs
  + staging                     the blocks whose parameters visit the device at one time
  + summing                     copies of gradients that replicas sum, where these do not lie in buckets
  + gaps                        what the allocator loses of all that comes and goes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallax.plan.cluster import Device
from parallax.plan.plan import STATE_BUCKET_BYTES, Directive, StagePlan
from parallax.plan.profile import NOTHING, BlockCost, ModelProfile


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """One block for one micro-batch on one rank. ``recompute_seconds`` is the part of ``backward_seconds`` that runs
    the forward again, ``weight_seconds`` the part that computes gradients of parameters; ``loss_bytes`` is the part
    of ``kept_bytes`` that the loss saves. Where the weight half runs apart, ``deferred_bytes`` take the place of
    ``kept_bytes`` between the halves."""

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    weight_seconds: float
    kept_bytes: int
    loss_bytes: int
    moved_bytes: int
    forward_work: int
    backward_work: int
    deferred_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """The most that a micro-batch in flight holds."""
        return max(self.kept_bytes, self.deferred_bytes)


class OffloadFractions(NamedTuple):
    """Shares of the optimizer's states, and of parameters with their gradients, that live in the tier below.
    ``sharded``: of the states that are on the device each replica holds and steps its part, and sends what is new to
    the others."""

    optimizer: float = 0.0
    parameters: float = 0.0
    sharded: bool = False

    @classmethod
    def of(cls, stage: StagePlan) -> OffloadFractions:
        """Those of a planned stage."""
        return cls(stage.optimizer_offload, stage.parameter_offload, stage.shard_optimizer)


ALL_ON_DEVICE = OffloadFractions()
SHARDED = OffloadFractions(sharded=True)


@dataclass(frozen=True, slots=True)
class StateLoad:
    """Parameters and what training adds to them, on the device; ``host_bytes`` are in the tier below, ``staging_bytes``
    hold the blocks that visit, ``summing_bytes`` copies of gradients while replicas sum them. Of each micro-batch
    ``read_bytes`` come up and ``written_bytes`` go down again, which takes ``streaming_seconds`` of the way to the
    tier."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    master_bytes: int
    staging_bytes: int
    summing_bytes: int
    host_bytes: int
    read_bytes: int
    written_bytes: int
    streaming_seconds: float
    update_seconds: float

    @property
    def device_bytes(self) -> int:
        """All that is on the device."""
        return self.lasting_bytes + self.staging_bytes + self.summing_bytes

    @property
    def lasting_bytes(self) -> int:
        """What is there for the whole run."""
        states = self.optimizer_bytes + self.master_bytes
        return self.parameter_bytes + self.gradient_bytes + states


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One stage on one rank: seconds and bytes that do not depend on the schedule. ``parameter_bytes``, and the
    ``trained_bytes`` of them that have gradients, count those in the tier below, too. ``gathered_bytes`` are sent among
    the replicas of the last stage before the loss of all rows, which takes ``gathered_seconds`` once in a step."""

    parameter_bytes: int
    trained_bytes: int
    states: StateLoad
    buffer_bytes: int
    reserve_bytes: int
    boundary_bytes: int
    gap_share: float
    input_bytes: float
    output_bytes: float
    blocks: tuple[BlockLoad, ...]
    gathered_bytes: int = 0
    gathered_seconds: float = 0.0

    @property
    def host_state_bytes(self) -> int:
        """Optimizer states, master copies, parameters and gradients in the tier below."""
        return self.states.host_bytes

    @property
    def update_seconds(self) -> float:
        """The optimizer's step."""
        return self.states.update_seconds

    @property
    def static_bytes(self) -> int:
        """What is there for the whole step."""
        return self.states.device_bytes + self.buffer_bytes + self.reserve_bytes

    @property
    def compute_seconds(self) -> float:
        """Forward and backward of one micro-batch, recomputation included."""
        return sum(block.forward_seconds + block.backward_seconds for block in self.blocks)

    @property
    def kept_bytes(self) -> int:
        """What one micro-batch in flight holds on the device at most."""
        return sum(block.held_bytes for block in self.blocks)

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

    def memory(self, in_flight: int, swap_limit: int) -> dict[str, int]:
        """Device bytes of the rank by term, with ``in_flight`` micro-batches between forward and backward."""
        loss = in_flight * sum(block.loss_bytes for block in self.blocks)
        passing = {
            "activations": in_flight * self.kept_bytes - loss,
            "loss": loss,
            "swap": swap_limit,
            "boundary": self.boundary_bytes,
            "workspace": self.work_bytes,
        }
        return {
            "parameters": self.states.parameter_bytes,
            "gradients": self.states.gradient_bytes,
            "optimizer": self.states.optimizer_bytes,
            "master": self.states.master_bytes,
            "staging": self.states.staging_bytes,
            "summing": self.states.summing_bytes,
            "buffers": self.buffer_bytes,
            **passing,
            "allocator": math.ceil(self.gap_share * sum(passing.values())),
            "reserve": self.reserve_bytes,
        }

    def peak_bytes(self, in_flight: int, swap_limit: int) -> int:
        """An upper bound on the device bytes of the rank: the sum of :meth:`memory`."""
        passing = self.boundary_bytes + self.work_bytes + in_flight * self.kept_bytes + swap_limit
        return self.static_bytes + passing + math.ceil(self.gap_share * passing)


def load_block(
    cost: BlockCost, directive: Directive, rows: float, *, speed: float = 1.0, split: bool = False
) -> BlockLoad:
    """One block under one directive, on a device of a ``speed`` relative to the profile's. Where backwards are
    ``split``, a block that keeps its activations runs its weight half apart."""
    saved, stays = math.ceil(cost.moved.at(rows)), math.ceil(cost.stays.at(rows))
    forward = cost.forward_seconds.at(rows) / speed
    backward = cost.backward_seconds.at(rows) / speed
    kept, moved, again = saved + stays, 0, 0.0
    forward_work = math.ceil(cost.forward_work.at(rows) + cost.output.at(rows))
    backward_work = math.ceil(cost.backward_work.at(rows) + cost.output.at(rows))
    if directive is Directive.OFFLOAD:
        # What has been written is free only when the block's own variables let go of it, at the block's end.
        kept, moved = stays, saved
        forward_work += saved
        slower = cost.offload_seconds.at(rows) / speed / 2
        forward, backward = forward + slower, backward + slower
    elif directive is Directive.RECOMPUTE:
        kept = math.ceil(cost.input.at(rows))
        forward_work += saved + stays
        backward_work += saved + stays
        again = max(0.0, forward - cost.skipped_seconds.at(rows) / speed)
    deferred = 0
    if split:  # under every directive: nothing is offloaded to save what splitting costs
        backward += cost.split_seconds.at(rows) / speed
    if split and directive is Directive.KEEP:
        unknown = cost.deferred == NOTHING and cost.weight_seconds != NOTHING
        deferred = saved + stays if unknown else math.ceil(cost.deferred.at(rows))
        backward_work = max(
            backward_work, math.ceil(cost.split_work.at(rows) + cost.output.at(rows))
        )
    loss = math.ceil(cost.by_loss.at(rows))
    return BlockLoad(
        forward_seconds=forward,
        backward_seconds=backward + again,
        recompute_seconds=again,
        weight_seconds=min(backward, cost.weight_seconds.at(rows) / speed),
        kept_bytes=kept + loss,
        loss_bytes=loss,
        moved_bytes=moved,
        forward_work=max(forward_work, cost.gathered_work),  # the loss follows the last forward
        backward_work=backward_work,
        deferred_bytes=deferred,
    )


def load_stage(
    profile: ModelProfile,
    start: int,
    directives: Sequence[Directive],
    rows: float,
    *,
    device: Device,
    below: OffloadFractions = ALL_ON_DEVICE,
    replicas: int = 1,
    split: bool = False,
    inputs_ahead: bool = False,
) -> StageLoad:
    """The stage that begins at block ``start`` with one directive per block, for ``rows`` rows per micro-batch on
    ``device``, which is that of one of ``replicas``. ``below`` is where its states live; ``split`` says whether the
    schedule runs weight halves apart, ``inputs_ahead`` whether the model's inputs come a micro-batch early."""
    stop = start + len(directives)
    costs = profile.blocks[start:stop]
    given = costs[0].input.at(rows)
    entering, ahead = given if start > 0 else 0.0, given if inputs_ahead else 0.0
    leaving = costs[-1].output.at(rows) if stop < len(profile.blocks) else 0.0
    sizes = Sizes.of(profile, start, stop)
    return StageLoad(
        parameter_bytes=sizes.parameters,
        trained_bytes=sizes.trained,
        states=load_states(profile, sizes, device, below, replicas, split=split),
        buffer_bytes=sum(cost.buffer_bytes for cost in costs),
        reserve_bytes=device.reserve_bytes
        + gap_bytes(device, max(cost.input.at(rows) for cost in costs)),
        boundary_bytes=math.ceil(2 * (entering + leaving) + ahead) + costs[-1].gathered_bytes,
        gap_share=device.gap_share,
        input_bytes=entering,
        output_bytes=leaving,
        blocks=tuple(
            load_block(cost, directive, rows, speed=device.speed, split=split)
            for cost, directive in zip(costs, directives)
        ),
        gathered_bytes=costs[-1].gathered_bytes,
        gathered_seconds=costs[-1].gathered_seconds / device.speed,
    )


def load_planned(
    profile: ModelProfile, stage: StagePlan, rows: float, *, device: Device, split: bool
) -> StageLoad:
    """A stage of a plan."""
    return load_stage(
        profile,
        stage.start,
        stage.directives,
        rows,
        device=device,
        below=OffloadFractions.of(stage),
        replicas=stage.replicas,
        split=split,
        inputs_ahead=stage.inputs_ahead,
    )


class Sizes(NamedTuple):
    """Bytes of a stage's parameters, of those of its largest block, of the largest parameter that is trained, and of
    all that are."""

    parameters: int
    block: int
    parameter: int
    trained: int

    @classmethod
    def of(cls, profile: ModelProfile, start: int, stop: int) -> Sizes:
        """Those of the blocks ``start`` to ``stop``."""
        costs, blocks = profile.blocks[start:stop], range(start, stop)
        return cls(
            profile.unique_parameter_bytes(blocks),
            max(cost.parameter_bytes for cost in costs),
            max(cost.largest_parameter_bytes for cost in costs),
            profile.unique_trained_bytes(blocks),
        )

    def most_trained(self, part: int) -> int:
        """The most bytes that are trained among ``part`` of the parameters' bytes: which these are is not said."""
        return min(part, self.trained)

    def least_trained(self, part: int) -> int:
        """The fewest."""
        return max(0, part - (self.parameters - self.trained))


def load_states(
    profile: ModelProfile,
    sizes: Sizes,
    device: Device,
    below: OffloadFractions = ALL_ON_DEVICE,
    replicas: int = 1,
    *,
    split: bool = False,
) -> StateLoad:
    """Parameters of these ``sizes`` in training, on one of ``replicas``; ``split`` says that backwards are.

    Optimizer states below are stepped there: their gradients go down and their parameters come up again. Where the tier
    is no place to step in they come up to be stepped, those of three buckets at a time. A share is rounded up to whole
    parameters. Parameters below come up for each forward and each backward, two blocks at a time, the one that runs and
    the next; the gradients of a block go down, where those of all micro-batches are summed: what is there comes up to
    be added to. Replicas hold one copy of the states below together, unless their parameters stream, and one copy of
    those on the device where they are sharded. Gradients and states are those of parameters that are trained; which
    of these stream is not known here, so both sides of the way count as many as there can be.
    """
    per_byte = profile.optimizer_bytes + profile.master_bytes
    states = math.ceil(sizes.trained * per_byte)
    lower = math.floor(states * below.optimizer)
    upper = dealt(states - lower, sizes.parameter * per_byte, replicas if below.sharded else 1)
    optimizer = math.ceil(upper * _share(profile.optimizer_bytes, profile.master_bytes))
    streamed, gone, surely_gone, visiting = _streaming(profile, sizes, below)
    window = visiting
    if not device.swaps_to.steps:
        window += min(lower, math.ceil(3 * STATE_BUCKET_BYTES * per_byte))
    rounding = _rounding_bytes(profile, sizes, states - lower if lower else 0, streamed, gone)
    stepped = below.optimizer * sizes.trained
    moving = max(0.0, stepped - sizes.least_trained(streamed))  # others are up and down anyway
    passing = math.ceil(_passing_bytes(profile, sizes, moving)) if device.swaps_to.steps else 0
    passing += max(visiting, _twice_bytes(profile, sizes, streamed))
    bucket = device.bucket_bytes if replicas > 1 else 0
    # The sums are written before what was there is given up.
    passing += 2 * bucket if streamed else 0
    mine = lower if streamed else dealt(lower, sizes.parameter * per_byte, replicas)
    pages = (mine + streamed + gone) // 128  # every place in a store begins at one
    on_device = (sizes.trained - stepped) * _step_share(profile, upper / max(1, states - lower))
    update = on_device * profile.optimizer_seconds / device.speed
    update += stepped * device.host_update_seconds
    return StateLoad(
        parameter_bytes=sizes.parameters - streamed,
        gradient_bytes=math.ceil(sizes.trained * profile.gradient_bytes) - surely_gone,
        optimizer_bytes=optimizer,
        master_bytes=upper - optimizer,
        staging_bytes=window,
        summing_bytes=_summing_bytes(profile, sizes, gone, bucket, split=split),
        host_bytes=mine + rounding + streamed + gone + pages + passing,
        read_bytes=2 * streamed + gone,
        written_bytes=gone,
        streaming_seconds=device.read.seconds(2 * streamed + gone) + device.write.seconds(gone),
        update_seconds=update + device.write.seconds(moving) + device.read.seconds(moving),
    )


def _streaming(
    profile: ModelProfile, sizes: Sizes, below: OffloadFractions
) -> tuple[int, int, int, int]:
    """Bytes of parameters that stream, the most and the fewest bytes of gradients that go with them, and what of both
    is on the device at one time."""
    streamed = math.floor(sizes.parameters * below.parameters)
    gone = math.floor(sizes.most_trained(streamed) * profile.gradient_bytes)
    surely_gone = math.floor(sizes.least_trained(streamed) * profile.gradient_bytes)
    largest = sizes.block
    visiting = math.ceil(min(streamed, 2 * largest) + min(gone, largest * profile.gradient_bytes))
    return streamed, gone, surely_gone, visiting


def _summing_bytes(
    profile: ModelProfile, sizes: Sizes, gone: int, bucket: int, *, split: bool
) -> int:
    """Two buckets on their way, of the gradients that stream, and where backwards are split of the others, of which
    none is cut. Elsewhere gradients lie in buckets."""
    whole = math.ceil(sizes.trained * profile.gradient_bytes)
    going = min(whole, gone + math.ceil(sizes.block * profile.gradient_bytes)) if gone else 0
    largest = bucket + math.ceil(sizes.parameter * profile.gradient_bytes) if bucket else 0
    return 2 * min(bucket, going) + (2 * min(largest, whole) if split else 0)


def _passing_bytes(profile: ModelProfile, sizes: Sizes, moving: float) -> float:
    """Weights and gradients of ``moving`` parameter bytes pass through a place in host memory; the weights that are
    stepped are copies."""
    copies = 1 if profile.master_bytes else 2
    return copies * min(sizes.trained, moving + (sizes.block if moving else 0))


def _twice_bytes(profile: ModelProfile, sizes: Sizes, streamed: int) -> int:
    """What is new of a block is written before the old is given up."""
    whole = min(sizes.block, streamed and sizes.parameters)
    return math.ceil(whole + sizes.most_trained(whole) * profile.gradient_bytes)


def _rounding_bytes(
    profile: ModelProfile, sizes: Sizes, upper: int, streamed: int, gone: int
) -> int:
    """What shares that are rounded up to whole parameters may add below: of ``upper`` bytes of states that would stay
    on the device, and of the parameters and gradients beside those that stream."""
    per_byte = profile.optimizer_bytes + profile.master_bytes
    rounding = min(upper, math.ceil(sizes.block * per_byte))
    if streamed:
        whole = math.ceil(sizes.parameters + sizes.trained * profile.gradient_bytes)
        block = sizes.block + sizes.most_trained(sizes.block) * profile.gradient_bytes
        rounding += min(whole - streamed - gone, math.ceil(block))
    return rounding


def dealt(states: int, largest: float, replicas: int) -> int:
    """The most of ``states`` that one of ``replicas`` gets: parameters are dealt out to whoever has least."""
    return min(states, math.ceil(states / replicas + largest * (1 - 1 / replicas)))


def _step_share(profile: ModelProfile, share: float) -> float:
    """How much of a step is left where only a ``share`` of the parameters is stepped: gradients are cleared, measured
    and clipped all the same, which takes as long as moving four times their bytes. A step moves weight, gradient and
    states, and all but the gradient back."""
    stepping = 3 + 2 * profile.optimizer_bytes
    return (4 + stepping * share) / (4 + stepping)


def gap_bytes(device: Device, tensor_bytes: float) -> int:
    """What the allocator holds and nobody uses where tensors of ``tensor_bytes`` go from block to block."""
    return math.ceil(device.gap_tensors * tensor_bytes)


def _share(part: float, other: float) -> float:
    return part / (part + other) if part > 0 else 0.0
