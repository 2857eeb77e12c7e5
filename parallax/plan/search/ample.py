"""Choose swap limits that let the allocator keep freed memory.

The search gives offloaded activations all of the remaining budget. On a CPU the peak is then so near the budget that
all freed memory must be returned to the system at once, which slows computing down. With a smaller limit more
activations are read back before they are used, and the allocator may keep its memory. The simulator decides which of
the two is faster.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

from parallax.errors import BudgetExceeded, InfeasiblePlan
from parallax.plan.cluster import Cluster
from parallax.plan.cost.peak import bytes_above_budget
from parallax.plan.plan import Pipeline, StagePlan
from parallax.plan.profile import ModelProfile
from parallax.plan.simulation.predict import Forecast, predict


def with_ample_memory(
    profile: ModelProfile, cluster: Cluster, pipeline: Pipeline, forecast: Forecast
) -> tuple[Pipeline, Forecast]:
    """Return ``pipeline``, whose forecast is ``forecast``, with smaller swap limits on each pipeline rank on which this
    does not lengthen the step. The limits keep a fifth of the budget free, or at least the bytes that the allocator
    keeps."""
    for pipeline_rank in range(pipeline.pipeline_ranks):
        ranks, mine = pipeline.ranks(pipeline_rank), set(pipeline.stages_of(pipeline_rank))
        limit = sum(_limit(pipeline.stages[stage]) for stage in mine)
        if not limit or not any(forecast.ranks[rank].returns_freed for rank in ranks):
            continue
        device = min((cluster.devices[rank] for rank in ranks), key=lambda d: d.memory_bytes)
        above = bytes_above_budget(forecast.stages[pipeline_rank].memory, device)
        for spare in (device.memory_bytes // 5, 0):
            less = (above + spare) / (1 + device.gap_share + device.kept_share) / limit
            with contextlib.suppress(InfeasiblePlan, BudgetExceeded):
                changed = replace(pipeline, stages=_with_less(pipeline.stages, mine, less))
                found = predict(profile, cluster, changed)
                kept = not any(found.ranks[rank].returns_freed for rank in ranks)
                if kept and found.step_seconds <= forecast.step_seconds:
                    pipeline, forecast = changed, found
                    break
    return pipeline, forecast


def _limit(stage: StagePlan) -> int:
    """Return the largest number of bytes of offloaded activations that the stage holds on the device."""
    return stage.swap_limit_bytes if stage.offloads else 0


def _with_less(stages: Sequence[StagePlan], mine: set[int], share: float) -> tuple[StagePlan, ...]:
    """Return ``stages``, with the swap limits of offloading stages in ``mine`` reduced by the fraction ``share``."""
    return tuple(
        replace(each, swap_limit_bytes=max(0, math.floor(_limit(each) * (1 - share)) - 1))
        if stage in mine and each.offloads
        else each
        for stage, each in enumerate(stages)
    )
