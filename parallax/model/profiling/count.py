"""Count the work of each block, without the device and without weights.

Each block runs forward and backward on fake tensors. These have shape, dtype and device but no memory. Autograd,
autocast and kernel selection work as on real tensors. Every dispatched operator is counted: matrix products by the
formulas of ``torch.utils.flop_counter``, all others by the bytes that they read and write. Saved tensors are classified
by the same rule as in the profiler and the swap manager. So the bytes of saved tensors, inputs and outputs equal those
that :mod:`parallax.model.profiling.measure` finds on a CPU. Working memory is the peak of live tensors. Kernels may
need scratch memory in addition, which only a measurement shows.

Each block is counted at two numbers of rows. They give the fixed part and the part per row of every figure.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from parallax.errors import DescribeError
from parallax.model.block import can_require_grad, in_dtype, tensors_in, transform, with_own_storage
from parallax.model.construction.attributes import plain_tensors
from parallax.model.describe import Chain, as_tuple
from parallax.model.losses import call_loss
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling.blocks import BlockSizes, block_by_block, repeat_rows, tie_costs
from parallax.model.profiling.meter import PassWork, WorkMeter
from parallax.model.saved import SavedBytes, address
from parallax.plan.analytic.recipe import recipe
from parallax.plan.profile import Affine
from parallax.plan.work import BlockWork, ModelWork, Work

Loss = Callable[[Any, Tensor], Tensor]
Sample = Callable[[int], tuple[tuple[Tensor, ...], Tensor]]

COUNTED_ROWS = (2, 4)


def count(
    chain: Chain,
    loss: Loss,
    sample: Sample,
    *,
    precision: PrecisionConfig,
    minimum_bytes: int,
    rows: tuple[int, int] = COUNTED_ROWS,
    gathered: int = 0,
    name: str = "model",
    progress: Callable[[str], None] = lambda text: None,
) -> ModelWork:
    """Return the work of ``chain``, with ``name`` as the model's name.

    ``sample(n)`` returns inputs and targets of n rows, of which only shapes and dtypes are used. ``precision``
    determines the bytes of AdamW's states. Saved tensors of less than ``minimum_bytes`` count as not offloadable. The
    loss is counted with the last block. If the loss is computed over the whole batch, ``gathered`` is the number of
    rows of the batch, and the loss is counted separately, on these rows; otherwise ``gathered`` is 0.

    Raises :class:`DescribeError` if a block does not accept the outputs of the one before it, or reads values, which
    fake tensors lack.
    """
    counter = _Counter(chain, loss, precision, progress, with_loss=not gathered)
    low, high = (counter.run(n, *sample(n)) for n in rows)
    blocks = [
        _work(chain, index, *pair, minimum_bytes) for index, pair in enumerate(zip(low, high))
    ]
    if gathered:
        found = counter.whole_loss(gathered, low[-1], high[-1], sample(gathered)[1])
        blocks[-1] = replace(blocks[-1], **found)
    how = recipe(str(precision))
    return ModelWork(
        model=name,
        fingerprint=chain.fingerprint(),
        precision=str(precision),
        dtype=precision.compute,
        blocks=tuple(blocks),
        # of GPUs, which keep recurrent weights in one buffer
        ties=tuple(tie_costs(chain, trained=True, flat=True)),
        frozen_ties=tuple(tie_costs(chain, trained=False, flat=True)),
        reads=tuple(block.reads for block in chain.blocks),
        optimizer_bytes=how.optimizer / how.weight,
        gradient_bytes=how.gradient / how.weight,
        master_bytes=how.master / how.weight,
        gathered_rows=gathered,
    )


@dataclass(frozen=True)
class _Counted:
    """The work of one block at one number of rows.

    ``forward``                                 the work of the forward
    ``input_gradient`` and ``weight_gradient``  the parts of the backward's work
    ``entering`` and ``leaving``                the bytes of the block's inputs and outputs
    ``outputs``                                 the block's output tensors
    ``movable``                                 the bytes of each saved tensor of any size that could be offloaded

    The other fields are bytes, as in :class:`~parallax.plan.profile.BlockCost`.
    """

    rows: int
    forward: PassWork
    input_gradient: PassWork
    weight_gradient: PassWork
    movable: tuple[int, ...]
    stays: int
    by_loss: int
    entering: int
    leaving: int
    forward_work: int
    backward_work: int
    deferred: int
    outputs: tuple[Tensor, ...]


class _Deferring(TorchFunctionMode):
    """Counts the bytes that :mod:`parallax.model.split_backward` stores for deferred weight gradients.

    These are the inputs of products with parameters (each storage once), the gradients of the products' outputs, and
    autocast's copies of the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inputs: dict[int, int] = {}
        self._outputs = 0

    @property
    def bytes(self) -> int:
        return sum(self._inputs.values()) + self._outputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [part for part in (*args, *(kwargs or {}).values()) if isinstance(part, Tensor)]
        weights = [
            t for t in tensors if isinstance(t, nn.Parameter) and t.requires_grad and t.dim() > 1
        ]
        if getattr(func, "__name__", "") in PRODUCTS and weights and isinstance(out, Tensor):
            for tensor in tensors:
                if not isinstance(tensor, nn.Parameter):
                    # Under autocast a product's input is a copy in the type of its output.
                    storage = tensor.untyped_storage()
                    size = storage.nbytes() // tensor.element_size() * out.element_size()
                    self._inputs[address(storage)] = size
            cast = (
                sum(weight.numel() for weight in weights if weight.dtype is not out.dtype)
                * out.element_size()
            )
            self._outputs += out.nbytes + cast
        return out


