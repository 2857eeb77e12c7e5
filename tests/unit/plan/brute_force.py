"""Every plan there is, on small cases: what the search must equal. It shares with the search the costs of one stage and
the formula, and none of its rules that exclude plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from parallax.plan.cluster import Device
from parallax.plan.cost.collective import all_reduce_seconds, broadcast_seconds
from parallax.plan.cost.stage import BlockLoad, StageLoad, load_block, load_stage
from parallax.plan.cost.traffic import TIER_FLOOR, TIER_SLACK
from parallax.plan.plan import Directive
from parallax.plan.rows import micro_batch_count
from parallax.plan.search.exact_stage import TIE
from parallax.plan.search.request import Request, Shape


def compipeline_ranks(total: int, parts: int) -> list[tuple[int, ...]]:
    return [c for c in itertools.product(range(1, total + 1), repeat=parts) if sum(c) == total]


def choices(length: int, kinds: int) -> np.ndarray[Any, Any]:
    """All ``kinds ** length`` assignments, one a row."""
    return np.array(list(itertools.product(range(kinds), repeat=length)))


Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StageCase:
    """Blocks from ``start`` to ``stop`` on ``replicas`` devices, each with up to ``rows`` rows of a micro-batch;
    ``in_flight`` micro-batches are under way at once."""

    start: int
    stop: int
    replicas: int
    rows: int
    in_flight: int
    split: bool


@dataclass(frozen=True)
class Sums:
    """Of a stage under every choice of directives, one entry each."""

    seconds: Numbers
    kept: Numbers
    moved: Numbers
    largest: Numbers
    work: Numbers

    @classmethod
    def of(cls, request: Request, stage_case: StageCase) -> Sums:
        blocks, speed = (
            request.profile.blocks[stage_case.start : stage_case.stop],
            request.device(0, 1).speed,
        )
        how: Any = {"speed": speed, "split": stage_case.split}
        loads = np.array(
            [
                [
                    [
                        figures(load_block(b, d, stage_case.rows, shares=shares, **how))
                        for d in request.allowed
                    ]
                    for b in blocks
                ]
                for shares in (False, True)
            ]
        )
        picks = choices(len(blocks), len(request.allowed))
        shares = np.diff(picks, axis=1, prepend=-1) == 0  # as the block before it
        taken = loads[shares.astype(int), np.arange(len(blocks))[None, :], picks]
        seconds, kept, moved = (taken[:, :, column].sum(1) for column in range(3))
        return cls(seconds, kept, moved, taken[:, :, 4].max(1), taken[:, :, 3].max(1))


def figures(load: BlockLoad) -> tuple[float, float, float, float, float]:
    """Seconds of both passes, bytes held and moved for a backward, bytes beside a pass, bytes of one block's swap."""
    return (
        load.forward_seconds + load.backward_seconds,
        load.held_bytes,
        load.transferred_bytes,
        max(load.forward_work, load.backward_work),
        load.moved_bytes,
    )


@dataclass(frozen=True)
class MemoryCheck:
    """What a stage needs on a device under each choice of directives, with its states where they are."""

    sums: Sums
    load: StageLoad
    device: Device
    in_flight: int

    @cached_property
    def passing(self) -> Numbers:
        """Bytes that come and go in a step."""
        sums = self.sums
        held = self.load.boundary_bytes + self.in_flight * sums.kept
        return held + sums.largest + sums.work

    @cached_property
    def peak(self) -> Numbers:
        return self._with_gaps(self.passing)

    @cached_property
    def fits(self) -> Numbers:
        moved = self.sums.moved
        in_tier = np.where(moved > 0, np.ceil(self.in_flight * moved * TIER_SLACK) + TIER_FLOOR, 0)
        tier = in_tier + self.load.host_state_bytes
        return (self.peak <= self.device.memory_bytes) & (tier <= self.device.tier_bytes)

    def seconds(self) -> float:
        """Of the fastest choice that fits."""
        moved = self.sums.moved
        computing = self.sums.seconds + self._waits() * each(self.device.read.seconds, moved)
        leaving = self._leaving()
        copying = each(self.device.write.seconds, leaving) + each(self.device.read.seconds, leaving)
        streaming = self.load.states.streaming_seconds
        seconds = np.maximum(computing, streaming + copying) + self.load.states.adding_seconds
        return float(np.where(self.fits, seconds, np.inf).min())

    def _waits(self) -> Numbers:
        """Memory for two blocks, or for all offloaded data, lets reads overlap; with less, a backward waits for
        them."""
        largest, moved = self.sums.largest, self.sums.moved
        ahead = self.passing - largest + np.minimum(2 * largest, self.in_flight * moved)
        return self._with_gaps(ahead) > self.device.memory_bytes

    def _leaving(self) -> Numbers:
        """With one micro-batch in flight, only activations beyond the swap limit are offloaded."""
        moved, spare = self.sums.moved, self.device.memory_bytes - self.peak
        limit = self.sums.largest + spare / (1 + self.device.gap_share)
        if self.in_flight == 1:
            return np.maximum(0.0, moved - limit)
        return np.where(limit >= self.in_flight * moved, 0, moved)

    def _with_gaps(self, passing: Numbers) -> Numbers:
        return self.load.static_bytes + passing + np.ceil(self.device.gap_share * passing)


