"""Keep one block's offloaded parameters in one flat storage, whose bytes are freed and read again.

A parameter keeps its identity, its version, and the storage that tensors saved by autograd share with it. Only the
bytes of that storage are freed (``resize_(0)``, as in FSDP: Zhao et al. 2023, section 4.3) and read again before use.
So no saved-tensor hook is needed, and a weight saved in the forward is the same weight in the backward. While the bytes
are offloaded, the parameter is a view of a single NaN, because a kernel that reads a storage without bytes would crash
the process.

::

    device   OFFLOADED ──start_read──▶ READING ──wait_for_read──▶ RESIDENT ──release──▶ OFFLOADED
                                                        (release writes first if weights were changed in place)
    store    chunk 0 │ chunk 1 │ …    each one slot in the store, and one bucket of the host optimizer
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from parallax.errors import SwapError
from parallax.machine.host import prefer_huge_pages, relieve_memory
from parallax.model.private import storage_references
from parallax.swap.parameters.chunks import Chunk, ChunkStore, Gradient, has_ended, span
from parallax.swap.stores.slots import StoreSlot
from parallax.swap.stores.store import Pending
from parallax.swap.weights import aligned_runs


class _State(enum.Enum):
    OFFLOADED = enum.auto()
    READING = enum.auto()
    RESIDENT = enum.auto()


@dataclass(frozen=True, slots=True)
class _FlatPlace:
    """A parameter of a block, in the block's storage.

    ``resident`` is the parameter's view of the storage, and ``placeholder`` is the tensor that replaces this view while
    the bytes are offloaded.
    """

    parameter: nn.Parameter
    resident: Tensor
    placeholder: Tensor


class FlatParameter:
    """The offloaded parameters of one block. The constructor offloads them from the device, into chunks.

    A chunk has at most ``chunk_bytes``. With ``split``, a parameter may be divided between chunks. The main thread
    transfers bytes between the device and the store. The optimizer's thread only writes new weights to the store
    (:meth:`Chunk.put`), which makes the device's copy ``stale``.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], tier: ChunkStore, chunk_bytes: int, *, split: bool
    ) -> None:
        self.tier = tier
        self.stale = False
        self.changed = (
            False  # whether an alias with a version counter of its own may have changed the weights
        )
        self._given = tuple(parameters)
        # makes runs long
        ordered = sorted(parameters, key=lambda p: (p.requires_grad, str(p.dtype)))
        self._gradients: dict[nn.Parameter, Gradient] = {}
        self.chunks = tuple(self._split_into_chunks(ordered, chunk_bytes, split=split))
        segments = [segment for chunk in self.chunks for segment in chunk.segments]
        self._gradients |= {
            p: Gradient([s for s in segments if s.parameter is p], tier) for p in ordered
        }
        self.size = self.chunks[-1].start + self.chunks[-1].size if self.chunks else 0
        device = ordered[0].device if ordered else torch.device("cpu")
        self.storage = torch.empty(self.size, dtype=torch.uint8, device=device).untyped_storage()
        self._places = [self._place(parameter) for parameter in ordered]
        self._state, self._versions = _State.RESIDENT, -1
        self._reads: list[Pending] = []
        self._targets: list[Tensor] = []  # targets of the running reads
        self._unused: list[StoreSlot] = []
        for place in self._places:
            place.resident.copy_(place.parameter.detach())
            place.parameter.data = place.resident
        self.release()

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the block, in the order of the constructor's argument."""
        return self._given

    @property
    def is_offloaded(self) -> bool:
        """Whether none of the block's bytes are on the device."""
        return self._state is _State.OFFLOADED

    @property
    def is_referenced(self) -> bool:
        """Whether other tensors share the parameters' memory on the device."""
        own = 1 + 2 * len(self._places)  # the storage, the parameters, and their views of it
        return self._state is _State.RESIDENT and storage_references(self.storage) > own

    @property
    def updating(self) -> bool:
        """Whether an optimizer step is about to change the weights."""
        return any(chunk.updating for chunk in self.chunks)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all trained parameters."""
        return sum(parameter.nbytes for parameter in self._given if parameter.requires_grad)

    def gradient(self, parameter: nn.Parameter) -> Gradient:
        return self._gradients[parameter]

    def clear_gradients(self, *, to_none: bool) -> None:
        """Remove the gradients with ``to_none``; otherwise fill each existing gradient with zeros.

        Gradients that a running step uses are left out. That step sets them to zero itself.
        """
        for parameter in self._given:
            parameter.grad = None
            if not any(chunk.updating for chunk in self.chunks if chunk.holds(parameter)):
                self._gradients[parameter].clear(to_none=to_none)

    def start_read(self) -> None:
        """Allocate memory on the device and begin to read the parameters into it."""
        relieve_memory(coming=self.size)
        self.storage.resize_(self.size)
        self._reads = [pending for pending in self._reads if not has_ended(pending)]
        self._free_unused()
        self.stale, self._state = False, _State.READING
        try:
            self._targets = self._chunk_bytes()
            if self._targets and self.storage.device.type == "cpu":
                prefer_huge_pages(self._targets[0].data_ptr(), self.size)
            for chunk, data in zip(self.chunks, self._targets):
                self._reads.append(chunk.fetch(data))
        except BaseException:
            self.release()
            raise

    def wait_for_read(self) -> None:
        """Wait until the device's current stream may use the weights."""
        if self._state is not _State.READING:
            return
        for pending in self._reads:
            pending.wait()
        for chunk, data in zip(self.chunks, self._targets):
            chunk.check(data)
        self._targets = []
        for place in self._places:
            place.parameter.data = place.resident
        self._state, self._versions, self.changed = _State.RESIDENT, self._version(), False

    def release(self) -> None:
        """Free the parameters' memory on the device. If they were changed in place, they are written to the store
        first."""
        if self._state is _State.READING:
            for pending in self._reads:
                with contextlib.suppress(SwapError):
                    if not pending.cancel():
                        pending.wait()
            self._targets = []  # the reads still hold their slots, because perhaps only the stream has waited
        elif self._is_changed():
            self._write_back()
        if self.size and not self.storage.resizable():
            raise SwapError(
                "an offloaded parameter was passed to .numpy(), so its memory cannot be freed: "
                "copy it first, with .clone().numpy()"
            )
        for place in self._places:
            place.parameter.data = place.placeholder
        self.storage.resize_(0)
        self._state = _State.OFFLOADED

    def read_full(self) -> list[Tensor]:
        """Return copies of the parameters in host memory, in the order of :attr:`parameters`."""
        if self._is_changed():
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
        """Set the parameters to ``tensors``, in the order of :attr:`parameters`."""
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
        """Put each parameter on the device with a separate storage, as before the offload."""
        if self.stale:
            self.release()
        if self.is_offloaded:
            self.start_read()
        self.wait_for_read()
        values = [place.resident.clone() for place in self._places]
        self.discard()
        for place, value in zip(self._places, values):
            place.parameter.data = value

    def discard(self) -> None:
        """Free all bytes on the device and in the store. The parameters cannot be read any more."""
        self.stale = True  # then release writes nothing
        with contextlib.suppress(SwapError):
            self.release()
        for gradient in self._gradients.values():
            gradient.clear(to_none=True)
        for chunk in self.chunks:
            chunk.discard()
        for slot in self._unused:
            self.tier.free(slot)
        self._unused.clear()

    def _retire_slot(self, old: StoreSlot | None) -> None:
        self.stale = True
        if old is not None:
            self._unused.append(old)
        self._free_unused()

    def _free_unused(self) -> None:
        """Free the slots that chunks used before their current ones, as soon as no read uses them any more."""
        if self._unused and all(has_ended(pending) for pending in self._reads):
            for slot in self._unused:
                self.tier.free(slot)
            self._unused.clear()

    def renew_storage(self) -> None:
        """Replace the storage if it can no longer be resized.

        The caller guarantees that no other code references the storage.
        """
        if self.size and not self.storage.resizable():
            self._write_back()
            self.storage = torch.empty(
                self.size, dtype=torch.uint8, device=self.storage.device
            ).untyped_storage()
            self._places = [self._place(place.parameter) for place in self._places]
            self.stale = True  # the new storage has no values yet

    def parameter_at(self, offset: int) -> nn.Parameter | None:
        """Return the parameter whose bytes include byte ``offset`` of the storage; None if there is none."""
        for place in self._places:
            start = place.resident.storage_offset() * place.resident.element_size()
            if start <= offset < start + place.resident.nbytes:
                return place.parameter
        return None

    def _is_changed(self) -> bool:
        """Whether the weights on the device were changed in place since they were read."""
        changed = self.changed or self._versions != self._version()
        return self._state is _State.RESIDENT and not self.stale and changed

    def _write_back(self) -> None:
        parts = self._chunk_bytes()  # kept until the writes end
        writes = [self.tier.write(data) for data in parts]
        for chunk, (slot, pending) in zip(self.chunks, writes):
            pending.wait()
            chunk.drop_master()
            chunk.put(slot, pending)
        self.stale = self.changed = False
        self._versions = self._version()

    def _version(self) -> int:
        return sum(place.parameter._version for place in self._places)

    def _chunk_bytes(self) -> list[Tensor]:
        """Return the bytes of each chunk on the device, as tensors that are not views of the parameters' storage.

        If code takes the address of a storage, as ``Tensor.numpy`` does, that storage can never be resized again.
        Separate storages over the same memory keep the parameters' storage resizable.
        """
        flat = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(
            self.storage, 0, (self.size,), (1,)
        )
        alias = from_dlpack(flat) if self.size else flat
        return [alias[chunk.start : chunk.start + chunk.size] for chunk in self.chunks]

    def _split_into_chunks(
        self, parameters: Sequence[nn.Parameter], chunk_bytes: int, *, split: bool
    ) -> Iterator[Chunk]:
        """Yield chunks, each of one dtype and with either trained or frozen parameters only.

        A chunk has at most ``chunk_bytes``. Without ``split``, no parameter is divided, so a chunk may be larger.
        """
        start = 0
        for run in aligned_runs(
            parameters, chunk_bytes, lambda p: (p.requires_grad, p.dtype), split=split, size=span
        ):
            yield Chunk(run, start, self.tier, self._gradients, self._retire_slot)
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


