"""Gradient synchronisation of a stage's replicas: torch DDP, made to add instead of average, once per step.

DDP's forward is never called: blocks run on their own, and DDP's hooks ignore every backward until the reducer is
told to expect one. That is done right before the last micro-batch's backward (torch's own pipelining does the same),
so the all-reduce of the accumulated gradients overlaps with it and happens exactly once. This file holds the two
private names that needs: ``reducer.prepare_for_backward`` and, for DDP's own forward is what would call it,
``reducer._rebuild_buckets``.
"""

# No `from __future__ import annotations` here: DDP checks a communication hook's annotations as objects.
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallax.errors import ParallaxError
from parallax.mesh import Mesh
from parallax.model.norms import Norms
from parallax.runtime.buckets import BUCKET_MEBIBYTES, BucketSync, Reduced
from parallax.runtime.compress import SHORT, Reduce, reduce_as, reduce_exactly
from parallax.runtime.replicas import ReplicasConfig
from parallax.runtime.stage import Stage
from parallax.swap.parameters import StreamedParameters


class GradientSync(Protocol):
    """How the gradients of one rank's stages become the sum over their replicas.

    The last backward of a stage is announced by :meth:`arm`; where backwards are split, the last weight half by
    :meth:`split` instead.
    """

    @property
    def all_reduces(self) -> int:
        """Of replicated gradients, so far."""

    def arm(self, stage: int) -> None:
        """The next backward is the step's last of ``stage``: reduce each bucket as soon as it is complete."""

    def split(self, stage: int, owed: Collection[nn.Parameter]) -> Reduced:
        """All gradients of ``stage`` are final but those ``owed``; the function is to be told of these one by one."""

    def disarm(self) -> None:
        """The backward that was expected ended early, or there is none."""

    def finish(self) -> float:
        """Return with every gradient reduced; the seconds waited. Reduces here what was not announced."""


class NoSync:
    """One replica: nothing to add. In the last backward of a stage, ``reduced`` is told of each of its parameters as
    soon as the gradient is final."""

    all_reduces = 0

    def __init__(self, parameters: Mapping[int, Iterable[nn.Parameter]], reduced: Reduced) -> None:
        self._parameters = {stage: list(found) for stage, found in parameters.items()}
        self._armed: set[int] = set()
        # Weakly: parameters hold their hooks, and who is told holds the parameters.
        self._listener = weakref.WeakMethod(reduced)
        for stage, found in self._parameters.items():
            for parameter in found:
                parameter.register_post_accumulate_grad_hook(self._hook(stage))

    def _hook(self, stage: int) -> Reduced:
        armed, listener = self._armed, self._listener

        def tell(parameter: torch.Tensor) -> None:
            told = listener()
            if stage in armed and told is not None:
                told(parameter)

        return tell

    def arm(self, stage: int) -> None:
        """What the next backward adds is the last."""
        self._armed.add(stage)

    def split(self, stage: int, owed: Collection[nn.Parameter]) -> Reduced:
        """Tell of all others now."""
        told, mine = self._listener(), set(self._parameters.get(stage, ()))

        def ready(parameter: torch.Tensor) -> None:
            if parameter in mine and told is not None:
                told(parameter)

        for parameter in mine.difference(owed):
            ready(parameter)
        return ready

    def disarm(self) -> None:
        """What is added is not the last."""
        self._armed.clear()

    def finish(self) -> float:
        """Nothing to wait for."""
        self._armed.clear()
        return 0.0


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
    announced, PowerSGD is left out."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
        config: ReplicasConfig,
    ) -> None:
        self._parameters = parameters
        self._books = _Books(reduce_exactly(group))
        self._armed = False
        self._unannounced = BucketSync(parameters.values(), group, SHORT.get(config.compress))
        self._trained = sum(parameter.numel() for parameter in parameters.values())
        self._ddp = DistributedDataParallel(
            nn.ParameterList(parameters.values()),  # all that DDP needs to know of a stage
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group,
            bucket_cap_mb=BUCKET_MEBIBYTES,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self._ddp.register_comm_hook(self._books, _sum)
        self._settle()
        self._books.reduce = reduce_as(config.compress, config.powersgd_rank, group, device)

    @property
    def all_reduces(self) -> int:
        """One for each bucket."""
        return self._books.all_reduces + self._unannounced.all_reduces

    def arm(self) -> None:
        """Tell the reducer to expect a backward."""
        self._armed, self._books.numbers = True, 0
        self._ddp.reducer.prepare_for_backward([])

    def disarm(self) -> None:
        """Gradients are reduced at the end."""
        self._armed = False

    def finish(self) -> float:
        """The armed backward has ended with everything reduced; otherwise reduce here, in the same order everywhere."""
        start = time.perf_counter()
        if not self._armed:
            self._unannounced.finish()
        elif self._books.numbers < self._trained:
            unused = [name for name, p in self._parameters.items() if p.grad is None or not p.grad.any()]
            raise ParallaxError(
                f"the replicas' gradients were not reduced: {', '.join(unused) or 'some parameters'} took no part in "
                "the last micro-batch; freeze parameters that are not used (requires_grad=False), or use one replica"
            )
        self._armed = False
        return time.perf_counter() - start

    def _settle(self) -> None:
        """Two rounds on zeros. DDP begins with one bucket for everything, which overlaps with nothing, and cuts it in
        the order of a first backward; after the second, gradients lie in the buckets instead of beside them."""
        trained = list(self._parameters.values())
        for _ in range(2):
            self.arm()
            zeros = [torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p) for p in trained]
            torch.autograd.backward([parameter.view_as(parameter) for parameter in trained], zeros)
            self._ddp.reducer._rebuild_buckets()
        self.finish()
        self._books.all_reduces = 0