PRODUCTS = ("linear", "addmm", "matmul", "mm", "__matmul__", "conv1d", "conv2d", "conv3d")


class _Counter:
    """Counts the work of the blocks of a chain in order. Blocks of equal cost are counted once.

    ``with_loss``: the loss is counted with the last block. The other arguments are those of :func:`count`.
    """

    def __init__(
        self,
        chain: Chain,
        loss: Loss,
        precision: PrecisionConfig,
        progress: Callable[[str], None],
        *,
        with_loss: bool,
    ) -> None:
        self._chain, self._loss, self._precision = chain, loss, precision
        self._progress = progress
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._with_loss = with_loss

    def run(self, rows: int, inputs: tuple[Tensor, ...], targets: Any) -> list[_Counted]:
        """Return the counts of every block with ``rows`` rows.

        The outputs of each block are the inputs of the next one.
        """
        with self._mode:
            entering, aims = tuple(map(_fake, inputs)), transform(targets, _fake)

        def find(index: int, entering: tuple[Tensor, ...], last: bool) -> _Counted:
            block, count = self._chain.blocks[index], len(self._chain.blocks)
            self._progress(f"counting block {index + 1} of {count} ({block.name}), {rows} row(s)")
            with self._mode:
                tables = _tables(block.module)
            copied = copy.deepcopy(block.module, tables)
            with self._mode:
                targets = aims if last and self._with_loss else None
                return self._count(index, copied, rows, entering, targets)

        return block_by_block(self._chain, entering, find)

    def _count(
        self,
        index: int,
        block: nn.Module,
        rows: int,
        inputs: tuple[Tensor, ...],
        targets: Any,
    ) -> _Counted:
        _fill(block, self._chain.dtype)
        leaves = tuple(
            tensor.detach().requires_grad_(index > 0 and can_require_grad(tensor))
            for tensor in inputs
        )
        meter = WorkMeter()
        meter.register_storages(
            [*block.parameters(), *block.buffers(), *leaves, *tensors_in(targets)]
        )

        enter = partial(_entering, leaves, torch.zeros((), requires_grad=True), meter)
        outputs = self._forward(block, enter(), None)
        movable, stays, by_loss, new = self._saved(block, enter(), targets)
        entering = enter()
        with meter.watch() as seen:
            results = self._forward(block, entering, targets)
        forward, forward_peak = seen()
        total, backward_peak = self._backward(meter, results, block, leaves, targets)
        entering = enter()
        with _Deferring() as deferring:
            self._forward(block, entering, None)
        inner = PassWork()
        if any(leaf.requires_grad for leaf in leaves):
            results = self._forward(block, enter(), targets)
            inner, _ = self._backward(meter, results, None, leaves, targets)
        return _Counted(
            rows=rows,
            forward=forward,
            input_gradient=inner,
            weight_gradient=total.minus(inner),
            movable=movable,
            stays=stays,
            by_loss=by_loss,
            entering=sum(tensor.nbytes for tensor in inputs),
            leaving=sum(tensor.nbytes for tensor in outputs),
            forward_work=max(0, forward_peak - new),
            backward_work=backward_peak,
            deferred=deferring.bytes,
            outputs=tuple(t.detach().requires_grad_(t.requires_grad) for t in outputs),
        )

    def whole_loss(self, rows: int, low: _Counted, high: _Counted, targets: Any) -> dict[str, Any]:
        """Return the ``gathered`` fields of the last block's :class:`BlockWork`: the work of one loss over ``rows``
        rows.

        ``low`` and ``high``: the counts of the last block at two numbers of rows. ``targets``: the targets of ``rows``
        rows.
        """
        self._progress(f"counting the loss of {rows} row(s)")
        with self._mode:
            aims, meter = transform(targets, _fake), WorkMeter()
            leaves = repeat_rows(rows, (low.rows, low.outputs), (high.rows, high.outputs))
            meter.register_storages([*leaves, *tensors_in(aims)])
            entering = _entering(leaves, torch.zeros((), requires_grad=True), meter)
            with meter.watch() as seen:
                (value,) = self._add_loss(entering, aims)
                if value.requires_grad:
                    torch.autograd.backward(value)
            found, peak = seen()
        return {
            "gathered_bytes": sum(tensor.nbytes for tensor in leaves),
            "gathered_work": peak + sum(tensor.nbytes for tensor in tensors_in(aims)),
            "gathered": Work(
                Affine(found.flops),
                Affine(found.bytes),
                found.kernels,
                Affine(found.attention_flops),
                Affine(found.operands),
            ),
        }

    def _forward(
        self, block: nn.Module, inputs: tuple[Tensor, ...], targets: Any
    ) -> tuple[Tensor, ...]:
        """Return the block's outputs or, if ``targets`` are given, the loss of these outputs."""
        try:
            with self._precision.autocast("cpu"):
                outputs = as_tuple(block(*inputs))
            return outputs if targets is None else self._add_loss(outputs, targets)
        except (TypeError, RuntimeError) as error:
            shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in inputs)
            raise DescribeError(
                f"block {type(block).__name__} cannot be counted on {shapes}: {str(error).splitlines()[0]}; a block "
                "must accept the outputs of the one before it, and read no tensor values (or else be measured)"
            ) from error

    def _add_loss(self, outputs: tuple[Tensor, ...], targets: Any) -> tuple[Tensor, ...]:
        with self._precision.autocast("cpu"):
            return (call_loss(self._loss, self._chain.results(outputs), targets, alone=True),)

    def _backward(
        self,
        meter: WorkMeter,
        results: tuple[Tensor, ...],
        block: nn.Module | None,
        leaves: tuple[Tensor, ...],
        targets: Any,
    ) -> tuple[PassWork, int]:
        """Return the work and the peak bytes of a backward of ``results``.

        The backward computes the gradients of the ``leaves`` and, if ``block`` is given, of the block's parameters.
        """
        roots = [tensor for tensor in results if tensor.requires_grad]
        if not roots:
            return PassWork(), 0
        gradients = [torch.ones_like(root) for root in roots] if targets is None else None
        del results
        if block is None:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            with meter.watch() as seen:
                torch.autograd.grad(roots, wanted, gradients, allow_unused=True)
            return seen()
        for parameter in block.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        meter.register_storages(
            [parameter.grad for parameter in block.parameters() if parameter.grad is not None]
        )
        with meter.watch() as seen:
            torch.autograd.backward(roots, gradients)
        for leaf in leaves:
            leaf.grad = None
        return seen()

    def _saved(
        self, block: nn.Module, entering: tuple[Tensor, ...], targets: Any
    ) -> tuple[tuple[int, ...], int, int, int]:
        """Return four results for a forward, by the same rule as the profiler:

        1. the bytes of each saved tensor that could be offloaded
        2. the resident bytes that the block saves for backward
        3. the bytes that the loss saves
        4. all bytes that exist after the forward and did not exist before it

        ``targets``: None without a loss.
        """
        held = [*block.parameters(), *block.buffers()]
        saved = SavedBytes(held, 0, plain=FakeTensor)
        with saved.block_hooks():
            results = self._forward(block, entering, None)
        if targets is not None:
            with saved.loss_hooks():
                results = self._add_loss(results, targets)
        _, stays, by_loss, new = saved.byte_totals(entering, results)
        return saved.movable_sizes(), stays, by_loss, new


