"""Measure the cost of each block on the real device: seconds, saved bytes by storage, working memory.

Blocks with equal structure, parameter shapes and inputs are measured once. A block is measured at several numbers of
rows, of which the smallest is usually one. Its passes are timed twice, some time apart, and the shorter time counts.
For larger numbers of rows only the seconds of forward and backward are measured, in few repetitions: libraries choose
kernels by the number of rows, so seconds of few rows do not predict those of many, while bytes do.
The backward is measured as a whole, and split into B and W pass (:mod:`parallax.model.split_backward`) for schedules
with separate weight-gradient passes. Results are cached by model, device and library versions, so only the first run of
a model takes this time.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from parallax.errors import DescribeError, SwapError, printable
from parallax.machine.device import private_random_state
from parallax.machine.host import (
    HUGE_PAGE_BYTES,
    RETURNED_BYTES,
    fresh_memory_seconds,
    huge_page_variables,
    trim_freed_memory,
)
from parallax.model.block import can_require_grad, tensors_in, to_device, with_own_storage
from parallax.model.describe import Chain, as_tuple
from parallax.model.layers.norms import share_alone
from parallax.model.losses import call_loss
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling.allocations import Allocations, measure_allocations
from parallax.model.profiling.blocks import (
    NO_LOSS,
    BatchLoss,
    BlockSizes,
    block_by_block,
    repeat_rows,
    tie_costs,
)
from parallax.model.profiling.cache import (
    Sample,
    device_name,
    load_cached,
    profile_path,
    store_cached,
)
from parallax.model.profiling.clock import Clock, NoiseMeter
from parallax.model.profiling.meter import FlopMeter
from parallax.model.profiling.offloads import Offloader, slowdown_seconds
from parallax.model.profiling.peak import peak_flops
from parallax.model.profiling.timed import BlockPasses, Tensors, optimizer_seconds
from parallax.model.recurrent import flattens_weights
from parallax.model.saved import SavedBytes
from parallax.plan.analytic.recipe import recipe
from parallax.plan.profile import Affine, BlockCost, ModelProfile

SECONDS_PER_BLOCK = 0.4
_REPEATS = (3, 15)
# Below this total of all measured blocks, larger numbers of rows are measured too: small kernels do not predict the
# cost of larger ones.
_CHEAP_SECONDS = 0.2
_ALWAYS = 3  # numbers of rows that are measured at any cost, if they fit the device
_MOST_SECONDS = 2.0  # of all distinct blocks at larger numbers of rows, which are only timed
_RUNS = 2  # at these numbers of rows, after a warm-up
_measured_here: set[Path] = set()  # cache files of profiles that this process has measured
_FREEING_DOUBLINGS = 13  # of rows, up to which the slowdown of fresh memory is computed
_GROWN = 1.5  # ratio for twice the rows; below it, costs that do not depend on rows dominate, such as reading weights


_Each = TypeVar("_Each", bound="_Measured | _TimedBlock")


@dataclass(frozen=True)
class _Measured:
    """The costs of one block at one number of rows.

    ``entering`` and ``leaving``  the bytes of the block's inputs and outputs
    ``allocated``                 the bytes of each block of memory that a forward and a backward allocate
    ``flops``                     the operations of matrix products in a forward and a backward
    ``outputs``                   the block's output tensors
    ``saved_inputs``, ``saved_outputs``  for each input and output the bytes of its storage, if the block saves it and
                                  it may be offloaded, and otherwise 0

    The other fields are seconds and bytes, as in :class:`~parallax.plan.profile.BlockCost`. ``offload_seconds`` is None
    if it was not measured.
    """

    rows: int
    forward_seconds: float
    backward_seconds: float
    weight_seconds: float
    split_seconds: float
    moved: int
    stays: int
    by_loss: int
    entering: int
    leaving: int
    forward_work: int
    backward_work: int
    deferred: int
    split_work: int
    allocated: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    flops: float = 0.0
    skipped_seconds: float = 0.0
    offload_seconds: float | None = None  # measured at the two largest numbers of rows only
    received_seconds: float = 0.0
    norm_seconds: float = 0.0
    norms: int = 0


@dataclass(frozen=True)
class _TimedBlock:
    """The seconds of one block's forward and backward, at a number of rows at which nothing else was measured.

    ``outputs``: the block's output tensors.
    """

    rows: int
    forward_seconds: float
    backward_seconds: float
    outputs: tuple[Tensor, ...] = ()


def measure(
    chain: Chain,
    loss: Callable[[Any, Tensor], Tensor],
    sample: Sample,
    rows: Sequence[int],
    *,
    device: torch.device,
    precision: PrecisionConfig,
    minimum_bytes: int,
    name: str = "model",
    offloader: Offloader | None = None,
    gathered: int = 0,
    shared_norms: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> ModelProfile:
    """Return the profile of ``chain``, with ``name`` as the model's name.

    ``sample(n)`` returns inputs and targets of n rows, and ``rows`` lists candidates for n. The three smallest are
    always measured. Larger ones are measured as long as the blocks take little time, or hardly more than for fewer
    rows. The next ones are only timed, as long as all blocks take a few seconds. Costs for other numbers of rows are
    interpolated, or extrapolated linearly.

    Saved tensors of less than ``minimum_bytes`` count as not offloadable. The loss is measured with the last block. If
    the loss is computed over the whole batch, ``gathered`` is the number of rows of the batch; otherwise it is 0. Such
    a loss is measured separately, on these rows, because its cost may be non-linear (that of all pairs of rows grows
    quadratically). ``offloader`` offloads as in a run; None: the run does not offload. ``shared_norms``: replicas share
    the statistics of BatchNorms. If a cached profile was measured on a busy machine, it is measured again, once in this
    process. Raises :class:`DescribeError` if a block does not accept the outputs of the one before it.
    """
    how: dict[str, Any] = {"precision": precision, "offloader": offloader}
    how |= {"minimum_bytes": minimum_bytes, "gathered": gathered, "shared_norms": shared_norms}
    path, ended = (
        profile_path(chain, loss, sample, each, device=device, **how) for each in (rows, ())
    )
    known, kept = load_cached(path, name), path
    if known is None:
        known, kept = _with_rows_of(load_cached(ended, name), rows), ended
    if known is not None and (not known.noisy or kept in _measured_here):
        progress(f"profile of {name} from {kept}")
        return known
    with private_random_state(device), precision.products():
        options = {"with_loss": not gathered, "shared_norms": shared_norms}
        bench = _Bench(
            chain, loss, device, precision, minimum_bytes, offloader, progress, **options
        )
        found = bench.rounds(sample, sorted(set(rows)))
        timed = bench.timed(sample, sorted(set(rows)), found)
        whole = bench.gathered_loss(gathered, found, sample) if gathered else NO_LOSS
    profile = _profile_of(chain, name, device, precision, found, timed, whole)
    profile = replace(profile, disturbance=round(bench.noise.disturbance, 3))
    trim_freed_memory()  # of the blocks, which this process has kept
    _measured_here.add(path)
    if known is not None and known.disturbance < profile.disturbance:
        return known  # measured again, but the machine was even busier
    store_cached(profile, path)
    if len(found) + len(timed) < len(set(rows)):
        store_cached(profile, ended)
        _measured_here.add(ended)
    return profile


def _with_rows_of(profile: ModelProfile | None, rows: Sequence[int]) -> ModelProfile | None:
    """Return ``profile`` if a measurement with the candidates ``rows`` would measure the same rows; otherwise None.

    ``profile``: a profile whose measurement ended before the last of its own candidates.
    """
    points = profile.blocks[0].forward_seconds.points if profile else ()
    measured = {n for n, _ in points}
    return profile if points and measured < set(rows) and max(measured) < max(rows) else None


class _TooLarge(DescribeError):
    """Raised if the device has too little memory for a measurement."""


@contextlib.contextmanager
def _fitting(what: str, rows: int, way_out: str) -> Iterator[None]:
    """A context that replaces an out-of-memory error of the device by :class:`_TooLarge` with a message of one line.

    The message has three parts from the caller. ``what``: what was measured, such as a block. ``rows``: on how many
    rows. ``way_out``: a remedy.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = printable(str(error).split(".")[0])
        raise _TooLarge(
            f"{what} does not fit the device while {rows} row(s) of it are measured: {reason}; {way_out}, or free the "
            "device"
        ) from error


