"""The parameters of one block in one run of bytes that comes to the device and goes again.

A parameter keeps its identity, its version and the storage that autograd's saved tensors share with it: only the bytes
of that storage are given back to the allocator (``resize_(0)``, as in FSDP: Zhao et al. 2023, section 4.3) and read
again before they are used. So no saved-tensor hook is needed, and a weight that was saved in the forward is the same
weight in the backward. While the bytes are away the parameter shows NaN in their place, because a kernel that reads
a storage without bytes ends the process.

::

    device   AWAY ──begin_read──▶ COMING ──arrive──▶ HERE ──release──▶ AWAY       (changed in place: written first)
    below    chunk 0 │ chunk 1 │ …    each one place in the store, and one bucket of the optimizer below
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from parallax.errors import SwapError
from parallax.swap.parameters.chunks import Chunk, ChunkStore, Gradient, is_over, span
from parallax.swap.stores.slots import StoreSlot
from parallax.swap.stores.store import Pending
from parallax.swap.weights import aligned_runs


class _State(enum.Enum):
    AWAY = enum.auto()
    COMING = enum.auto()
    HERE = enum.auto()


@dataclass(frozen=True, slots=True)
class _FlatPlace:
    """A parameter in the block's storage, and what it shows while the bytes are away."""

    parameter: nn.Parameter
    here: Tensor
    away: Tensor


