"""Compress the gradients that replicas exchange: not at all, to two bytes, or as products of two narrow matrices.

Compressed reductions use torch's communication hooks for DDP. These hooks average, but replicas' gradients must be
summed here, so each bucket is first multiplied by the number of replicas.
"""

# No `from __future__ import annotations` here: DDP checks a communication hook's annotations as objects.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from parallax.errors import PlanError

SHORT = {"fp16": torch.float16, "bf16": torch.bfloat16}
COMPRESSIONS = ("none", *SHORT, "powersgd")
EXACT_STEPS = (
    2  # torch's PowerSGD starts when DDP no longer rebuilds its buckets: with the third step
)

Reduce = Callable[[dist.GradBucket], torch.futures.Future[torch.Tensor]]  # type: ignore[name-defined]


def reduce_exactly(group: dist.ProcessGroup) -> Reduce:
    """Return a DDP communication hook that sums over ``group`` without compression."""

    def reduce(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    return reduce


def reduce_as(compress: str, rank: int, group: dist.ProcessGroup, device: torch.device) -> Reduce:
    """Return a DDP communication hook that sums over ``group`` with the compression ``compress``. ``rank``: the number
    of columns of PowerSGD's matrices."""
    if compress == "none":
        return reduce_exactly(group)
    hook, state = (
        _power_sgd(rank, group, device) if compress == "powersgd" else _short(compress, group)
    )
    # PowerSGD starts its next all-reduce when one has ended. Gloo completes them on threads of its own, so with two
    # buckets under way, replicas may start them in different orders.
    one_by_one = compress == "powersgd" and dist.get_backend(group) == "gloo"
    size = group.size()

    def reduce(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        bucket.buffer().mul_(size)
        future = hook(state, bucket)
        if one_by_one:
            future.wait()
        return future

    return reduce


def _short(compress: str, group: dist.ProcessGroup) -> tuple[Callable[..., Any], Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[
        compress
    ], group


def _power_sgd(
    rank: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Callable[..., Any], Any]:
    if device.type == "cpu" and torch.accelerator.is_available():
        raise PlanError(
            "replicas.compress=powersgd synchronizes with a GPU that the stage does not use: hide it with "
            "CUDA_VISIBLE_DEVICES='', or use replicas.compress=bf16"
        )
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=rank, start_powerSGD_iter=EXACT_STEPS
    )
    return powerSGD_hook.powerSGD_hook, state
