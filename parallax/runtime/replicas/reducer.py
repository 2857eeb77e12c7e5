"""Uses the reducer of torch DDP for one stage's replicas, with sums instead of averages, once per step.

DDP's forward is never called. DDP's hooks ignore every backward until the reducer is prepared for a backward. The
reducer is prepared right before the backward of the last micro-batch (as in torch's own pipelining), so the all-reduce
of the accumulated gradients overlaps with this backward, and happens exactly once.

This needs two private names of torch, which only this file uses: ``reducer.prepare_for_backward``, and
``reducer._rebuild_buckets``, which DDP's own forward would call.
"""

# No `from __future__ import annotations` here: DDP checks a communication hook's annotations as objects.
import time
from collections.abc import Iterable
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallax.errors import ParallaxError
from parallax.runtime.replicas.buckets import BucketSync, Reduced
from parallax.runtime.replicas.compress import SHORT, Reduce, reduce_as, reduce_exactly
from parallax.runtime.replicas.config import ReplicasConfig


@cache  # once per process
def touch_reducer() -> None:
    """Construct and discard a DDP reducer of a tiny module, because the first reducer of a process loads torch's
    compiler. torch.distributed must be initialised."""
    DistributedDataParallel(
        nn.Linear(1, 1), init_sync=False
    )  # makes a reducer without communication


class _HookState:
    """The state of the communication hook.

    The reducer holds this state for its lifetime. So the state must not hold the reducer, because the garbage collector
    could not free that cycle.
    """

    def __init__(self, reduce: Reduce) -> None:
        self.reduce = reduce
        self.all_reduces = self.numbers = 0


def _sum(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    assert isinstance(state, _HookState)
    state.all_reduces += 1
    state.numbers += bucket.buffer().numel()
    return state.reduce(bucket)


class ReplicaSync:
    """Sums the gradients of replicas with DDP's reducer, compressed as ``config`` says.

    If :meth:`arm` was not called before the last backward, :meth:`finish` sums the gradients, without PowerSGD. The
    gradients are views of the reducer's buckets, so ``bucket_bytes`` does not affect memory.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
        config: ReplicasConfig,
        bucket_bytes: int,
    ) -> None:
        self._parameters = parameters
        self._state = _HookState(reduce_exactly(group))
        self._armed = False
        # Ids of parameters that ever had a gradient, and of those with one in the last backward.
        self._used: set[int] = set()
        self._fired: set[int] = set()
        self._unannounced = BucketSync(parameters.values(), group, SHORT.get(config.compress))
        self._trained = sum(parameter.numel() for parameter in parameters.values())
        self._ddp = DistributedDataParallel(
            nn.ParameterList(parameters.values()),  # DDP needs only the parameters of a stage
            device_ids=[device.index] if device.type != "cpu" else None,
            process_group=group,
            bucket_cap_mb=bucket_bytes / 2**20,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self._ddp.register_comm_hook(self._state, _sum)
        self._settle()
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(_note(self._used, self._fired))
        self._state.reduce = reduce_as(config.compress, config.powersgd_rank, group, device)

    @property
    def all_reduces(self) -> int:
        return self._state.all_reduces + self._unannounced.all_reduces

    def arm(self) -> None:
        """Prepare the reducer for the next backward."""
        self._armed, self._state.numbers = True, 0
        self._fired.clear()
        self._ddp.reducer.prepare_for_backward([])

    def ended(self) -> None:
        """Add zero gradients for parameters that the backward did not use.

        Other replicas may have used these parameters, and a bucket is reduced only when all replicas have completed it.
        """
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
        """Whether ``parameter`` ever had a gradient on this rank."""
        return id(parameter) in self._used

    def disarm(self) -> None:
        """Withdraw the announcement of a backward; :meth:`finish` then reduces the gradients."""
        self._armed = False

    def finish(self) -> float:
        """Finish the reduction and return the seconds spent waiting.

        If :meth:`arm` has announced a backward, check that this backward has reduced all gradients. Otherwise reduce
        them now, in the same order on all ranks.
        """
        start = time.perf_counter()
        if not self._armed:
            self._unannounced.finish()
        elif self._state.numbers < self._trained:
            raise ParallaxError(
                f"the replicas reduced {self._state.numbers} of {self._trained} gradients: a parameter was used after "
                "the last micro-batch's backward had ended; run the blocks through the engine alone"
            )
        self._armed = False
        return time.perf_counter() - start

    def _settle(self) -> None:
        """Run two backwards on zeros, so that the reducer reaches its final buckets.

        DDP starts with one bucket, whose all-reduce overlaps with no backward, and rebuilds its buckets in the order of
        the first backward. After the second backward, gradients are views of the buckets.
        """
        for _ in range(2):
            self.arm()
            self._add_zeros(self._parameters.values())
            self._ddp.reducer._rebuild_buckets()
        self.finish()
        self._state.all_reduces = 0

    def _add_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        added = list(parameters)
        zeros = [torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p) for p in added]
        torch.autograd.backward([parameter.view_as(parameter) for parameter in added], zeros)


def _note(*sets: set[int]) -> Reduced:
    """Return a gradient hook that adds the parameter's id to ``sets``. It records ids because parameters hold their
    hooks, so a hook must not hold a parameter."""

    def note(parameter: torch.Tensor) -> None:
        for each in sets:
            each.add(id(parameter))

    return note
