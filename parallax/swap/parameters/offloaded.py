"""Parameter offload: weights and gradients are in a store, and on the device one block at a time.

The blocks of a stage run one after another. So only the weights of the running block and of the next one need to be on
the device. Gradients are offloaded as soon as autograd has computed them. Gradients of several micro-batches are summed
in the order in which autograd would sum them on the device, so the result is bit-identical.

::

    device   │ block 1 runs │ block 2 is read │        forward
             │ block 2 runs │ block 3 is read │
                   …
             │ block 2 runs │ block 1 is read │ gradients of block 3 are written │        backward

If a block computes several micro-batches before the next block does, its weights are read once for all of them. Its
gradients then stay on the device until the last micro-batch (:meth:`OffloadedParameters.hold_gradients`).

The weight-gradient pass of a split backward computes gradients without autograd. It adds them to the stored gradients
between :meth:`OffloadedParameters.fetch_gradient` and :meth:`OffloadedParameters.offload_gradient`, without reading
weights.

The bytes on the device never exceed ``limit_bytes``, which allows the ``window`` largest blocks and the gradients of
one block.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from parallax.errors import SwapError, check_positive
from parallax.machine.host import relieve_memory
from parallax.model.block import tensors_in
from parallax.model.private import as_plain_tensors
from parallax.plan.plan import STATE_BUCKET_BYTES
from parallax.swap.parameters.chunks import Chunk, ChunkStore, Gradient, GradientWrite, has_ended
from parallax.swap.parameters.flat import FlatParameter, lay_out
from parallax.swap.stores.store import Store
from parallax.swap.weights import ParameterSegment, stepped_in

_REMEMBERED = 100_000  # block visits of one step; a longer sequence is an evaluation without end


@dataclass
class ParameterStatistics:
    """Statistics since the last :meth:`OffloadedParameters.take_statistics`, in bytes and seconds.

    ``high_water`` is the peak of bytes on the device, including memory reserved for gradients of the running backward.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    stall_seconds: float = 0.0
    high_water: int = 0


class GradientSink(Protocol):
    """The interface of an object that takes gradients of a step's last backward before they are written to the
    store."""

    def accept(self, parameter: nn.Parameter, total: Tensor) -> Collection[ParameterSegment]:
        """Copy some segments of ``total``, this rank's sum of the gradients of ``parameter``, and return these
        segments.

        The segments that are not returned are written to the store.
        """

    def accepted(self, parameter: nn.Parameter) -> None:
        """Note that the writes of the segments that :meth:`accept` has not returned have begun. Called after each
        :meth:`accept`."""


@dataclass(frozen=True, slots=True)
class _PendingGradient:
    """A gradient that stays on the device until its write has ended."""

    gradient: Tensor
    written: GradientWrite


