"""torch DDP as the reducer of one stage's replicas, made to add instead of average, once per step.

DDP's forward is never called: blocks run on their own, and DDP's hooks ignore every backward until the reducer is
told to expect one. That is done right before the last micro-batch's backward (torch's own pipelining does the same),
so the all-reduce of the accumulated gradients overlaps with it and happens exactly once. This file holds the two
private names that needs: ``reducer.prepare_for_backward`` and, for DDP's own forward is what would call it,
``reducer._rebuild_buckets``.
"""

# No `from __future__ import annotations` here: DDP checks a communication hook's annotations as objects.
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallax.errors import ParallaxError
from parallax.runtime.replicas.buckets import BucketSync, Reduced
from parallax.runtime.replicas.compress import SHORT, Reduce, reduce_as, reduce_exactly
from parallax.runtime.replicas.config import ReplicasConfig


def touch_reducer() -> None:
    """Make one for next to nothing, in a process that is in a world: torch loads its compiler for the first."""
    DistributedDataParallel(nn.Linear(1, 1), init_sync=False)  # which says nothing to anybody


class _Books:
    """What the communication hook is told, and tells. The reducer holds it for as long as it lives, and nothing that
    holds the reducer: that would be a cycle which no collector sees."""

    def __init__(self, reduce: Reduce) -> None:
        self.reduce = reduce
        self.all_reduces = self.numbers = 0


def _sum(books: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    assert isinstance(books, _Books)
    books.all_reduces += 1
    books.numbers += bucket.buffer().numel()
    return books.reduce(bucket)


class ReplicaSync:
    """Several replicas: DDP's reducer with a hook that sums, compressed as ``config`` says. Where nothing was
    announced, PowerSGD is left out. Its buckets, of ``bucket_bytes``, are the gradients: large ones take no more
    memory."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
        config: ReplicasConfig,
        bucket_bytes: int,
    ) -> None:
        self._parameters = parameters
        self._books = _Books(reduce_exactly(group))
        self._armed = False
        # Ids of parameters that ever had a gradient; in the last backward:
        self._used: set[int] = set()
        self._fired: set[int] = set()
        self._unannounced = BucketSync(parameters.values(), group, SHORT.get(config.compress))
        self._trained = sum(parameter.numel() for parameter in parameters.values())
        self._ddp = DistributedDataParallel(
            nn.ParameterList(parameters.values()),  # all that DDP needs to know of a stage
            device_ids=[device.index] if device.type != "cpu" else None,
            process_group=group,
            bucket_cap_mb=bucket_bytes / 2**20,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self._ddp.register_comm_hook(self._books, _sum)
        self._settle()
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(_note(self._used, self._fired))
        self._books.reduce = reduce_as(config.compress, config.powersgd_rank, group, device)

    @property
    def all_reduces(self) -> int:
        return self._books.all_reduces + self._unannounced.all_reduces

    def arm(self) -> None:
        """Tell the reducer to expect a backward."""
        self._armed, self._books.numbers = True, 0
        self._fired.clear()
        self._ddp.reducer.prepare_for_backward([])

    def ended(self) -> None:
        """Add zeros to what took no part: other replicas may have used it, and wait for it in their buckets."""
        missing = (
            [p for p in self._parameters.values() if id(p) not in self._fired]
            if self._armed
            else []
        )
        if missing:
            used = set(self._used)
            self._add_zeros(missing)
            self._used.intersection_update(used)

    def took_part(self, parameter: nn.Parameter) -> bool:
        """Whether ``parameter`` ever had a gradient here."""
        return id(parameter) in self._used

    def disarm(self) -> None:
        """Gradients are reduced at the end."""
        self._armed = False

    def finish(self) -> float:
        """The armed backward has ended with everything reduced; otherwise reduce here, in the same order everywhere."""
        start = time.perf_counter()
        if not self._armed:
            self._unannounced.finish()
        elif self._books.numbers < self._trained:
            raise ParallaxError(
                f"the replicas reduced {self._books.numbers} of {self._trained} gradients: a parameter was used after "
                "the last micro-batch's backward had ended; run the blocks through the engine alone"
            )
        self._armed = False
        return time.perf_counter() - start

    def _settle(self) -> None:
        """Two rounds on zeros. DDP begins with one bucket for everything, which overlaps with nothing, and cuts it in
        the order of a first backward; after the second, gradients lie in the buckets instead of beside them."""
        for _ in range(2):
            self.arm()
            self._add_zeros(self._parameters.values())
            self._ddp.reducer._rebuild_buckets()
        self.finish()
        self._books.all_reduces = 0

    def _add_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        added = list(parameters)
        zeros = [torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p) for p in added]
        torch.autograd.backward([parameter.view_as(parameter) for parameter in added], zeros)


def _note(*sets: set[int]) -> Reduced:
    """A hook that notes its parameter's id: parameters hold their hooks, so a hook must not hold parameters."""

    def note(parameter: torch.Tensor) -> None:
        for each in sets:
            each.add(id(parameter))

    return note
