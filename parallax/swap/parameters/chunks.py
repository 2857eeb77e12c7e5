"""What lives below of a block's parameters: weights in chunks, and gradients, each in a place of its own in the store.

A chunk is also what an optimizer below the device steps at one time: it reads the chunk's weights and gradients into
host memory, and writes the weights again. What the device has of them is old from then on.
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

ALIGNMENT = 64  # bytes, as torch's own allocator on a CPU: kernels round in another way where vectors begin elsewhere
# Chunks that the optimizer's thread may leave behind in host memory while they are written.
_GOING = 2


class ChunkStore:
    """A store, with what is known of the transfers through it."""

    def __init__(self, store: Store, *, verify: bool) -> None:
        # Of everything that the main thread and the optimizer's both touch.
        self.lock = threading.RLock()
        self.bytes_in = self.bytes_out = 0
        self._counting = threading.Lock()
        self._store = store
        self._sums: dict[StoreSlot, int] | None = {} if verify else None
        self._going: deque[tuple[Tensor, Pending]] = deque()

    def write(self, data: Tensor) -> tuple[StoreSlot, Pending]:
        """Begin to copy ``data`` down; the caller keeps it unchanged until that is done."""
        slot, pending = self._store.write(data)
        if self._sums is not None:
            self._sums[slot] = checksum(data)
        with self._counting:
            self.bytes_out += slot.size
        return slot, pending

    def write_behind(self, data: Tensor) -> tuple[StoreSlot, Pending]:
        """The same for host memory, which is kept here, a little of it."""
        written = self.write(data)
        self._going.append((data, written[1]))
        while len(self._going) > _GOING:
            self._going.popleft()[1].wait()
        return written

    def read(self, slot: StoreSlot, target: Tensor) -> Pending:
        """Begin to copy the bytes of ``slot`` into ``target``."""
        with self._counting:
            self.bytes_in += slot.size
        return self._store.read(slot, target)

    def check(self, slot: StoreSlot, data: Tensor) -> None:
        """Where verification is on, raise :class:`SwapError` unless ``data`` is what was written."""
        if self._sums is not None and self._sums[slot] != checksum(data):
            raise SwapError(
                f"{slot.size} bytes at byte {slot.offset} of the {self._store.tier} tier are not what was written: "
                "check the disk or the memory, or switch streaming of parameters off"
            )

    def free(self, slot: StoreSlot) -> None:
        """The caller has waited for the transfers of this place."""
        if self._sums is not None:
            del self._sums[slot]
        self._store.free(slot)

    def let_go(self) -> None:
        """Of host memory that was kept for writes; chunks that are discarded have waited for theirs."""
        self._going.clear()


class GradientWrite:
    """A gradient, or a part of it, on its way to a new place; whoever began that keeps the bytes until it is over."""

    def __init__(
        self, tier: ChunkStore, transfers: Sequence[tuple[Pending, StoreSlot | None]]
    ) -> None:
        self._tier, self._transfers = tier, transfers

    def is_over(self) -> bool:
        """Whether all transfers ended, well or not."""
        return all(is_over(pending) for pending, _ in self._transfers)

    def end(self) -> None:
        """Wait for them; then the places before are free."""
        try:
            for pending, _ in self._transfers:
                pending.wait()
        finally:
            for _, old in self._transfers:
                if old is not None:
                    self._tier.free(old)


class Gradient:
    """The gradient of one parameter, summed below."""

    def __init__(self, segments: Sequence[ParameterSegment], tier: ChunkStore) -> None:
        self.segments, self._tier = segments, tier
        self.seen = False  # a gradient that was made zero stays zero, and does not become none
        self._places: dict[ParameterSegment, tuple[StoreSlot, Pending]] = {}
        # Of the parts that were written in one piece, by the first element of each.
        self._norms: dict[int, Tensor] = {}

    @property
    def is_below(self) -> bool:
        """Whether there is one, other than zero."""
        return bool(self._places)

    @property
    def norm(self) -> Tensor | None:
        """Its norm on the device: to the last bit where it was written in one piece."""
        norms = list(self._norms.values())
        if len(norms) < 2:
            return norms[0] if norms else None
        return torch.linalg.vector_norm(torch.stack(norms))

    def write(self, total: Tensor, segments: Sequence[ParameterSegment] = ()) -> GradientWrite:
        """Begin to write all of it, or what ``total`` has of it, the neighbours ``segments``, in place of what was
        there."""
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
        """Whether a read of ``segment`` would not wait for its write."""
        place = self._places.get(segment)
        return place is None or is_over(place[1])

    def check(self, segment: ParameterSegment, data: Tensor) -> None:
        self._tier.check(self._places[segment][0], _bytes(data))

    def read(self, segment: ParameterSegment, target: Tensor) -> Pending | None:
        """Begin to read one segment into ``target``; None where there is nothing to read."""
        place = self._places.get(segment)
        if place is None:
            return None
        place[1].wait()
        return self._tier.read(place[0], _bytes(target))

    def read_all(self, total: Tensor) -> list[Pending]:
        """All of it into ``total``, which a device's stream may read afterwards; the transfers, which may still run."""
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

    def stepped(self, segment: ParameterSegment) -> Tensor | None:
        """One segment in host memory, in the type that it is stepped in; zeros for one that was made zero."""
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
                with contextlib.suppress(SwapError):  # nobody wants it any more
                    if not pending.cancel():
                        pending.wait()
                self._tier.free(slot)
        self._norms.clear()

    def clear(self, *, to_none: bool) -> None:
        """No gradient, or a gradient of zeros where there was one."""
        self.drop(self.segments)
        self.seen = self.seen and not to_none