class FlatParameter:
    """One block. Made with the parameters on the device; afterwards they are below.

    The main thread moves the bytes; the optimizer's thread only puts new ones below (:meth:`Chunk.put`), which makes
    the device's copy ``stale``.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], tier: ChunkStore, chunk_bytes: int, *, cut: bool
    ) -> None:
        self.tier = tier
        self.stale = False
        self._given = tuple(parameters)
        # So that runs are long.
        ordered = sorted(parameters, key=lambda p: (p.requires_grad, str(p.dtype)))
        self._gradients: dict[nn.Parameter, Gradient] = {}
        self.chunks = tuple(self._cut(ordered, chunk_bytes, cut=cut))
        segments = [segment for chunk in self.chunks for segment in chunk.segments]
        self._gradients |= {
            p: Gradient([s for s in segments if s.parameter is p], tier) for p in ordered
        }
        self.size = self.chunks[-1].start + self.chunks[-1].size if self.chunks else 0
        device = ordered[0].device if ordered else torch.device("cpu")
        self.storage = torch.empty(self.size, dtype=torch.uint8, device=device).untyped_storage()
        self._places = [self._place(parameter) for parameter in ordered]
        self._state, self._versions = _State.HERE, -1
        self._reads: list[Pending] = []
        self._unused: list[StoreSlot] = []
        for place in self._places:
            place.here.copy_(place.parameter.detach())
            place.parameter.data = place.here
        self.release()

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """In the order that they were given in."""
        return self._given

    @property
    def is_away(self) -> bool:
        """Whether no byte is on the device."""
        return self._state is _State.AWAY

    @property
    def updating(self) -> bool:
        """Whether a step of the optimizer is about to change it."""
        return any(chunk.updating for chunk in self.chunks)

    @property
    def gradient_bytes(self) -> int:
        """Of all parameters that are trained."""
        return sum(parameter.nbytes for parameter in self._given if parameter.requires_grad)

    def gradient(self, parameter: nn.Parameter) -> Gradient:
        return self._gradients[parameter]

    def clear_gradients(self, *, to_none: bool) -> None:
        """They become zero, or none; a step that is under way makes those that it uses zero itself."""
        for parameter in self._given:
            parameter.grad = None
            if not any(chunk.updating for chunk in self.chunks if chunk.holds(parameter)):
                self._gradients[parameter].clear(to_none=to_none)

    def begin_read(self) -> None:
        """Take the bytes on the device and begin to fill them."""
        self.storage.resize_(self.size)
        self._reads = [pending for pending in self._reads if not is_over(pending)]
        self._free_unused()
        self.stale, self._state = False, _State.COMING
        try:
            for chunk, data in zip(self.chunks, self._split()):
                self._reads.append(chunk.fetch(data))
        except BaseException:
            self.release()
            raise

    def arrive(self) -> None:
        """Return when the device's current stream may read the bytes."""
        if self._state is not _State.COMING:
            return
        for pending in self._reads:
            pending.wait()
        for chunk, data in zip(self.chunks, self._split()):
            chunk.check(data)
        for place in self._places:
            place.parameter.data = place.here
        self._state, self._versions = _State.HERE, self._version()

    def release(self) -> None:
        """Give the bytes on the device back; what was changed in place there goes below first."""
        if self._state is _State.COMING:
            for pending in self._reads:
                with contextlib.suppress(SwapError):
                    if not pending.cancel():
                        pending.wait()
            self._reads.clear()
        elif self._state is _State.HERE and not self.stale and self._versions != self._version():
            self._write_back()
        if self.size and not self.storage.resizable():
            raise SwapError(
                "a parameter that streams was handed out by .numpy(), so its memory cannot be given back: "
                "copy it first, with .clone().numpy()"
            )
        for place in self._places:
            place.parameter.data = place.away
        self.storage.resize_(0)
        self._state = _State.AWAY

    def read_full(self) -> list[Tensor]:
        """Host copies of the parameters, in the order given, whatever is on the device."""
        if self._state is _State.HERE and not self.stale and self._versions != self._version():
            self._write_back()
        found: dict[nn.Parameter, Tensor] = {}
        for chunk in self.chunks:
            host = torch.empty(chunk.size, dtype=torch.uint8)
            chunk.fetch(host).wait()
            chunk.check(host)
            for segment, data in chunk.pieces(host):
                whole = found.setdefault(
                    segment.parameter, torch.empty(segment.parameter.shape, dtype=data.dtype)
                )
                whole.view(-1)[segment.start : segment.stop] = data
        return [found[parameter] for parameter in self._given]

    def write_full(self, tensors: Sequence[Tensor]) -> None:
        """New values of the parameters, in the order given."""
        values = dict(zip(self._given, tensors, strict=True))
        for chunk in self.chunks:
            host = torch.empty(chunk.size, dtype=torch.uint8)
            for segment, data in chunk.pieces(host):
                value = values[segment.parameter].detach()
                if value.shape != segment.parameter.shape:
                    raise SwapError(
                        f"a parameter of shape {list(data.shape)} cannot hold {list(value.shape)}"
                    )
                data.copy_(value.reshape(-1)[segment.start : segment.stop])
            chunk.drop_master()
            chunk.put(*self.tier.write_behind(host))

    def restore(self) -> None:
        """The parameters stay on the device, each in a storage of its own, as if they had never streamed."""
        if self.stale:
            self.release()
        if self.is_away:
            self.begin_read()
        self.arrive()
        values = [place.here.clone() for place in self._places]
        self.discard()
        for place, value in zip(self._places, values):
            place.parameter.data = value

    def discard(self) -> None:
        """Give all bytes back, here and below; nothing can be read any more."""
        self.stale = True  # so that nothing is written
        with contextlib.suppress(SwapError):
            self.release()
        for gradient in self._gradients.values():
            gradient.clear(to_none=True)
        for chunk in self.chunks:
            chunk.discard()
        for slot in self._unused:
            self.tier.free(slot)
        self._unused.clear()

    def _age(self, old: StoreSlot | None) -> None:
        self.stale = True
        if old is not None:
            self._unused.append(old)
        self._free_unused()

    def _free_unused(self) -> None:
        """Free places that a read may still be at, as soon as none is."""
        if self._unused and all(is_over(pending) for pending in self._reads):
            for slot in self._unused:
                self.tier.free(slot)
            self._unused.clear()

    def _write_back(self) -> None:
        for chunk, data in zip(self.chunks, self._split()):
            slot, pending = self.tier.write(data)
            pending.wait()
            chunk.drop_master()
            chunk.put(slot, pending)
        self.stale, self._versions = False, self._version()

    def _version(self) -> int:
        return sum(place.parameter._version for place in self._places)

    def _split(self) -> list[Tensor]:
        """The storage's bytes, chunk by chunk, under a storage of their own: who asks for their address must not make
        the parameters' one fixed for good, as ``Tensor.numpy`` does."""
        flat = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(
            self.storage, 0, (self.size,), (1,)
        )
        alias = from_dlpack(flat) if self.size else flat
        return [alias[chunk.start : chunk.start + chunk.size] for chunk in self.chunks]

    def _cut(
        self, parameters: Sequence[nn.Parameter], chunk_bytes: int, *, cut: bool
    ) -> Iterator[Chunk]:
        """In runs of one type, either all trained or none."""
        start = 0
        for run in aligned_runs(
            parameters, chunk_bytes, lambda p: (p.requires_grad, p.dtype), cut=cut, size=span
        ):
            yield Chunk(run, start, self.tier, self._gradients, self._age)
            start += sum(span(segment) for segment in run)

    def _place(self, parameter: nn.Parameter) -> _FlatPlace:
        chunk = next(chunk for chunk in self.chunks if chunk.holds(parameter))
        before = itertools.takewhile(lambda s: s.parameter is not parameter, chunk.segments)
        offset = chunk.start + sum(span(segment) for segment in before)
        here = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        here.set_(
            self.storage, offset // parameter.element_size(), parameter.shape, parameter.stride()
        )
        fill = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
        away = torch.full((), fill, dtype=parameter.dtype, device=parameter.device)
        return _FlatPlace(parameter, here, away.expand(parameter.shape))
