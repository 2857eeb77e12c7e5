"""Sum the gradients of replicas without DDP, in buckets that are all-reduced as soon as they are complete."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from parallax.plan.cluster import LEAST_BUCKET_BYTES

Reduced = Callable[[torch.Tensor], None]
_CONCURRENT = 2  # all-reduces at one time; each holds a copy of its gradients


class BucketSync:
    """All-reduces the gradients of ``parameters`` over the replicas in ``group``, without DDP.

    It is used for split backwards, whose weight gradients bypass autograd hooks, and for parameters whose last backward
    is not known in advance.

    A bucket is filled until it has at least ``bucket_bytes``. Buckets are reduced in a fixed order: a bucket is reduced
    when it and all earlier buckets are complete. If ``short`` is given, gradients are converted to this type for the
    reduction.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        short: torch.dtype | None = None,
        *,
        bucket_bytes: int = LEAST_BUCKET_BYTES,
    ) -> None:
        self._group, self._short = group, short
        self._buckets: list[list[nn.Parameter]] = []
        free_bytes = 0
        # The last layer's gradients are complete first.
        for parameter in reversed(list(parameters)):
            if free_bytes <= 0:
                self._buckets.append([])
                free_bytes = bucket_bytes
            self._buckets[-1].append(parameter)
            free_bytes -= parameter.nbytes
        self._place = {
            parameter: place for place, bucket in enumerate(self._buckets) for parameter in bucket
        }
        self._reducing: deque[tuple[dist.Work, torch.Tensor, list[nn.Parameter]]] = deque()
        self.all_reduces = 0
        self.disarm()

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        return self._place.keys()

    def took_part(self, parameter: nn.Parameter) -> bool:
        """Return whether a backward has given ``parameter`` a gradient. Zeros that this class adds do not count.

        Call this method before :meth:`finish`.
        """
        return parameter.grad is not None and parameter not in self._zeros

    def split(self, pending: Collection[nn.Parameter]) -> Reduced:
        """Announce that all gradients are final except those of ``pending``, and reduce the complete buckets. Return a
        function to call with each parameter of ``pending`` when its gradient is final."""
        for parameter in self._place:
            if parameter not in pending:
                self._left[self._place[parameter]] -= 1
        self._launch()
        return self._complete

    def _complete(self, parameter: torch.Tensor) -> None:
        place = self._place.get(parameter)  # type: ignore[call-overload]
        if place is not None:
            self._left[place] -= 1
            self._launch()

    def disarm(self) -> None:
        """Reset for a new step, without waiting for running reductions: after a failed step, other ranks may never join
        them."""
        self._reducing.clear()
        self._zeros: set[nn.Parameter] = set()
        self._left = [len(bucket) for bucket in self._buckets]
        self._next = 0

    def finish(self) -> float:
        start = time.perf_counter()
        self._left = [0] * len(self._buckets)
        self._launch()
        self._collect(0)
        self.disarm()
        return time.perf_counter() - start

    def _launch(self) -> None:
        while self._next < len(self._buckets) and self._left[self._next] <= 0:
            bucket = self._buckets[self._next]
            self._next += 1
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                    self._zeros.add(parameter)
            self._collect(_CONCURRENT - 1)
            flat = torch.cat(
                [parameter.grad.reshape(-1) for parameter in bucket if parameter.grad is not None]
            )
            if self._short is not None:
                flat = flat.to(self._short)
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None
            self._reducing.append((work, flat, bucket))
            self.all_reduces += 1

    def _collect(self, left: int) -> None:
        while len(self._reducing) > left:
            work, flat, bucket = self._reducing.popleft()
            work.wait()
            for parameter, part in zip(
                bucket, flat.split([parameter.numel() for parameter in bucket])
            ):
                assert parameter.grad is not None
                parameter.grad.copy_(part.view_as(parameter))


def anywhere(
    flags: Sequence[bool], device: torch.device, group: dist.ProcessGroup | None
) -> list[bool]:
    """Return, for each flag, whether it is set on any rank of the group."""
    found = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found.tolist()]
