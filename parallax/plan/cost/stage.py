"""Compute the seconds and bytes of one replica of one stage from a profile, for given rows and directives.

A directive says whether a block keeps, offloads or recomputes its activations. Bytes are rounded up to whole numbers.
Device bytes of a rank at any time::

    static                      parameters, gradients, optimizer states, master copies, buffers, the device's reserve,
                                its context, the process groups of its replicas, and the connections to other stages
  + boundary                    received and sent tensors in transit; outputs that are gathered for one loss
  + Σ in flight  kept           resident saved activations, per micro-batch between forward and backward. With split
                                backwards this includes the bytes held until the weight-gradient pass.
  + offloaded and resident      activations to be offloaded or prefetched; bounded by the stage's swap limit
  + work                        workspace of the running block, with recomputed activations; or of the loss of all rows
  + staging                     the blocks whose offloaded parameters are on the device at one time
  + summing                     copies of gradients that replicas sum, unless the gradients are views of buckets
  + gaps                        bytes that the allocator loses to gaps, beside all transient bytes (:class:`Gaps`)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from parallax.plan.cluster import Device
from parallax.plan.cost.allocator import Gaps
from parallax.plan.cost.communicators import Beside, connection_bytes
from parallax.plan.cost.states import ALL_ON_DEVICE, OffloadFractions, Sizes, StateLoad, load_states
from parallax.plan.plan import EACH_MICRO_BATCH, Directive, StagePlan, Visits
from parallax.plan.profile import NOTHING, BlockCost, ModelProfile


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """The cost of one block for one micro-batch on one rank.

    ``recompute_seconds``  the part of ``backward_seconds`` that runs the forward again
    ``weight_seconds``     the part of ``backward_seconds`` that computes gradients of parameters
    ``kept_bytes``         saved activations that stay on the device
    ``loss_bytes``         the part of ``kept_bytes`` that the loss saves
    ``moved_bytes``        saved activations that are offloaded
    ``shared_bytes``       the part of ``moved_bytes`` that the block before offloads
    ``forward_work``       workspace of the forward
    ``backward_work``      workspace of the backward
    ``forward_exchange``   the part of ``forward_seconds`` that waits for statistics of other replicas
    ``backward_exchange``  the part of ``backward_seconds`` that waits for them
    ``deferred_bytes``     bytes held between the input-gradient and the weight-gradient pass, in place of
                           ``kept_bytes``
    ``trained_bytes``      bytes of the block's trained parameters
    """

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
    trained_bytes: int = 0
    forward_exchange: float = 0.0
    backward_exchange: float = 0.0
    shared_bytes: int = 0

    @property
    def transferred_bytes(self) -> int:
        """Return the bytes that are written for this block alone."""
        return self.moved_bytes - self.shared_bytes

    @property
    def held_bytes(self) -> int:
        """Return the largest number of bytes that one in-flight micro-batch holds."""
        return max(self.kept_bytes, self.deferred_bytes)


# Terms that a rank with several stages counts once: its stages run one at a time.
ONCE = ("workspace", "reserve", "context", "communicators")
PASSING = ("activations", "loss", "swap", "boundary", "workspace")  # transient bytes


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The costs of one stage on one rank that do not depend on the schedule.

    ``parameter_bytes``   all parameters, offloaded ones included
    ``trained_bytes``     parameters that have a gradient
    ``boundary_bytes``    tensors in transit from and to other stages, inputs copied ahead, and outputs that are
                          gathered for one loss
    ``passed_bytes``      a part of ``boundary_bytes``. A rank with several stages holds this part for only one stage at
                          a time, so only the largest of its stages counts.
    ``input_bytes``       bytes of the stage's input for one micro-batch; 0 for the first stage
    ``output_bytes``      bytes of the stage's output for one micro-batch; 0 for the last stage
    ``gathered_bytes``    outputs that the replicas of the last stage exchange for a loss over all rows
    ``gathered_seconds``  seconds of that loss, once per step
    ``first_seconds``     seconds of the first forwards of a step: each block runs the micro-batches of its first visit
                          (:class:`~parallax.plan.plan.Visits`)
    """

    parameter_bytes: int
    trained_bytes: int
    states: StateLoad
    buffer_bytes: int
    reserve_bytes: int
    context_bytes: int
    connection_bytes: int
    boundary_bytes: int
    passed_bytes: int
    gaps: Gaps
    input_bytes: float
    output_bytes: float
    blocks: tuple[BlockLoad, ...]
    gathered_bytes: int = 0
    gathered_seconds: float = 0.0
    first_seconds: float = 0.0

    @property
    def host_state_bytes(self) -> int:
        """Return the bytes of optimizer states, master copies, parameters and gradients in the offload tier."""
        return self.states.host_bytes

    @property
    def update_seconds(self) -> float:
        """Return the seconds that the optimizer's step adds to a training step.

        The time that the next forward waits for transfers of offloaded states is included.
        """
        return self.states.update_seconds + self.waiting_seconds([self])

    @staticmethod
    def waiting_seconds(loads: Iterable[StageLoad]) -> float:
        """Return the seconds that the first forwards of one rank's stages wait for transfers of offloaded states."""
        return max(0.0, sum(load.states.ahead_seconds - load.first_seconds for load in loads))

    @property
    def static_bytes(self) -> int:
        """Return the bytes that are on the device for the whole step."""
        beside = self.reserve_bytes + self.context_bytes + self.connection_bytes
        return self.states.device_bytes + self.buffer_bytes + beside

    @property
    def compute_seconds(self) -> float:
        """Return the seconds of forward and backward of one micro-batch, including recomputation."""
        return sum(block.forward_seconds + block.backward_seconds for block in self.blocks)

    @property
    def kept_bytes(self) -> int:
        """Return an upper bound on the device bytes of one micro-batch in flight."""
        return sum(block.held_bytes for block in self.blocks)

    @property
    def moved_bytes(self) -> int:
        """Return the bytes of one micro-batch's saved activations that are offloaded."""
        return sum(block.transferred_bytes for block in self.blocks)

    @property
    def smallest_swap_limit(self) -> int:
        """Return the smallest swap limit, in bytes, with which the backward of the largest offloaded block fits."""
        return max((block.moved_bytes for block in self.blocks), default=0)

    @property
    def work_bytes(self) -> int:
        """Return the workspace bytes of the block that needs the largest workspace."""
        return max(max(block.forward_work, block.backward_work) for block in self.blocks)

    @property
    def reused_bytes(self) -> int:
        """Return the workspace bytes of the block that needs the most, without the activations that it offloads.

        During a forward, activations that will be offloaded are part of the workspace. They are left out because they
        count towards the swap limit.
        """
        return max(
            max(block.forward_work - block.moved_bytes, block.backward_work)
            for block in self.blocks
        )

    def memory(self, in_flight: int, swap_limit: int) -> dict[str, int]:
        """Return the device bytes of the rank by term.

        ``in_flight`` is the number of micro-batches between forward and backward. ``swap_limit`` is in bytes.
        """
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
            "optimizer": self.states.optimizer_bytes + self.states.exchange_bytes,
            "master": self.states.master_bytes,
            "staging": self.states.staging_bytes,
            "summing": self.states.summing_bytes,
            "buffers": self.buffer_bytes,
            **passing,
            "allocator": self.gaps.lost(sum(passing.values())),
            "reserve": self.reserve_bytes,
            "context": self.context_bytes,
            "communicators": self.states.communicator_bytes,
            "connections": self.connection_bytes,
        }

    def peak_bytes(self, in_flight: int, swap_limit: int) -> int:
        """Return an upper bound on the device bytes of the rank: the sum of :meth:`memory`."""
        passing = self.passing_bytes(in_flight, swap_limit)
        return self.static_bytes + passing + self.gaps.lost(passing)

    def passing_bytes(self, in_flight: int, swap_limit: int) -> int:
        """Return the transient bytes in :meth:`memory`, which are held only for a part of the step."""
        return self.boundary_bytes + self.work_bytes + in_flight * self.kept_bytes + swap_limit