class PositionSync:
    """Several replicas of all stages of one position: ``parts`` announce their last backwards each for itself; of what
    stages here share, nobody knows which backward is the last, so ``late`` is reduced at the end."""

    def __init__(self, parts: Mapping[int, ReplicaSync | BucketSync], late: BucketSync) -> None:
        self._parts, self._late = parts, late

    @property
    def all_reduces(self) -> int:
        """Of all."""
        return sum(part.all_reduces for part in (*self._parts.values(), self._late))

    def arm(self, stage: int) -> None:
        """Expect the last backward of ``stage``."""
        part = self._parts.get(stage)
        if isinstance(part, ReplicaSync):
            part.arm()

    def split(self, stage: int, owed: Collection[nn.Parameter]) -> Reduced:
        """Begin with what is complete."""
        part = self._parts.get(stage)
        return part.split(owed) if isinstance(part, BucketSync) else lambda parameter: None

    def disarm(self) -> None:
        """Expect none."""
        for part in self._parts.values():
            part.disarm()

    def finish(self) -> float:
        """Stage by stage."""
        return sum(part.finish() for part in (*self._parts.values(), self._late))


class StreamedSync:
    """Adds up the gradients that live below the device, one after another, when the step's last backward is over; in
    the type ``short`` where there is one."""

    def __init__(
        self, inner: GradientSync, streamed: StreamedParameters, group: dist.ProcessGroup, short: torch.dtype | None
    ) -> None:
        self._inner, self._streamed, self._group, self._short = inner, streamed, group, short
        self._trained = list(dict.fromkeys(s.parameter for chunk in streamed.chunks for s in chunk.segments))
        self._own = 0

    @property
    def all_reduces(self) -> int:
        """Of both kinds."""
        return self._inner.all_reduces + self._own

    def arm(self, stage: int) -> None:
        """Expect the last backward."""
        self._inner.arm(stage)

    def split(self, stage: int, owed: Collection[nn.Parameter]) -> Reduced:
        """Begin with what is complete."""
        return self._inner.split(stage, owed)

    def disarm(self) -> None:
        """Expect none."""
        self._inner.disarm()

    def finish(self) -> float:
        """Those on the device first."""
        waited = self._inner.finish()
        start = time.perf_counter()
        for parameter in self._trained:
            total = self._streamed.read_gradient(parameter)
            total = torch.zeros_like(parameter) if total is None else total
            sent = total if self._short is None else total.to(self._short)
            dist.all_reduce(sent, group=self._group)
            self._streamed.write_gradient(parameter, sent.to(total.dtype))
            self._own += 1
        return waited + time.perf_counter() - start


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

    def arm(self, stage: int) -> None:
        """Expect the last backward."""
        self._inner.arm(stage)

    def split(self, stage: int, owed: Collection[nn.Parameter]) -> Reduced:
        """Begin with what is complete."""
        return self._inner.split(stage, owed)

    def disarm(self) -> None:
        """Expect none."""
        self._inner.disarm()

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