def _profile_of(
    chain: Chain,
    name: str,
    device: torch.device,
    precision: PrecisionConfig,
    found: Sequence[Sequence[_Measured]],
    timed: Sequence[Sequence[_TimedBlock]],
    whole: BatchLoss,
) -> ModelProfile:
    how, on = recipe(str(precision)), device_name(device)
    threads = torch.get_num_threads()
    peak, source = peak_flops(
        device, on, precision.compute, max(map(_rate, itertools.chain(*found)))
    )
    return ModelProfile(
        model=name,
        fingerprint=chain.fingerprint(),
        device=f"{on}, {threads} thread{'s' * (threads > 1)}",
        precision=str(precision),
        blocks=(
            *(_cost(chain, i, found, timed) for i in range(len(chain.blocks) - 1)),
            replace(
                _cost(chain, -1, found, timed),
                gathered_bytes=whole.outputs,
                gathered_work=whole.work,
                gathered_seconds=whole.seconds,
            ),
        ),
        ties=tuple(tie_costs(chain, trained=True, flat=flattens_weights(device))),
        frozen_ties=tuple(tie_costs(chain, trained=False, flat=flattens_weights(device))),
        optimizer_bytes=how.optimizer / how.weight,
        optimizer_seconds=optimizer_seconds(device, chain.dtype),
        gradient_bytes=how.gradient / how.weight,
        master_bytes=how.master / how.weight,
        gathered_rows=whole.rows,
        peak_flops=peak,
        peak_source=source,
        freeing_slowdown=_freeing_slowdown(device, found[min(2, len(found) - 1)]),
    )


