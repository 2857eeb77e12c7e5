"""Why nothing fits, and the smallest changes that do: each was planned again, and anything smaller does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from parallax.errors import InfeasiblePlan
from parallax.plan.pipelines import PipelineSearch
from parallax.plan.plan import Directive
from parallax.plan.request import AUTO, PlanConfig, Request, sizes
from parallax.units import format_bytes

MIB = 2**20
MOST_MEMORY = 2**50  # no device will have as much

Fits = Callable[[Request], bool]


def refusal(request: Request, refused: Sequence[str], fits: Fits) -> InfeasiblePlan:
    """The error for ``request``, whose candidates were ``refused``; ``fits`` plans again."""
    config, devices, blocks = request.config, len(request.devices), len(request.profile.blocks)
    if not request.position_counts():
        return InfeasiblePlan(
            f"plan.stages={config.stages} with plan.replicas={config.replicas} does not use {devices} "
            f"device(s) and {blocks} block(s): every stage needs a block and a device, and every device a stage; "
            f"set cluster.devices{_devices_asked(config)}, or leave plan.replicas=auto"
        )
    device = min(request.devices, key=lambda device: device.memory_bytes - device.reserve_bytes)
    needed = _least_memory(request, fits)
    if needed is None:
        tier = min(device.tier_bytes for device in request.devices)
        return InfeasiblePlan(
            f"{format_bytes(tier)} per device in tier {device.tier} cannot hold what must "
            "be offloaded: use plan.activations=auto, a smaller trainer.microbatch, or a larger tier"
        )
    more = needed - device.memory_bytes
    fixes = [f"cluster.device_memory={math.ceil(needed / MIB)}MiB ({more:,} bytes more)", *_other_fixes(request, fits)]
    detail = f" ({refused[0]})" if refused else ""
    return InfeasiblePlan(
        f"no plan fits {format_bytes(device.memory_bytes)} per device{detail}: the best needs "
        f"{format_bytes(needed)} on its fullest; what fits: {', or '.join(fixes)}"
    )


def _other_fixes(request: Request, fits: Fits) -> Iterator[str]:
    """Changes other than memory: one of each kind, the smallest."""
    config = request.config
    for rows in [size for size in sizes(request.global_batch, AUTO) if size < min(request.microbatches)]:
        if fits(request.changed(microbatch=rows)):
            yield f"trainer.microbatch={rows}"
            break
    if isinstance(config.stages, int):
        most = min(len(request.devices), len(request.profile.blocks))
        for stages in range(config.stages + 1, most + 1):
            if fits(request.changed(config=replace(config, stages=stages, replicas=AUTO))):
                yield f"plan.stages={stages}"
                break
    if len(request.allowed) < len(Directive):
        if not request.swap and fits(request.changed(swap=True)):
            yield "swap=auto"
        elif fits(request.changed(config=PlanConfig(), swap=True)):
            yield "plan=auto swap=auto"


def _least_memory(request: Request, fits: Fits) -> int | None:
    """The fewest bytes per device with which a plan exists; None where no memory helps."""
    if len(request.profile.blocks) * len(request.devices) <= 256 and len(set(request.devices)) == 1:
        plain = [shape for shape in request.shapes() if shape.interleave == 1]
        needed = PipelineSearch(request).least_memory(plain)
        return None if math.isinf(needed) else math.ceil(needed)
    low, high = max(device.memory_bytes for device in request.devices), MOST_MEMORY
    if not fits(_with_memory(request, high)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if fits(_with_memory(request, middle)):
            high = middle
        else:
            low = middle
    return high


def _with_memory(request: Request, memory: int) -> Request:
    """The same question with devices of at least ``memory`` bytes."""
    nodes = tuple(
        replace(
            node,
            devices=tuple(replace(device, memory_bytes=max(device.memory_bytes, memory)) for device in node.devices),
        )
        for node in request.cluster.nodes
    )
    return request.changed(cluster=replace(request.cluster, nodes=nodes))


def _devices_asked(config: PlanConfig) -> str:
    """``=N`` where stages and replicas say how many devices they mean."""
    stages, replicas = config.stages, config.replicas
    if isinstance(replicas, list | tuple):
        return f"={sum(replicas)}"
    return f"={stages * replicas}" if isinstance(stages, int) and isinstance(replicas, int) else ""