def rank_memory(stages: Sequence[tuple[StageLoad, int, int]]) -> dict[str, int]:
    """Return the device bytes of a rank by term.

    ``stages`` has three numbers for each stage of the rank: its load, its micro-batches in flight, and its swap limit
    in bytes. Bytes that a process needs only once are counted once. The memory for fetched blocks of offloaded
    parameters and states also counts once, because the stages share it.
    """
    terms: dict[str, int] = {}
    for load, in_flight, limit in stages:
        for term, size in load.memory(in_flight, limit).items():
            found = terms.get(term, 0)
            terms[term] = max(found, size) if term in ONCE else found + size
    window = max(load.states.most_staging_bytes for load, _, _ in stages)
    terms["staging"] = min(terms["staging"], window)
    passed = [load.passed_bytes for load, _, _ in stages]
    terms["boundary"] -= sum(passed) - max(passed)
    most = max(load.states.most_summing_bytes for load, _, _ in stages)
    terms["summing"] = math.ceil(min(terms["summing"], most))
    terms["allocator"] = rank_gaps(load for load, _, _ in stages).lost(passing_bytes(terms))
    return terms


def rank_gaps(loads: Iterable[StageLoad]) -> Gaps:
    """Return the bytes that a rank with the stages ``loads`` loses to gaps in its allocator, as a function of its
    transient bytes."""
    return Gaps.together(load.gaps for load in loads)