def _rate(block: _Measured) -> float:
    """Return the operations per second of a block's forward and backward."""
    return block.flops / max(block.forward_seconds + block.backward_seconds, 1e-9)


def _freeing_slowdown(device: torch.device, blocks: Sequence[_Measured]) -> tuple[float, ...]:
    """Return the factors by which forward and backward slow down if freed memory is returned to the system at once, for
    micro-batches of 1, 2, 4, ... rows.

    Each tensor of :data:`RETURNED_BYTES` or more then needs fresh memory pages. They are huge pages except at the ends
    of the tensor, which have as many bytes as one huge page, because malloc does not align them. The factors are
    computed from the bytes of the tensors. They cannot be measured here, because this process keeps freed memory.
    """
    seconds = sum(block.forward_seconds + block.backward_seconds for block in blocks)
    if device.type != "cpu" or not seconds:
        return (1.0,)
    small = fresh_memory_seconds()
    huge = fresh_memory_seconds(huge=True) if huge_page_variables() else small
    allocated = Counter(size for block in blocks for size in block.allocated)

    def factor(rows: int) -> float:
        scale, added = rows / blocks[0].rows, 0.0
        for size, count in allocated.items():
            if size * scale >= RETURNED_BYTES:
                ends = min(1.0, HUGE_PAGE_BYTES / (size * scale))
                added += count * size * (small * ends + huge * (1 - ends))
        return round(1 + added / seconds, 3)

    return tuple(factor(1 << n) for n in range(_FREEING_DOUBLINGS))


