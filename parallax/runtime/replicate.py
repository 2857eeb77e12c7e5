"""Gradient synchronisation of a stage's replicas: torch DDP, made to add instead of average, once per step.

DDP's forward is never called: blocks run on their own, and DDP's hooks ignore every backward until the reducer is
told to expect one. That is done right before the last micro-batch's backward (torch's own pipelining does the same),
so the all-reduce of the accumulated gradients overlaps with it and happens exactly once. This file holds the two
private names that needs: ``reducer.prepare_for_backward`` and, for DDP's own forward is what would call it,
``reducer._rebuild_buckets``.
"""

# No `from __future__ import annotations` here: DDP checks a communication hook's annotations as objects.
import time
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallax.errors import ParallaxError
from parallax.mesh import Mesh

BUCKET_MEBIBYTES = 4


class GradientSync(Protocol):
    """How a stage's gradients become the sum over its replicas."""

    @property
    def all_reduces(self) -> int:
        """Of replicated gradients, so far."""

    def arm(self) -> None:
        """The next backward is the step's last: reduce each bucket as soon as it is complete."""

    def finish(self) -> float:
        """Return with every gradient reduced; the seconds waited. Reduces here what was not armed."""


class NoSync:
    """One replica: nothing to add."""

    all_reduces = 0

    def arm(self) -> None:
        """Nothing to expect."""

    def finish(self) -> float:
        """Nothing to wait for."""
        return 0.0


class ReplicaSync:
    """Several replicas: DDP's reducer with a hook that sums."""

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self.all_reduces = 0
        self._group, self._stage = group, stage
        self._armed = False
        self._trained = sum(p.numel() for p in stage.parameters() if p.requires_grad)
        self._reduced = 0  # of these numbers
        self._ddp = DistributedDataParallel(
            stage,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group,
            bucket_cap_mb=BUCKET_MEBIBYTES,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self._ddp.register_comm_hook(None, self._sum)
        self._settle()

    def arm(self) -> None:
        """Tell the reducer to expect a backward."""
        self._armed, self._reduced = True, 0
        self._ddp.reducer.prepare_for_backward([])

    def finish(self) -> float:
        """The armed backward has ended with everything reduced; otherwise reduce here, in the same order everywhere."""
        start = time.perf_counter()
        if not self._armed:
            self._reduce_now()
        elif self._reduced < self._trained:
            trained = [(name, p) for name, p in self._stage.named_parameters() if p.requires_grad]
            unused = [name for name, p in trained if p.grad is None or not p.grad.any()]
            raise ParallaxError(
                f"the replicas' gradients were not reduced: {', '.join(unused) or 'some parameters'} took no part in "
                "the last micro-batch; freeze parameters that are not used (requires_grad=False), or use one replica"
            )
        self._armed = False
        return time.perf_counter() - start

    def _settle(self) -> None:
        """Two rounds on zeros. DDP begins with one bucket for everything, which overlaps with nothing, and cuts it in
        the order of a first backward; after the second, gradients lie in the buckets instead of beside them."""
        trained = [parameter for parameter in self._stage.parameters() if parameter.requires_grad]
        for _ in range(2):
            self.arm()
            zeros = [torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p) for p in trained]
            torch.autograd.backward([parameter.view_as(parameter) for parameter in trained], zeros)
            self._ddp.reducer._rebuild_buckets()
        self.finish()
        self.all_reduces = 0

    def _sum(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        del state
        self.all_reduces += 1
        self._reduced += bucket.buffer().numel()
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def _reduce_now(self) -> None:
        bucket: list[torch.Tensor] = []
        for parameter in self._stage.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(gradient.nbytes for gradient in bucket) >= BUCKET_MEBIBYTES * 2**20:
                self._reduce_flat(bucket)
                bucket = []
        if bucket:
            self._reduce_flat(bucket)

    def _reduce_flat(self, gradients: list[torch.Tensor]) -> None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.all_reduces += 1
        dist.all_reduce(flat, group=self._group)
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(part.view_as(gradient))


class SharedSync:
    """Adds up the gradients of parameters that several stages hold, after each stage has added up its replicas.

    One replica of each stage contributes, the others contribute zeros: the sum needs no rescaling.
    """

    def __init__(
        self, inner: GradientSync, shared: dict[str, tuple[nn.Parameter, dist.ProcessGroup]], *, gives: bool
    ) -> None:
        self._inner, self._shared, self._gives = inner, shared, gives

    @property
    def all_reduces(self) -> int:
        """Of the replicas."""
        return self._inner.all_reduces

    def arm(self) -> None:
        """Expect the last backward."""
        self._inner.arm()

    def finish(self) -> float:
        """Replicas first, then the stages."""
        waited = self._inner.finish()
        start = time.perf_counter()
        for _, (parameter, group) in sorted(self._shared.items()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif not self._gives:
                parameter.grad.zero_()
            dist.all_reduce(parameter.grad, group=group)
        return waited + time.perf_counter() - start


def sync_for(stage: nn.Module, mesh: Mesh, tensors: dict[str, torch.Tensor]) -> GradientSync:
    """The synchronisation of a stage whose parameters have the model-wide names ``tensors``."""
    trained = any(parameter.requires_grad for parameter in stage.parameters())
    sync: GradientSync = NoSync()
    if mesh.replicas is not None and trained:
        sync = ReplicaSync(stage, mesh.replicas, mesh.device)
    shared = {n: (tensors[n], group) for n, group in mesh.shared.items() if tensors[n].requires_grad}
    return SharedSync(sync, shared, gives=mesh.replica == 0) if shared else sync  # type: ignore[arg-type]
