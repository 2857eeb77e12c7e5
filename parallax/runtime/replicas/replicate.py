"""Gradients become sums over replicas, and over stages that share a parameter; replicas share optimizer states."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from parallax.mesh import Mesh
from parallax.model.layers.norms import BatchNorms
from parallax.runtime.replicas.buckets import BucketSync, Reduced, anywhere
from parallax.runtime.replicas.compress import SHORT
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.runtime.replicas.reducer import ReplicaSync
from parallax.runtime.replicas.streamed_sum import StreamedSum
from parallax.runtime.stage import Stage
from parallax.swap.parameters.offloaded import OffloadedParameters


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

    def ended(self, stage: int) -> None:
        """That backward has ended: what took no part in it is complete, too."""

    def split(self, stage: int, owed: Collection[nn.Parameter]) -> Reduced:
        """All gradients of ``stage`` are final but those ``owed``; the function is to be told of these one by one."""

    def disarm(self) -> None:
        """The backward that was expected ended early, or there is none."""

    def finish(self) -> float:
        """Return with every gradient reduced; the seconds waited. Reduces here what was not announced."""


class NoSync:
    """One replica: nothing to add. In the last backward of a stage, ``reduced`` is told of each of its parameters as
    soon as the gradient is final. Hooks that do so are there for this one backward: each costs a call into Python."""

    all_reduces = 0

    def __init__(self, parameters: Mapping[int, Iterable[nn.Parameter]], reduced: Reduced) -> None:
        self._parameters = {stage: list(found) for stage, found in parameters.items()}
        self._hooks: list[RemovableHandle] = []
        # Weakly: parameters hold their hooks, and who is told holds the parameters.
        listener = weakref.WeakMethod(reduced)

        def tell(parameter: torch.Tensor) -> None:
            told = listener()
            if told is not None:
                told(parameter)

        self._tell = tell

    def arm(self, stage: int) -> None:
        """What the next backward adds is the last."""
        for parameter in self._parameters.get(stage, ()):
            if parameter.requires_grad:  # it may have been frozen since
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._tell))

    def ended(self, stage: int) -> None:
        """Nobody waits for what had no gradient."""
        del stage
        self.disarm()

    def split(self, stage: int, owed: Collection[nn.Parameter]) -> Reduced:
        """Tell of all others now."""
        mine = set(self._parameters.get(stage, ()))

        def ready(parameter: torch.Tensor) -> None:
            if parameter in mine:
                self._tell(parameter)

        for parameter in mine.difference(owed):
            ready(parameter)
        return ready

    def disarm(self) -> None:
        """What is added is not the last."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def finish(self) -> float:
        return 0.0


class StageGradientSync:
    """Several replicas of all stages of one pipeline rank: ``parts`` announce their last backwards each for itself; of
    what stages here share, nobody knows which backward is the last, so ``late`` is reduced at the end.

    A parameter that no replica has ever used has no gradient, as in one process, so that no weight decay acts on it: as
    long as there may be some, the replicas ask each other.
    """

    def __init__(
        self,
        parts: Mapping[int, ReplicaSync | BucketSync],
        late: BucketSync,
        members: Mapping[int, Iterable[nn.Parameter]],
        group: dist.ProcessGroup,
    ) -> None:
        self._parts, self._late, self._group = parts, late, group
        self._unused: list[tuple[ReplicaSync | BucketSync, nn.Parameter]] = [
            (parts[stage], parameter) for stage in parts for parameter in members[stage]
        ]
        self._unused += [(late, parameter) for parameter in late.parameters]

    @property
    def all_reduces(self) -> int:
        return sum(part.all_reduces for part in (*self._parts.values(), self._late))

    def arm(self, stage: int) -> None:
        """Expect the last backward of ``stage``."""
        part = self._parts.get(stage)
        if isinstance(part, ReplicaSync):
            part.arm()

    def ended(self, stage: int) -> None:
        part = self._parts.get(stage)
        if isinstance(part, ReplicaSync):
            part.ended()

    def split(self, stage: int, owed: Collection[nn.Parameter]) -> Reduced:
        """Begin with what is complete."""
        part = self._parts.get(stage)
        return part.split(owed) if isinstance(part, BucketSync) else lambda parameter: None

    def disarm(self) -> None:
        for part in self._parts.values():
            part.disarm()

    def finish(self) -> float:
        took_part = [part.took_part(parameter) for part, parameter in self._unused]
        waited = sum(part.finish() for part in (*self._parts.values(), self._late))
        if self._unused:
            self._forget_unused(took_part)
        return waited

    def _forget_unused(self, took_part: list[bool]) -> None:
        used = anywhere(took_part, self._unused[0][1].device, self._group)
        self._unused = [each for each, is_used in zip(self._unused, used) if not is_used]
        for _, parameter in self._unused:
            parameter.grad = None


