"""Compute the bytes of parameters, gradients and optimizer states of a stage on one rank, on the device and
offloaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallax.plan.cluster import Device
from parallax.plan.plan import (
    EACH_MICRO_BATCH,
    STATE_BUCKET_BYTES,
    UPDATE_BUCKET_BYTES,
    StagePlan,
    Visits,
)
from parallax.plan.profile import ModelProfile


class OffloadFractions(NamedTuple):
    """The fractions of the optimizer states, and of the parameters with their gradients, that are offloaded.

    With ``sharded``, each replica holds and steps only a shard of the states on the device, and broadcasts the
    parameters that it has stepped.
    """

    optimizer: float = 0.0
    parameters: float = 0.0
    sharded: bool = False

    @classmethod
    def of(cls, stage: StagePlan) -> OffloadFractions:
        return cls(stage.optimizer_offload, stage.parameter_offload, stage.shard_optimizer)


# Seconds of adding a gradient to a stored one and of its norm, relative to those of AdamW's step: four passes over the
# memory of a parameter where the step makes seven.
ADDING = 4 / 7

ALL_ON_DEVICE = OffloadFractions()
SHARDED = OffloadFractions(sharded=True)


@dataclass(frozen=True, slots=True)
class StateLoad:
    """The bytes of a stage's parameters, gradients and optimizer states on one rank, and the seconds to move and step
    them.

    On the device for the whole run:

    ``parameter_bytes``     parameters, and those of two bytes with which the next step computes, if it precedes the
                            update; in full precision, these are states
    ``gradient_bytes``      gradients
    ``optimizer_bytes``     optimizer states
    ``master_bytes``        full-precision copies of parameters
    ``communicator_bytes``  process groups in which replicas sum gradients; offloaded gradients have a group of their
                            own

    On the device for a part of the step:

    ``exchange_bytes``      copies of the fragments of weights that are exchanged while local steps run
    ``staging_bytes``       blocks fetched from the tier, and gradients that are widened beside tensors of the next step
    ``summing_bytes``       copies of gradients while replicas sum them; for asynchronous replicas, the sums of all
                            updates that may have begun, and the weights that are being sent
    ``most_staging_bytes``  upper bound on ``staging_bytes`` for all stages of a rank together: the largest of any stage
    ``most_summing_bytes``  upper bound on ``summing_bytes`` for all stages of a rank together

    In the offload tier, and on the link to it:

    ``host_bytes``         bytes in the tier
    ``read_bytes``         bytes fetched by each pass of a micro-batch
    ``written_bytes``      bytes written by the backward of a micro-batch
    ``streaming_seconds``  seconds of these transfers, per micro-batch
    ``adding_seconds``     seconds per micro-batch for which the backward waits to add gradients to stored ones
    ``update_seconds``     seconds of the optimizer's step after the last micro-batch
    ``ahead_seconds``      seconds of fetching and writing states while the next forward runs; 0 if the tier can step
                           states in place
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    master_bytes: int
    exchange_bytes: int
    staging_bytes: int
    most_staging_bytes: int
    summing_bytes: int
    most_summing_bytes: float
    communicator_bytes: int
    host_bytes: int
    read_bytes: int
    written_bytes: int
    streaming_seconds: float
    adding_seconds: float
    update_seconds: float
    ahead_seconds: float

    @property
    def device_bytes(self) -> int:
        passing = self.staging_bytes + self.summing_bytes + self.exchange_bytes
        return self.lasting_bytes + passing + self.communicator_bytes

    @property
    def lasting_bytes(self) -> int:
        """Return the bytes that are on the device for the whole run."""
        states = self.optimizer_bytes + self.master_bytes
        return self.parameter_bytes + self.gradient_bytes + states


