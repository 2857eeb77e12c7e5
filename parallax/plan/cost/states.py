"""Parameters, gradients and optimizer states of a stage on one rank: what is on the device, and what is below."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from parallax.plan.cluster import Device
from parallax.plan.plan import STATE_BUCKET_BYTES, StagePlan
from parallax.plan.profile import ModelProfile


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
    hold the blocks that visit, ``summing_bytes`` copies of gradients while replicas sum them;
    ``communicator_bytes`` are what the groups take in which they do: those that stream have one of their own. Of
    each micro-batch ``read_bytes`` come up and ``written_bytes`` go down again, which takes ``streaming_seconds``
    of the way to the tier."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    master_bytes: int
    staging_bytes: int
    summing_bytes: int
    communicator_bytes: int
    host_bytes: int
    read_bytes: int
    written_bytes: int
    streaming_seconds: float
    update_seconds: float

    @property
    def device_bytes(self) -> int:
        """All that is on the device."""
        passing = self.staging_bytes + self.summing_bytes
        return self.lasting_bytes + passing + self.communicator_bytes

    @property
    def lasting_bytes(self) -> int:
        """What is there for the whole run."""
        states = self.optimizer_bytes + self.master_bytes
        return self.parameter_bytes + self.gradient_bytes + states


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

    Optimizer states below are stepped there: their gradients go down and their parameters come up again; where the tier
    is no place to step in the states come up, those of three buckets at a time. A share is rounded up to whole
    parameters. Parameters below come up for each forward and each backward, two blocks at a time; the gradients of a
    block go down, to be added to what is there. Replicas hold one copy of the states below together, unless their
    parameters stream, and one of those on the device where they are sharded. Which of the parameters that are trained
    stream is not known here, so both sides of the way count as many as there can be.
    """
    per_byte = profile.optimizer_bytes + profile.master_bytes
    states = math.ceil(sizes.trained * per_byte)
    lower = math.floor(states * below.optimizer)
    upper = dealt(states - lower, sizes.parameter * per_byte, replicas if below.sharded else 1)
    optimizer = math.ceil(upper * _share(profile.optimizer_bytes, profile.master_bytes))
    streamed, gone, surely_gone, visiting = _streaming(profile, sizes, below)
    steps = device.swaps_to.steps
    window = visiting + (not steps) * min(lower, math.ceil(3 * STATE_BUCKET_BYTES * per_byte))
    rounding = _rounding_bytes(profile, sizes, states - lower if lower else 0, streamed, gone)
    stepped = below.optimizer * sizes.trained
    moving = max(0.0, stepped - sizes.least_trained(streamed))  # others are up and down anyway
    passing = math.ceil(_passing_bytes(profile, sizes, moving)) if steps else 0
    bucket = device.bucket_bytes if replicas > 1 else 0
    passing += _twice_bytes(profile, sizes, streamed, visiting, bucket)
    mine = lower if streamed else dealt(lower, sizes.parameter * per_byte, replicas)
    pages = (mine + streamed + gone) // 128  # every place in a store begins at one
    here = (sizes.trained - stepped) * _step_share(profile, upper / max(1, states - lower))
    return StateLoad(
        parameter_bytes=sizes.parameters - streamed,
        gradient_bytes=math.ceil(sizes.trained * profile.gradient_bytes) - surely_gone,
        optimizer_bytes=optimizer,
        master_bytes=upper - optimizer,
        staging_bytes=window,
        summing_bytes=_summing_bytes(profile, sizes, gone, bucket, split=split),
        communicator_bytes=(1 + (gone > 0)) * device.collective_bytes if replicas > 1 else 0,
        host_bytes=mine + rounding + streamed + gone + pages + passing,
        read_bytes=2 * streamed + gone,
        written_bytes=gone,
        streaming_seconds=device.read.seconds(2 * streamed + gone) + device.write.seconds(gone),
        update_seconds=_update_seconds(profile, device, here, stepped, moving),
    )


def _update_seconds(
    profile: ModelProfile, device: Device, here: float, below: float, moving: float
) -> float:
    """The step of so many bytes of parameters on the device, and of so many below, of which ``moving`` go there and
    back. What a byte takes below is known from the host's memory alone; it is not believed to be less than what was
    measured on the device."""
    byte = profile.optimizer_seconds / device.speed
    seconds = here * byte + below * max(byte, device.host_update_seconds)
    return seconds + device.write.seconds(moving) + device.read.seconds(moving)


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


def _twice_bytes(
    profile: ModelProfile, sizes: Sizes, streamed: int, visiting: int, bucket: int
) -> int:
    """What is new of a block, and of the buckets that replicas sum, is written before the old is given up."""
    whole = min(sizes.block, streamed and sizes.parameters)
    block = math.ceil(whole + sizes.most_trained(whole) * profile.gradient_bytes)
    return max(visiting, block) + (2 * bucket if streamed else 0)


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


def _share(part: float, other: float) -> float:
    return part / (part + other) if part > 0 else 0.0