def passing_bytes(terms: dict[str, int]) -> int:
    """Return the transient bytes in ``terms`` (:func:`rank_memory`), which are held only for a part of the step."""
    return sum(terms[term] for term in PASSING)


def load_block(
    cost: BlockCost,
    directive: Directive,
    rows: float,
    *,
    speed: float = 1.0,
    split: bool = False,
    received: bool = False,
    exchange_seconds: float | None = None,
    shares: bool = False,
) -> BlockLoad:
    """Return the cost of one block under one directive, on a device with ``speed`` relative to the profile's device.

    With ``split`` backwards, a block that keeps its activations has a separate weight-gradient pass. ``received``: the
    block's stage is not the first. ``exchange_seconds``: the seconds of an exchange of a few numbers between the
    replicas of the block, which each BatchNorm with statistics over all of them needs in each pass; None: there are no
    replicas. ``shares``: the block before has the same directive, so what both of them save is counted there.
    """
    saved, stays = math.ceil(cost.moved.at(rows)), math.ceil(cost.stays.at(rows))
    forward, backward, exchange = _seconds(cost, rows, speed, received, exchange_seconds)
    shared = math.floor(cost.shared.at(rows)) if shares else 0
    kept, moved, again = saved + stays - shared, 0, 0.0
    forward_work = math.ceil(cost.forward_work.at(rows) + cost.output.at(rows))
    backward_work = math.ceil(cost.backward_work.at(rows) + cost.output.at(rows))
    if directive is Directive.OFFLOAD:
        # Offloaded tensors are freed only at the block's end, when its own variables no longer refer to them.
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
    if split:  # under every directive, so that offloading never appears to save the cost
        backward += cost.split_seconds.at(rows) / speed
    if split and directive is Directive.KEEP:
        unknown = cost.deferred == NOTHING and cost.weight_seconds != NOTHING
        deferred = saved + stays if unknown else math.ceil(cost.deferred.at(rows))
        split_work = math.ceil(cost.split_work.at(rows) + cost.output.at(rows))
        backward_work = max(backward_work, split_work)
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
        trained_bytes=cost.parameter_bytes - cost.frozen_bytes,
        forward_exchange=exchange,
        backward_exchange=exchange * (2 if again else 1),
        shared_bytes=shared if moved else 0,
    )


def _seconds(
    cost: BlockCost, rows: float, speed: float, received: bool, exchange_seconds: float | None
) -> tuple[float, float, float]:
    """Return the seconds of a block's forward and backward, and the part of each of them that waits for statistics of
    other replicas. The other arguments are those of :func:`load_block`."""
    forward = cost.forward_seconds.at(rows) / speed
    backward = cost.backward_seconds.at(rows) / speed
    if received:
        backward += cost.received_seconds.at(rows) / speed
    if not cost.norms or exchange_seconds is None:
        return forward, backward, 0.0
    exchange = cost.norms * exchange_seconds
    slower = cost.norm_seconds.at(rows) / speed / 2 + exchange
    return forward + slower, backward + slower, exchange