def each(seconds: Callable[[float], float], sizes: Numbers) -> Numbers:
    return np.array([seconds(size) for size in sizes])


def every_stage(
    request: Request, shape: Shape, stage_case: StageCase, *, always: bool
) -> list[tuple[float, float, float]]:
    """(seconds, tail, least peak bytes) of the fastest directives that fit, for every share of offloaded states."""
    model, device = request.profile, request.device(0, 1)
    sums, keep = (
        Sums.of(request, stage_case),
        (Directive.KEEP,) * (stage_case.stop - stage_case.start),
    )
    found: list[tuple[float, float, float]] = []
    for offload in request.host_states:
        if offload.sharded and stage_case.replicas == 1 and found:
            continue
        where = {
            "device": device,
            "offload": offload,
            "replicas": stage_case.replicas,
            "split": stage_case.split,
        }
        load = load_stage(model, stage_case.start, keep, stage_case.rows, **where)
        memory = MemoryCheck(sums, load, device, stage_case.in_flight)
        if not memory.fits.any():
            continue
        best, tail = memory.seconds(), tail_seconds(request, load, stage_case.replicas)
        if offload.sharded:
            if found and found[0][0] <= best * TIE and not always:
                continue
            sending = broadcast_seconds(
                load.trained_bytes, stage_case.replicas, request.cluster.local
            )
            tail += sending
        found.append((best, tail, float(memory.peak[memory.fits].min())))
    return found


def tail_seconds(request: Request, load: StageLoad, replicas: int) -> float:
    """Of the update, and of adding up gradients before it."""
    gradients = load.trained_bytes * request.profile.gradient_bytes
    return load.update_seconds + all_reduce_seconds(gradients, range(replicas), request.cluster)


def brute_force(request: Request, *, always: bool = False) -> float:
    """The least step time by the formula, over every plan; infinite where none fits. Replicas share states where that
    makes the stage itself faster, or ``always`` where it is possible."""
    known: dict[Any, Any] = {}
    least = math.inf
    for shape in every_shape(request):
        for cuts in every_partition(request, shape):
            found = []
            for stage_case in cuts:
                if (shape.split, stage_case) not in known:
                    known[shape.split, stage_case] = every_stage(
                        request, shape, stage_case, always=always
                    )
                found.append(known[shape.split, stage_case])
            for picked in itertools.product(*found):
                times = [stage[0] for stage in picked]
                work = sum(
                    seconds * stage_case.replicas for seconds, stage_case in zip(times, cuts)
                )
                tail = max(stage[1] for stage in picked)
                least = min(least, request.score(shape, max(times), sum(times), tail, work)[0])
    return least


def every_shape(request: Request) -> Iterator[Shape]:
    splits = any(block.weight_seconds.at(1) for block in request.profile.blocks)
    most = min(len(request.profile.blocks), len(request.devices))
    schedules = [schedule for schedule in request.schedules if not schedule.has_virtual_stages]
    for schedule, parts in itertools.product(schedules, range(1, most + 1)):
        alike = parts == 1 and request.config.schedule == "auto" and schedule.name != "1f1b"
        for micro in request.sizes(parts, schedule):
            shape = Shape(schedule, micro, parts)
            if not alike and (splits or parts == 1 or not shape.split):
                yield shape


def every_partition(request: Request, shape: Shape) -> Iterator[list[StageCase]]:
    """The stages of each plan of a shape."""
    blocks, devices = len(request.profile.blocks), len(request.devices)
    parts, micro = shape.pipeline_ranks, shape.microbatch
    count = micro_batch_count(request.global_batch, micro)
    for cuts in itertools.combinations(range(1, blocks), parts - 1):
        bounds = [0, *cuts, blocks]
        for replicas in compipeline_ranks(devices, parts):
            if not request.has_rows(shape, max(replicas)):
                continue
            in_flight_by_stage = [shape.schedule.in_flight(parts, s, count) for s in range(parts)]
            yield [
                StageCase(start, stop, r, -(-micro // r), in_flight, shape.split)
                for start, stop, r, in_flight in zip(
                    bounds, bounds[1:], replicas, in_flight_by_stage
                )
            ]