def _entering(leaves: Sequence[Tensor], anchor: Tensor, meter: WorkMeter) -> tuple[Tensor, ...]:
    """Return inputs for a block, made from ``leaves``. The block may change the inputs in place.

    As in a stage, an input that needs a gradient is not a leaf, but the result of a graph node with two parents: a leaf
    and the scalar ``anchor``. The storages of the inputs are registered with ``meter``.
    """
    made = tuple(leaf + anchor.to(leaf.dtype) if leaf.requires_grad else leaf for leaf in leaves)
    meter.register_storages(made)
    return made


def _fake(tensor: Any) -> Any:
    """Return a fake CPU tensor with the shape and strides of ``tensor`` and a storage of its own; other values
    unchanged.
    """
    if not isinstance(tensor, Tensor):
        return tensor
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(count, dtype=tensor.dtype, device="cpu")
    return with_own_storage(
        whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    )


def _tables(block: nn.Module) -> dict[int, Any]:
    """Return {tensor id: fake CPU tensor} for the block's tensors that are neither parameters nor buffers."""
    found = [t for t in plain_tensors(block).values() if not isinstance(t, nn.Parameter)]
    return {id(t): torch.empty_like(t, device="cpu") for t in found}


def _fill(block: nn.Module, dtype: torch.dtype) -> None:
    """Replace the block's meta parameters and buffers by fake CPU tensors."""
    made: dict[int, Tensor] = {}

    def replaced(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=in_dtype(tensor.dtype, dtype))
            shared = (
                nn.Parameter(empty, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
            made[id(tensor)] = shared
        return made[id(tensor)]

    for owner in block.modules():
        parameters = owner.named_parameters(recurse=False, remove_duplicate=False)
        buffers = owner.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in [*parameters, *buffers]:
            setattr(owner, name, replaced(tensor))


def _work(chain: Chain, index: int, low: _Counted, high: _Counted, minimum_bytes: int) -> BlockWork:
    def line(of: Callable[[_Counted], float]) -> Affine:
        return Affine.through((low.rows, of(low)), (high.rows, of(high)))

    def work(of: Callable[[_Counted], PassWork]) -> Work:
        return Work(
            flops=line(lambda c: of(c).flops),
            bytes=line(lambda c: of(c).bytes),
            kernels=max(of(low).kernels, of(high).kernels),
            attention_flops=line(lambda c: of(c).attention_flops),
            operands=replace(line(lambda c: of(c).operands), fixed=0.0),  # without the weights
        )

    moved, small = _by_size((low.rows, low.movable), (high.rows, high.movable), minimum_bytes)
    return BlockWork(
        name=chain.blocks[index].name,
        **asdict(BlockSizes.of(chain, index)),
        forward=work(lambda c: c.forward),
        input_gradient=work(lambda c: c.input_gradient),
        weight_gradient=work(lambda c: c.weight_gradient),
        moved=moved,
        stays=line(lambda c: c.stays).plus(small),
        by_loss=line(lambda c: c.by_loss),
        input=line(lambda c: c.entering),
        output=line(lambda c: c.leaving),
        forward_work=line(lambda c: c.forward_work),
        backward_work=line(lambda c: c.backward_work),
        deferred=line(lambda c: c.deferred),
    )


def _by_size(
    low: tuple[int, tuple[int, ...]], high: tuple[int, tuple[int, ...]], minimum_bytes: int
) -> tuple[Affine, Affine]:
    """Return two costs as functions of the number of rows: the bytes of the tensors of at least ``minimum_bytes``,
    which can be offloaded, and the bytes of the smaller tensors.

    ``low`` and ``high``: a number of rows, and the bytes that each tensor has with it. A tensor grows with the rows, so
    both functions have a step at the number of rows at which a tensor reaches the minimum.
    """
    (few, sizes), (many, larger) = low, high
    if len(sizes) != len(larger):
        sizes, larger = (sum(sizes),), (sum(larger),)
    lines = [Affine.through((few, a), (many, b)) for a, b in zip(sizes, larger)]
    enough = [_least_rows(line, minimum_bytes) for line in lines]
    steps = {rows for rows in enough if 1 < rows < math.inf}
    rows = sorted({1.0, *(least + shift for least in steps for shift in (-1, 0, 1))})

    def total(chosen: Callable[[float, float], bool]) -> Affine:
        """Return the total bytes of some tensors, as a function of the number of rows.

        For n rows these are the tensors for which ``chosen(m, n)`` is true, where m is the least number of rows with
        which the tensor has at least ``minimum_bytes``.
        """

        def at(count: float) -> list[Affine]:
            return [line for line, least in zip(lines, enough) if chosen(least, count)]

        points = [(count, sum(line.at(count) for line in at(count))) for count in rows if steps]
        last = at(rows[-1])
        fixed, per_row = sum(line.fixed for line in last), sum(line.per_row for line in last)
        return Affine(fixed, per_row, points=tuple(points))

    return total(lambda least, count: least <= count), total(lambda least, count: least > count)


def _least_rows(line: Affine, size: int) -> float:
    """Return the least whole number of rows, above 0, with which a tensor has at least ``size`` bytes; infinite if
    there is none. ``line``: the bytes of the tensor as a function of the rows."""
    if line.at(1) >= size:
        return 1.0
    return float(math.ceil((size - line.fixed) / line.per_row)) if line.per_row > 0 else math.inf
