"""Weights and gradients that live below the device and visit it block by block.

A stage's blocks run one after another, so of all its weights only those of the block that runs, and of the next, need
to be on the device; gradients go down as soon as autograd has made them, where those of several micro-batches are
summed in the order in which autograd would have summed them on the device: the result is the same to the last bit.

::

    device   │ block 1 runs │ block 2 comes │        forward
             │ block 2 runs │ block 3 comes │
                   …
             │ block 2 runs │ block 1 comes │ gradients of block 3 go │        backward

What is on the device never exceeds ``limit_bytes``: the ``window`` largest blocks, and the gradients of one.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from parallax.errors import SwapError, check_positive
from parallax.model.block import tensors_in
from parallax.plan.plan import STATE_BUCKET_BYTES
from parallax.swap.parameters.chunks import Chunk, ChunkStore, Gradient, GradientWrite, is_over
from parallax.swap.parameters.flat import FlatParameter
from parallax.swap.parameters.layout import lay_out
from parallax.swap.parameters.prefetch_order import PrefetchOrder
from parallax.swap.stores.store import Store
from parallax.swap.weights import ParameterSegment, stepped_in


@dataclass
class StreamStatistics:
    """What happened since the last :meth:`StreamedParameters.take_statistics`; bytes and seconds. ``high_water`` is of
    the bytes on the device, those of gradients that the running backward will make included."""

    bytes_in: int = 0
    bytes_out: int = 0
    stall_seconds: float = 0.0
    high_water: int = 0


class GradientSink(Protocol):
    """Who wants the gradients of a step's last backward before they are written below."""

    def take(self, parameter: nn.Parameter, total: Tensor) -> Collection[ParameterSegment]:
        """The segments of ``total``, this rank's sum, that it has copied; the others are written below, now."""

    def taken(self, parameter: nn.Parameter) -> None:
        """They are on their way."""


class NoSink:
    """Nobody: all are written."""

    def take(self, parameter: nn.Parameter, total: Tensor) -> Collection[ParameterSegment]:
        del parameter, total
        return ()

    def taken(self, parameter: nn.Parameter) -> None:
        """Nobody waits for it."""


NO_SINK = NoSink()


@dataclass(frozen=True, slots=True)
class _Going:
    """A gradient that stays on the device until all of it is written."""

    gradient: Tensor
    written: GradientWrite


