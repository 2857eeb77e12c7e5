"""Sum gradients over replicas and over stages that share a parameter, and shard optimizer states over replicas."""

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
    """Sums the gradients of one rank's stages over their replicas.

    Call :meth:`arm` before the last backward of a stage, or :meth:`split` before its last weight-gradient pass if
    backwards are split. Call :meth:`ended` after that pass.
    """

    @property
    def all_reduces(self) -> int:
        """Number of all-reduces of replicated gradients so far."""

    def arm(self, stage: int) -> None:
        """Announce the last backward of ``stage`` in this step, so that each bucket is reduced as soon as it is
        complete."""

    def ended(self, stage: int) -> None:
        """Announce that the last backward or weight-gradient pass of ``stage`` has ended, so that the gradients of
        unused parameters are final too."""

    def split(self, stage: int, pending: Collection[nn.Parameter]) -> Reduced:
        """Announce that all gradients of ``stage`` are final except those of ``pending``. Return a function to call
        with each parameter of ``pending`` when its gradient is final."""

    def disarm(self) -> None:
        """Withdraw the announcement of a backward that failed or did not happen."""

    def finish(self) -> float:
        """Reduce all gradients that are not reduced yet; return the seconds spent waiting."""


class NoSync:
    """The :class:`GradientSync` of a rank without replicas, in which nothing is summed.

    During the last backward of a stage, ``reduced`` is called with each parameter as soon as its gradient is final.
    Hooks on the parameters do this. They exist only for this backward, because each hook costs a call into Python.
    """

    all_reduces = 0

    def __init__(self, parameters: Mapping[int, Iterable[nn.Parameter]], reduced: Reduced) -> None:
        self._parameters = {stage: list(found) for stage, found in parameters.items()}
        self._hooks: list[RemovableHandle] = []
        # A weak reference: parameters hold their hooks, and the listener holds the parameters.
        listener = weakref.WeakMethod(reduced)

        def notify(parameter: torch.Tensor) -> None:
            report = listener()
            if report is not None:
                report(parameter)

        self._notify = notify

    def arm(self, stage: int) -> None:
        """Add hooks to the parameters of ``stage``, for its last backward."""
        for parameter in self._parameters.get(stage, ()):
            if parameter.requires_grad:  # the user may have frozen it
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._notify))

    def ended(self, stage: int) -> None:
        """Remove the hooks."""
        del stage
        self.disarm()

    def split(self, stage: int, pending: Collection[nn.Parameter]) -> Reduced:
        """Call ``reduced``, the constructor's function, for each parameter of ``stage`` outside of ``pending``.

        Return a function to call with each parameter of ``pending`` when its gradient is final. It also calls
        ``reduced``.
        """
        mine = set(self._parameters.get(stage, ()))

        def ready(parameter: torch.Tensor) -> None:
            if parameter in mine:
                self._notify(parameter)

        for parameter in mine.difference(pending):
            ready(parameter)
        return ready

    def disarm(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def finish(self) -> float:
        return 0.0


class StageGradientSync:
    """Sums the gradients of all stages of one pipeline rank over its replicas, which are the ranks of ``group``.

    ``parts`` maps each stage to the object that reduces the stage's gradients during its last backward, and ``members``
    maps each stage to the parameters with these gradients. ``late`` reduces the gradients of parameters that several
    stages of this rank use. It does so at the end of the step, because it is not known which backward is their last.

    A parameter that no replica has ever used must have no gradient, as in a single process: with a zero gradient,
    weight decay would change it. So as long as there are unused parameters, the replicas exchange after each step which
    of these parameters they have used.
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
        part = self._parts.get(stage)
        if isinstance(part, ReplicaSync):
            part.arm()

    def ended(self, stage: int) -> None:
        part = self._parts.get(stage)
        if isinstance(part, ReplicaSync):
            part.ended()

    def split(self, stage: int, pending: Collection[nn.Parameter]) -> Reduced:
        part = self._parts.get(stage)
        return part.split(pending) if isinstance(part, BucketSync) else lambda parameter: None

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


class SyncStep(Protocol):
    """A synchronization between ranks that follows the :class:`GradientSync` of a rank, for example the sum of
    gradients over stages that share a parameter. It may start during the last backward of a step."""

    @property
    def all_reduces(self) -> int:
        """Number of all-reduces of replicated gradients so far."""

    def arm(self, stage: int, pending: Collection[nn.Parameter] | None = None) -> None:
        """Announce the last backward of ``stage`` in this step, or its last weight-gradient pass.

        ``pending`` is given for a weight-gradient pass only. It holds the parameters whose gradients the pass still
        changes.
        """

    def ended(self, stage: int) -> None:
        """Announce that the last backward or weight-gradient pass of ``stage`` has ended."""

    def run(self) -> None:
        """Run the synchronization."""

    def forget(self) -> None:
        """Drop the synchronization of an aborted step."""


class StatisticsAverage:
    """Averages the running statistics of the BatchNorms ``norms`` over the replicas."""

    all_reduces = 0

    def __init__(self, norms: BatchNorms) -> None:
        self._norms = norms

    def arm(self, stage: int, pending: Collection[nn.Parameter] | None = None) -> None:
        """No-op: :meth:`run` does all work."""

    def ended(self, stage: int) -> None:
        """No-op: :meth:`arm` starts nothing."""

    def run(self) -> None:
        self._norms.average_statistics()

    def forget(self) -> None:
        """Drop the numbers of micro-batches by which the replicas' statistics are weighted."""
        self._norms.reset_counts()


class SharedSum:
    """Sums the gradients of parameters that several stages hold, after each stage has summed them over its replicas.

    All replicas of a stage then have the same gradient. So one replica of each stage contributes its gradient, and the
    others contribute zeros. A parameter that no stage has ever used must have no gradient. So as long as there are
    unused parameters, the stages exchange after each step which of these parameters they have used.

    ``shared`` maps the name of each parameter to the parameter and the process group of the sum. ``gives`` is True on
    the replica that contributes its gradient.
    """

    all_reduces = 0

    def __init__(
        self, shared: dict[str, tuple[nn.Parameter, dist.ProcessGroup]], *, gives: bool
    ) -> None:
        self._shared, self._gives = shared, gives
        self._unused = set(shared)

    def arm(self, stage: int, pending: Collection[nn.Parameter] | None = None) -> None:
        """No-op: :meth:`run` does all work."""

    def ended(self, stage: int) -> None:
        """No-op: :meth:`arm` starts nothing."""

    def run(self) -> None:
        """All-reduce each parameter, in the order of names."""
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
        """No-op: :meth:`run` leaves no all-reduce to drop."""


class ChainedSync:
    """Runs the :class:`GradientSync` ``inner``, and then the synchronizations ``following``, in order."""

    def __init__(self, inner: GradientSync, following: Sequence[SyncStep]) -> None:
        self._inner, self._following = inner, following

    @property
    def all_reduces(self) -> int:
        return self._inner.all_reduces + sum(each.all_reduces for each in self._following)

    def arm(self, stage: int) -> None:
        self._inner.arm(stage)
        for each in self._following:
            each.arm(stage)

    def ended(self, stage: int) -> None:
        self._inner.ended(stage)
        for each in self._following:
            each.ended(stage)

    def split(self, stage: int, pending: Collection[nn.Parameter]) -> Reduced:
        ready = self._inner.split(stage, pending)
        for each in self._following:
            each.arm(stage, pending)
        return ready

    def disarm(self) -> None:
        self._inner.disarm()
        for each in self._following:
            each.forget()

    def finish(self) -> float:
        """Reduce the rank's own gradients, then run the further synchronizations; return the seconds spent waiting."""
        waited = self._inner.finish()
        start = time.perf_counter()
        for each in self._following:
            each.run()
        return waited + time.perf_counter() - start


class SharedStates:
    """Shards the optimizer states, resident or offloaded, over the replicas (ZeRO stage 1).

    Each parameter belongs to one replica, which steps it and broadcasts the new weights. Parameters are assigned in
    order of size, largest first, each to the replica that has the fewest bytes so far.
    """

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
        """Return the replica that steps ``parameter``."""
        return self._owner[parameter]

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this replica steps ``parameter``."""
        return self._owner[parameter] == self._replica

    def broadcast(self, parameter: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        """Broadcast ``tensors`` from the replica that steps ``parameter``, in one message."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, group=self._group, group_src=self._owner[parameter])
        if not self.owns(parameter):
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
                tensor.copy_(part.view_as(tensor))


def sync_for(
    stage: Stage, mesh: Mesh, reduced: Reduced, config: ReplicasConfig, *, split: bool
) -> GradientSync:
    """Return the :class:`GradientSync` of a rank, for all its stages.

    ``reduced`` is called with each parameter whose gradient is final before :meth:`GradientSync.finish`. ``split`` is
    True if backwards are split. :meth:`ReplicasConfig.check` must have accepted the plan.
    """
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
    if mesh.summed is not None and resident:
        sync: GradientSync = _replicated(parts, resident, mesh, config, split=split)
    else:  # shared parameters are final only after SharedSum
        final = {
            number: [p for name, p in part.items() if name not in shared]
            for number, part in parts.items()
        }
        sync = NoSync(final, reduced)
    following: list[SyncStep] = [*_streamed_sum(stage, mesh, config, alone=not resident)]
    # With local steps, statistics are averaged at the end of a round; for asynchronous replicas, at each meeting.
    if stage.norms.statistics_differ and not (mesh.plan.local_steps or mesh.asynchronous):
        following.append(StatisticsAverage(stage.norms))
    if shared:
        following.append(SharedSum(shared, gives=mesh.member == 0 or mesh.asynchronous))
    return ChainedSync(sync, following) if following else sync


def _streamed_sum(
    stage: Stage, mesh: Mesh, config: ReplicasConfig, *, alone: bool
) -> Iterator[StreamedSum]:
    """Yield one :class:`StreamedSum`, which sums the gradients of offloaded parameters over the replicas.

    Yield none if there are no replicas or no offloaded parameters. ``alone`` is True if no other gradients are summed
    during the backward.
    """
    streamed = stage.offloaded
    if mesh.streamed is None or mesh.summed is None:
        return
    if isinstance(streamed, OffloadedParameters) and streamed.chunks:
        yield StreamedSum(
            streamed,
            {number: stage.parameters_of(number) for number in mesh.stages},
            mesh.streamed,
            mesh.summed,
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
    group = mesh.summed
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