class _Bench:
    """Measures the blocks of a chain in order. Blocks of equal cost are measured once.

    ``with_loss``: the loss is measured with the last block. ``shared_norms``: the cost of statistics of BatchNorms that
    replicas share is measured. The other arguments are those of :func:`measure`.
    """

    def __init__(
        self,
        chain: Chain,
        loss: Callable[[Any, Tensor], Tensor],
        device: torch.device,
        precision: PrecisionConfig,
        minimum_bytes: int,
        offloader: Offloader | None,
        progress: Callable[[str], None],
        *,
        with_loss: bool = True,
        shared_norms: bool = False,
    ) -> None:
        self._chain, self._loss, self._device, self._offloader = chain, loss, device, offloader
        self._precision, self._minimum, self._progress = precision, minimum_bytes, progress
        self._clock = Clock(device)
        self.noise = NoiseMeter(device, self._clock)
        self._with_loss, self._shared_norms = with_loss, shared_norms

    def run(self, rows: int, inputs: tuple[Tensor, ...], targets: Any) -> list[_Measured]:
        """Return the measurements of every block with ``rows`` rows.

        The outputs of each block are the inputs of the next one.
        """

        return self._visit(
            "measuring",
            rows,
            inputs,
            targets,
            lambda index, entering, aims: self._measured(index, rows, entering, aims),
        )

    def _visit(
        self,
        doing: str,
        rows: int,
        inputs: tuple[Tensor, ...],
        targets: Any,
        find: Callable[[int, tuple[Tensor, ...], Any], _Each],
    ) -> list[_Each]:
        """Return ``find(index, inputs, targets)`` for every block. ``doing``: a word for the progress."""

        def visit(index: int, entering: tuple[Tensor, ...], last: bool) -> _Each:
            name, count = self._chain.blocks[index].name, len(self._chain.blocks)
            self._progress(f"{doing} block {index + 1} of {count} ({name}), {rows} row(s)")
            aims = (
                with_own_storage(to_device(targets, self._device))
                if last and self._with_loss
                else None
            )
            with self._fitting_block(index, rows):
                return find(index, entering, aims)

        return block_by_block(self._chain, with_own_storage(to_device(inputs, self._device)), visit)

    def rounds(self, sample: Sample, rows: Sequence[int]) -> list[list[_Measured]]:
        """Return the measurements of every block, for each number in ``rows`` that :func:`measure` selects.

        All blocks are timed twice: from few rows to many, and back. The shorter times count, because a temporary
        disturbance only adds time.
        """
        found: list[list[_Measured]] = []
        for n in rows:
            if len(found) >= _ALWAYS:
                before, now = (self._distinct_seconds(blocks) for blocks in found[-2:])
                if now > max(_CHEAP_SECONDS, _GROWN * before):
                    break
            try:
                found.append(self.run(n, *sample(n)))
            except _TooLarge:
                if len(found) < 2:
                    raise
                break
            except (ValueError, DescribeError):
                if n > 1 or len(rows) == 1:
                    raise  # a single row may be too few (BatchNorm); try more
        for place in reversed(range(len(found))):
            blocks = found[place]
            n, ends = blocks[0].rows, place >= len(found) - 2
            found[place] = self.run_again(n, *sample(n), blocks, offload=ends)
        return found

    def run_again(
        self,
        rows: int,
        inputs: tuple[Tensor, ...],
        targets: Any,
        known: Sequence[_Measured],
        *,
        offload: bool,
    ) -> list[_Measured]:
        """Time all blocks a second time. Return the measurements ``known``, which :meth:`run` returned, with the
        shorter times.

        Two measurements are added: the seconds of the part of a forward that recomputation skips and, with ``offload``,
        the slowdown by offloading.
        """

        return self._visit(
            "timing again",
            rows,
            inputs,
            targets,
            lambda index, entering, aims: self._timed_again(
                index, entering, aims, known[index], offload
            ),
        )

    def timed(
        self, sample: Sample, rows: Sequence[int], known: Sequence[Sequence[_Measured]]
    ) -> list[list[_TimedBlock]]:
        """Return the seconds of every block for each number in ``rows``, in increasing order, that is larger than those
        of ``known``, the measurements, and for which all distinct blocks take at most about :data:`_MOST_SECONDS`."""
        found: list[list[_TimedBlock]] = []
        last, seconds = known[-1][0].rows, self._distinct_seconds(known[-1])
        for n in [n for n in rows if n > last]:
            if seconds * n / last > _MOST_SECONDS:
                break
            try:
                blocks = self._visit("timing", n, *sample(n), partial(self._timed, n))
            except _TooLarge:
                break
            last, seconds = n, self._distinct_seconds(blocks)
            found.append([replace(block, outputs=()) for block in blocks])
        return found

    def _timed(
        self, rows: int, index: int, inputs: tuple[Tensor, ...], targets: Any
    ) -> _TimedBlock:
        block, passes = self._passes(index, inputs, targets)
        outputs = self.forward(block, passes.enter(), None)
        _, forward, backward = self._few_seconds(passes)
        return _TimedBlock(
            rows=rows,
            forward_seconds=forward,
            backward_seconds=backward,
            outputs=tuple(t.detach().requires_grad_(t.requires_grad) for t in outputs),
        )

    def _distinct_seconds(self, blocks: Sequence[_Measured] | Sequence[_TimedBlock]) -> float:
        distinct = {id(block): block for block in blocks}.values()
        return sum(block.forward_seconds + block.backward_seconds for block in distinct)

    def _fitting_block(self, index: int, rows: int) -> contextlib.AbstractContextManager[None]:
        name = printable(self._chain.blocks[index].name)
        way_out = "give it shorter rows, partition it into more blocks"
        return _fitting(f"block {index} ({name})", rows, way_out)

    def _passes(
        self, index: int, inputs: tuple[Tensor, ...], targets: Any
    ) -> tuple[nn.Module, BlockPasses]:
        """Return the block ``index`` on the device, with gradients to accumulate into, and the passes of this block.

        ``targets``: the targets if the passes include the loss, otherwise None.
        """
        (block,) = materialise(self._chain, index, index + 1, self._device)
        leaves = tuple(
            tensor.detach().requires_grad_(index > 0 and tensor.requires_grad) for tensor in inputs
        )
        for parameter in block.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return block, BlockPasses(self, self._device, block, leaves, targets)

    def _received(
        self, index: int, block: nn.Module, passes: BlockPasses, targets: Any
    ) -> BlockPasses:
        """Return ``passes`` of ``block`` as in a stage after the first, which receives its inputs: they all need
        gradients, also those that do not depend on parameters."""
        leaves = passes.leaves
        needed = [index > 0 and can_require_grad(leaf) for leaf in leaves]
        if needed == [leaf.requires_grad for leaf in leaves]:
            return passes
        received = tuple(leaf.detach().requires_grad_(needs) for leaf, needs in zip(leaves, needed))
        return BlockPasses(self, self._device, block, received, targets)

    def _measured(
        self, index: int, rows: int, inputs: tuple[Tensor, ...], targets: Any
    ) -> _Measured:
        block, own = self._passes(index, inputs, targets)
        outputs = self.forward(block, own.enter(), None)
        times = self._times(own)
        passes = self._received(index, block, own, targets)  # which saves the most
        saved, new = self._saved(block, passes.enter(), targets)
        _, forward, backward = self._allocations(passes.enter, passes.forward, passes.backward)
        sent = outputs if passes is own else self.forward(block, passes.enter(), None)
        arriving = sum(tensor.nbytes for tensor in sent if tensor.requires_grad)
        del sent
        if targets is not None:
            arriving = 0  # the backward starts at the loss
        # The inputs stay alive until the W pass.
        split, first, second = self._allocations(
            passes.enter_and_split, passes.input_gradient_pass, passes.weight_gradient_pass
        )
        with FlopMeter() as meter:
            own.backward(own.forward(own.enter()))
        return _Measured(
            rows=rows,
            **dict[str, Any](times),
            **saved,
            flops=meter.flops,
            entering=sum(tensor.nbytes for tensor in inputs),
            leaving=sum(tensor.nbytes for tensor in outputs),
            forward_work=max(0, forward.most - new),
            backward_work=max(0, backward.most - arriving),
            deferred=max(0, split.left + first.left),
            split_work=max(0, first.most - arriving, second.most),
            allocated=forward.blocks + backward.blocks,
            outputs=tuple(t.detach().requires_grad_(t.requires_grad) for t in outputs),
        )

    def _timed_again(
        self,
        index: int,
        inputs: tuple[Tensor, ...],
        targets: Any,
        known: _Measured,
        offload: bool,
    ) -> _Measured:
        block, passes = self._passes(index, inputs, targets)
        times = {name: min(t, getattr(known, name)) for name, t in self._times(passes).items()}
        skipped = min(times["forward_seconds"], self._skipped_seconds(passes))
        received = self._received(index, block, passes, targets)
        offloading = self._offload_seconds(block, known.moved, received) if offload else None
        whole = times["forward_seconds"] + times["backward_seconds"]
        more = 0.0 if received is passes else sum(self._few_seconds(received)[1:]) - whole
        norms, slower = self._norm_costs(block, passes, whole) if self._shared_norms else (0, 0.0)
        return replace(
            known,
            **times,
            skipped_seconds=skipped,
            offload_seconds=offloading,
            received_seconds=max(0.0, more),
            norms=norms,
            norm_seconds=slower,
        )

    def _norm_costs(
        self, block: nn.Module, passes: BlockPasses, seconds: float
    ) -> tuple[int, float]:
        """Return the number of BatchNorms in ``block``, and the seconds by which statistics that replicas share slow
        down a forward and a backward together, without the exchange of these statistics.

        ``seconds``: those of both without such statistics. The BatchNorms of ``block`` are changed.
        """
        norms = share_alone(block)
        if not norms:
            return 0, 0.0
        _, *shared = self._few_seconds(passes)
        return norms, max(0.0, sum(shared) - seconds)

    def _few_seconds(self, passes: BlockPasses) -> list[float]:
        """Return the least seconds of new inputs, of a forward and of a backward, in few repetitions."""
        with self.noise.timed_part():
            runs = [
                self._seconds(passes.enter, passes.forward, passes.backward)
                for _ in range(1 + _RUNS)
            ]
        return [min(column) for column in zip(*runs[1:])]

    def _times(self, passes: BlockPasses) -> dict[str, float]:
        """Return {field of :class:`_Measured`: seconds} for a block's forward and backward, as a whole and split."""
        _, forward, backward = self._time(passes.enter, passes.forward, passes.backward)
        split = passes.split, passes.input_gradient_pass, passes.weight_gradient_pass
        _, *others, weight = self._time(passes.enter, *split)
        return {
            "forward_seconds": forward,
            "backward_seconds": backward,
            "weight_seconds": min(weight, backward) if self._splits(passes) else 0.0,
            "split_seconds": max(0.0, sum(others) + weight - forward - backward),
        }

    def gathered_loss(self, rows: int, found: list[list[_Measured]], sample: Sample) -> BatchLoss:
        """Return the cost of one loss over ``rows`` rows. ``found``: the measurements of all blocks."""
        low, high = (found * 2)[-2:]
        with _fitting("the loss", rows, "use a smaller trainer.global_batch"):
            return self.whole_loss(rows, low[-1], high[-1], sample(rows)[1])

    def whole_loss(self, rows: int, low: _Measured, high: _Measured, targets: Any) -> BatchLoss:
        """Return the cost of one loss over ``rows`` rows.

        ``low`` and ``high``: the measurements of the last block at two numbers of rows. The block's outputs in them are
        repeated to get outputs of ``rows`` rows. ``targets``: the targets of these rows.
        """
        self._progress(f"measuring the loss of {rows} row(s)")
        aims = with_own_storage(to_device(targets, self._device))
        leaves = repeat_rows(rows, (low.rows, low.outputs), (high.rows, high.outputs))
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        held = list[Tensors]()  # as the executor holds the gathered outputs

        def enter(_: object = None) -> Tensors:
            held[:] = [
                tuple(t + anchor.to(t.dtype) if t.requires_grad else t.clone() for t in leaves)
            ]
            return held[0]

        def forward(entering: Tensors) -> Tensors:
            return self.add_loss(entering, aims)

        def backward(results: Tensors) -> None:
            if results[0].requires_grad:
                torch.autograd.backward(results)
            for leaf in (*leaves, anchor):
                leaf.grad = None

        _, *seconds = self._time(enter, forward, backward)
        _, first, second = self._allocations(enter, forward, backward)
        return BatchLoss(
            rows=rows,
            outputs=sum(tensor.nbytes for tensor in leaves),
            work=max(first.most, first.left + second.most)
            + sum(tensor.nbytes for tensor in tensors_in(aims)),
            seconds=sum(seconds),
        )

    def _offload_seconds(self, block: nn.Module, moved: int, passes: BlockPasses) -> float:
        """Return the seconds by which offloading slows down a forward and a backward of ``block`` together.

        ``moved``: the bytes of saved activations that can be offloaded. The result is 0 if there are none, if the run
        does not offload, or if the offload tier cannot hold the activations.
        """
        try:
            if moved and self._offloader is not None:
                with self._offloader.of(block, moved, self._device) as offloads:
                    return slowdown_seconds(
                        offloads,
                        passes.offloaded,
                        passes.backward,
                        self._clock,
                        3 * SECONDS_PER_BLOCK,
                    )
        except SwapError as error:
            self._progress(f"the cost of offloading was not measured: {error}")
        return 0.0

    def _splits(self, passes: BlockPasses) -> bool:
        """Return whether a split backward of the block defers any weight gradient."""
        results, store = passes.enter_and_split(None)
        passes.backward(results)
        defers = bool(store.pending_parameters())
        store.finish()  # breaks the reference cycle between the store and the graph
        return defers

    def forward(
        self, block: nn.Module, inputs: tuple[Tensor, ...], targets: Any
    ) -> tuple[Tensor, ...]:
        """Return the block's outputs or, if ``targets`` are given, the loss of these outputs."""
        with self._precision.autocast(self._device.type):
            try:
                outputs = as_tuple(block(*inputs))
            except torch.OutOfMemoryError:
                raise
            except (TypeError, RuntimeError) as error:
                shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in inputs)
                raise DescribeError(
                    f"block {type(block).__name__} does not take what the block before it returns ({shapes}): "
                    f"{str(error).splitlines()[0]}"
                ) from error
            return outputs if targets is None else self.add_loss(outputs, targets)

    def add_loss(self, outputs: tuple[Tensor, ...], targets: Any) -> tuple[Tensor, ...]:
        """Return the loss of the last block's outputs."""
        with self._precision.autocast(self._device.type):
            return (call_loss(self._loss, self._chain.results(outputs), targets, alone=True),)

    def _saved(
        self, block: nn.Module, entering: tuple[Tensor, ...], targets: Any
    ) -> tuple[dict[str, Any], int]:
        """Return {field of :class:`_Measured`: the bytes that a forward saves for backward}, and the number of bytes
        that exist after the forward and did not exist before it.

        ``targets``: None without a loss.
        """
        saved = SavedBytes([*block.parameters(), *block.buffers()], self._minimum)
        with saved.block_hooks():
            outputs = results = self.forward(block, entering, None)
        if targets is not None:
            with saved.loss_hooks():
                results = self.add_loss(outputs, targets)
        moved, stays, by_loss, new = saved.byte_totals(entering, results)
        return {
            "moved": moved,
            "stays": stays,
            "by_loss": by_loss,
            "saved_inputs": saved.movable_bytes(entering),
            "saved_outputs": saved.movable_bytes(outputs),
        }, new

    def _skipped_seconds(self, passes: BlockPasses) -> float:
        """Return the seconds of the part of a forward, with its loss, that recomputation skips.

        Torch stops recomputing as soon as the last saved tensor exists. The result is the minimum of several runs,
        because the planner subtracts it from the seconds of a forward.
        """
        found = []
        for _ in range(1 + _REPEATS[0]):
            self._clock.evict_caches()
            found.append(passes.after_the_last_saved(self._clock))
        return min(found[1:])

    def _time(self, *passes: Callable[[Any], Any]) -> list[float]:
        """Return the typical seconds of each of ``passes``. The argument of each pass is the result of the previous
        one.

        The typical time is the median of several runs for CPU time. For wall time it is the lower quartile, because
        disturbances only add time. A first run is a warm-up.
        """
        with self.noise.timed_part():
            return self._typical_seconds(passes)

    def _typical_seconds(self, passes: Sequence[Callable[[Any], Any]]) -> list[float]:
        times: list[list[float]] = []
        begun = time.perf_counter()
        while len(times) <= _REPEATS[0] or (
            len(times) <= _REPEATS[1] and time.perf_counter() - begun < SECONDS_PER_BLOCK
        ):
            times.append(self._seconds(*passes))
        typical = statistics.median if self._clock.undisturbed else _quartile
        return [typical(list(column)) for column in zip(*times[1:])]

    def _seconds(self, *passes: Callable[[Any], Any]) -> list[float]:
        """Run ``passes`` once, and return the seconds of each of them."""
        found, seconds = None, []
        for each in passes:
            self._clock.evict_caches()
            start = self._clock.now()
            found = each(found)
            seconds.append(self._clock.now() - start)
        return seconds

    def _allocations(self, *passes: Callable[[Any], Any]) -> list[Allocations]:
        results: list[Any] = [None]

        def run(each: Callable[[Any], Any]) -> None:
            results.append(each(results.pop()))

        return [measure_allocations(self._device, partial(run, each)) for each in passes]