class StatisticsSync:
    """Averages the running statistics of the replicas' BatchNorms when the gradients are reduced."""

    def __init__(self, inner: GradientSync, norms: Norms) -> None:
        self._inner, self._norms = inner, norms

    @property
    def all_reduces(self) -> int:
        """Of gradients."""
        return self._inner.all_reduces

    def arm(self, stage: int) -> None:
        """Expect the last backward."""
        self._inner.arm(stage)

    def split(self, stage: int, owed: Collection[nn.Parameter]) -> Reduced:
        """Begin with what is complete."""
        return self._inner.split(stage, owed)

    def disarm(self) -> None:
        """Expect none."""
        self._inner.disarm()
        self._norms.forget()

    def finish(self) -> float:
        """Gradients first."""
        waited = self._inner.finish()
        start = time.perf_counter()
        self._norms.average()
        return waited + time.perf_counter() - start


class SharedStates:
    """Replicas share one copy of the optimizer states that lie below the device: each parameter belongs to one replica,
    which steps it and broadcasts the new weights. Parameters are dealt out largest first, to whoever has least."""

    def __init__(
        self, group: dist.ProcessGroup, replica: int, replicas: int, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._group, self._replica = group, replica
        self._owner: dict[torch.Tensor, int] = {}
        loads = [0] * replicas
        for parameter in sorted(parameters, key=lambda p: p.nbytes, reverse=True):
            owner = loads.index(min(loads))
            self._owner[parameter] = owner
            loads[owner] += parameter.nbytes

    def owner(self, parameter: torch.Tensor) -> int:
        """The replica that it was dealt to."""
        return self._owner[parameter]

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether it was dealt to this one."""
        return self._owner[parameter] == self._replica

    def spread(self, parameter: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        """One broadcast for all ``tensors``."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, group=self._group, group_src=self._owner[parameter])
        if not self.owns(parameter):
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
                tensor.copy_(part.view_as(tensor))


def sync_for(stage: Stage, mesh: Mesh, reduced: Reduced, config: ReplicasConfig, *, split: bool) -> GradientSync:
    """The synchronisation of all stages of a rank. ``reduced`` is told of gradients that are final before
    :meth:`GradientSync.finish`; ``split`` says that backwards are. The plan has passed :meth:`ReplicasConfig.check`."""
    trained = {n: t for n, t in stage.named_tensors().items() if isinstance(t, nn.Parameter) and t.requires_grad}
    resident = {name: parameter for name, parameter in trained.items() if not stage.streams(parameter)}
    shared = {name: (trained[name], group) for name, group in mesh.shared.items() if name in trained}
    users = Counter(parameter for number in mesh.stages for parameter in stage.parameters_of(number))
    parts: dict[int, dict[str, nn.Parameter]] = {}
    for number in mesh.stages:
        own = set(stage.parameters_of(number))
        parts[number] = {name: p for name, p in resident.items() if p in own and users[p] == 1}
    if mesh.replicas is not None and resident:
        sync: GradientSync = _replicated(parts, resident, mesh.replicas, mesh.device, config, split=split)
    else:  # those that ranks share are final only when the other ranks' are added
        told = {number: [p for name, p in part.items() if name not in shared] for number, part in parts.items()}
        sync = NoSync(told, reduced)
    if mesh.replicas is not None and stage.streamed is not None:
        sync = StreamedSync(sync, stage.streamed, mesh.replicas, SHORT.get(config.compress))
    if stage.norms.differ:
        sync = StatisticsSync(sync, stage.norms)
    return SharedSync(sync, shared, gives=mesh.replica == 0) if shared else sync


def _replicated(
    parts: Mapping[int, dict[str, nn.Parameter]],
    resident: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup,
    device: torch.device,
    config: ReplicasConfig,
    *,
    split: bool,
) -> PositionSync:
    announced = {name for part in parts.values() for name in part}
    short = SHORT.get(config.compress)
    late = BucketSync([parameter for name, parameter in resident.items() if name not in announced], group, short)
    syncs: dict[int, ReplicaSync | BucketSync] = {}
    for number, part in parts.items():
        if part:
            syncs[number] = (
                BucketSync(part.values(), group, short) if split else ReplicaSync(part, group, device, config)
            )
    return PositionSync(syncs, late)
