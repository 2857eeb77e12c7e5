"""Estimate the memory that training a model needs, independent of any machine.

On one device the result is a sum of terms (:meth:`parallax.plan.cost.stage.StageLoad.memory`), once with all
activations kept and once with all recomputed. For a pipeline of n stages it is the memory of the stage that needs most,
in the partition that minimizes this memory. Under 1F1B, stage s holds up to n − s micro-batches, so early stages get
fewer blocks. A loss over the whole batch needs GPipe, under which each stage holds all micro-batches. The minimum is
found by bisection. A memory limit is feasible if all blocks are assigned when each stage in turn takes as many blocks
as fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallax.plan.cluster import Device, Link
from parallax.plan.cost.stage import load_block, load_stage
from parallax.plan.plan import BESIDE_ALLOCATOR, Directive
from parallax.plan.profile import NOTHING, BlockCost, ModelProfile
from parallax.plan.rows import micro_batch_count
from parallax.plan.schedule import Schedule
from parallax.plan.schedule.gpipe import GPIPE
from parallax.plan.schedule.one_forward import ONE_FORWARD_ONE_BACKWARD
from parallax.plan.work import ModelWork

# Terms of a rank's bytes that depend on the device and on its peers: a plan counts them in its budget.
UNCOUNTED = ("reserve", "allocator", *BESIDE_ALLOCATOR)
ENOUGH = 1.005  # bisection ends when its limits are this close
DIRECTIVES = (Directive.KEEP, Directive.RECOMPUTE)

_NOWHERE = Link(bytes_per_second=1.0)
ANY_DEVICE = Device(
    kind="any", memory_bytes=1, tier="none", tier_bytes=0, write=_NOWHERE, read=_NOWHERE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeed:
    """The bytes that the largest of ``stages`` pipeline stages needs, with all activations kept or all recomputed."""

    stages: int
    keep_bytes: int
    recompute_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Device bytes by the terms of :meth:`parallax.plan.cost.stage.StageLoad.memory`, without the ``uncounted`` terms.

    ``keep`` and ``recompute`` are for one device, with all activations kept and with all recomputed. ``pipelines`` is
    for pipelines under ``schedule``.
    """

    model: str
    precision: str
    parameters: int
    rows: int
    micro_batches: int
    schedule: str
    keep: dict[str, int]
    recompute: dict[str, int]
    pipelines: tuple[StageNeed, ...]
    uncounted: tuple[str, ...] = UNCOUNTED


def estimate(work: ModelWork, *, global_batch: int, microbatch: int | str = "auto") -> Estimate:
    """Return the memory of training with ``global_batch`` rows per step in micro-batches of ``microbatch`` rows.

    If ``microbatch`` is auto, a step is one micro-batch.
    """
    rows = global_batch if microbatch == "auto" else min(global_batch, int(microbatch))
    micro_batches = micro_batch_count(global_batch, rows)
    profile = without_seconds(work)
    alone = _schedule(profile).in_flight(1, 0, micro_batches)
    keep, recompute = (_terms(profile, directive, rows, alone) for directive in DIRECTIVES)
    return Estimate(
        model=work.model,
        precision=work.precision,
        parameters=profile.parameters,
        rows=rows,
        micro_batches=micro_batches,
        schedule=_schedule(profile).name,
        keep=keep,
        recompute=recompute,
        pipelines=tuple(
            StageNeed(
                stages=stages,
                keep_bytes=_fullest(profile, Directive.KEEP, rows, micro_batches, stages),
                recompute_bytes=_fullest(profile, Directive.RECOMPUTE, rows, micro_batches, stages),
            )
            for stages in stage_counts(len(profile.blocks))
        ),
    )


def stage_counts(blocks: int) -> list[int]:
    """Return the numbers of stages to estimate: 1, 2, 4, … and the number of blocks."""
    return [2**power for power in range(blocks.bit_length()) if 2**power < blocks] + [blocks]


def without_seconds(work: ModelWork) -> ModelProfile:
    """Return a profile with the bytes of ``work`` and without times, which depend on the device."""
    blocks = tuple(
        BlockCost(
            forward_seconds=NOTHING,
            backward_seconds=NOTHING,
            **{name: getattr(block, name) for name in _SIZES},
        )
        for block in work.blocks
    )
    return ModelProfile(
        model=work.model,
        fingerprint=work.fingerprint,
        device="any",
        precision=work.precision,
        blocks=blocks,
        ties=work.ties,
        frozen_ties=work.frozen_ties,
        optimizer_bytes=work.optimizer_bytes,
        gradient_bytes=work.gradient_bytes,
        master_bytes=work.master_bytes,
        gathered_rows=work.gathered_rows,
        source="analytic",
    )