def _at_more_rows(
    field: str, known: _Measured, timed: Sequence[_TimedBlock]
) -> list[tuple[int, float]]:
    """Return (rows, value) of ``field`` for each of ``timed``, if it follows from their seconds.

    Weight gradients are as large a part of a backward as in ``known``, the measurement of fewer rows.
    """
    if field == "weight_seconds":
        share = known.weight_seconds / max(known.backward_seconds, 1e-12)
        return [(block.rows, share * block.backward_seconds) for block in timed]
    if field in ("forward_seconds", "backward_seconds"):
        return [(block.rows, getattr(block, field)) for block in timed]
    return []


def _quartile(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


def _cost(
    chain: Chain,
    index: int,
    found: Sequence[Sequence[_Measured]],
    timed: Sequence[Sequence[_TimedBlock]],
) -> BlockCost:
    place = index % len(chain.blocks)

    def shared(blocks: Sequence[_Measured]) -> int:
        pairs = zip(blocks[place - 1].saved_outputs, blocks[place].saved_inputs)
        return sum(map(min, pairs)) if place else 0

    def cost(field: str) -> Affine:
        each = [(blocks[index].rows, getattr(blocks[index], field)) for blocks in found]
        known = [(rows, value) for rows, value in each if value is not None]
        known += _at_more_rows(field, found[-1][index], [blocks[index] for blocks in timed])
        if field.endswith("seconds"):  # a decrease with more rows is noise
            known = list(
                zip([rows for rows, _ in known], itertools.accumulate([y for _, y in known], max))
            )
        return Affine.measured(known)

    return BlockCost(
        name=chain.blocks[index].name,
        **asdict(BlockSizes.of(chain, index)),
        flops_per_row=found[-1][index].flops / found[-1][index].rows,
        forward_seconds=cost("forward_seconds"),
        backward_seconds=cost("backward_seconds"),
        weight_seconds=cost("weight_seconds"),
        split_seconds=cost("split_seconds"),
        offload_seconds=cost("offload_seconds"),
        skipped_seconds=cost("skipped_seconds"),
        received_seconds=cost("received_seconds"),
        norms=found[-1][index].norms,
        norm_seconds=cost("norm_seconds"),
        moved=cost("moved"),
        shared=Affine.measured([(blocks[place].rows, shared(blocks)) for blocks in found]),
        stays=cost("stays"),
        by_loss=cost("by_loss"),
        input=cost("entering"),
        output=cost("leaving"),
        forward_work=cost("forward_work"),
        backward_work=cost("backward_work"),
        deferred=cost("deferred"),
        split_work=cost("split_work"),
    )