class OffloadedParameters:
    """The offloaded parameters of a stage.

    ``blocks`` yields the parameters of each block, which are offloaded before the next block is requested. So a
    generator can create blocks that do not all fit on the device together.

    Parameters that several blocks use, that share memory with others, or that are not contiguous stay on the device
    with their gradients (:meth:`is_offloaded` is False). Offloaded parameters may be read or changed in place only
    after :meth:`enter` of their block. An optimizer steps them through :attr:`chunks`, of at most ``chunk_bytes`` each.
    Without ``split``, a chunk contains whole parameters only. ``window`` is the number of blocks whose weights may be
    on the device at one time. With ``keep_referenced``, a block stays on the device while other tensors share its
    memory, beyond the limit if necessary.
    """

    def __init__(
        self,
        blocks: Iterable[Iterable[nn.Parameter]],
        store: Store,
        *,
        window: int = 2,
        chunk_bytes: int = STATE_BUCKET_BYTES,
        split: bool = True,
        keep_referenced: bool = False,
        verify: bool = False,
    ) -> None:
        check_positive("window", window)
        self._keep_referenced = keep_referenced
        self._tier, self.lock = (tier := ChunkStore(store, verify=verify)), tier.lock
        self._window = window
        self._flats = lay_out(
            blocks, lambda parameters: FlatParameter(parameters, tier, chunk_bytes, split=split)
        )
        self._index_storages()
        self._flat_of = {parameter: flat for flat in self._flats for parameter in flat.parameters}
        self._hooks: list[RemovableHandle] = []
        self._watched: set[nn.Parameter] = set()
        self._visits = PrefetchOrder()
        self._in_use: tuple[FlatParameter, ...] = ()
        # gradients that the running block's backward has still to make, or that are fetched
        self._reserved = 0
        self._fetched: set[nn.Parameter] = set()
        self._holds = False
        self._held: set[nn.Parameter] = set()  # parameters whose gradients include the stored ones
        self._pending: deque[_PendingGradient] = deque()
        self.sink: GradientSink | None = None
        self.kept_gradients: set[nn.Parameter] = set()  # these stay in ``grad``
        self._statistics = ParameterStatistics()
        self._counted = (0, 0)
        self._closed = False
        self._least = 0, 0  # lower bounds of the limits, raised by :meth:`extend_limit`
        self._weight_limit, self._limit_bytes, self._write_limit = self._limits()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks with all trained offloaded parameters, in the order of the forward. Each is a bucket of the host
        optimizer."""
        return tuple(
            c for flat in self._flats for c in flat.chunks if c.segments[0].parameter.requires_grad
        )

    @property
    def limit_bytes(self) -> int:
        """The most bytes on the device at any time: the weights of ``window`` blocks and the gradients of one block."""
        return self._limit_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights and gradients on the device now."""
        with self.lock:
            self._collect_written()
            return self._weights() + self._gradients()

    @property
    def stall_seconds(self) -> float:
        """Seconds that training has waited for weights or for memory since the last :meth:`take_statistics`."""
        return self._statistics.stall_seconds

    def is_offloaded(self, parameter: nn.Parameter) -> bool:
        """Whether ``parameter`` is offloaded; False if it stays on the device."""
        return parameter in self._flat_of

    def parameters(self, block: int) -> tuple[nn.Parameter, ...]:
        """Return the offloaded parameters of a block."""
        return self._flats[block].parameters

    def holds_memory_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is an offloaded parameter or a view of one."""
        return self.block_of_memory(tensor) is not None

    def block_of_memory(self, tensor: Tensor) -> int | None:
        """Return the index of the block whose memory ``tensor`` shares; None if it shares no memory with offloaded
        parameters.
        """
        return self._blocks_by_storage.get(id(tensor.untyped_storage()))

    def parameter_of(self, block: int, view: Tensor) -> nn.Parameter | None:
        """Return the parameter of ``block`` that ``view`` is a view of; None if there is none."""
        return self._flats[block].parameter_at(int(view.storage_offset()) * view.element_size())

    def attach(self, block: int, module: nn.Module) -> None:
        """Add hooks to ``module``, the module of ``block``, that load the block's weights before they are used.

        They load the weights before each forward, including recomputation, and before the backward. They run before the
        module's own forward hooks, because these may use the weights, as in torch.nn.utils.spectral_norm.
        """
        self._hooks.append(
            module.register_forward_pre_hook(lambda *_: self.enter(block), prepend=True)
        )
        self._hooks.append(
            module.register_forward_hook(
                lambda _, args, kwargs, result: self.before_backward(block, result, (args, kwargs)),
                with_kwargs=True,
            )
        )

    def before_backward(self, block: int, result: Any, given: Any = ()) -> None:
        """Load the weights of ``block`` when the backward reaches ``result``, the output of the block.

        Inputs of the block (``given``) that it returns unchanged are not treated as its outputs.
        """
        passed = {tensor.grad_fn for tensor in tensors_in(given)}
        for node in {tensor.grad_fn for tensor in tensors_in(result)} - passed:
            if node is not None:
                node.register_prehook(lambda _: self._enter_backward(block))

    def enter(self, *blocks: int, backward: bool = False) -> None:
        """Load ``blocks``: wait until the device's current stream may use their weights, and begin to read the next
        block.

        With ``backward``, memory for the gradients of the last of ``blocks`` is reserved.
        """
        returns = backward or torch.is_grad_enabled()
        with self.lock, torch.no_grad():
            self._check_open()
            self._in_use = tuple(self._flats[block] for block in blocks)
            for block, flat in zip(blocks, self._in_use):
                moved = self._visits.visit(block, returns=returns)
                if backward or moved:
                    self._reserved = flat.gradient_bytes if backward else 0
                if returns:
                    self._watch(flat)
                self._load(flat)

    def _load(self, flat: FlatParameter) -> None:
        """Load the weights of one block that is about to be used, and begin to read the next block."""
        start = time.perf_counter()
        self._collect_written()
        try:
            if flat.stale:
                flat.release()
            if flat.is_offloaded:
                self._free_bytes_for(flat.size, weights=flat.size)
                flat.start_read()
            self._free_bytes_for(0)
            self._prefetch()
            self._note_high_water()
            flat.wait_for_read()
        except BaseException:
            flat.release()
            raise
        self._statistics.stall_seconds += time.perf_counter() - start

    def extend_limit(self, blocks: Iterable[int]) -> bool:
        """Raise the limits if ``blocks`` and their gradients together exceed them; return whether the limits were
        raised."""
        flats = [self._flats[block] for block in blocks]
        weights = sum(flat.size for flat in flats)
        total = weights + sum(flat.gradient_bytes for flat in flats)
        if weights <= self._weight_limit and total <= self._limit_bytes:
            return False
        self._least = max(self._least[0], weights), max(self._least[1], total)
        self._weight_limit, self._limit_bytes, self._write_limit = self._limits()
        return True

    def is_referenced(self, block: int) -> bool:
        """Whether ``block`` is on the device and other tensors share its memory."""
        return self._flats[block].is_referenced

    def note_change(self, block: int) -> None:
        """Mark the weights of ``block``, which is on the device, as changed, because they may have been changed through
        another tensor. So they are written to the store before their memory is freed."""
        self._flats[block].changed = True

    def restart_visits(self) -> None:
        """Note that a step has ended. The next step is expected to use the blocks in the same order."""
        with self.lock:
            self._visits.restart()

    @contextlib.contextmanager
    def hold_gradients(self, hold: bool) -> Iterator[None]:
        """A context for a backward of one block.

        With ``hold``, the next backward runs through the same block. So its gradients stay on the device and are summed
        there. Without ``hold``, all gradients of the block are written to the store.
        """
        self._holds = hold
        try:
            yield
            if not hold:
                for parameter in list(self._held):  # unchanged by the last backward
                    self._offload_gradient(parameter)
        finally:
            self._holds = False

    def _enter_backward(self, block: int) -> None:
        if torch.is_grad_enabled():
            raise SwapError(
                "create_graph=True: a backward through this backward would use the weights of blocks in an unknown "
                "order; keep parameters on the device where gradients of gradients are needed"
            )
        self.enter(block, backward=True)

    def norm_terms(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return tensors whose total norm is exactly the norm of all gradients of ``parameters``.

        These tensors are the gradients of the parameters that stay on the device, and the norms of the offloaded
        gradients, in fp32 or a wider dtype.
        """
        found = []
        for parameter in parameters:
            flat = self._flat_of.get(parameter)
            gradient = None if flat is None else flat.gradient(parameter)
            if gradient is None and parameter.grad is not None:
                found.append(parameter.grad)
            elif gradient is not None and gradient.norm is not None:
                found.append(gradient.norm.view(1))
            elif gradient is not None and gradient.seen:
                found.append(
                    torch.zeros(1, dtype=stepped_in(parameter.dtype), device=parameter.device)
                )
        return found

    def read_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of an offloaded parameter, on the device; None if there is none."""
        with self.lock, torch.no_grad():
            gradient = self._flat_of[parameter].gradient(parameter)
            if not gradient.seen:
                return None
            self._free_bytes_for(parameter.nbytes)
            relieve_memory(coming=parameter.nbytes)
            total = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            for transfer in gradient.read_all(total):
                while not has_ended(transfer):  # its slot may be reused next
                    time.sleep(0)
            return total

    def write_gradient(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Begin to write ``total`` in place of the stored gradient. The caller must not change ``total`` afterwards."""
        with self.lock, torch.no_grad():
            self._check_open()
            stored = self._flat_of[parameter].gradient(parameter)
            total = total.contiguous()
            self._pending.append(_PendingGradient(total, stored.write(total)))
            self._free_bytes_for(0)

    def clear_gradient(self, parameter: nn.Parameter, *, to_none: bool) -> None:
        """Drop the stored gradient of ``parameter``. Afterwards it is None with ``to_none``, otherwise zeros if there
        was one."""
        with self.lock:
            while self._pending:
                with contextlib.suppress(SwapError):  # the gradient is dropped anyway
                    self._finish_oldest_write()
            self._flat_of[parameter].gradient(parameter).clear(to_none=to_none)

    def gradient(self, parameter: nn.Parameter) -> Gradient:
        """Return the stored gradient of an offloaded parameter.

        The caller must hold :attr:`lock` when it begins to read or write the gradient.
        """
        return self._flat_of[parameter].gradient(parameter)

    def zero_gradients(self, *, set_to_none: bool = False) -> None:
        """Remove the gradients with ``set_to_none``; otherwise fill each existing gradient with zeros.

        Gradients that a running optimizer step uses are left out. That step sets them to zero itself. The order in
        which the last step used the blocks becomes the expected order of the next step.
        """
        with self.lock:
            while self._pending:
                with contextlib.suppress(SwapError):  # the gradient is dropped anyway
                    self._finish_oldest_write()
            for flat in self._flats:
                flat.clear_gradients(to_none=set_to_none)
            self._reserved = 0
            self._held.clear()
            self._fetched.clear()
            self._visits.restart()

    def read_full(self, block: int) -> list[Tensor]:
        """Return copies of the offloaded parameters of ``block`` in host memory, without using device memory."""
        with self.lock, torch.no_grad():
            self._check_open()
            return self._flats[block].read_full()

    def write_full(self, block: int, tensors: Sequence[Tensor]) -> None:
        """Write ``tensors`` into the offloaded parameters of ``block``, in the order of :meth:`parameters`."""
        with self.lock, torch.no_grad():
            self._check_open()
            self._flats[block].write_full(tensors)

    def take_statistics(self) -> ParameterStatistics:
        """Return the statistics since the last call."""
        with self.lock:
            self._collect_written()
            taken = self._statistics
            now = (self._tier.bytes_in, self._tier.bytes_out)
            taken.bytes_in, taken.bytes_out = now[0] - self._counted[0], now[1] - self._counted[1]
            self._counted = now
            self._statistics = ParameterStatistics(high_water=self._weights() + self._gradients())
            return taken

    def restore(self) -> None:
        """Put every parameter on the device and end the offload. Gradients are lost."""
        with self.lock, torch.no_grad():
            self.zero_gradients(set_to_none=True)
            for flat in self._flats:
                flat.restore()
            self._close()

    def close(self) -> None:
        """End the offload. Weights that are not on the device stay NaN. The caller closes the store afterwards."""
        with self.lock, torch.no_grad():
            if not self._closed:
                self.zero_gradients(set_to_none=True)
                for flat in self._flats:
                    flat.discard()
                self._close()

    def _close(self) -> None:
        self._closed = True
        self._tier.release_buffers()
        for hook in self._hooks:
            hook.remove()

    def _check_open(self) -> None:
        if self._closed:
            raise SwapError(
                "offloaded parameters were read after close(): call close() after the last use"
            )

    def _limits(self) -> tuple[int, int, int]:
        """Return three limits in bytes: for weights on the device, for weights and gradients together, and for running
        writes.

        The second limit allows at least one block with its gradients and one further gradient, because adding a
        gradient to the stored one needs both in memory. The third limit bounds the gradients that are being written.
        While a gradient is being written, the store has its old and its new values, so the store's capacity includes
        one more block with gradients.
        """
        sizes = [flat.size for flat in self._flats]
        largest = max(sizes, default=0)
        weights = max(self._least[0], min(sum(sizes), self._window * largest))
        gradients = max((flat.gradient_bytes for flat in self._flats), default=0)
        twice = max((p.nbytes for p in self._flat_of if p.requires_grad), default=0)
        limit = max(self._least[1], weights + gradients, largest + gradients + twice)
        return weights, limit, largest + gradients

    def _watch(self, flat: FlatParameter) -> None:
        """Register gradient hooks on those trained parameters of a block that have none yet.

        Parameters may have been unfrozen since the last call.
        """
        new = [p for p in flat.parameters if p.requires_grad and p not in self._watched]
        if new:
            self._hooks.extend(
                parameter.register_post_accumulate_grad_hook(self._offload_gradient)
                for parameter in new
            )
            self._watched.update(new)
            self._weight_limit, self._limit_bytes, self._write_limit = self._limits()

    def fetch_gradient(self, parameter: nn.Parameter) -> None:
        """Set ``.grad`` of an offloaded parameter to the stored gradient, if there is one, so that the caller can add
        to it.

        Memory for the gradient is reserved until :meth:`offload_gradient`. The same number of bytes is freed for the
        tensor that the caller adds. Gradients that are fetched at the same time must belong to one block, and no
        backward may run meanwhile. For a parameter that stays on the device this is a no-op.
        """
        if parameter not in self._flat_of:
            return
        with self.lock, torch.no_grad():
            self._check_open()
            start = time.perf_counter()
            if not self._fetched:
                self._reserved = 0  # the last backward, which reserved these bytes, has ended
            self._fetched.add(parameter)
            self._reserved += parameter.nbytes
            self._collect_written()
            self._free_bytes_for(parameter.nbytes)
            self._note_high_water(parameter.nbytes)
            relieve_memory(coming=2 * parameter.nbytes)
            stored = self._flat_of[parameter].gradient(parameter)
            if stored.is_stored:
                total = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                stored.read_all(total)
                parameter.grad = total
            self._statistics.stall_seconds += time.perf_counter() - start

    def offload_gradient(self, parameter: nn.Parameter) -> None:
        """Begin to write ``.grad`` in place of the stored gradient. Called after :meth:`fetch_gradient`.

        For a parameter that stays on the device this is a no-op.
        """
        if parameter not in self._flat_of:
            return
        total, parameter.grad = parameter.grad, None
        assert total is not None
        with self.lock, torch.no_grad():
            self._check_open()
            start = time.perf_counter()
            self._fetched.remove(parameter)
            self._write_gradient(parameter, total.detach().contiguous())
            self._statistics.stall_seconds += time.perf_counter() - start

    def _offload_gradient(self, parameter: Tensor) -> None:
        """Add a gradient that autograd has computed to the stored gradient, and begin to write the sum.

        Inside :meth:`hold_gradients`, the sum stays on the device.
        """
        assert isinstance(parameter, nn.Parameter)
        added = parameter in self._held
        if parameter in self.kept_gradients or (self._holds and added):
            return
        with self.lock, torch.no_grad(), as_plain_tensors():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                return
            self._check_open()
            if gradient.layout is not torch.strided:
                raise SwapError(
                    "a sparse gradient cannot be offloaded: use dense ones, or keep the parameters on the device"
                )
            start = time.perf_counter()
            stored = self._flat_of[parameter].gradient(parameter)
            total = gradient.detach().contiguous()
            if stored.is_stored and not added:
                self._free_bytes_for(total.nbytes)
                self._note_high_water(total.nbytes)
                total = torch.empty_like(total)
                stored.read_all(total)
                total.add_(gradient)
            if self._holds:
                parameter.grad = total
                self._held.add(parameter)
                return
            self._held.discard(parameter)
            self._write_gradient(parameter, total)
            self._statistics.stall_seconds += time.perf_counter() - start

    def _write_gradient(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Begin to write ``total``, the sum of a parameter's gradients, in place of the stored gradient.

        The segments that the :class:`GradientSink` accepts, if there is a sink, are not written.
        """
        stored = self._flat_of[parameter].gradient(parameter)
        self._reserved = max(0, self._reserved - total.nbytes)
        taken = () if self.sink is None else self.sink.accept(parameter, total)
        rest = [segment for segment in stored.segments if segment not in taken]
        while self._pending and self._under_write() + total.nbytes > self._write_limit:
            self._finish_oldest_write()
        if rest:
            part = total.view(-1)[rest[0].start : rest[-1].stop]
            self._pending.append(_PendingGradient(total, stored.write(part, rest)))
        if self.sink is not None:
            self.sink.accepted(parameter)
        self._note_high_water()
        self._free_bytes_for(0)  # the gradient may be of a block that was not entered
        self._collect_written()
        self._prefetch()

    def _prefetch(self) -> None:
        """Begin to read the weights of the blocks expected next, if they fit."""
        for flat in self._expected_next():
            if flat.stale and not flat.is_offloaded:
                flat.release()
            if not flat.is_offloaded:
                continue
            while not self._fits(flat.size + self._accumulation_bytes(), weights=flat.size):
                if not self._evict():
                    return
            if flat.updating:
                return
            flat.start_read()

    def _free_bytes_for(self, size: int, *, weights: int = 0) -> None:
        """Free memory until ``size`` more bytes fit on the device, of which ``weights`` are weights.

        First, blocks that are not expected next are evicted. Then the call waits for gradients that are being written.
        Only then are blocks evicted that are expected next. If all bytes are in use, the call returns although ``size``
        bytes do not fit.
        """
        while not self._fits(size, weights=weights):
            if self._evict():
                continue
            if self._pending and self._weights() + weights <= self._weight_limit:
                self._finish_oldest_write()
            elif not self._evict(expected=True):
                return  # all other bytes are in use

    def _fits(self, size: int, *, weights: int = 0) -> bool:
        held = self._weights()
        return (
            held + weights <= self._weight_limit
            and held + self._gradients() + size <= self._limit_bytes
        )

    def _evict(self, *, expected: bool = False) -> bool:
        """Evict one block that is not in use; return whether there was one.

        Blocks that are expected next are evicted only if ``expected``.
        """
        spared = [] if expected else self._expected_next()
        for flat in self._flats:
            if (
                flat.size
                and not flat.is_offloaded
                and flat not in self._in_use
                and flat not in spared
                and not (self._keep_referenced and flat.is_referenced)
            ):
                if self._keep_referenced and not flat.storage.resizable():
                    flat.renew_storage()
                    self._index_storages()
                flat.release()
                return True
        return False

    def _expected_next(self) -> list[FlatParameter]:
        following = self._visits.next_blocks(self._window - 1, len(self._flats))
        return [self._flats[block] for block in following if self._flats[block] not in self._in_use]

    def _accumulation_bytes(self) -> int:
        """Return the bytes needed to add one gradient of the running block to the stored gradient."""
        if not self._reserved or not self._in_use:
            return 0
        flat = self._in_use[-1]
        return max((p.nbytes for p in flat.parameters if flat.gradient(p).is_stored), default=0)

    def _index_storages(self) -> None:
        self._blocks_by_storage = {id(flat.storage): i for i, flat in enumerate(self._flats)}

    def _collect_written(self) -> None:
        """Release the gradients whose writes have ended."""
        while self._pending and self._pending[0].written.has_ended():
            self._finish_oldest_write()

    def _finish_oldest_write(self) -> None:
        """Wait for the gradient whose write began first, and release it."""
        pending = self._pending.popleft()  # holds the bytes until the write has ended
        pending.written.finish()

    def _weights(self) -> int:
        return sum(flat.size for flat in self._flats if not flat.is_offloaded)

    def _gradients(self) -> int:
        return self._reserved + self._under_write()

    def _under_write(self) -> int:
        return sum(pending.gradient.nbytes for pending in self._pending)

    def _note_high_water(self, more: int = 0) -> None:
        held = self._weights() + self._gradients() + more
        self._statistics.high_water = max(self._statistics.high_water, held)


class ResidentParameters:
    """The interface of :class:`OffloadedParameters` for a stage whose parameters all stay on the device.

    The constructor iterates ``blocks`` once, so that a generator creates them.
    """

    chunks: tuple[Chunk, ...] = ()
    stall_seconds = 0.0

    def __init__(self, blocks: Iterable[Iterable[nn.Parameter]] = ()) -> None:
        for _ in blocks:
            pass

    def is_offloaded(self, parameter: nn.Parameter) -> bool:  # noqa: ARG002
        return False

    def holds_memory_of(self, tensor: Tensor) -> bool:  # noqa: ARG002
        return False

    def parameters(self, block: int) -> tuple[nn.Parameter, ...]:  # noqa: ARG002
        return ()

    def attach(self, block: int, module: nn.Module) -> None:
        """No-op: no weights need to be loaded."""

    def norm_terms(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def read_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad

    def read_full(self, block: int) -> list[Tensor]:  # noqa: ARG002
        return []

    def write_full(self, block: int, tensors: Sequence[Tensor]) -> None:
        """No-op: no parameter is offloaded."""

    def hold_gradients(self, hold: bool) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        return contextlib.nullcontext()

    def fetch_gradient(self, parameter: nn.Parameter) -> None:
        """No-op: no gradient is offloaded."""

    def offload_gradient(self, parameter: nn.Parameter) -> None:
        """No-op: gradients stay on the device."""

    def zero_gradients(self, *, set_to_none: bool = False) -> None:
        """No-op: no gradient is offloaded."""

    def take_statistics(self) -> ParameterStatistics:
        return ParameterStatistics()

    def close(self) -> None:
        """No-op: no store was opened."""


class PrefetchOrder:
    """Records the order in which blocks run, and predicts which blocks run next.

    A step is expected to run the blocks in the order of the previous step. Without a previous step, or after a
    deviation from its order, the blocks are expected to run forward in the order of the stage and then backward. If
    there is no backward, they are expected to run forward again and again.
    """

    def __init__(self) -> None:
        self._last: list[int] = []
        self._now: list[int] = []
        self._same = self._returns = True

    def visit(self, block: int, *, returns: bool = True) -> bool:
        """Record that ``block`` runs now; return whether it is another block than the one that ran last.

        ``returns`` is True if a backward through the blocks follows.
        """
        self._returns = returns
        if self._now and self._now[-1] == block:
            return False
        if len(self._now) == _REMEMBERED:
            self._now.clear()
        at = len(self._now)
        self._same = self._same and at < len(self._last) and self._last[at] == block
        self._now.append(block)
        return True

    def restart(self) -> None:
        self._last, self._now, self._same = self._now, [], True

    def next_blocks(self, count: int, blocks: int) -> list[int]:
        """Return the next ``count`` blocks that are expected to run, or fewer if the order is unknown.

        ``blocks`` is the number of blocks of the stage.
        """
        if self._same:
            return self._last[len(self._now) : len(self._now) + count]
        at = self._now[-1]
        if not self._returns:
            return [(at + ahead) % blocks for ahead in range(1, min(count, blocks - 1) + 1)]
        forward = len(self._now) < 2 or at > self._now[-2]
        found = []
        for _ in range(min(count, blocks - 1)):
            forward = at == 0 or (forward and at < blocks - 1)
            at += 1 if forward else -1
            found.append(at)
        return found