class Chunk:
    """A run of a block's parameters, or of parts of them: one place in the store.

    It is what an optimizer below the device steps at one time (:class:`~parallax.swap.optimizer.host.Weights`), with a
    master copy below where the device's type is too short to be stepped in. ``aged`` hears of a new place, with the
    old one, which a read may still be at.
    """

    def __init__(
        self,
        segments: Sequence[ParameterSegment],
        start: int,
        tier: ChunkStore,
        gradients: Mapping[nn.Parameter, Gradient],
        aged: Callable[[StoreSlot | None], None],
    ) -> None:
        self.segments, self.start, self.device = tuple(segments), start, torch.device("cpu")
        self.size = sum(span(segment) for segment in segments[:-1]) + bytes_of(segments[-1])
        self.updating = False
        self._tier, self._gradients, self._aged = tier, gradients, aged
        self._slot: StoreSlot | None = None
        self._pending: Pending | None = None
        self._master: StoreSlot | None = None
        self._host: Tensor | None = None
        self._steps: list[Tensor] = []
        self.kept: list[Tensor | None] = []  # the master is a place of its own

    def reduced(self) -> None:
        """The gradients are below already; from here on the device's copy is about to age."""
        self.updating = True

    def commit(self, unused: Event) -> None:
        """The step does not touch what the device has."""

    def begin(self) -> list[tuple[Tensor, Tensor | None]]:
        """The weights and gradients of each segment, read into host memory."""
        self._steps = self._full()
        return [
            (step, self._gradients[s.parameter].stepped(s))
            for step, s in zip(self._steps, self.segments)
        ]

    def stepped(self) -> None:
        """Round the new weights to the device's type."""
        for place, step in zip(self.shared(), self._steps):
            if place.dtype is not step.dtype:
                place.copy_(step)

    def shared(self) -> list[Tensor]:
        """Host memory in the device's type."""
        if self._host is None:
            self._host = torch.empty(self.size, dtype=torch.uint8)
        return [_shaped(flat, segment) for segment, flat in self.pieces(self._host)]

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether a part of ``parameter`` is here."""
        return any(segment.parameter is parameter for segment in self.segments)

    def pieces(self, data: Tensor) -> Iterator[tuple[ParameterSegment, Tensor]]:
        """Each segment, with its elements in the chunk's bytes ``data``."""
        offset = 0
        for segment in self.segments:
            yield segment, data[offset : offset + bytes_of(segment)].view(segment.parameter.dtype)
            offset += span(segment)

    def end(self) -> None:
        """Begin to write the new weights; gradients become zero."""
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
        """The next :meth:`StreamedParameters.enter` reads the new weights, and waits for them itself."""

    def skip(self) -> None:
        """Gradients are the parameters' again, to be dropped."""
        self.updating = False

    def reset(self) -> None:
        """A step was not finished, and what is below is right."""
        self.updating, self._host, self._steps = False, None, []

    def masters(self) -> list[Tensor | None]:
        """Those of each segment, read into host memory; none before the first step."""
        if self._master is None:
            return []
        try:
            return list(self._full())
        finally:
            self._host = None

    def restore(self, index: int, master: Tensor | None) -> None:
        """Somebody else has written the weights below; the master of one segment is this one, or made of them."""
        if master is None:
            self.drop_master()
        elif self._is_short:
            steps = self._full()
            steps[index].copy_(master)
            self._host = None
            self._write_master(steps)

    def put(self, slot: StoreSlot, pending: Pending) -> None:
        """The weights are in ``slot`` from here on, and no longer as the device may have them."""
        with self._tier.lock:
            self._let_end()  # the place before may be given away next
            old, self._slot, self._pending = self._slot, slot, pending
            self._aged(old)

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
        """Nothing is below any more."""
        self.drop_master()
        self._let_end()
        if self._slot is not None:
            self._tier.free(self._slot)
        self._slot = self._pending = None

    def drop_master(self) -> None:
        """The weights as the device has them are the truth."""
        if self._master is not None:
            self._tier.free(self._master)
            self._master = None

    def _let_end(self) -> None:
        """Wait until the weights are written, whether that fails or not."""
        if self._pending is not None:
            with contextlib.suppress(SwapError):
                self._pending.wait()

    @property
    def _is_short(self) -> bool:
        """Whether weights are of a type too short to be stepped in."""
        dtype = self.segments[0].parameter.dtype
        return stepped_in(dtype) is not dtype

    def _full(self) -> list[Tensor]:
        """The weights of each segment as they are stepped, read into host memory; beside them, as the device has
        them where there is no master yet."""
        low = self.shared()
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


def is_over(pending: Pending) -> bool:
    """Whether a transfer ended, well or not."""
    try:
        return pending.done()
    except SwapError:
        return True


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def span(segment: ParameterSegment) -> int:
    """Bytes from where a segment begins to where the next one does."""
    return -(-bytes_of(segment) // ALIGNMENT) * ALIGNMENT


def _shaped(flat: Tensor, segment: ParameterSegment) -> Tensor:
    return flat.view(segment.parameter.shape) if segment.whole else flat