def load_stage(
    profile: ModelProfile,
    start: int,
    directives: Sequence[Directive],
    rows: float,
    *,
    device: Device,
    offload: OffloadFractions = ALL_ON_DEVICE,
    replicas: int = 1,
    split: bool = False,
    inputs_ahead: bool = False,
    beside: Beside | None = None,
    visits: Visits = EACH_MICRO_BATCH,
    boundaries_held: int = 0,
) -> StageLoad:
    """Return the cost of a stage on ``device``, for ``rows`` rows per micro-batch.

    The stage begins at block ``start``, has one directive per block, and runs on ``replicas`` ranks.

    ``offload``          the fractions of states and parameters that are offloaded
    ``split``            the schedule splits backwards
    ``inputs_ahead``     the model's inputs are copied one micro-batch early
    ``beside``           the replica counts of the stages before and after (:func:`connection_bytes`)
    ``visits``           how often each block runs in a step (:class:`~parallax.plan.plan.Visits`)
    ``boundaries_held``  number of boundary tensors held (:func:`parallax.plan.plan.boundaries_held`)
    """
    stop = start + len(directives)
    costs = profile.blocks[start:stop]
    given = costs[0].input.at(rows)
    entering, ahead = given if start > 0 else 0.0, given if inputs_ahead else 0.0
    leaving = costs[-1].output.at(rows) if stop < len(profile.blocks) else 0.0
    sizes = Sizes.of(profile, start, stop)
    visits = visits.at(start)
    exchanging = device.exchange_seconds(replicas)
    how: Any = {"speed": device.speed, "split": split, "exchange_seconds": exchanging}
    passed = math.ceil(boundaries_held * max(entering, leaving))
    own = 0.0 if boundaries_held else 2 * entering + 2 * leaving
    return StageLoad(
        parameter_bytes=sizes.parameters,
        trained_bytes=sizes.trained,
        states=load_states(profile, sizes, device, offload, replicas, split=split, visits=visits),
        buffer_bytes=sum(cost.buffer_bytes for cost in costs),
        reserve_bytes=device.reserve_bytes,
        context_bytes=device.context_bytes,
        connection_bytes=connection_bytes(profile, device, [(start, stop)], replicas, beside),
        boundary_bytes=passed + math.ceil(own + ahead) + costs[-1].gathered_bytes,
        passed_bytes=passed,
        gaps=Gaps.of(device, max(cost.input.at(rows) for cost in costs)),
        input_bytes=entering,
        output_bytes=leaving,
        blocks=tuple(
            load_block(cost, directive, rows, received=start > 0, shares=shares, **how)
            for cost, directive, shares in zip(costs, directives, _sharing(directives))
        ),
        gathered_bytes=costs[-1].gathered_bytes,
        gathered_seconds=costs[-1].gathered_seconds / device.speed,
        first_seconds=visits.micro_batches
        * sum(cost.forward_seconds.at(rows) for cost in costs)
        / device.speed,
    )


def _sharing(directives: Sequence[Directive]) -> list[bool]:
    """Return for each block of a stage whether the block before it keeps or offloads its activations as it does."""
    pairs = zip([None, *directives], directives)
    return [before is each and each is not Directive.RECOMPUTE for before, each in pairs]


def load_planned(
    profile: ModelProfile,
    stage: StagePlan,
    rows: float,
    *,
    device: Device,
    split: bool,
    beside: Beside | None = None,
    visits: Visits = EACH_MICRO_BATCH,
    boundaries_held: int = 0,
) -> StageLoad:
    """Return the cost of ``stage``, a stage of a plan, for micro-batches of ``rows`` rows.

    The other arguments are those of :func:`load_stage`.
    """
    return load_stage(
        profile,
        stage.start,
        stage.directives,
        rows,
        device=device,
        offload=OffloadFractions.of(stage),
        replicas=stage.replicas,
        split=split,
        inputs_ahead=stage.inputs_ahead,
        beside=beside,
        visits=visits,
        boundaries_held=boundaries_held,
    )