_Make = Callable[[list[nn.Parameter]], FlatParameter]


def lay_out(blocks: Iterable[Iterable[nn.Parameter]], make: _Make) -> list[FlatParameter]:
    """Return one :class:`FlatParameter` per block.

    ``make`` is called with a block's parameters to offload and returns their :class:`FlatParameter`. It is called for
    each block before the next block is taken from the iterable.

    Parameters stay on the device if several blocks use them, if they share memory with other tensors, or if they are
    not plain contiguous memory. A parameter of several blocks is detected at its second block and then put back on the
    device. If a block cannot be offloaded, all blocks are restored.
    """
    laid = _Layout(make)
    try:
        for parameters in blocks:
            laid.add(list(dict.fromkeys(parameters)))
    except BaseException:
        for flat in laid.flats:
            flat.restore()
        raise
    return laid.flats


class _Layout:
    """Collects the :class:`FlatParameter` of each block for :func:`lay_out`.

    ``_original_storages`` maps the id of a storage to the storage and the offloaded parameter that used it. With it, a
    tensor of a later block that still shares this storage is detected.
    """

    def __init__(self, make: _Make) -> None:
        self.flats: list[FlatParameter] = []
        self._make = make
        self._flat_of: dict[nn.Parameter, FlatParameter] = {}
        self._kept: set[nn.Parameter] = set()
        self._original_storages: dict[
            int, tuple[weakref.ref[torch.UntypedStorage], nn.Parameter]
        ] = {}

    def add(self, parameters: list[nn.Parameter]) -> None:
        storages = [parameter.untyped_storage() for parameter in parameters]
        offloaded = []
        for parameter, storage in zip(parameters, storages):
            home, twin = self._original_storages.get(id(storage), (None, parameter))
            if parameter in self._flat_of:
                self._keep(parameter, None)
            elif home is not None and home() is storage:
                self._keep(twin, storage)
            elif (
                _is_plain(parameter)
                and storages.count(storage) == 1
                and parameter not in self._kept
            ):
                offloaded.append(parameter)
        self._original_storages |= {
            id(p.untyped_storage()): (weakref.ref(p.untyped_storage()), p) for p in offloaded
        }
        flat = self._make(offloaded)
        self.flats.append(flat)
        self._flat_of |= dict.fromkeys(offloaded, flat)

    def _keep(self, parameter: nn.Parameter, storage: torch.UntypedStorage | None) -> None:
        """Put a parameter back on the device permanently, into ``storage`` if other tensors share that storage."""
        flat = self._flat_of.pop(parameter, None)
        if flat is None:
            return
        self._kept.add(parameter)
        flat.restore()
        if storage is not None:
            home = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            parameter.data = home.set_(storage, 0, parameter.shape, parameter.stride())
        rest = [other for other in flat.parameters if other is not parameter]
        again = self.flats[self.flats.index(flat)] = self._make(rest)
        self._flat_of |= dict.fromkeys(rest, again)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether ``parameter`` is of the class ``nn.Parameter``, contiguous, and the only tensor in its memory."""
    plain = (
        type(parameter) is nn.Parameter
        and parameter.layout is torch.strided
        and parameter.is_contiguous()
    )
    return plain and 0 < parameter.nbytes == parameter.untyped_storage().nbytes()
