"""Explain why no plan fits, and find the smallest changes with which one fits, verified by planning again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeGuard

from parallax.common.units import format_bytes
from parallax.errors import InfeasiblePlan
from parallax.plan.cluster import Cluster
from parallax.plan.config import AUTO, PlanConfig
from parallax.plan.microbatches import sizes
from parallax.plan.plan import Directive
from parallax.plan.search.exact import ExactSearch
from parallax.plan.search.greedy import GreedySearch
from parallax.plan.search.request import Request

MIB = 2**20
MEMORY_TRIES = 16  # each an eighth larger than the previous one
UNBOUNDED = 2**60  # bytes of a tier without a limit

Fits = Callable[[Request], bool]


def refusal(request: Request, refused: Sequence[str], fits: Fits) -> InfeasiblePlan:
    """Return the error for a ``request`` that no plan fits.

    ``refused`` has the reasons why the candidates of the request do not fit. ``fits`` is a function that returns
    whether a changed request has a plan.
    """
    config, devices, blocks = request.config, len(request.devices), len(request.profile.blocks)
    if not request.pipeline_rank_counts():
        return InfeasiblePlan(
            f"plan.stages={config.stages} with plan.replicas={config.replicas} does not use {devices} "
            f"device(s) and {blocks} block(s): every stage needs a block and a device, and every device a stage; "
            f"set cluster.devices{_devices_setting(config)}, or use plan.replicas=auto"
        )
    shapes = list(request.shapes())
    if not shapes:
        return InfeasiblePlan(
            f"plan.schedule={config.schedule} with plan.interleave={config.interleave} has no shape for {blocks} "
            f"block(s), {devices} device(s) and {request.global_batch} rows: interleaving needs two pipeline ranks or "
            "more, a block for each of their stages, and a number of micro-batches that the pipeline ranks divide; "
            "use plan.schedule=auto"
        )
    uneven = {shape.pipeline_ranks for shape in shapes if devices % shape.pipeline_ranks}
    interleaved_unevenly = all(
        shape.interleave > 1 and shape.pipeline_ranks in uneven for shape in shapes
    )
    if interleaved_unevenly and not _lists(config.replicas):
        counts = " or ".join(map(str, sorted(uneven)))
        return InfeasiblePlan(
            f"plan.schedule={shapes[0].schedule} needs as many devices on every pipeline rank, and {devices} "
            f"cannot be divided by {counts}: use cluster.devices={devices - devices % min(uneven)}, another "
            "plan.stages, or plan.schedule=auto"
        )
    device = min(request.devices, key=lambda device: device.memory_bytes - device.fixed_bytes)
    needed = _least_memory(request)
    if needed is None:
        return _too_small_a_tier(request, fits)
    more = needed - device.memory_bytes
    if more <= 0:  # enough by the search's estimate, but not in the full prediction
        reason = refused[0] if refused else "no partition that was tried fits every stage"
        fixes = [
            *_more_memory(request, device.memory_bytes + 1, fits),
            *_other_fixes(request, fits),
        ]
        fixes = fixes or ["more cluster.device_memory"]
        return InfeasiblePlan(
            f"no plan fits {format_bytes(device.memory_bytes)} per device: {reason}; use {', or '.join(fixes)}"
        )
    fixes = [*_more_memory(request, needed, fits), *_other_fixes(request, fits)]
    detail = f" ({refused[0]})" if refused else ""
    return InfeasiblePlan(
        f"no plan fits {format_bytes(device.memory_bytes)} per device{detail}: the best needs {format_bytes(needed)} "
        f"on its fullest device; these changes fit: {', or '.join(fixes) or 'none of those tried'}"
    )


def _more_memory(request: Request, needed: int, fits: Fits) -> Iterator[str]:
    """Yield advice on the memory per device with which a plan fits.

    ``needed`` bytes, an estimate, are tried first. If a plan does not fit them in the full prediction, larger sizes are
    tried. If none of these fits, nothing is yielded.
    """
    least = min(device.memory_bytes for device in request.devices)
    for _ in range(MEMORY_TRIES):
        size = math.ceil(needed / MIB)
        if fits(request.changed(cluster=_with_capacity(request, size * MIB, 0))):
            yield f"cluster.device_memory={size}MiB ({needed - least:,} bytes more)"
            return
        needed = size * MIB * 9 // 8


def _too_small_a_tier(request: Request, fits: Fits) -> InfeasiblePlan:
    """Return the error for a request that needs a larger offload tier, whatever the memory of the devices."""
    smallest = min(request.devices, key=lambda device: device.tier_bytes)
    name, tier = smallest.tier, smallest.tier_bytes
    fixes = [*_larger_tier(request, tier, fits), *_other_fixes(request, fits)]
    return InfeasiblePlan(
        f"{format_bytes(tier)} per device in tier {name} cannot hold the bytes that must be offloaded; "
        f"these changes fit: {', or '.join(fixes) or 'another plan.activations, plan.optimizer or plan.parameters'}"
    )


def _larger_tier(request: Request, tier: int, fits: Fits) -> Iterator[str]:
    """Yield advice on the smallest offload tier, in whole MiB, with which a plan fits.

    ``tier`` is the bytes of the present tier, which is too small. If a plan also needs more device memory, the advice
    includes it.
    """
    least = min(device.memory_bytes for device in request.devices)
    needed = _least_memory(request.changed(cluster=_with_capacity(request, least, UNBOUNDED)))
    if needed is None:
        return
    memory = least if needed <= least else math.ceil(needed / MIB) * MIB
    low = high = math.ceil(tier / MIB)
    while not fits(request.changed(cluster=_with_capacity(request, memory, high * MIB))):
        low, high = high, 2 * high + 1
        if high * MIB > UNBOUNDED:
            return
    while high - low > 1:
        middle = (low + high) // 2
        enough = fits(request.changed(cluster=_with_capacity(request, memory, middle * MIB)))
        low, high = (low, middle) if enough else (middle, high)
    beside = "" if memory == least else f" cluster.device_memory={memory // MIB}MiB"
    each = max(len(node.devices) for node in request.cluster.nodes)
    key = request.devices[0].swaps_to.key
    more = f"{high}MiB per device, {high * MIB - tier:,} bytes more"
    yield f"cluster.{key}={each * high}MiB{beside} ({more})"


def _with_capacity(request: Request, memory: int, tier: int) -> Cluster:
    """Return the same cluster with at least ``memory`` bytes on each device and ``tier`` bytes in each offload tier."""
    return request.cluster.with_devices(
        replace(
            device,
            memory_bytes=max(device.memory_bytes, memory),
            tier_bytes=max(device.tier_bytes, tier),
        )
        for device in request.cluster.devices
    )


def _other_fixes(request: Request, fits: Fits) -> Iterator[str]:
    """Yield changes of settings, other than more memory, with which a plan fits: of each kind, the smallest change."""
    config = request.config
    for rows in [
        size for size in sizes(request.global_batch, AUTO) if size < min(request.microbatches)
    ]:
        if fits(request.changed(microbatch=rows)):
            yield f"trainer.microbatch={rows}"
            break
    if isinstance(config.stages, int):
        most = min(len(request.devices), len(request.profile.blocks))
        for stages in range(config.stages + 1, most + 1):
            if fits(request.changed(config=replace(config, stages=stages, replicas=AUTO))):
                yield f"plan.stages={stages}" + (
                    "" if config.replicas == AUTO else " plan.replicas=auto"
                )
                break
    if len(request.allowed) < len(Directive):
        if not request.swap and fits(request.changed(swap=True)):
            yield "swap.tier=auto"
        elif fits(request.changed(config=PlanConfig(), swap=True)):
            yield f"{config.freed} swap.tier=auto"


def _least_memory(request: Request) -> int | None:
    """Return the fewest bytes per device with which a plan exists; None if no memory suffices."""
    plain = [shape for shape in request.shapes() if shape.interleave == 1]
    if plain and request.small and not request.mixed:
        needed = ExactSearch(request).least_memory(plain)
        return None if math.isinf(needed) else math.ceil(needed)
    found = [
        GreedySearch(ordered).least_memory(list(ordered.shapes())) for ordered in request.orders()
    ]
    able = [needed for needed in found if needed is not None]
    return min(able) if able else None


def _lists(replicas: int | str | list[int]) -> TypeGuard[list[int]]:
    """Return whether the user listed the replicas of each stage."""
    return isinstance(replicas, list | tuple)


def _devices_setting(config: PlanConfig) -> str:
    """Return the text ``=N`` that completes the advice "set cluster.devices".

    N is the number of devices that the configured stages and replicas need. If they do not determine it, the text is
    empty.
    """
    stages, replicas = config.stages, config.replicas
    if _lists(replicas):
        return f"={sum(replicas)}"
    return f"={stages * replicas}" if isinstance(stages, int) and isinstance(replicas, int) else ""