_SIZES = (
    *(
        "name",
        "parameters",
        "parameter_bytes",
        "frozen_bytes",
        "largest_bytes",
        "buffer_bytes",
        "moved",
        "stays",
        "by_loss",
    ),
    *("input", "output", "forward_work", "backward_work", "deferred"),
    *("gathered_bytes", "gathered_work"),
)


def _schedule(profile: ModelProfile) -> Schedule:
    """Return the schedule with the fewest micro-batches in flight, or GPipe for a loss over the whole batch."""
    return GPIPE if profile.gathered_rows else ONE_FORWARD_ONE_BACKWARD


def _terms(
    profile: ModelProfile, directive: Directive, rows: int, in_flight: int
) -> dict[str, int]:
    load = load_stage(profile, 0, [directive] * len(profile.blocks), rows, device=ANY_DEVICE)
    return {
        term: size
        for term, size in load.memory(in_flight, 0).items()
        if term not in ("swap", *UNCOUNTED)
    }


def _fullest(
    profile: ModelProfile, directive: Directive, rows: int, micro_batches: int, stages: int
) -> int:
    """Return the bytes of the largest of ``stages`` stages, in the partition of the blocks that minimizes these bytes.

    ``directive`` says whether all blocks keep or recompute their activations. ``rows`` is the rows of a micro-batch.
    """
    schedule = _schedule(profile)
    in_flight_by_stage = [
        schedule.in_flight(stages, stage, micro_batches) for stage in range(stages)
    ]
    partitioner = _ChainPartitioner(profile, directive, rows)
    low, high = 0.0, 1.0
    while partitioner.partition(high, in_flight_by_stage) is None:
        low, high = high, high * 2
    while high > low * ENOUGH and high - low > 1:
        middle = (low + high) / 2 if low == 0 else math.sqrt(low * high)
        low, high = (
            (middle, high)
            if partitioner.partition(middle, in_flight_by_stage) is None
            else (low, middle)
        )
    bounds = partitioner.partition(high, in_flight_by_stage)
    assert bounds is not None
    return max(
        load_stage(
            profile, start, [directive] * (stop - start), rows, device=ANY_DEVICE
        ).peak_bytes(in_flight, 0)
        for (start, stop), in_flight in zip(bounds, in_flight_by_stage)
    )


class _ChainPartitioner:
    """Partitions a chain of blocks into stages such that no stage exceeds a memory limit."""

    def __init__(self, profile: ModelProfile, directive: Directive, rows: int) -> None:
        costs, loads = (
            profile.blocks,
            [load_block(cost, directive, rows) for cost in profile.blocks],
        )
        per_byte = profile.gradient_bytes + profile.optimizer_bytes + profile.master_bytes
        self._static = [
            cost.parameter_bytes + cost.trained_bytes * per_byte + cost.buffer_bytes
            for cost in costs
        ]
        self._kept = [load.kept_bytes for load in loads]
        self._work = [max(load.forward_work, load.backward_work) for load in loads]
        self._enters = [0.0, *(2 * cost.input.at(rows) for cost in costs[1:])]
        self._leaves = [2.0 * cost.output.at(rows) for cost in costs[:-1]]
        self._leaves.append(float(costs[-1].gathered_bytes))

    def partition(
        self, limit: float, in_flight_by_stage: Sequence[int]
    ) -> list[tuple[int, int]] | None:
        """Return the blocks (first, last + 1) of each stage, at least one per stage; None if no partition fits.

        No stage has more than ``limit`` bytes. ``in_flight_by_stage`` has the number of micro-batches in flight on each
        stage.
        """
        bounds, start, blocks = [], 0, len(self._static)
        for stage, in_flight in enumerate(in_flight_by_stage):
            most = blocks - (len(in_flight_by_stage) - stage - 1)
            stop = self._reach(start, most, limit, in_flight)
            if stop == start:
                return None
            bounds.append((start, stop))
            start = stop
        return bounds if start == blocks else None

    def _reach(self, start: int, most: int, limit: float, in_flight: int) -> int:
        """Return the index after the last block of the longest stage from block ``start`` that fits ``limit`` bytes.

        The index is at most ``most``. If not even block ``start`` fits, the result is ``start``. ``in_flight``
        micro-batches are in flight on the stage.
        """
        stop, total, work = start, self._enters[start], 0.0
        for index in range(start, most):
            total += self._static[index] + in_flight * self._kept[index]
            work = max(work, self._work[index])
            if total + work + self._leaves[index] <= limit:
                stop = index + 1
        return stop
