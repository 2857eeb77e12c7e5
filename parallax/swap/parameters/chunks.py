"""Offloaded weights and gradients of a block in the store.

Weights are stored in chunks, each in one slot. Gradients are stored per parameter. A chunk is also a bucket of the host
optimizer. For a step, the host optimizer reads the chunk's weights and gradients into host memory and writes the new
weights to the store. If the weights are also on the device, that copy is then stale.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from parallax.errors import SwapError
from parallax.machine.device import Event
from parallax.swap.stores.slots import StoreSlot
from parallax.swap.stores.store import Pending, Store
from parallax.swap.verify import checksum
from parallax.swap.weights import ParameterSegment, bytes_of, stepped_in

ALIGNMENT = 64  # bytes, as torch's CPU allocator: kernels round differently at other alignments
# chunks in host memory that are under write while the optimizer's thread continues
_BUFFERS = 2


class ChunkStore:
    """A store for the offloaded blocks of a stage, which counts transfers and verifies checksums."""

    def __init__(self, store: Store, *, verify: bool) -> None:
        # guards all state shared by the main thread and the optimizer's thread
        self.lock = threading.RLock()
        self.bytes_in = self.bytes_out = 0
        self._counting = threading.Lock()
        self._store = store
        self._sums: dict[StoreSlot, int] | None = {} if verify else None
        self._writing: deque[tuple[Tensor, Pending]] = deque()

    def write(self, data: Tensor) -> tuple[StoreSlot, Pending]:
        """Begin to write ``data``. The caller must keep it unchanged until the transfer ends."""
        slot, pending = self._store.write(data)
        if self._sums is not None:
            self._sums[slot] = checksum(data)
        with self._counting:
            self.bytes_out += slot.size
        return slot, pending

    def write_behind(self, data: Tensor) -> tuple[StoreSlot, Pending]:
        """Begin to write ``data`` from host memory, and keep the tensor alive until the transfer ends.

        If two earlier buffers are still being written, the call waits first.
        """
        written = self.write(data)
        self._writing.append((data, written[1]))
        while len(self._writing) > _BUFFERS:
            self._writing.popleft()[1].wait()
        return written

    def read(self, slot: StoreSlot, target: Tensor) -> Pending:
        """Begin to read the bytes of ``slot`` into ``target``."""
        with self._counting:
            self.bytes_in += slot.size
        return self._store.read(slot, target)

    def check(self, slot: StoreSlot, data: Tensor) -> None:
        """Raise :class:`SwapError` if ``data`` differs from the bytes written to ``slot``. Without verification, do
        nothing."""
        if self._sums is not None and self._sums[slot] != checksum(data):
            raise SwapError(
                f"{slot.size} bytes at byte {slot.offset} of the {self._store.tier} tier are not what was written: "
                "check the disk or the memory, or plan without parameter offload"
            )

    def free(self, slot: StoreSlot) -> None:
        """Free a slot whose transfers have ended."""
        if self._sums is not None:
            del self._sums[slot]
        self._store.free(slot)

    def release_buffers(self) -> None:
        """Release host buffers whose writes have ended."""
        self._writing.clear()


class GradientWrite:
    """A running write of a gradient, or of a part of it.

    The new values go to new slots of the store, and the slots of the previous values are freed afterwards. The caller
    must keep the source tensor unchanged until the write has ended.
    """

    def __init__(
        self, tier: ChunkStore, transfers: Sequence[tuple[Pending, StoreSlot | None]]
    ) -> None:
        self._tier, self._transfers = tier, transfers

    def has_ended(self) -> bool:
        """Whether all transfers have ended, successfully or not."""
        return all(has_ended(pending) for pending, _ in self._transfers)

    def finish(self) -> None:
        """Wait for the transfers, then free the slots that held the previous values."""
        try:
            for pending, _ in self._transfers:
                pending.wait()
        finally:
            for _, old in self._transfers:
                if old is not None:
                    self._tier.free(old)


class Gradient:
    """The gradient of one offloaded parameter, accumulated in the store."""

    def __init__(self, segments: Sequence[ParameterSegment], tier: ChunkStore) -> None:
        self.segments, self._tier = segments, tier
        self.seen = False  # a zeroed gradient stays zero instead of None
        self._places: dict[ParameterSegment, tuple[StoreSlot, Pending]] = {}
        # of each part written in one piece, by its first element
        self._norms: dict[int, Tensor] = {}

    @property
    def is_stored(self) -> bool:
        """Whether the store holds a nonzero gradient."""
        return bool(self._places)

    @property
    def norm(self) -> Tensor | None:
        """The norm of the gradient, on the device; None if there is none.

        The norm is exact if the gradient was written in one piece. Otherwise it is computed from the norms of the
        pieces.
        """
        norms = list(self._norms.values())
        if len(norms) < 2:
            return norms[0] if norms else None
        return torch.linalg.vector_norm(torch.stack(norms))

    def write(self, total: Tensor, segments: Sequence[ParameterSegment] = ()) -> GradientWrite:
        """Begin to write ``total`` in place of the stored gradient.

        ``total`` consists of the adjacent ``segments``; by default it is the whole gradient.
        """
        segments = segments or self.segments
        flat, first, begun = total.detach().reshape(-1), segments[0].start, []
        for segment in segments:
            old = self._places.get(segment)
            part = flat[segment.start - first : segment.stop - first]
            slot, pending = self._tier.write(_bytes(part))
            self._places[segment] = slot, pending
            begun.append((pending, old[0] if old else None))
            self._norms.pop(segment.start, None)
        self._norms[first] = torch.linalg.vector_norm(flat, dtype=stepped_in(total.dtype))
        self.seen = True
        return GradientWrite(self._tier, begun)

    def is_written(self, segment: ParameterSegment) -> bool:
        """Whether ``segment`` of the gradient can be read without waiting for a running write."""
        place = self._places.get(segment)
        return place is None or has_ended(place[1])

    def check(self, segment: ParameterSegment, data: Tensor) -> None:
        self._tier.check(self._places[segment][0], _bytes(data))

    def read(self, segment: ParameterSegment, target: Tensor) -> Pending | None:
        """Begin to read one segment of the gradient into ``target``, and return the transfer. Return None if the
        segment is not stored."""
        place = self._places.get(segment)
        if place is None:
            return None
        place[1].wait()
        return self._tier.read(place[0], _bytes(target))

    def read_all(self, total: Tensor) -> list[Pending]:
        """Begin to read all segments of the gradient into ``total``, for use on the device's stream; return the running
        transfers."""
        flat = total.view(-1)
        pending = [
            (segment, self.read(segment, flat[segment.start : segment.stop]))
            for segment in self.segments
        ]
        for segment, transfer in pending:
            if transfer is None:
                flat[segment.start : segment.stop].zero_()
                continue
            transfer.wait()
            self.check(segment, flat[segment.start : segment.stop])
        return [transfer for _, transfer in pending if transfer is not None]

    def read_for_step(self, segment: ParameterSegment) -> Tensor | None:
        """Return one segment of the gradient in host memory, in the dtype in which it is stepped.

        The result is zeros if the gradient was set to zero, and None if there is no gradient.
        """
        if not self.seen:
            return None
        found = torch.zeros(segment.stop - segment.start, dtype=segment.parameter.dtype)
        transfer = self.read(segment, found)
        if transfer is not None:
            transfer.wait()
            self.check(segment, found)
        return _shaped(found.to(stepped_in(found.dtype)), segment)

    def drop(self, segments: Iterable[ParameterSegment]) -> None:
        for segment in segments:
            slot, pending = self._places.pop(segment, (None, None))
            if slot is not None and pending is not None:
                with contextlib.suppress(SwapError):  # the gradient is dropped anyway
                    if not pending.cancel():
                        pending.wait()
                self._tier.free(slot)
        self._norms.clear()

    def clear(self, *, to_none: bool) -> None:
        """Drop the stored gradient. Afterwards it is None with ``to_none``, otherwise zeros if there was one."""
        self.drop(self.segments)
        self.seen = self.seen and not to_none


class Chunk:
    """Consecutive parameters of a block, or parts of them, in one slot of the store.

    A chunk is a bucket of the host optimizer (:class:`~parallax.swap.weights.BucketWeights`). If the weights' dtype has
    too little precision for steps, a second slot holds a full-precision master copy. When the weights move to a new
    slot, ``retire_slot`` is called with the previous slot, because a running read may still use that slot. ``start`` is
    the byte of the block's storage at which the chunk begins.
    """

    def __init__(
        self,
        segments: Sequence[ParameterSegment],
        start: int,
        tier: ChunkStore,
        gradients: Mapping[nn.Parameter, Gradient],
        retire_slot: Callable[[StoreSlot | None], None],
    ) -> None:
        self.segments, self.start, self.device = tuple(segments), start, torch.device("cpu")
        self.size = sum(span(segment) for segment in segments[:-1]) + bytes_of(segments[-1])
        self.updating = False
        self._tier, self._gradients, self._retire_slot = tier, gradients, retire_slot
        self._slot: StoreSlot | None = None
        self._pending: Pending | None = None
        self._master: StoreSlot | None = None
        self._host: Tensor | None = None
        self._steps: list[Tensor] = []
        self.kept: list[
            Tensor | None
        ] = []  # empty: the chunk stores its master in a slot of its own

    def reduced(self) -> None:
        """Note that the next optimizer step will make the device's copy of the weights stale.

        The gradients are already in the store.
        """
        self.updating = True

    def commit(self, unused: Event) -> None:
        """No-op: the step does not use the device's copy of the weights."""

    def tensors_to_step(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the weights and gradients of each parameter segment, read into host memory."""
        self._steps = self._full()
        return [
            (step, self._gradients[s.parameter].read_for_step(s))
            for step, s in zip(self._steps, self.segments)
        ]

    def round_masters(self) -> None:
        """Convert the new weights to the dtype that the device uses."""
        for place, step in zip(self.exchange_tensors(), self._steps):
            if place.dtype is not step.dtype:
                place.copy_(step)

    def exchange_tensors(self) -> list[Tensor]:
        """Return host memory for the weights of each parameter segment, in the dtype that the device uses."""
        if self._host is None:
            self._host = torch.empty(self.size, dtype=torch.uint8)
        return [_shaped(flat, segment) for segment, flat in self.pieces(self._host)]

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the chunk contains ``parameter`` or a part of it."""
        return any(segment.parameter is parameter for segment in self.segments)

    def pieces(self, data: Tensor) -> Iterator[tuple[ParameterSegment, Tensor]]:
        """Yield each segment with the part of ``data``, the chunk's bytes, that holds the segment's elements."""
        offset = 0
        for segment in self.segments:
            yield segment, data[offset : offset + bytes_of(segment)].view(segment.parameter.dtype)
            offset += span(segment)

    def publish(self) -> None:
        """Begin to write the new weights to the store, and set the gradients to zero."""
        assert self._host is not None
        host, self._host = self._host, None
        steps, self._steps = self._steps, []
        self.put(*self._tier.write_behind(host))
        if steps and self._is_short:
            self._write_master(steps)
        for segment in self.segments:
            self._gradients[segment.parameter].drop([segment])
        self.updating = False

    def wait(self) -> None:
        """No-op: :meth:`OffloadedParameters.enter` reads the new weights and waits for them."""

    def skip(self) -> None:
        """Note that no step follows, so the device's copy of the weights stays valid."""
        self.updating = False

    def reset(self) -> None:
        """Discard an unfinished step. The stored weights are valid."""
        self.updating, self._host, self._steps = False, None, []

    def masters(self) -> list[Tensor | None]:
        """Return the master copy of each parameter segment in host memory; empty if there are no masters yet."""
        if self._master is None:
            return []
        try:
            return list(self._full())
        finally:
            self._host = None

    def restore(self, index: int, master: Tensor | None) -> None:
        """Set the master copy of the parameter segment ``index``. The caller has already set the weights of the
        segment; None derives the master from them."""
        if master is None:
            self.drop_master()
        elif self._is_short:
            steps = self._full()
            steps[index].copy_(master)
            self._host = None
            self._write_master(steps)

    def put(self, slot: StoreSlot, pending: Pending) -> None:
        """Make ``slot`` the slot of the weights, which the transfer ``pending`` writes.

        The device's copy of the weights becomes stale.
        """
        with self._tier.lock:
            self._wait_for_write()  # the previous slot may be reused next
            old, self._slot, self._pending = self._slot, slot, pending
            self._retire_slot(old)

    def fetch(self, target: Tensor) -> Pending:
        """Begin to read the weights into ``target``."""
        assert self._slot is not None
        assert self._pending is not None
        self._pending.wait()
        return self._tier.read(self._slot, target)

    def check(self, data: Tensor) -> None:
        assert self._slot is not None
        self._tier.check(self._slot, data)

    def discard(self) -> None:
        """Free all slots of the chunk in the store."""
        self.drop_master()
        self._wait_for_write()
        if self._slot is not None:
            self._tier.free(self._slot)
        self._slot = self._pending = None

    def drop_master(self) -> None:
        """Drop the master copy, because new weights were set in the device's dtype. A new master will be made from
        them."""
        if self._master is not None:
            self._tier.free(self._master)
            self._master = None

    def _wait_for_write(self) -> None:
        """Wait until the write of the weights has ended, and ignore its errors."""
        if self._pending is not None:
            with contextlib.suppress(SwapError):
                self._pending.wait()

    @property
    def _is_short(self) -> bool:
        """Whether the weights' dtype has too little precision to be stepped."""
        dtype = self.segments[0].parameter.dtype
        return stepped_in(dtype) is not dtype

    def _full(self) -> list[Tensor]:
        """Return the weights of each segment in the dtype in which they are stepped, read into host memory.

        They are read from the master copy if there is one. Otherwise they are read in the device's dtype into the
        memory that :meth:`exchange_tensors` returns, and then converted.
        """
        low = self.exchange_tensors()
        if self._master is None:
            assert self._host is not None
            self.fetch(self._host).wait()
            self.check(self._host)
            return [place.to(stepped_in(place.dtype)) for place in low]
        flat = torch.empty(sum(place.numel() for place in low), dtype=torch.float32)
        self._tier.read(self._master, _bytes(flat)).wait()
        return [
            part.view(place.shape)
            for part, place in zip(flat.split([place.numel() for place in low]), low)
        ]

    def _write_master(self, steps: list[Tensor]) -> None:
        self.drop_master()
        self._master, pending = self._tier.write_behind(
            _bytes(torch.cat([step.view(-1) for step in steps]))
        )
        pending.wait()


def has_ended(pending: Pending) -> bool:
    """Whether a transfer has ended, successfully or not."""
    try:
        return pending.done()
    except SwapError:
        return True


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def span(segment: ParameterSegment) -> int:
    """Return the bytes from the start of a segment to the aligned start of the next segment."""
    return -(-bytes_of(segment) // ALIGNMENT) * ALIGNMENT


def _shaped(flat: Tensor, segment: ParameterSegment) -> Tensor:
    return flat.view(segment.parameter.shape) if segment.whole else flat
