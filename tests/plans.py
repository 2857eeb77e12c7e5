"""Plans made by hand, for tests that need a particular one."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from parallax.model.construction.deferred import ModelFactory
from parallax.model.describe import Chain, describe
from parallax.plan.cluster import LEAST_BUCKET_BYTES
from parallax.plan.plan import Directive, Plan, Prediction, RankPrediction, StagePlan
from parallax.plan.schedule import SCHEDULES, named
from parallax.plan.updates import Updates

GIB = 2**30
DRAINING = {name: each for name, each in SCHEDULES.items() if not each.continues}


def stages_each(schedule: str, pipeline_ranks: int) -> int:
    """Two stages to each of two pipeline ranks where a schedule can have that, one to each of others; 0 where it
    cannot."""
    known, each = (
        SCHEDULES[schedule],
        2 if pipeline_ranks == 2 and SCHEDULES[schedule].allows(2) else 1,
    )
    return each if known.allows(each) else 0


_described: dict[bytes, Chain] = {}


def described(factory: ModelFactory, **options: Any) -> Chain:
    """Return ``describe(factory, **options)``, computed once in a process: engines leave a chain as it is. The key is
    the pickled call, because bound methods of equal configurations are not equal."""
    key = pickle.dumps((factory, options))
    if key not in _described:
        _described[key] = describe(factory, **options)
    return _described[key]


def make_plan(
    chain: Chain,
    *,
    replicas: Sequence[int] = (1,),
    schedule: str = "1f1b",
    directive: str = "keep",
    global_batch: int = 8,
    microbatch: int = 2,
    swap_limit: int = GIB,
    boundaries: Sequence[int] | None = None,
    tier: str = "disk",
    tier_bytes: int = GIB,
    placement: tuple[int, ...] = (),
    optimizer_offload: float = 0.0,
    parameter_offload: float = 0.0,
    interleave: int = 1,
    shard: bool = False,
    inputs_ahead: bool = False,
    gather_loss: bool = False,
    updates: str = "synchronous",
    bucket_bytes: int = LEAST_BUCKET_BYTES,
    group: int = 0,
    local_steps: int = 0,
    staleness: int = 0,
    local_groups: int = 0,
    fragments: int = 1,
    fragment_delay: int = 0,
) -> Plan:
    """A plan with blocks distributed evenly over stages (or divided at ``boundaries``), ``interleave`` stages for each
    of ``replicas``, and one directive for all of them."""
    blocks, stages = len(chain.blocks), len(replicas) * interleave
    bounds = (
        [0, *boundaries, blocks]
        if boundaries
        else [blocks * s // stages for s in range(stages + 1)]
    )
    whole = sum(p.numel() for block in chain.blocks for p in block.module.parameters())
    free_bytes = (
        16 * whole * chain.dtype.itemsize
    )  # more than any states, weights or gradients take
    counts = [replicas[named(schedule).pipeline_rank_of(s, len(replicas))] for s in range(stages)]
    parts = tuple(
        StagePlan(
            start=low,
            stop=high,
            replicas=r,
            directives=(Directive(directive),) * (high - low),
            swap_limit_bytes=swap_limit,
            tier_bytes=tier_bytes,
            state_bytes=free_bytes,
            streamed_bytes=free_bytes,
            optimizer_offload=optimizer_offload,
            parameter_offload=parameter_offload,
            shard_optimizer=shard,
            bucket_bytes=bucket_bytes,
            inputs_ahead=inputs_ahead and low == 0,
        )
        for low, high, r in zip(bounds, bounds[1:], counts)
    )
    rank = RankPrediction(
        peak_bytes=0, budget_bytes=1, tier_peak_bytes=0, offloaded_bytes=0, stall_seconds=0.0
    )
    return Plan(
        model="test",
        fingerprint=chain.fingerprint(),
        schedule=named(schedule, group),
        global_batch=global_batch,
        microbatch=microbatch,
        stages=parts,
        tier=tier,
        placement=placement,
        interleave=interleave,
        gather_loss=gather_loss,
        local_steps=local_steps,
        staleness=staleness,
        local_groups=local_groups,
        fragments=fragments,
        fragment_delay=fragment_delay,
        updates=Updates(updates),
        prediction=Prediction(step_seconds=0.0, bubble=0.0, ranks=(rank,) * sum(replicas)),
    )
