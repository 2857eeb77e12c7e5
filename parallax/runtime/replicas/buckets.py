"""Gradient synchronisation of replicas without DDP: buckets that are reduced as soon as they are complete."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from parallax.plan.cluster import LEAST_BUCKET_BYTES

Reduced = Callable[[torch.Tensor], None]
_FLYING = 2  # buckets that may be reduced at one time: each is a copy of its gradients


class BucketSync:
    """Several replicas, without DDP: for backwards that are split, whose weight halves autograd does not see, and for
    what no last backward announced. Buckets of ``bucket_bytes``, or a parameter more, are reduced in one order, each
    when it and all before it are complete, in the type ``short`` where there is one."""

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
        room = 0
        # The last layer's gradients are complete first.
        for parameter in reversed(list(parameters)):
            if room <= 0:
                self._buckets.append([])
                room = bucket_bytes
            self._buckets[-1].append(parameter)
            room -= parameter.nbytes
        self._place = {
            parameter: place for place, bucket in enumerate(self._buckets) for parameter in bucket
        }
        self._flying: deque[tuple[dist.Work, torch.Tensor, list[nn.Parameter]]] = deque()
        self.all_reduces = 0
        self.disarm()

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        return self._place.keys()

    def took_part(self, parameter: nn.Parameter) -> bool:
        """Whether ``parameter`` has, or had, a gradient that was not made up here; asked before :meth:`finish`."""
        return parameter.grad is not None and parameter not in self._made_up

    def split(self, owed: Collection[nn.Parameter]) -> Reduced:
        """Begin with what is complete."""
        for parameter in self._place:
            if parameter not in owed:
                self._left[self._place[parameter]] -= 1
        self._launch()
        return self._ready

    def _ready(self, parameter: torch.Tensor) -> None:
        place = self._place.get(parameter)  # type: ignore[call-overload]
        if place is not None:
            self._left[place] -= 1
            self._launch()

    def disarm(self) -> None:
        """Everything is to come. Nothing that flies is waited for: where a step failed, others may never answer."""
        self._flying.clear()
        self._made_up: set[nn.Parameter] = set()
        self._left = [len(bucket) for bucket in self._buckets]
        self._next = 0

    def finish(self) -> float:
        start = time.perf_counter()
        self._left = [0] * len(self._buckets)
        self._launch()
        self._land(0)
        self.disarm()
        return time.perf_counter() - start

    def _launch(self) -> None:
        while self._next < len(self._buckets) and self._left[self._next] <= 0:
            bucket = self._buckets[self._next]
            self._next += 1
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                    self._made_up.add(parameter)
            self._land(_FLYING - 1)
            flat = torch.cat(
                [parameter.grad.reshape(-1) for parameter in bucket if parameter.grad is not None]
            )
            if self._short is not None:
                flat = flat.to(self._short)
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None
            self._flying.append((work, flat, bucket))
            self.all_reduces += 1

    def _land(self, left: int) -> None:
        while len(self._flying) > left:
            work, flat, bucket = self._flying.popleft()
            work.wait()
            for parameter, part in zip(
                bucket, flat.split([parameter.numel() for parameter in bucket])
            ):
                assert parameter.grad is not None
                parameter.grad.copy_(part.view_as(parameter))


def anywhere(
    flags: Sequence[bool], device: torch.device, group: dist.ProcessGroup | None
) -> list[bool]:
    """Which of the flags are set on any rank of the group."""
    found = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found.tolist()]
