"""The loss on the last stage, from the outputs of a step's micro-batches.

The usual loss is a mean over rows, so it is computed separately for each micro-batch of each replica
(:class:`LossOfParts`). A loss over the whole batch, such as a contrastive loss, cannot be computed from parts, so the
outputs of all micro-batches and replicas are gathered first (:class:`GatheredLoss`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallax.common.seeds import block_seed
from parallax.errors import ConfigError, DataError, HangError
from parallax.mesh import Mesh
from parallax.model.block import to_device, with_own_storage
from parallax.model.counting import Counting, RowMeanCheck
from parallax.model.describe import Chain
from parallax.model.precision import PrecisionConfig
from parallax.nodes.objects import all_gather_object
from parallax.plan.rows import micro_batch_rows
from parallax.runtime.batch import Rows
from parallax.runtime.channels.message import Gradients, Tensors
from parallax.runtime.entry import GraphEntry
from parallax.runtime.metrics import Metrics
from parallax.runtime.stage import seed_block

logger = logging.getLogger("parallax")

Loss = Callable[[Any, Any], Tensor]
Roots = Sequence[Tensor | GradientEdge | None]


class LossStep(Protocol):
    """The properties of the current step that a loss needs; see :class:`~parallax.runtime.executor.StepContext`."""

    @property
    def index(self) -> int:
        """The number of the step, from 0."""

    @property
    def batch(self) -> Rows:
        """The global batch of the step."""

    @property
    def denominator(self) -> float:
        """The number by which losses are divided: the number of rows of the batch or, if the loss defines a method
        ``count``, the number of targets that this method counts in the batch."""

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of the batch."""

    @property
    def training(self) -> bool:
        """Whether backwards follow the forwards."""

    @property
    def scale(self) -> float:
        """The loss scale, by which gradients are multiplied."""


class StepLoss(Protocol):
    """Computes the loss of a step from the outputs of the last stage, and the gradients from which backwards start."""

    @property
    def share(self) -> Tensor:
        """This rank's part of the latest step's loss, on its device; the sum over all ranks is the loss."""

    def begin(self) -> None:
        """Start a step and drop the results of the previous one."""

    def add(self, step: LossStep, micro: int, low: int, high: int, outputs: Tensors) -> Roots:
        """Add the outputs of rows [low, high) of the batch, this rank's part of micro-batch ``micro``. Return the
        tensors from which the backward of these rows starts."""

    def complete(self, step: LossStep) -> float:
        """Finish the loss after this rank's last forward; return the seconds spent waiting for other ranks."""

    def gradients(self, micro: int) -> Gradients:
        """Return the gradients of the tensors that :meth:`add` returned for micro-batch ``micro``. Call it once for
        each micro-batch."""

    def abandon(self) -> None:
        """Drop in-flight micro-batches."""