class Sizes(NamedTuple):
    """Bytes of a stage's parameters. A parameter can be offloaded unless several blocks use it.

    ``parameters``           all parameters
    ``block``                parameters of the largest block
    ``parameter``            the largest trained parameter
    ``trained``              all trained parameters
    ``offloadable``          all parameters that can be offloaded
    ``offloadable_trained``  all trained parameters that can be offloaded
    ``offloadable_block``    the parameters of one block that can be offloaded, for the largest such block
    """

    parameters: int
    block: int
    parameter: int
    trained: int
    offloadable: int
    offloadable_trained: int
    offloadable_block: int

    @classmethod
    def of(cls, profile: ModelProfile, start: int, stop: int) -> Sizes:
        """Return the sizes of the blocks ``start`` to ``stop`` - 1."""
        costs, blocks = profile.blocks[start:stop], range(start, stop)
        parameters = profile.unique_parameter_bytes(blocks)
        trained = profile.unique_trained_bytes(blocks)
        return cls(
            parameters,
            max(cost.parameter_bytes for cost in costs),
            max(cost.largest_parameter_bytes for cost in costs),
            trained,
            parameters - tied_bytes(profile.shared, start, stop),
            trained - tied_bytes(profile.ties, start, stop),
            max(
                cost.parameter_bytes - tied_bytes(profile.shared, index, index + 1)
                for index, cost in zip(blocks, costs)
            ),
        )

    def offloaded(self, share: float) -> int:
        """Return the offloaded bytes if a fraction ``share`` of the parameters that can be offloaded is offloaded."""
        return math.floor(self.offloadable * share)

    def most_trained(self, part: int) -> int:
        """Return an upper bound on the bytes of trained parameters among ``part`` bytes of parameters that can be
        offloaded."""
        return min(part, self.offloadable_trained)

    def least_trained(self, part: int) -> int:
        return max(0, part - (self.offloadable - self.offloadable_trained))


def tied_bytes(ties: Sequence[tuple[int, tuple[int, ...]]], start: int, stop: int) -> int:
    """Return the bytes of the parameters that several blocks share and that the blocks ``start`` to ``stop`` − 1 use.

    ``ties`` has, for each shared parameter, its bytes and the indices of its blocks.
    """
    return sum(size for size, users in ties if any(start <= user < stop for user in users))


def load_states(
    profile: ModelProfile,
    sizes: Sizes,
    device: Device,
    offload: OffloadFractions = ALL_ON_DEVICE,
    replicas: int = 1,
    *,
    split: bool = False,
    visits: Visits = EACH_MICRO_BATCH,
) -> StateLoad:
    """Return the bytes and seconds of parameters of these ``sizes`` in training, on one of ``replicas`` replicas.

    ``split``: the schedule splits backwards. ``visits``: how often each block runs in a step. Offloaded optimizer
    states are stepped in the tier: gradients are written there, and parameters are read back. If the tier cannot step,
    the states of three buckets at a time are fetched instead. Offloaded parameters are fetched for each pass, two
    blocks at a time, and their gradients are added to those in the tier. Replicas together hold one copy of offloaded
    states, unless the parameters are offloaded too or replicas take local steps, and one copy of resident states if
    these are sharded. Which parameters are offloaded is unknown, so bytes on device and in tier are upper bounds.
    """
    per_byte, sets = profile.optimizer_bytes + profile.master_bytes, 1 + visits.accumulates
    following, widened = _following_bytes(profile, sizes, visits)
    states = math.ceil(sizes.trained * per_byte)
    lower = math.floor(states * offload.optimizer)
    together, largest = profile.summing(replicas), sizes.parameter * per_byte
    upper = shard_bytes(states - lower, largest, together if offload.sharded else 1)
    optimizer = math.ceil(upper * _share(profile.optimizer_bytes, profile.master_bytes))
    streamed, gone, surely_gone = _offloaded_bytes(profile, sizes, offload)
    visiting, window = _fetched_bytes(profile, sizes, streamed, gone, visits)
    steps = device.swaps_to.steps
    fetched = 0 if steps else math.ceil(3 * _state_bucket_bytes(profile, sizes) * per_byte)
    rounding = _rounding_bytes(profile, sizes, states - lower if lower else 0, streamed, gone)
    stepped = offload.optimizer * sizes.trained
    moving = max(0.0, stepped - sizes.least_trained(streamed))  # offloaded ones move anyway
    bucket = device.bucket_bytes if together > 1 else 0
    passing = _rewriting_bytes(profile, sizes, streamed, visiting, bucket)
    passing += steps * _copied_bytes(profile, sizes, moving, stepped)
    mine = lower if streamed else shard_bytes(lower, largest, together)
    pages = (mine + streamed + gone) // 128  # every allocation in a store starts at a page
    here = (sizes.trained - stepped) * _step_share(profile, upper / max(1, states - lower))
    streaming = device.read.seconds((1 + visits.backward) * streamed) + device.write.seconds(gone)
    return StateLoad(
        parameter_bytes=sizes.parameters - streamed + following,
        gradient_bytes=sets * math.ceil(sizes.trained * profile.gradient_bytes) - surely_gone,
        optimizer_bytes=optimizer,
        master_bytes=upper - optimizer,
        exchange_bytes=_exchange_bytes(profile, sizes.trained - stepped * steps),
        staging_bytes=visiting + min(lower, fetched) + widened,
        most_staging_bytes=window + fetched + widened,
        summing_bytes=_summing_bytes(profile, sizes, gone, bucket, split=split)
        + _owner_bytes(profile, sizes, device, replicas),
        most_summing_bytes=math.inf if split or profile.staleness else 2 * bucket,
        communicator_bytes=_groups(replicas, together, gone) * device.collective_bytes,
        host_bytes=mine + rounding + streamed + gone + pages + passing,
        read_bytes=math.ceil(streamed / visits.micro_batches),
        written_bytes=math.ceil(gone / visits.micro_batches),
        streaming_seconds=streaming / visits.micro_batches,
        adding_seconds=_adding_seconds(profile, device, gone * visits.again) / visits.micro_batches,
        update_seconds=_update_seconds(profile, device, here, stepped, moving),
        ahead_seconds=_ahead_seconds(profile, device, stepped, stepped - moving),
    )