class StreamedParameters:
    """The parameters of ``blocks``, which go below as the iterable gives them, so that a generator may make block after
    block where all do not fit.

    Those that several blocks use, that share memory with others, or that do not lie in one run of bytes stay where they
    are, with their gradients (:meth:`streams`). Others may be looked at and changed in place only while their block
    is :meth:`enter`-ed. An optimizer steps them through :attr:`chunks`, of at most ``chunk_bytes``; without ``cut``
    none has only a part of a parameter.
    """

    def __init__(
        self,
        blocks: Iterable[Iterable[nn.Parameter]],
        store: Store,
        *,
        window: int = 2,
        chunk_bytes: int = STATE_BUCKET_BYTES,
        cut: bool = True,
        verify: bool = False,
    ) -> None:
        check_positive("window", window)
        self._tier, self.lock = (tier := ChunkStore(store, verify=verify)), tier.lock
        self._window = window
        self._flats = lay_out(
            blocks, lambda parameters: FlatParameter(parameters, tier, chunk_bytes, cut=cut)
        )
        self._storages = {id(flat.storage) for flat in self._flats}
        self._of = {parameter: flat for flat in self._flats for parameter in flat.parameters}
        self._hooks: list[RemovableHandle] = []
        self._watched: set[nn.Parameter] = set()
        self._visits = PrefetchOrder()
        self._current: FlatParameter | None = None
        self._reserved = 0  # gradients that the running block's backward has still to make
        self._going: deque[_Going] = deque()
        self.sink: GradientSink = NO_SINK
        self._statistics = StreamStatistics()
        self._counted = (0, 0)
        self._closed = False
        self._weight_limit, self._limit_bytes = self._limits()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """What an optimizer steps: of all that is trained, in the order of the forward."""
        return tuple(
            c for flat in self._flats for c in flat.chunks if c.segments[0].parameter.requires_grad
        )

    @property
    def limit_bytes(self) -> int:
        """The most that is ever on the device: the weights of the window, and the gradients of one block."""
        return self._limit_bytes

    @property
    def resident_bytes(self) -> int:
        """What is on the device now."""
        with self.lock:
            self._reap()
            return self._weights() + self._gradients()

    @property
    def stall_seconds(self) -> float:
        """Since the last :meth:`take_statistics`, how long training waited for weights, or for room."""
        return self._statistics.stall_seconds

    def streams(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter lives below."""
        return parameter in self._of

    def parameters(self, block: int) -> tuple[nn.Parameter, ...]:
        """Those of a block that live below."""
        return self._flats[block].parameters

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a parameter that lives below, or a view of one."""
        return id(tensor.untyped_storage()) in self._storages

    def attach(self, block: int, module: nn.Module) -> None:
        """From here on ``module`` enters ``block`` by itself: before each forward, recomputed or not, and before the
        backward of whatever it returned."""
        self._hooks.append(module.register_forward_pre_hook(lambda *_: self.enter(block)))
        self._hooks.append(
            module.register_forward_hook(
                lambda _, args, kwargs, result: self.before_backward(block, result, (args, kwargs)),
                with_kwargs=True,
            )
        )

    def before_backward(self, block: int, result: Any, given: Any = ()) -> None:
        """Enter ``block`` when the backward comes to its ``result``. What the block only passes on, of what it was
        ``given``, belongs to another block."""
        passed = {tensor.grad_fn for tensor in tensors_in(given)}
        for node in {tensor.grad_fn for tensor in tensors_in(result)} - passed:
            if node is not None:
                node.register_prehook(lambda _: self._enter_backward(block))

    def enter(self, block: int, *, backward: bool = False) -> None:
        """Return when the device's current stream may use the weights of ``block``, and begin to read those of the
        next. In a ``backward``, room for its gradients is kept."""
        with self.lock, torch.no_grad():
            self._check_open()
            flat = self._current = self._flats[block]
            moved = self._visits.at(block)
            if backward or moved:
                self._reserved = flat.gradient_bytes if backward else 0
            self._watch(flat)
            start = time.perf_counter()
            self._reap()
            try:
                if flat.stale:
                    flat.release()
                if flat.is_away:
                    self._make_room(flat.size, weights=flat.size)
                    flat.begin_read()
                self._make_room(0)
                self._look_ahead()
                self._note()
                flat.arrive()
            except BaseException:
                flat.release()
                raise
            self._statistics.stall_seconds += time.perf_counter() - start

    def _enter_backward(self, block: int) -> None:
        if torch.is_grad_enabled():
            raise SwapError(
                "create_graph=True: a backward through this backward would use the weights of blocks in an order that "
                "nobody announces; keep parameters on the device where gradients of gradients are needed"
            )
        self.enter(block, backward=True)

    def norm_terms(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """What stands for the gradients of ``parameters`` in their total norm, with the same result to the last bit: of
        each that lives below, the norm alone, in fp32 at least."""
        found = []
        for parameter in parameters:
            flat = self._of.get(parameter)
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
        """The gradient of a parameter that lives below, on its device."""
        with self.lock, torch.no_grad():
            gradient = self._of[parameter].gradient(parameter)
            if not gradient.seen:
                return None
            total = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            for transfer in gradient.read_all(total):
                while not is_over(transfer):  # its place may be given away next
                    time.sleep(0)
            return total

    def gradient(self, parameter: nn.Parameter) -> Gradient:
        """What is below of the gradient of a parameter that lives there; reads and writes of it begin with
        :attr:`lock` held."""
        return self._of[parameter].gradient(parameter)

    def zero_gradients(self, *, set_to_none: bool = False) -> None:
        """Before each step: gradients become zero, or none, those aside that an optimizer is stepping on and makes zero
        itself. What the last step did is what this one is expected to do."""
        with self.lock:
            while self._going:
                with contextlib.suppress(SwapError):  # nobody wants it any more
                    self._end()
            for flat in self._flats:
                flat.clear_gradients(to_none=set_to_none)
            self._reserved = 0
            self._visits.restart()

    def read_full(self, block: int) -> list[Tensor]:
        """The values of :meth:`parameters`, in host memory, without a visit to the device."""
        with self.lock, torch.no_grad():
            self._check_open()
            return self._flats[block].read_full()

    def write_full(self, block: int, tensors: Sequence[Tensor]) -> None:
        """New values for :meth:`parameters`."""
        with self.lock, torch.no_grad():
            self._check_open()
            self._flats[block].write_full(tensors)

    def take_statistics(self) -> StreamStatistics:
        """What happened since the last call."""
        with self.lock:
            self._reap()
            taken = self._statistics
            now = (self._tier.bytes_in, self._tier.bytes_out)
            taken.bytes_in, taken.bytes_out = now[0] - self._counted[0], now[1] - self._counted[1]
            self._counted = now
            self._statistics = StreamStatistics(high_water=self._weights() + self._gradients())
            return taken

    def restore(self) -> None:
        """Bring every parameter back to the device to stay, and stop streaming; gradients are lost."""
        with self.lock, torch.no_grad():
            self.zero_gradients(set_to_none=True)
            for flat in self._flats:
                flat.restore()
            self._close()

    def close(self) -> None:
        """Stop streaming; weights that are not on the device stay NaN. The store is the caller's to close, next."""
        with self.lock, torch.no_grad():
            if not self._closed:
                self.zero_gradients(set_to_none=True)
                for flat in self._flats:
                    flat.discard()
                self._close()

    def _close(self) -> None:
        self._closed = True
        self._tier.let_go()
        for hook in self._hooks:
            hook.remove()

    def _check_open(self) -> None:
        if self._closed:
            raise SwapError(
                "the parameters that streamed are gone: make what reads them end before close()"
            )

    def _limits(self) -> tuple[int, int]:
        """Of weights, and of weights and gradients together. Adding a gradient to one that is below takes it twice,
        for which there must be room beside the block that runs."""
        sizes = [flat.size for flat in self._flats]
        largest = max(sizes, default=0)
        weights = min(sum(sizes), self._window * largest)
        gradients = max((flat.gradient_bytes for flat in self._flats), default=0)
        twice = max((p.nbytes for p in self._of if p.requires_grad), default=0)
        return weights, max(weights + gradients, largest + gradients + twice)

    def _watch(self, flat: FlatParameter) -> None:
        """Take every gradient as soon as autograd has accumulated it; parameters may have been frozen until now."""
        new = [p for p in flat.parameters if p.requires_grad and p not in self._watched]
        if new:
            self._hooks.extend(
                parameter.register_post_accumulate_grad_hook(self._take) for parameter in new
            )
            self._watched.update(new)
            self._weight_limit, self._limit_bytes = self._limits()

    def _take(self, parameter: Tensor) -> None:
        """Begin to write a gradient, added to what is below."""
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        with self.lock, torch.no_grad():
            self._check_open()
            if gradient.layout is not torch.strided:
                raise SwapError(
                    "a sparse gradient cannot stream: use dense ones, or keep the parameters on the device"
                )
            start = time.perf_counter()
            below = self._of[parameter].gradient(parameter)
            total = gradient.detach().contiguous()
            if below.is_below:
                self._make_room(total.nbytes)
                self._note(total.nbytes)
                total = torch.empty_like(total)
                below.read_all(total)
                total.add_(gradient)
            self._reserved = max(0, self._reserved - total.nbytes)
            taken = self.sink.take(parameter, total)
            left = [segment for segment in below.segments if segment not in taken]
            if left:
                part = total.view(-1)[left[0].start : left[-1].stop]
                self._going.append(_Going(total, below.write(part, left)))
            self.sink.taken(parameter)
            self._note()
            self._reap()
            self._look_ahead()
            self._statistics.stall_seconds += time.perf_counter() - start

    def _look_ahead(self) -> None:
        """Begin to read what comes next, where it fits."""
        for flat in self._expected():
            if flat.stale and not flat.is_away:
                flat.release()
            if not flat.is_away:
                continue
            while not self._fits(flat.size + self._adding(), weights=flat.size):
                if not self._evict():
                    return
            if flat.updating:
                return
            flat.begin_read()

    def _make_room(self, size: int, *, weights: int = 0) -> None:
        """Return when ``size`` more bytes fit, of which ``weights``: give up blocks that are not expected, wait for
        gradients to be written, give up blocks that are."""
        while not self._fits(size, weights=weights):
            if self._evict():
                continue
            if self._going and self._weights() + weights <= self._weight_limit:
                self._end()
            elif not self._evict(expected=True):
                return  # what is left is in use

    def _fits(self, size: int, *, weights: int = 0) -> bool:
        held = self._weights()
        return (
            held + weights <= self._weight_limit
            and held + self._gradients() + size <= self._limit_bytes
        )

    def _evict(self, *, expected: bool = False) -> bool:
        """Give up one block; whether there was one."""
        spared = [] if expected else self._expected()
        for flat in self._flats:
            if flat.size and not flat.is_away and flat is not self._current and flat not in spared:
                flat.release()
                return True
        return False

    def _expected(self) -> list[FlatParameter]:
        following = self._visits.following(self._window - 1, len(self._flats))
        return [
            self._flats[block] for block in following if self._flats[block] is not self._current
        ]

    def _adding(self) -> int:
        """Room that is needed to add the running block's gradients to those below."""
        flat = self._current
        if not self._reserved or flat is None:
            return 0
        return max((p.nbytes for p in flat.parameters if flat.gradient(p).is_below), default=0)

    def _reap(self) -> None:
        """Let go of gradients that are written."""
        while self._going and self._going[0].written.is_over():
            self._end()

    def _end(self) -> None:
        """Wait for the gradient that was taken first of those under way."""
        going = self._going.popleft()  # which holds the bytes
        going.written.end()

    def _weights(self) -> int:
        return sum(flat.size for flat in self._flats if not flat.is_away)

    def _gradients(self) -> int:
        return self._reserved + sum(going.gradient.nbytes for going in self._going)

    def _note(self, more: int = 0) -> None:
        held = self._weights() + self._gradients() + more
        self._statistics.high_water = max(self._statistics.high_water, held)
