"""Every plan there is, on small cases: what the search must equal. It shares with the search the costs of one stage and
the formula, and none of its ways to leave plans out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from parallax.plan.cost.collective import all_reduce_seconds, broadcast_seconds
from parallax.plan.cost.stage import load_block, load_stage
from parallax.plan.cost.traffic import TIER_FLOOR, TIER_SLACK
from parallax.plan.plan import Directive
from parallax.plan.rows import micro_batch_count
from parallax.plan.search.exact_stage import TIE
from parallax.plan.search.request import Request, Shape


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    return [c for c in itertools.product(range(1, total + 1), repeat=parts) if sum(c) == total]


def choices(length: int, kinds: int) -> np.ndarray[Any, Any]:
    """All ``kinds ** length`` assignments, one a row."""
    return np.array(list(itertools.product(range(kinds), repeat=length)))


def every_stage(
    request: Request,
    shape: Shape,
    start: int,
    stop: int,
    r: int,
    rows: int,
    flight: int,
    split: bool,
    *,
    always: bool,
) -> list[tuple[float, float, float]]:
    """(seconds, tail, least peak bytes) of the fastest directives that fit, for every share of states below."""
    model, device, allowed = request.profile, request.device(0, 1), list(request.allowed)
    loads = [
        [load_block(model.blocks[i], d, rows, speed=device.speed, split=split) for d in allowed]
        for i in range(start, stop)
    ]
    picks = choices(stop - start, len(allowed))
    table = np.array(
        [
            [
                (
                    b.forward_seconds + b.backward_seconds,
                    b.held_bytes,
                    b.moved_bytes,
                    max(b.forward_work, b.backward_work),
                )
                for b in row
            ]
            for row in loads
        ]
    )
    taken = table[np.arange(stop - start)[None, :], picks]
    seconds, kept, moved = (taken[:, :, column].sum(1) for column in range(3))
    largest, work = taken[:, :, 2].max(1), taken[:, :, 3].max(1)
    found = []
    for below in request.states_below(shape):
        if below.sharded and r == 1 and found:
            continue
        load = load_stage(
            model,
            start,
            (Directive.KEEP,) * (stop - start),
            rows,
            device=device,
            below=below,
            replicas=r,
            split=split,
        )
        passing = load.boundary_bytes + flight * kept + largest + work
        peak = load.static_bytes + passing + np.ceil(device.gap_share * passing)
        tier = (
            np.where(moved > 0, np.ceil(flight * moved * TIER_SLACK) + TIER_FLOOR, 0)
            + load.host_state_bytes
        )
        fits = (peak <= device.memory_bytes) & (tier <= device.tier_bytes)
        if fits.any():
            gradients = load.parameter_bytes * model.gradient_bytes
            reduce = all_reduce_seconds(gradients, range(r), request.cluster)
            streaming = load.states.streaming_seconds
            # Room for two blocks, or for all that moves, lets reading overlap; with less a backward waits for it.
            ahead = passing - largest + np.minimum(2 * largest, flight * moved)
            waits = (
                load.static_bytes + ahead + np.ceil(device.gap_share * ahead) > device.memory_bytes
            )
            # With one micro-batch in flight only what the swap limit has no room for leaves the device.
            limit = largest + (device.memory_bytes - peak) / (1 + device.gap_share)
            leaving = (
                np.maximum(0.0, moved - limit)
                if flight == 1
                else np.where(limit >= flight * moved, 0, moved)
            )
            copying = [device.write.seconds(m) + device.read.seconds(m) for m in leaving]
            computing = seconds + waits * np.array([device.read.seconds(m) for m in moved])
            best = np.where(
                fits, np.maximum(computing, streaming + np.array(copying)), np.inf
            ).min()
            tail = load.update_seconds + reduce
            if below.sharded:
                if found and found[0][0] <= best * TIE and not always:
                    continue
                tail += broadcast_seconds(load.parameter_bytes, r, request.cluster.local)
            found.append((float(best), tail, float(peak[fits].min())))
    return found


def brute_force(request: Request, *, always: bool = False) -> float:
    """The least step time by the formula, over every plan; infinite where none fits. Replicas share states where that
    makes the stage itself faster, or ``always`` where it is possible."""
    blocks, devices, batch = len(request.profile.blocks), len(request.devices), request.global_batch
    known: dict[Any, Any] = {}
    least = math.inf
    schedules = [schedule for schedule in request.schedules if not schedule.shares_positions]
    for schedule, parts in itertools.product(schedules, range(1, min(blocks, devices) + 1)):
        for micro in request.sizes(parts, schedule):
            shape = Shape(schedule, micro, parts)
            if parts == 1 and request.config.schedule == "auto" and schedule.name != "1f1b":
                continue  # all would be the same
            if (
                parts > 1
                and shape.split
                and not any(b.weight_seconds.at(1) for b in request.profile.blocks)
            ):
                continue
            for cuts in itertools.combinations(range(1, blocks), parts - 1):
                bounds = [0, *cuts, blocks]
                for replicas in compositions(devices, parts):
                    # One of them at most, where the devices do not divide.
                    idle = max(replicas) > micro
                    even = devices // parts <= micro < max(replicas) <= -(-devices // parts)
                    if idle and not even and micro < max(request.microbatches):
                        continue
                    found = []
                    for s, r in enumerate(replicas):
                        rows, flight = (
                            -(-micro // r),
                            schedule.in_flight(parts, s, micro_batch_count(batch, micro)),
                        )
                        key = bounds[s], bounds[s + 1], r, rows, flight, shape.split
                        if key not in known:
                            known[key] = every_stage(request, shape, *key, always=always)
                        found.append(known[key])
                    for picked in itertools.product(*found):
                        times = [stage[0] for stage in picked]
                        work = sum(seconds * r for seconds, r in zip(times, replicas))
                        tail = max(stage[1] for stage in picked)
                        least = min(
                            least, request.score(shape, max(times), sum(times), tail, work)[0]
                        )
    return least