def _following_bytes(profile: ModelProfile, sizes: Sizes, visits: Visits) -> tuple[int, int]:
    """Return the bytes of weights of two bytes with which the next step computes, and of the gradients that an update
    widens at a time, while tensors of the next step are on the device. Both are 0 if no pass precedes the update, or in
    full precision."""
    if not (visits.continues and profile.master_bytes):
        return 0, 0
    bucket = max(UPDATE_BUCKET_BYTES, 0 if profile.divides else sizes.parameter)
    return sizes.trained, math.ceil(min(sizes.trained, bucket) * profile.master_bytes)


def _copied_bytes(profile: ModelProfile, sizes: Sizes, moving: float, stepped: float) -> int:
    """Return the bytes of host memory for copies of weights and gradients, in addition to the optimizer states.

    The host steps ``stepped`` bytes of parameters, of which ``moving`` bytes are copied from the device and back.
    """
    staged = math.ceil(_host_staging_bytes(profile, sizes, moving))
    return staged + _exchange_bytes(profile, stepped)


def _exchange_bytes(profile: ModelProfile, trained: float) -> int:
    """Return an upper bound on the bytes of the copies that are exchanged while local steps run, for ``trained``
    bytes of trained parameters, which are consecutive in the model.

    An exchange holds a copy of the fragment's weights and their mean, with the buffers in which both are sent. Each
    parameter is added to the smallest fragment, so fragments differ by at most the largest parameter of the model, and
    their shares of consecutive parameters by at most twice as much.
    """
    if not profile.fragment_delay:
        return 0
    count = profile.fragments
    under_way = min(count, math.ceil(profile.fragment_delay / (profile.local_steps // count)))
    largest = max(cost.largest_parameter_bytes for cost in profile.blocks)
    held = min(trained, under_way * (trained / count + 2 * largest))
    wide, sent = max(1.0, profile.master_bytes), profile.synced_bytes
    copies = 2 * wide + (sent if sent < wide else 0.0) + (1.5 * wide if profile.local_groups else 0)
    return math.ceil(held * copies)


def _groups(replicas: int, together: int, gone: int) -> int:
    """Return the number of process groups in which a replica exchanges gradients and weights with others.

    ``together`` of the ``replicas`` replicas sum gradients with each other. ``gone`` is the bytes of offloaded
    gradients.
    """
    if replicas == 1:
        return 0
    return 1 + (gone > 0 and together > 1) + (1 < together < replicas)


def _state_bucket_bytes(profile: ModelProfile, sizes: Sizes) -> int:
    """Return the largest number of bytes of parameters whose states are fetched to the device at one time."""
    return max(STATE_BUCKET_BYTES, 0 if profile.divides else sizes.parameter)


def _update_seconds(
    profile: ModelProfile, device: Device, here: float, offloaded: float, moving: float
) -> float:
    """Return the seconds of an optimizer step.

    ``here``       bytes of parameters whose states are stepped on the device
    ``offloaded``  bytes of parameters whose states are offloaded
    ``moving``     bytes of parameters that are copied to the tier and back, if the tier can step states

    The host optimizer's seconds per byte are at least those of the device. The host's step counts in full although it
    overlaps with the next forward, because that forward may keep the host's cores busy.
    """
    byte = profile.optimizer_seconds / device.speed
    seconds = here * byte + offloaded * max(byte, device.host_update_seconds)
    if device.swaps_to.steps:
        seconds += device.write.seconds(moving) + device.read.seconds(moving)
    return seconds


def _ahead_seconds(
    profile: ModelProfile, device: Device, offloaded: float, streamed: float
) -> float:
    """Return the seconds in which offloaded states are read and written for one step.

    The result is 0 if the tier steps states in place. ``offloaded`` is the bytes of parameters whose states are
    offloaded. For ``streamed`` bytes of these parameters, the parameters are offloaded as well: their gradients are
    read and their weights are written. Their weights are also read if there are no full-precision master copies.
    """
    if device.swaps_to.steps:
        return 0.0
    states = offloaded * (profile.optimizer_bytes + profile.master_bytes)
    weights = 0.0 if profile.master_bytes else streamed
    read = states + weights + streamed * profile.gradient_bytes
    return device.read.seconds(read) + device.write.seconds(states + streamed)


def _adding_seconds(profile: ModelProfile, device: Device, gone: int) -> float:
    """Return the seconds of reading ``gone`` bytes of stored gradients and adding new gradients to them."""
    return device.read.seconds(gone) + ADDING * gone * profile.optimizer_seconds / device.speed


def _fetched_bytes(
    profile: ModelProfile, sizes: Sizes, streamed: int, gone: int, visits: Visits
) -> tuple[int, int]:
    """Return the device bytes of fetched blocks for this stage, and an upper bound for a rank with several such stages.

    The stage has ``streamed`` bytes of offloaded parameters with ``gone`` bytes of gradients. If a block computes
    several micro-batches in a row, the largest gradient counts twice: once for the new gradient, and once for the sum
    that stays on the device.
    """
    block = sizes.offloadable_block
    twice = math.ceil(sizes.parameter * profile.gradient_bytes) * (visits.micro_batches > 1)
    mine = math.ceil(min(streamed, 2 * block) + min(gone, block * profile.gradient_bytes))
    return mine + (twice if streamed else 0), math.ceil(
        block * (2 + profile.gradient_bytes)
    ) + twice


def _offloaded_bytes(
    profile: ModelProfile, sizes: Sizes, offload: OffloadFractions
) -> tuple[int, int, int]:
    """Return three numbers of bytes: the offloaded parameters, and an upper and a lower bound on their gradients."""
    streamed = sizes.offloaded(offload.parameters)
    gone = math.floor(sizes.most_trained(streamed) * profile.gradient_bytes)
    surely_gone = math.floor(sizes.least_trained(streamed) * profile.gradient_bytes)
    return streamed, gone, surely_gone


def _summing_bytes(
    profile: ModelProfile, sizes: Sizes, gone: int, bucket: int, *, split: bool
) -> int:
    """Return the bytes of the buckets in which replicas reduce gradients.

    ``bucket`` is the bytes of one bucket. Offloaded gradients, of which the stage has ``gone`` bytes, use two buckets.
    With ``split`` backwards, gradients that stay on the device use two more buckets, each larger by one parameter,
    because no parameter is divided between buckets. Without split backwards, gradients that stay on the device are
    views of their buckets and need no copies.
    """
    whole = math.ceil(sizes.trained * profile.gradient_bytes)
    going = min(whole, gone + math.ceil(sizes.block * profile.gradient_bytes)) if gone else 0
    largest = bucket + math.ceil(sizes.parameter * profile.gradient_bytes) if bucket else 0
    return 2 * min(bucket, going) + (2 * min(largest, whole) if split else 0)


def _owner_bytes(profile: ModelProfile, sizes: Sizes, device: Device, replicas: int) -> int:
    """Return the additional device bytes of the owner of the state that asynchronous replicas share: a sum of gradients
    for each update that may have begun, which is one more than the staleness, the gradients that it is receiving from
    each other replica, and a copy of the weights.

    The result is 0 for accelerators, because these bytes are then in host memory, which is not counted.
    """
    if not profile.staleness or replicas == 1 or device.kind != "cpu":
        return 0
    copies = (profile.staleness + replicas) * profile.gradient_bytes + 1
    return math.ceil(copies * sizes.trained)


def _host_staging_bytes(profile: ModelProfile, sizes: Sizes, moving: float) -> float:
    """Return the bytes of host memory for copies of weights and gradients if the host steps ``moving`` bytes of
    parameters."""
    copies = 1 if profile.master_bytes else 2
    return copies * min(sizes.trained, moving + (sizes.block if moving else 0))


def _rewriting_bytes(
    profile: ModelProfile, sizes: Sizes, streamed: int, visiting: int, bucket: int
) -> int:
    """Return the additional bytes in the offload tier because new data is written before old data is freed.

    These are the bytes of one block or, if larger, ``visiting``: the bytes of parameters and gradients that are on the
    device at one time. If the stage has offloaded parameters (``streamed`` bytes), the two buckets of ``bucket`` bytes
    in which replicas sum gradients are added.
    """
    whole = min(sizes.offloadable_block, streamed and sizes.offloadable)
    block = math.ceil(whole + sizes.most_trained(whole) * profile.gradient_bytes)
    return max(visiting, block) + (2 * bucket if streamed else 0)


def _rounding_bytes(
    profile: ModelProfile, sizes: Sizes, upper: int, streamed: int, gone: int
) -> int:
    """Return the additional bytes in the offload tier because offloaded shares are rounded up to whole parameters or
    blocks.

    At most the states of one block are added. If the stage has ``streamed`` bytes of offloaded parameters, with
    ``gone`` bytes of gradients, at most one further block of parameters and gradients is added. ``upper`` is the bytes
    of the states that are not offloaded, which limits the rounding of states.
    """
    per_byte = profile.optimizer_bytes + profile.master_bytes
    rounding = min(upper, math.ceil(sizes.block * per_byte))
    if streamed:
        whole = math.ceil(sizes.offloadable + sizes.offloadable_trained * profile.gradient_bytes)
        block = sizes.offloadable_block
        gradients = sizes.most_trained(block) * profile.gradient_bytes
        rounding += min(whole - streamed - gone, math.ceil(block + gradients))
    return rounding


def shard_bytes(states: int, largest: float, replicas: int) -> int:
    """Return the most bytes of ``states`` that one of ``replicas`` shards can hold.

    Each parameter is assigned to the shard that is smallest so far; ``largest`` is the largest parameter.
    """
    return min(states, math.ceil(states / replicas + largest * (1 - 1 / replicas)))


def _step_share(profile: ModelProfile, share: float) -> float:
    """Return the seconds of an optimizer step on a fraction ``share`` of the parameters, as a fraction of those of a
    full step.

    The seconds are proportional to bytes of memory traffic. To clear, measure and clip the gradients moves four times
    the bytes of all gradients, whatever the share is. The step itself reads weight, gradient and states, and writes
    weight and states.
    """
    stepping = 3 + 2 * profile.optimizer_bytes
    return (4 + stepping * share) / (4 + stepping)


def _share(part: float, other: float) -> float:
    return part / (part + other) if part > 0 else 0.0
