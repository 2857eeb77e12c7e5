"""Profiles, clusters and stages made by hand, for tests of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallax.plan.cluster import Cluster, Device, Link, Node
from parallax.plan.plan import Directive, Pipeline, Plan, Prediction, RankPrediction, StagePlan
from parallax.plan.profile import Affine, BlockCost, ModelProfile
from parallax.plan.schedule import Schedule, named

FREE = Link(bytes_per_second=1e30)
HUGE = 10**15


def block(name: str = "b", forward: float = 1.0, backward: float = 2.0, **fields: Any) -> BlockCost:
    """Seconds per row; the other fields are Affine, a number of bytes per row, or (whole) bytes."""
    values: dict[str, Any] = {
        "parameters": 0,
        "parameter_bytes": 0,
        "moved": 0,
        "input": 0,
        "output": 0,
        **fields,
    }
    for key, value in values.items():
        if key not in (
            "parameters",
            "parameter_bytes",
            "frozen_bytes",
            "largest_bytes",
            "buffer_bytes",
        ) and not isinstance(value, Affine):
            values[key] = Affine(0.0, value)
    return BlockCost(
        name=name,
        forward_seconds=Affine(0.0, forward),
        backward_seconds=Affine(0.0, backward),
        **values,
    )


def profile(blocks: Sequence[BlockCost], **fields: Any) -> ModelProfile:
    return ModelProfile(
        model="m", fingerprint="f", device="d", precision="fp32", blocks=tuple(blocks), **fields
    )


def cluster(
    devices: int,
    memory: int = HUGE,
    *,
    concurrent: float = 1000.0,
    link: Link = FREE,
    write: Link = FREE,
    read: Link | None = None,
    tier: int = HUGE,
    tier_name: str = "disk",
    reserve: int = 0,
    **fields: Any,
) -> Cluster:
    device = Device(
        kind="cpu",
        memory_bytes=memory,
        tier=tier_name,
        tier_bytes=tier,
        write=write,
        read=read or write,
        reserve_bytes=reserve,
        **fields,
    )
    return Cluster(
        nodes=(Node(name="n", devices=(device,) * devices, concurrent=concurrent),),
        local=link,
        remote=link,
    )


def stages(
    bounds: Sequence[int],
    replicas: Sequence[int] | None = None,
    directive: str = "keep",
    limit: int = HUGE,
):
    """Stages between neighbouring ``bounds``."""
    counts = replicas or [1] * (len(bounds) - 1)
    return [
        StagePlan(
            start=low,
            stop=high,
            replicas=r,
            directives=(Directive(directive),) * (high - low),
            swap_limit_bytes=limit,
            tier_bytes=HUGE,
        )
        for low, high, r in zip(bounds, bounds[1:], counts)
    ]


def pipeline(
    parts: Sequence[StagePlan],
    *,
    schedule: Schedule | str = "1f1b",
    rows: int = 4,
    micro: int = 4,
    interleave: int = 1,
    placement: tuple[int, ...] = (),
) -> Pipeline:
    """``rows`` rows in ``micro`` micro-batches, or fewer of equal size, through stages ``parts``."""
    return Pipeline(
        schedule=named(schedule) if isinstance(schedule, str) else schedule,
        stages=tuple(parts),
        global_batch=rows,
        microbatch=-(-rows // max(1, micro)),
        interleave=interleave,
        placement=placement,
    )


def plan(**changes: Any) -> Plan:
    rank = RankPrediction(
        peak_bytes=10, budget_bytes=20, tier_peak_bytes=0, offloaded_bytes=0, stall_seconds=0.0
    )
    fields: dict[str, Any] = {
        "model": "m",
        "fingerprint": "f",
        "schedule": "1f1b",
        "global_batch": 8,
        "microbatch": 2,
        "stages": tuple(stages([0, 2, 3], [1, 2], "offload")),
        "tier": "disk",
        "prediction": Prediction(step_seconds=1.0, bubble=0.25, ranks=(rank,) * 3),
        **changes,
    }
    return Plan(**fields)
