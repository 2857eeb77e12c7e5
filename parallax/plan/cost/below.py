"""The bytes that the stages of a plan may hold in the tier below, beside activations.

A stage's optimizer states are a share of its own parameters', with one exception: a parameter that several stages have
is stepped below by all of them where one does, for kernels of a device may round otherwise. So these bytes are known
when all stages are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from parallax.plan.cost.states import Sizes, dealt
from parallax.plan.plan import StagePlan
from parallax.plan.profile import ModelProfile


def with_room_below(
    profile: ModelProfile, stages: Sequence[StagePlan], pipeline_ranks: int
) -> tuple[StagePlan, ...]:
    """``stages``, which ``pipeline_ranks`` of the pipeline hold, with what their optimizer states and their parameters
    may take in the tier below: ``state_bytes`` and ``streamed_bytes``."""
    shares = [  # the stages of one pipeline rank are stepped alike
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
            streamed and stage.replicas > 1
        ):  # the sums are written before what was there is given up
            streamed += 2 * stage.bucket_bytes
        found.append(replace(stage, state_bytes=states, streamed_bytes=streamed))
    return tuple(found)


def _state_bytes(
    profile: ModelProfile, sizes: Sizes, stage: StagePlan, share: float, forced: int
) -> int:
    """A ``share`` of the states, rounded up to whole parameters, of which a replica gets its part, and all of those of
    ``forced`` bytes of parameters. The masters of parameters that visit lie beside these."""
    per_byte = profile.optimizer_bytes + profile.master_bytes
    whole, largest = math.ceil(sizes.trained * per_byte), sizes.parameter * per_byte
    lower = min(whole, math.floor(whole * share + largest)) if share else 0
    streamed = math.floor(sizes.parameters * stage.parameter_offload)
    mine = lower if streamed else dealt(lower, largest, stage.replicas)
    more = math.ceil(forced * per_byte)
    return min(whole, mine + more) - math.floor(
        sizes.least_trained(streamed) * profile.master_bytes
    )


def _streamed_bytes(profile: ModelProfile, sizes: Sizes, share: float) -> int:
    """A ``share`` of the parameters, rounded up to whole blocks, with gradients and masters of those that are trained.
    Of one block, what is new is written before the old is given up."""
    if not share:
        return 0
    whole = min(sizes.parameters, sizes.parameters * share + sizes.block)
    trained = min(whole, sizes.trained)
    passing = min(whole, sizes.block) + profile.gradient_bytes * min(trained, sizes.block)
    return math.ceil(whole + trained * (profile.gradient_bytes + profile.master_bytes) + passing)


def _forced(profile: ModelProfile, stages: Sequence[StagePlan], pipeline_ranks: int) -> list[int]:
    """Of each stage, the bytes of parameters that it steps below because another pipeline rank that has them does."""
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
