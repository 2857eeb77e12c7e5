"""Reduce the memory of activations where this lets the allocator keep freed memory for reuse.

The search gives activations all of the remaining budget. On a CPU the peak is then so near the budget that all freed
memory must be returned to the system at once, which slows computing down. Smaller swap limits, or more recomputed
blocks, avoid this but cost time as well. The simulator decides which is faster.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

from parallax.errors import BudgetExceeded, InfeasiblePlan
from parallax.plan.cluster import Cluster
from parallax.plan.cost.peak import bytes_above_budget
from parallax.plan.cost.stage import load_block
from parallax.plan.plan import Directive, Pipeline, StagePlan
from parallax.plan.profile import ModelProfile
from parallax.plan.simulation.predict import Forecast, predict_costs, stage_loads


def with_ample_memory(
    profile: ModelProfile, cluster: Cluster, pipeline: Pipeline, forecast: Forecast
) -> tuple[Pipeline, Forecast]:
    """Return ``pipeline`` and its ``forecast``, with less memory for activations on the ranks whose allocator can then
    keep freed memory for reuse.

    Only pipeline ranks are changed whose allocator would otherwise return freed memory to the system at once. A rank
    that offloads activations gets smaller swap limits: first so small that a fifth of the memory stays free; if that is
    not accepted, just small enough for the allocator to keep freed memory. On a rank that offloads nothing but
    recomputes some blocks, more blocks are recomputed. A change is accepted if the allocator can then keep freed memory
    and the step takes no longer.
    """
    for pipeline_rank in range(pipeline.pipeline_ranks):
        ranks = pipeline.ranks(pipeline_rank)
        if not any(forecast.ranks[rank].returns_freed for rank in ranks):
            continue
        device = min((cluster.devices[rank] for rank in ranks), key=lambda d: d.memory_bytes)
        mine = pipeline.stages_of(pipeline_rank)
        loads = stage_loads(profile, cluster, pipeline)
        work = max(loads[stage].reused_bytes for stage in mine)
        above = bytes_above_budget(forecast.stages[pipeline_rank].memory, device, work)
        offloads = any(pipeline.stages[stage].offloads for stage in mine)
        for spare in (device.memory_bytes // 5, 0) if offloads else (0,):
            less = (above + spare) / (1 + device.gap_share + device.kept_share)
            stages = _with_less(profile, pipeline, pipeline_rank, less)
            if stages == pipeline.stages:
                break
            with contextlib.suppress(InfeasiblePlan, BudgetExceeded):
                changed = replace(pipeline, stages=stages)
                found = predict_costs(profile, cluster, changed)
                kept = not any(found.ranks[rank].returns_freed for rank in ranks)
                if kept and found.step_seconds <= forecast.step_seconds:
                    pipeline, forecast = changed, found
                    break
    return pipeline, forecast


def _limit(stage: StagePlan) -> int:
    """Return the largest bytes of offloaded activations that may be on the device of a stage at one time."""
    return stage.swap_limit_bytes if stage.offloads else 0


def _with_less(
    profile: ModelProfile, pipeline: Pipeline, pipeline_rank: int, less: float
) -> tuple[StagePlan, ...]:
    """Return the stages of ``pipeline``, changed so that the activations of ``pipeline_rank`` need fewer bytes.

    ``less`` is the number of bytes to save; if that is impossible, as many as possible are saved. Swap limits are
    reduced. If nothing is offloaded but some blocks are recomputed, more blocks are recomputed.
    """
    mine, stages = pipeline.stages_of(pipeline_rank), pipeline.stages
    limit = sum(_limit(stages[stage]) for stage in mine)
    if limit:
        share = 1 - less / limit
        changed = {
            stage: replace(
                stages[stage],
                swap_limit_bytes=max(0, math.floor(_limit(stages[stage]) * share) - 1),
            )
            for stage in mine
            if stages[stage].offloads
        }
    elif any(Directive.RECOMPUTE in stages[stage].directives for stage in mine):
        changed = _recomputing(profile, pipeline, mine, less)
    else:
        changed = {}
    return tuple(changed.get(index, stage) for index, stage in enumerate(stages))


def _recomputing(
    profile: ModelProfile, pipeline: Pipeline, mine: Sequence[int], less: float
) -> dict[int, StagePlan]:
    """Return {index: stage} for the stages ``mine``, in which kept blocks are recomputed until activations need
    ``less`` fewer bytes, or until no block is kept.

    The first blocks are recomputed first, because they would keep their activations for the longest time.
    """
    changed = dict[int, StagePlan]()
    count = pipeline.micro_batches(pipeline.global_batch)
    for index in mine:
        stage = pipeline.stages[index]
        in_flight = pipeline.schedule.in_flight(
            len(pipeline.stages), index, count, pipeline.interleave
        )
        directives = list(stage.directives)
        for place, directive in enumerate(directives):
            if less <= 0 or directive is not Directive.KEEP:
                continue
            cost, rows = (
                profile.blocks[stage.start + place],
                -(-pipeline.microbatch // stage.replicas),
            )
            kept, again = (
                load_block(cost, each, rows).kept_bytes
                for each in (Directive.KEEP, Directive.RECOMPUTE)
            )
            directives[place] = Directive.RECOMPUTE
            less -= in_flight * max(0, kept - again)
        changed[index] = replace(stage, directives=tuple(directives))
    return changed
