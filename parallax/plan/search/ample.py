"""Swap limits that leave an allocator room for what is freed.

The search gives offloaded activations all of the budget that is left. On a CPU the peak is then so near the budget that
all freed memory has to go back at once, and computing takes longer. With a smaller limit more is read back before it
is used, and the allocator may keep its memory. The simulator says which of both is faster.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

from parallax.errors import BudgetExceeded, InfeasiblePlan
from parallax.plan.cluster import Cluster
from parallax.plan.cost.peak import bytes_above_ample
from parallax.plan.plan import StagePlan
from parallax.plan.profile import ModelProfile
from parallax.plan.simulation.predict import Forecast, Pipeline, predict


def with_ample_memory(
    profile: ModelProfile, cluster: Cluster, pipeline: Pipeline, forecast: Forecast
) -> tuple[Pipeline, Forecast]:
    """``pipeline``, of this ``forecast``, with smaller swap limits at positions where that makes no step longer."""
    for position in range(pipeline.positions):
        ranks, mine = pipeline.ranks(position), set(pipeline.stages_of(position))
        offloads = any(pipeline.stages[stage].offloads for stage in mine)
        if not offloads or not any(forecast.ranks[rank].returns_freed for rank in ranks):
            continue
        device = min((cluster.devices[rank] for rank in ranks), key=lambda d: d.memory_bytes)
        above = bytes_above_ample(forecast.stages[position].memory, device)
        stages = _with_less(
            pipeline.stages, mine, above / (1 + device.gap_share + device.kept_share)
        )
        with contextlib.suppress(InfeasiblePlan, BudgetExceeded):
            changed = replace(pipeline, stages=stages)
            found = predict(profile, cluster, changed)
            kept = not any(found.ranks[rank].returns_freed for rank in ranks)
            if kept and found.step_seconds <= forecast.step_seconds:
                pipeline, forecast = changed, found
    return pipeline, forecast


def _with_less(stages: Sequence[StagePlan], mine: set[int], size: float) -> tuple[StagePlan, ...]:
    """``stages`` whose offloaded activations hold ``size`` bytes less on the device, in proportion to their limits."""
    whole = sum(stages[stage].swap_limit_bytes for stage in mine if stages[stage].offloads)
    less = size / whole
    return tuple(
        replace(each, swap_limit_bytes=max(0, math.floor(each.swap_limit_bytes * (1 - less)) - 1))
        if stage in mine and each.offloads
        else each
        for stage, each in enumerate(stages)
    )
