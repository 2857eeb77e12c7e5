"""BatchNorm under a plan: the rows over which statistics are computed, and recomputation.

A BatchNorm computes statistics over the rows of its input: those of one micro-batch, on one replica. So its result
depends on how rows are partitioned. The user chooses one of three modes
(:class:`~parallax.runtime.replicas.config.ReplicasConfig`).

``replica``: statistics over each replica's own rows. Each replica keeps running statistics. After a step these are
averaged, weighted by the number of micro-batches that each replica computed. So all replicas save and evaluate with the
same statistics.

``sync``: statistics over all replicas' rows of the micro-batch. Count, mean and sum of squares of the replicas are
combined by Chan's formula, with one all-reduce in the forward and one in the backward. If a micro-batch has fewer rows
than there are replicas, only the replicas with rows take part, in a separate process group. Each replica computes the
gradients of weight and bias from its own rows, as for all parameters.

``frozen``: running statistics are used and not updated, as in evaluation.

The first forward updates the running statistics. So a recomputed forward uses copies of them. It repeats the
collectives, which match because all replicas recompute the same blocks in the same order.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import noop_context_fn

from parallax.mesh import TIMEOUT, Mesh
from parallax.plan.rows import replica_rows

BATCHNORM = ("replica", "sync", "frozen")
_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BatchNorms:
    """Handles the BatchNorm modules of a rank's blocks. ``mode`` is one of :data:`BATCHNORM`.

    ``mesh``: the process groups of the rank; None: there are no replicas.
    """

    def __init__(self, mode: str = "replica", mesh: Mesh | None = None) -> None:
        self._mode = mode
        self._mesh = mesh if mesh is not None and mesh.replicas is not None else None
        self._modules_by_block: dict[int, list[nn.Module]] = {}
        self._seen: Counter[int] = Counter()  # block → number of its micro-batches in this step
        self._participants = _Participants(None, 0, 1)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def add_block(self, place: int, block: nn.Module, *, compiled: bool = False) -> None:
        """Replace the forwards of the BatchNorm modules in ``block``, the block with index ``place``.

        ``compiled``: the block is compiled. BatchNorms that communicate are then excluded from compilation.
        """
        found = _norms_in(block)
        if not found:
            return
        self._modules_by_block[place] = found
        for module in found:
            module.forward = _plain_forward(module)
            if self._mode == "sync" and self._mesh is not None:
                module.forward = _synchronised(module.forward, lambda: self._participants)
                if compiled:  # not otherwise, because this imports dynamo, which takes seconds
                    module.forward = torch.compiler.disable(module.forward)
        self.freeze_statistics()

    def freeze_statistics(self) -> None:
        """In mode ``frozen``, set the BatchNorms to evaluation mode. Call this after ``train()``."""
        if self._mode == "frozen":
            for module in self._modules():
                module.eval()

    def begin_micro_batch(self, place: int, rows: int) -> None:
        """Prepare the BatchNorms of block ``place`` for the forward of a micro-batch.

        ``rows``: the number of the micro-batch's rows on all replicas.
        """
        if place in self._modules_by_block:
            self._seen[place] += 1
            self._participants = self._participants_of(rows)

    def modules_of(self, place: int) -> Sequence[nn.Module]:
        """Return the BatchNorms of block ``place``."""
        return self._modules_by_block.get(place, ())

    def checkpoint_contexts(self, place: int, rows: int) -> Callable[[], tuple[Any, Any]]:
        """Return the ``context_fn`` that torch.utils.checkpoint needs to recompute block ``place``.

        ``rows``: the number of the micro-batch's rows on all replicas.
        """
        if place not in self._modules_by_block:
            return noop_context_fn
        return lambda: (contextlib.nullcontext(), self._recomputing(place, rows))

    @contextlib.contextmanager
    def _recomputing(self, place: int, rows: int) -> Iterator[None]:
        self._participants = self._participants_of(rows)
        # Replace the buffer objects instead of restoring values: graphs have saved the buffers.
        real = [
            (m, name, t)
            for m in self._modules_by_block[place]
            for name in _STATISTICS
            if (t := _statistic(m, name)) is not None
        ]
        for module, name, tensor in real:
            setattr(module, name, tensor.clone())
        try:
            yield
        finally:
            for module, name, tensor in real:
                setattr(module, name, tensor)

    def _participants_of(self, rows: int) -> _Participants:
        """Return the replicas that have rows in a micro-batch of ``rows`` rows.

        All these replicas must call this method, because the call may create a process group.
        """
        mesh = self._mesh
        if self._mode != "sync" or mesh is None:
            return self._participants
        present = [
            k
            for k in range(mesh.replica_count)
            if (part := replica_rows(rows, mesh.replica_count, k))[0] < part[1]
        ]
        place = present.index(mesh.replica)
        if len(present) == mesh.replica_count:
            return _Participants(mesh.statistics, place, len(present))
        if len(present) == 1:
            return _Participants(None, 0, 1)
        ranks = tuple(mesh.plan.ranks(mesh.pipeline_rank)[k] for k in present)
        if ranks not in self._groups:
            backend = dist.get_backend(mesh.replicas)
            group = dist.new_group(
                list(ranks), backend=backend, timeout=TIMEOUT, use_local_synchronization=True
            )
            self._groups[ranks] = group
        return _Participants(self._groups[ranks], place, len(present))

    @property
    def statistics_differ(self) -> bool:
        """Whether the running statistics may differ between replicas after a step."""
        tracked = any(_statistic(module, "running_mean") is not None for module in self._modules())
        return self._mesh is not None and self._mode != "frozen" and tracked

    def reset_counts(self) -> None:
        self._seen.clear()

    def average_statistics(self) -> None:
        """Average the running statistics over the replicas, weighted by the number of micro-batches since the last
        call.

        All replicas must call this after the step's last backward.
        """
        assert self._mesh is not None
        # The last replica has rows in every micro-batch.
        last = self._mesh.replica == self._mesh.replica_count - 1
        moved: list[tuple[Tensor, float]] = []
        counts: list[Tensor] = []
        weighed: set[nn.Module] = set()
        for place, modules in self._modules_by_block.items():
            weight = float(self._seen[place]) if self._mode == "replica" else float(last)
            for module in modules:
                mean, variance, count = (_statistic(module, name) for name in _STATISTICS)
                if mean is None or variance is None or module in weighed:
                    continue
                weighed.add(module)
                moved += [(mean, weight), (variance, weight)]
                counts += [] if count is None else [count]
        if moved:
            _average(moved, self._mesh.replicas)
        if counts:
            most = torch.stack(counts)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._mesh.replicas)
            for count, value in zip(counts, most):
                count.copy_(value)
        self.reset_counts()

    def _modules(self) -> Iterator[nn.Module]:
        return (module for modules in self._modules_by_block.values() for module in modules)


def share_alone(block: nn.Module) -> int:
    """Let the BatchNorms in ``block`` compute statistics as replicas that share them do, without other replicas.

    Return the number of these BatchNorms.
    """
    found, alone = _norms_in(block), _Participants(None, 0, 1)
    for module in found:
        module.forward = _synchronised(_plain_forward(module), lambda: alone)
    return len(found)


def _norms_in(block: nn.Module) -> list[nn.Module]:
    return [module for module in block.modules() if isinstance(module, _KINDS)]


def _plain_forward(module: nn.Module) -> Callable[[Tensor], Tensor]:
    # SyncBatchNorm's own forward would wait for ranks of other stages.
    if isinstance(module, nn.SyncBatchNorm):
        return nn.BatchNorm2d.forward.__get__(module)
    return module.forward


def _synchronised(
    forward: Callable[[Tensor], Tensor], participants: Callable[[], _Participants]
) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with _Synchronising(participants()):
            return forward(x)

    return run


def _statistic(module: nn.Module, name: str) -> Tensor | None:
    found: Tensor | None = getattr(module, name)
    return found


def _average(moved: Sequence[tuple[Tensor, float]], group: dist.ProcessGroup | None) -> None:
    """Replace each tensor in ``moved`` by its weighted average over the replicas.

    ``moved``: (tensor, weight of this replica). A tensor whose weights are 0 on all replicas is unchanged. ``group``:
    the process group of the replicas.
    """
    wide = _wide(moved[0][0].dtype)
    parts = [tensor.to(wide) * weight for tensor, weight in moved]
    # Filled on the device: a copy from the host would block it.
    weights = [torch.full((1,), weight, dtype=wide, device=parts[0].device) for _, weight in moved]
    flat = torch.cat([*parts, *weights])
    dist.all_reduce(flat, group=group)
    *sums, totals = flat.split([*(part.numel() for part in parts), len(weights)])
    for (tensor, _), value, total in zip(moved, sums, totals):
        tensor.copy_(torch.where(total > 0, value / total.clamp(min=1), tensor))


class _Participants:
    """The replicas that have rows in a micro-batch.

    ``group``: their process group; None if only this replica has rows. ``place``: the index of this replica among them.
    ``count``: their number.
    """

    def __init__(self, group: dist.ProcessGroup | None, place: int, count: int) -> None:
        self.group, self.place, self.count = group, place, count

    def sum(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over the participants, in place, by all-reduce."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)


class _Synchronising(TorchFunctionMode):
    """Replaces F.batch_norm, which BatchNorm modules call, by a function with statistics over all replicas' rows."""

    def __init__(self, participants: _Participants) -> None:
        super().__init__()
        self._participants = participants

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.batch_norm:
            return _batch_norm(self._participants, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm(
    participants: _Participants,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    result, mean, variance, count = _Synchronised.apply(input, weight, bias, eps, participants)
    if input.numel() == input.shape[1] and int(count) == 1:
        raise ValueError(
            f"BatchNorm got one value for each of {input.shape[1]} channels from all replicas together, and a variance "
            "needs two; use batches of more rows, or replicas.batchnorm=frozen"
        )
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    found: Tensor = result
    return found


class _Synchronised(torch.autograd.Function):
    """Batch normalization over the rows of all participants.

    It returns this replica's result, the mean and variance of each channel, and the count of values in a channel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        participants: _Participants,
    ) -> tuple[Tensor, ...]:
        wide, channels = x.to(_wide(x.dtype)), x.shape[1]
        own = wide.transpose(0, 1).flatten(1)
        table = wide.new_zeros(participants.count, 2 * channels + 1)
        mean = own.mean(1)
        mine = table[participants.place]
        mine[:channels], mine[channels:-1], mine[-1] = (
            mean,
            (own - mean[:, None]).square().sum(1),
            own.shape[1],
        )
        participants.sum(table)
        means, squares, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / count
        scale = (variance + eps).rsqrt()
        ctx.participants, ctx.bias_dtype = participants, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, mean, scale, count)
        result = (wide - _across(mean, x)) * _across(scale if weight is None else scale * weight, x)
        if bias is not None:
            result += _across(bias, x)
        ctx.mark_non_differentiable(mean, variance, count)
        return result.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        normal = (x.to(scale.dtype) - _across(mean, x)) * _across(scale, x)
        wide = gradient.to(scale.dtype)
        over = [d for d in range(x.dim()) if d != 1]
        sums = torch.stack([wide.sum(over), (wide * normal).sum(over)])
        of_bias = sums[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        of_weight = sums[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_x = None
        if ctx.needs_input_grad[0]:
            shared = sums.clone()
            ctx.participants.sum(shared)
            shared /= count
            of_x = wide - _across(shared[0], x) - normal * _across(shared[1], x)
            of_x = (of_x * _across(scale if weight is None else scale * weight, x)).to(x.dtype)
        return of_x, of_weight, of_bias, None, None


def _across(of_channels: Tensor, x: Tensor) -> Tensor:
    return of_channels.view(1, -1, *(1,) * (x.dim() - 2))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics are computed: ``dtype``, but at least single precision."""
    return torch.promote_types(dtype, torch.float32)