class Evaluation:
    """Computes the loss of this rank's rows, and passes the outputs and targets of these rows to ``metrics``.

    ``share`` is this rank's part of the step's loss. ``mass`` is the weight of this rank's rows in the mean: the number
    of rows or, if the loss is a mean that ignores some targets, the number of targets that count.
    """

    def __init__(
        self, loss: Loss, chain: Chain, precision: PrecisionConfig, metrics: Metrics
    ) -> None:
        device = metrics.device
        self._metrics = metrics
        self._loss, self._chain, self._precision, self._device = loss, chain, precision, device
        self._counts, self._counting = hasattr(loss, "count"), Counting(loss)
        self._share = torch.zeros((), dtype=torch.float64, device=device)
        self._even = RowMeanCheck(loss)
        self._whole: float | None = None
        self.mass = 0.0
        self._rows: list[tuple[int, int]] = []
        self._values = torch.zeros(0, dtype=torch.float64, device=device)

    @property
    def share(self) -> Tensor:
        """This rank's part of the loss since :meth:`begin`; the loss is the sum over all ranks."""
        return self._share

    def parts(self) -> list[tuple[int, int, float]]:
        """Return (first row, last row + 1, loss) for each call of :meth:`of` since :meth:`begin`. Synchronizes with the
        device."""
        return [(*rows, value) for rows, value in zip(self._rows, self._values.tolist())]

    def begin(self) -> None:
        self._share.zero_()
        self._metrics.begin(training=True)
        self._whole, self.mass, self._rows = None, 0.0, []

    def of(
        self, step: LossStep, outputs: Tensors, low: int, high: int, *, counted: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of rows [low, high), whose outputs are ``outputs``, and the gradient of that loss from which
        the backward starts.

        If ``counted`` is True, the loss is added to ``share``, and the rows are passed to the metrics.
        """
        given = step.batch.targets(low, high)
        targets = with_own_storage(to_device(given, self._device))
        results = self._chain.results(outputs)
        with self._precision.autocast(self._device.type):
            value = self._counting.value(results, targets, lambda: step.batch.inputs(low, high))
        if counted and self._metrics.wanted(training=step.training):
            scored = self._counting.scored(results, targets, lambda: step.batch.inputs(low, high))
            self._metrics.add(*scored, training=step.training)
        if value.dtype.itemsize < 4:
            value = value.float()
        if step.training and not self._counts and high - low < len(step.batch):
            self._check_mean(step, results, given, low, high)
        mass, whole = self._masses(step, results, low, high)
        if not mass:  # a mean over no targets is NaN
            value = _nothing_of(outputs, value)
        weight = mass / (whole or 1.0)
        if counted:
            self._share.add_(value.detach().reshape(()), alpha=weight)
            if len(self._values) < step.micro_batches:
                with torch.inference_mode(False):  # a training step writes to them later
                    self._values = self._share.new_zeros(step.micro_batches)
            self._values[len(self._rows)].copy_(value.detach().reshape(()))
            self._rows.append((low, high))
            self.mass += high - low if self._counts else mass
        # A new tensor for each micro-batch: autograd may use it, or a view of it, as the gradient of a parameter.
        return value, torch.full_like(value, weight * step.scale, requires_grad=False)

    def _check_mean(self, step: LossStep, results: Any, targets: Any, low: int, high: int) -> None:
        """Raise :class:`ConfigError` if a loss of unknown kind ignores some targets of rows [low, high), because it is
        then not the mean over rows."""
        if self._counting.counts_targets:
            return
        rows, first = high - low, low
        if rows == 1:
            first = min(low, len(step.batch) - 2)
            targets = step.batch.targets(first, first + 2)
        how = self._even.difference(results, rows, to_device(targets, self._device))
        if how:
            raise ConfigError(
                f"the loss depends on the micro-batches, as targets are masked: in rows {first} to {high} of step "
                f"{step.index} it is {how}; give the loss count(targets), the number of targets that count, and let it "
                "return the sum over these, or use torch.nn.functional.cross_entropy with ignore_index, or "
                "trainer.gather_loss=true"
            )

    def _masses(self, step: LossStep, results: Any, low: int, high: int) -> tuple[float, float]:
        """Return the weight of rows [low, high) in the mean over the batch, and the weight of the whole batch.
        ``results`` is the model's return value for these rows."""
        if self._counts:
            return 1.0, step.denominator
        rows = len(step.batch)
        if self._counting.counts_targets:
            try:
                mass = self._counting.row_weight(results, high - low, step.batch, low, high)
                whole = self._whole or self._mass_of_all(step, results, high - low)
                if self._counting.observed:  # before, the counting rule may still change
                    self._whole = whole
                return mass, whole
            except HangError:
                raise
            except Exception as error:  # a user's loss may fail on other rows
                logger.debug("targets are not counted: %s", error)
                self._counting.assume_row_mean()
        return float(high - low), float(rows)

    def _mass_of_all(self, step: LossStep, results: Any, few: int) -> float:
        """Return the weight of the whole batch in the mean.

        ``results`` is the model's return value for any ``few`` rows of the batch. The targets of the whole batch are
        counted in one call. If that fails, because their shapes differ between micro-batches, the targets of each
        micro-batch are counted separately.
        """
        rows, mass = len(step.batch), partial(self._counting.row_weight, results, few, step.batch)
        try:
            return mass(0, rows)
        except HangError:
            raise
        except Exception as error:
            logger.debug("targets are counted by micro-batches: %s", error)
        bounds = (micro_batch_rows(rows, step.micro_batches, m) for m in range(step.micro_batches))
        return sum(mass(*each) for each in bounds)


def _nothing_of(outputs: Tensors, value: Tensor) -> Tensor:
    """Return a loss of 0, with the type and the device of ``value``, that depends on ``outputs``, so that a backward
    can run."""
    parts = [each.flatten()[:0].sum() for each in outputs if each.requires_grad]
    return sum(
        (each.to(value.dtype) for each in parts), torch.zeros_like(value, requires_grad=False)
    )


class LossOfParts:
    """Computes the loss of each micro-batch separately.

    A loss that is a mean is weighted by the micro-batch's number of rows or, if it ignores some targets, by the number
    of targets that count. A loss with ``count`` is a sum, which is divided by :attr:`LossStep.denominator`.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._seeds: dict[int, Gradients] = {}

    @property
    def share(self) -> Tensor:
        return self._evaluation.share

    def begin(self) -> None:
        self._evaluation.begin()

    def add(self, step: LossStep, micro: int, low: int, high: int, outputs: Tensors) -> Roots:
        value, seed = self._evaluation.of(step, outputs, low, high)
        if step.training:
            self._seeds[micro] = (seed,)
        return (value,)

    def complete(self, step: LossStep) -> float:
        """No-op: the loss of every micro-batch is complete already."""
        del step
        return 0.0

    def gradients(self, micro: int) -> Gradients:
        return self._seeds.pop(micro, ())

    def abandon(self) -> None:
        self._seeds.clear()


class _Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class _PartOutputs(NamedTuple):
    """The shapes and types of the outputs of one replica's micro-batch, which is rows [low, high) of the batch."""

    micro: int
    low: int
    high: int
    outputs: tuple[_Kind, ...]

    def looks_like_rows(self, index: int) -> bool:
        """Whether the first dimension of output ``index`` has the size of the micro-batch."""
        return self.outputs[index].shape[:1] == (self.high - self.low,)


class _Whole(NamedTuple):
    """The description of one output for the whole batch. ``has_rows``: whether the first dimension is the rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    has_rows: bool


@dataclass(slots=True)
class _Buffer:
    """Collects one of the model's outputs over the micro-batches of this rank.

    ``rows`` is the output for the whole batch, with zeros in rows of other replicas. ``single`` is the value of an
    output without rows. ``differ`` is True if micro-batches returned different values for an output without rows.
    """

    rows: Tensor | None = None
    single: Tensor | None = None
    differ: bool = False

    def add(self, output: Tensor, low: int, high: int, batch: int) -> None:
        """Add ``output``, the value for rows [low, high) of a batch of ``batch`` rows."""
        if output.dim() == 0 or len(output) != high - low:
            self.add_single(output)
            return
        if self.rows is None:
            self.rows = output.new_zeros((batch, *output.shape[1:]))
        if self.rows.shape[1:] == output.shape[1:]:  # otherwise _agreed raises on all ranks
            self.rows[low:high].copy_(output)

    def add_single(self, value: Tensor) -> None:
        """Store the value of an output without rows."""
        value = value.resolve_conj().resolve_neg()
        if self.single is None:
            self.single = value.clone(memory_format=torch.contiguous_format)
        self.differ |= not _same(self.single, value)

    def settle(self, parts: Sequence[_PartOutputs]) -> None:
        """Add the values of the micro-batches ``parts`` to ``single``, from ``rows``.

        Call this method if the output proves to have no rows. ``parts`` are the micro-batches whose values
        :meth:`add` has taken for rows, because their length happens to be the number of rows of the micro-batch.
        """
        for part in parts if self.rows is not None else ():
            self.add_single(self.rows[part.low : part.high])  # type: ignore[index]


class GatheredLoss:
    """The loss over the whole batch.

    Each micro-batch keeps the gradient edges of its outputs, and copies the outputs into buffers for the whole batch.
    After the last forward, the replicas of the last stage all-reduce their buffers as bytes. Each row is non-zero on
    one replica only, so the sum is exact for every type. Then each replica computes the same loss, and starts the
    backward of each of its own micro-batches from the gradients of that micro-batch's rows.

    An output without rows, such as a learnt temperature, must be the same in all micro-batches. It is passed to the
    loss once, and its gradient is passed to the micro-batch with the batch's first row.
    """

    def __init__(self, evaluation: Evaluation, chain: Chain, mesh: Mesh) -> None:
        self._evaluation, self._mesh = evaluation, mesh
        self._seed, self._place = chain.seed, len(chain.blocks)
        self._rowless = chain.blocks[-1].unbatched
        self._anchor = torch.empty(0, device=mesh.device, requires_grad=True)
        self._parts: list[_PartOutputs] = []
        self._buffers: list[_Buffer] = []
        self._gradients: dict[int, Gradients] = {}

    @property
    def share(self) -> Tensor:
        """The loss of the whole batch on the first replica, and 0 on the other replicas."""
        return self._evaluation.share

    def begin(self) -> None:
        self._evaluation.begin()

    def add(self, step: LossStep, micro: int, low: int, high: int, outputs: Tensors) -> Roots:
        if not self._buffers:
            self._buffers = [_Buffer() for _ in outputs]
        for index, (buffer, output) in enumerate(zip(self._buffers, outputs)):
            _check_plain(index, output)
            if index in self._rowless:
                buffer.add_single(output.detach())
            else:
                buffer.add(output.detach(), low, high, len(step.batch))
        kinds = [_Kind(tuple(o.shape), o.dtype, o.requires_grad) for o in outputs]
        self._parts.append(_PartOutputs(micro, low, high, tuple(kinds)))
        return [get_gradient_edge(o) if o.requires_grad else None for o in outputs]

    def complete(self, step: LossStep) -> float:
        """Gather the outputs, compute the loss, and slice its gradients by micro-batch."""
        start, rows = time.perf_counter(), len(step.batch)
        whole = _agreed(self._parts_of_all(), rows, self._rowless)
        gathered = tuple([self._gathered(*each) for each in enumerate(whole)])
        self._buffers = []
        waited = time.perf_counter() - start
        # A loss that draws random numbers draws the same on all replicas.
        seed_block(self._mesh.device, block_seed(self._seed, step.index, self._place))
        gradients = self._run(step, gathered, [each.requires_grad for each in whole])
        del gathered
        for part in self._parts if step.training else ():
            self._gradients[part.micro] = tuple(
                [_gradient_part(gradient, each, part) for gradient, each in zip(gradients, whole)]
            )
        self._parts = []
        return waited

    def gradients(self, micro: int) -> Gradients:
        return self._gradients.pop(micro, ())

    def abandon(self) -> None:
        self._parts, self._buffers = [], []
        self._gradients.clear()

    def _parts_of_all(self) -> list[_PartOutputs]:
        """Return the descriptions of the outputs of all micro-batches of all replicas. Collective over the replicas."""
        if self._mesh.statistics is None:
            return self._parts
        found = all_gather_object(self._parts, self._mesh.statistics)
        return [part for parts in found for part in parts]

    def _gathered(self, index: int, whole: _Whole) -> Tensor:
        """Return the output ``index`` for the whole batch, equal on every replica.

        Raises :class:`DataError` if an output without rows differs between micro-batches.
        """
        buffer = self._buffers[index] if self._parts else _Buffer()
        if whole.has_rows:
            return self._summed(self._zeros(whole) if buffer.rows is None else buffer.rows)
        buffer.settle([part for part in self._parts if part.looks_like_rows(index)])
        first = any(part.low == 0 for part in self._parts)
        mine = buffer.single if first else None
        value = self._summed(self._zeros(whole) if mine is None else mine.clone())
        if buffer.differ or (buffer.single is not None and not _same(buffer.single, value)):
            raise DataError(
                f"output {index} of the model has no rows and differs between micro-batches, and "
                "trainer.gather_loss=true needs one value for the whole batch: return a value for each row, or use "
                "trainer.gather_loss=false"
            )
        return value

    def _zeros(self, whole: _Whole) -> Tensor:
        return torch.zeros(whole.shape, dtype=whole.dtype, device=self._mesh.device)

    def _summed(self, tensor: Tensor) -> Tensor:
        """All-reduce ``tensor`` in place over the replicas, and return it. At each index, at most one replica may have
        a value other than zero."""
        if self._mesh.statistics is not None and tensor.numel():
            dist.all_reduce(tensor.view(-1).view(torch.uint8), group=self._mesh.statistics)
        return tensor

    def _run(self, step: LossStep, outputs: Tensors, needed: Sequence[bool]) -> Gradients:
        """Compute the loss of ``outputs``; return the gradient of each output, or None where ``needed`` is False."""
        entry = GraphEntry(self._anchor)
        if step.training:
            training = tuple([output for output, each in zip(outputs, needed) if each])
            entered = iter(entry.enter(training, training))
            outputs = tuple([next(entered) if n else output for output, n in zip(outputs, needed)])
            del training, entered
        value, seed = self._evaluation.of(
            step, outputs, 0, len(step.batch), counted=self._mesh.replica == 0
        )
        if not step.training:
            return ()
        torch.autograd.backward(value, seed)
        arrived = iter(entry.take_gradients())
        return tuple([next(arrived) if each else None for each in needed])


def _agreed(parts: Sequence[_PartOutputs], rows: int, rowless: Collection[int]) -> list[_Whole]:
    """Return a description of each of the model's outputs for the whole batch of ``rows`` rows.

    ``parts`` describes the outputs of each micro-batch of every replica. ``rowless`` holds the indices of the outputs
    that are known to have no rows. Raises :class:`DataError` if micro-batches returned different shapes or types.
    """
    counts = sorted({len(part.outputs) for part in parts})
    if len(counts) > 1:
        raise DataError(
            f"the model returns {counts[0]} tensors for some micro-batches and {counts[-1]} for others, and "
            "trainer.gather_loss=true concatenates their rows: return the same number for all"
        )
    return [_whole(index, parts, rows, index in rowless) for index in range(counts[0])]


def _whole(index: int, parts: Sequence[_PartOutputs], rows: int, rowless: bool) -> _Whole:
    kinds = [part.outputs[index] for part in parts]
    has_rows = not rowless and all(part.looks_like_rows(index) for part in parts)
    shapes = sorted({kind.shape[1:] if has_rows else kind.shape for kind in kinds})
    types = sorted({str(kind.dtype).removeprefix("torch.") for kind in kinds})
    if len(shapes) > 1 or len(types) > 1:
        first, other = (f"{types[end]} {shapes[end]}" for end in (0, -1))
        raise DataError(
            f"output {index} of the model is {first} for {'a row' if has_rows else 'some rows'} and {other} for "
            f"{'another' if has_rows else 'others'}, and trainer.gather_loss=true concatenates rows: pad "
            "the rows of a batch to one size, or use trainer.gather_loss=false"
        )
    shape = (rows, *shapes[0]) if has_rows else shapes[0]
    return _Whole(shape, kinds[0].dtype, any(kind.requires_grad for kind in kinds), has_rows)


def _gradient_part(gradient: Tensor | None, whole: _Whole, part: _PartOutputs) -> Tensor | None:
    """Return the rows of ``gradient`` that belong to the micro-batch ``part``, from which its backward starts. The
    gradient of an output without rows belongs to the micro-batch with the batch's first row."""
    if gradient is None or whole.has_rows:
        return None if gradient is None else gradient[part.low : part.high]
    return gradient if part.low == 0 else None


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether ``one`` and ``other`` have bit-identical values, NaN included."""
    return one.shape == other.shape and bool(torch.equal(_bytes(one), _bytes(other)))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _check_plain(index: int, output: Tensor) -> None:
    if output.layout is torch.strided and not output.is_nested:
        return
    kind = "nested" if output.is_nested else str(output.layout).removeprefix("torch.")
    raise DataError(
        f"output {index} of the model is a {kind} tensor, and trainer.gather_loss=true concatenates rows: "
        "return a plain tensor, or use trainer.gather_loss=false"
    )