class Following(Protocol):
    """What is done when the gradients of a rank's own parameters are reduced, or begun in a step's last backward."""

    @property
    def all_reduces(self) -> int:
        """Of replicated gradients, so far."""

    def arm(self) -> None:
        """The next backward is the last."""

    def ended(self) -> None:
        """It is over."""

    def run(self) -> None:
        """Do it."""

    def forget(self) -> None:
        """The step ended early."""


class StatisticsAverage:
    """Averages the running statistics of the replicas' BatchNorms."""

    all_reduces = 0

    def __init__(self, norms: BatchNorms) -> None:
        self._norms = norms

    def arm(self) -> None:
        """Nothing is done before the end."""

    def ended(self) -> None:
        """Nothing was begun."""

    def run(self) -> None:
        self._norms.average_statistics()

    def forget(self) -> None:
        """Micro-batches so far do not count."""
        self._norms.reset_counts()


class SharedSum:
    """Adds up the gradients of parameters that several stages hold, after each stage has added up its replicas.

    One replica of each stage contributes, the others contribute zeros: the sum needs no rescaling. What no stage has
    ever used has no gradient: as long as that may be so, the stages ask each other.
    """

    all_reduces = 0

    def __init__(
        self, shared: dict[str, tuple[nn.Parameter, dist.ProcessGroup]], *, gives: bool
    ) -> None:
        self._shared, self._gives = shared, gives
        self._unused = set(shared)

    def arm(self) -> None:
        """Nothing is done before the end."""

    def ended(self) -> None:
        """Nothing was begun."""

    def run(self) -> None:
        """One after the other, in the order of their names."""
        for name, (parameter, group) in sorted(self._shared.items()):
            if name in self._unused:
                (used,) = anywhere([parameter.grad is not None], parameter.device, group)
                if not used:
                    continue
                self._unused.remove(name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif not self._gives:
                parameter.grad.zero_()
            dist.all_reduce(parameter.grad, group=group)

    def forget(self) -> None:
        """Nothing is under way."""


class FollowedSync:
    """A synchronisation that something follows, in order."""

    def __init__(self, inner: GradientSync, following: Sequence[Following]) -> None:
        self._inner, self._following = inner, following

    @property
    def all_reduces(self) -> int:
        return self._inner.all_reduces + sum(each.all_reduces for each in self._following)

    def arm(self, stage: int) -> None:
        self._inner.arm(stage)
        for each in self._following:
            each.arm()

    def ended(self, stage: int) -> None:
        self._inner.ended(stage)
        for each in self._following:
            each.ended()

    def split(self, stage: int, owed: Collection[nn.Parameter]) -> Reduced:
        """Begin with what is complete."""
        return self._inner.split(stage, owed)

    def disarm(self) -> None:
        self._inner.disarm()
        for each in self._following:
            each.forget()

    def finish(self) -> float:
        """The rank's own parameters first."""
        waited = self._inner.finish()
        start = time.perf_counter()
        for each in self._following:
            each.run()
        return waited + time.perf_counter() - start


class SharedStates:
    """Replicas share one copy of the optimizer's states, on the device or below it: each parameter belongs to one of
    them, which steps it and broadcasts the new weights. They are dealt out largest first, to whoever has least."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        replica: int,
        replicas: int,
        parameters: Sequence[nn.Parameter],
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

    def broadcast(self, parameter: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        """One broadcast for all ``tensors``."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, group=self._group, group_src=self._owner[parameter])
        if not self.owns(parameter):
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
                tensor.copy_(part.view_as(tensor))


def sync_for(
    stage: Stage, mesh: Mesh, reduced: Reduced, config: ReplicasConfig, *, split: bool
) -> GradientSync:
    """The synchronisation of all stages of a rank. ``reduced`` is told of gradients that are final before
    :meth:`GradientSync.finish`; ``split`` says that backwards are. The plan has passed :meth:`ReplicasConfig.check`."""
    trained = {
        n: t
        for n, t in stage.named_tensors().items()
        if isinstance(t, nn.Parameter) and t.requires_grad
    }
    resident = {
        name: parameter for name, parameter in trained.items() if not stage.is_offloaded(parameter)
    }
    shared = {
        name: (trained[name], group) for name, group in mesh.shared.items() if name in trained
    }
    users = Counter(
        parameter for number in mesh.stages for parameter in stage.parameters_of(number)
    )
    parts: dict[int, dict[str, nn.Parameter]] = {}
    for number in mesh.stages:
        own = set(stage.parameters_of(number))
        parts[number] = {name: p for name, p in resident.items() if p in own and users[p] == 1}
    if mesh.replicas is not None and resident:
        sync: GradientSync = _replicated(parts, resident, mesh, config, split=split)
    else:  # those that ranks share are final only when the other ranks' are added
        told = {
            number: [p for name, p in part.items() if name not in shared]
            for number, part in parts.items()
        }
        sync = NoSync(told, reduced)
    following: list[Following] = [*_streamed_sum(stage, mesh, config, alone=not resident)]
    if stage.norms.statistics_differ:
        following.append(StatisticsAverage(stage.norms))
    if shared:
        following.append(SharedSum(shared, gives=mesh.replica == 0))
    return FollowedSync(sync, following) if following else sync


def _streamed_sum(
    stage: Stage, mesh: Mesh, config: ReplicasConfig, *, alone: bool
) -> Iterator[StreamedSum]:
    """Of parameters that stream, where there are any; ``alone``: nothing else is summed in the backward."""
    streamed = stage.offloaded
    if mesh.streamed is None or mesh.replicas is None:
        return
    if isinstance(streamed, OffloadedParameters):
        yield StreamedSum(
            streamed,
            mesh.streamed,
            mesh.replicas,
            SHORT.get(config.compress),
            mesh.plan.stages[mesh.pipeline_rank].bucket_bytes,
            beside=alone or dist.get_backend(mesh.streamed) != "nccl",
        )


def _replicated(
    parts: Mapping[int, dict[str, nn.Parameter]],
    resident: Mapping[str, nn.Parameter],
    mesh: Mesh,
    config: ReplicasConfig,
    *,
    split: bool,
) -> StageGradientSync:
    group = mesh.replicas
    assert group is not None
    announced = {name for part in parts.values() for name in part}
    short = SHORT.get(config.compress)
    late = BucketSync(
        [parameter for name, parameter in resident.items() if name not in announced], group, short
    )
    syncs: dict[int, ReplicaSync | BucketSync] = {}
    for number, part in parts.items():
        bucket_bytes = mesh.plan.stages[number].bucket_bytes
        if part:
            syncs[number] = (
                BucketSync(part.values(), group, short, bucket_bytes=bucket_bytes)
                if split
                else ReplicaSync(part, group, mesh.device, config, bucket_bytes)
            )
    return StageGradientSync(
        syncs, late, {number: part.values() for number, part in parts.items()}, group
    )
