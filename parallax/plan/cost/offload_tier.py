"""Compute the bytes of each stage's parameters and optimizer states in the offload tier.

Normally a stage offloads a share of its own parameters' optimizer states. But if one stage steps a tied parameter in
the offload tier, all stages that hold the parameter do so, because a step on the device may round differently. So these
bytes depend on all stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from parallax.plan.cost.states import Sizes, shard_bytes
from parallax.plan.plan import StagePlan
from parallax.plan.profile import ModelProfile


def with_offload_bytes(
    profile: ModelProfile, stages: Sequence[StagePlan], pipeline_ranks: int
) -> tuple[StagePlan, ...]:
    """Return ``stages`` with the fields ``state_bytes`` and ``streamed_bytes`` set.

    Both are upper bounds on the bytes that one replica of a stage has in the offload tier: ``state_bytes`` for
    optimizer states, and ``streamed_bytes`` for parameters with their gradients and master copies. The stages are on
    ``pipeline_ranks`` pipeline ranks.
    """
    shares = [  # all stages of one pipeline rank have the same share
        max(stage.optimizer_offload for stage in stages[pipeline_rank::pipeline_ranks])
        for pipeline_rank in range(pipeline_ranks)
    ]
    forced = _forced(profile, stages, pipeline_ranks)
    found = []
    for index, stage in enumerate(stages):
        sizes = Sizes.of(profile, stage.start, stage.stop)
        states = _state_bytes(profile, sizes, stage, shares[index % pipeline_ranks], forced[index])
        streamed = _streamed_bytes(profile, sizes, stage.parameter_offload)
        if (
            streamed and profile.summing(stage.replicas) > 1
        ):  # new sums are written before old ones are freed
            streamed += 2 * stage.bucket_bytes
        found.append(replace(stage, state_bytes=states, streamed_bytes=streamed))
    return tuple(found)


def _state_bytes(
    profile: ModelProfile, sizes: Sizes, stage: StagePlan, share: float, forced: int
) -> int:
    """Return an upper bound on the bytes of optimizer states that one replica of ``stage`` has in the offload tier.

    The bound is a sum of two parts. The first is the offloaded ``share`` of the stage's states, rounded up to whole
    parameters. A replica has its shard of these states, or all of them if the stage offloads parameters, too. The
    second part is the states of ``forced`` bytes of tied parameters, which are stepped in the tier because of another
    stage (:func:`_forced`). Master copies of offloaded parameters are left out: :func:`_streamed_bytes` counts them.
    """
    per_byte = profile.optimizer_bytes + profile.master_bytes
    whole, largest = math.ceil(sizes.trained * per_byte), sizes.parameter * per_byte
    lower = min(whole, math.floor(whole * share + largest)) if share else 0
    streamed = sizes.offloaded(stage.parameter_offload)
    sharers = profile.summing(stage.replicas)
    mine = lower if streamed else shard_bytes(lower, largest, sharers)
    more = math.ceil(forced * per_byte)
    return min(whole, mine + more) - math.floor(
        sizes.least_trained(streamed) * profile.master_bytes
    )


def _streamed_bytes(profile: ModelProfile, sizes: Sizes, share: float) -> int:
    """Return the bytes of a ``share`` of the parameters in the offload tier, with gradients and master copies.

    The share is rounded up to whole blocks. One block counts twice, because its new data is written before its old data
    is freed.
    """
    if not share:
        return 0
    block = sizes.offloadable_block
    whole = min(sizes.offloadable, sizes.offloadable * share + block)
    trained = min(whole, sizes.offloadable_trained)
    passing = min(whole, block) + profile.gradient_bytes * min(trained, block)
    return math.ceil(whole + trained * (profile.gradient_bytes + profile.master_bytes) + passing)


def _forced(profile: ModelProfile, stages: Sequence[StagePlan], pipeline_ranks: int) -> list[int]:
    """Return, for each stage, the bytes of its tied parameters that must be stepped in the tier.

    These are the parameters that stages on several pipeline ranks hold, if at least one of these stages offloads
    optimizer states. Then all of these stages step the parameter in the tier.
    """
    forced = [0] * len(stages)
    for size, users in profile.ties:
        having = [
            index
            for index, stage in enumerate(stages)
            if any(stage.start <= user < stage.stop for user in users)
        ]
        apart = len({index % pipeline_ranks for index in having}) > 1
        if apart and any(stages[index].optimizer_offload for index in having):
            for index in having:
                forced[index] += size
    return forced
