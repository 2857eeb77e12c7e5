"""Streams, events and pinned memory of a device, and the null objects that stand for them on a CPU.

Callers never ask which device they are on: on a CPU every copy is finished when it returns, so the null event is
always done and waiting for it does nothing. All logic above this file is therefore tested without a GPU.
"""

from __future__ import annotations

import mmap
import queue
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from parallax.common.units import format_bytes
from parallax.errors import SwapError

_REMEDY = (
    "lower cluster.host_memory, raise the limit of locked memory (ulimit -l), or set swap.tier=disk"
)
_CYCLES_PER_SECOND = 1.5e9  # of a GPU's clock, roughly: for delays that only have to be long enough


def no_delay() -> float:
    """Seconds by which a transfer is held up: none. Tests of the waits hold them up at random."""
    return 0.0


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether everything before it has finished."""

    def wait_host(self) -> None:
        """Block this thread until it has."""

    def wait_stream(self) -> None:
        """Make the current compute stream wait for it."""

    def seconds(self) -> float:
        """How long the copy that ends here took; asked once it is done."""


class DoneEvent:
    """Everything has already happened."""

    def done(self) -> bool:
        """Always."""
        return True

    def wait_host(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self) -> None:
        """Nothing to wait for."""

    def seconds(self) -> float:
        """No time of its own."""
        return 0.0


class TimedEvent(DoneEvent):
    """A copy that was over when it returned."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        """What it took."""
        return self._seconds


class CudaEvent:
    """A CUDA event recorded on a stream; ``start`` is the event before the copy that it ends."""

    def __init__(self, stream: torch.cuda.Stream, start: torch.cuda.Event | None = None) -> None:
        self._device = stream.device
        self._start, self._event = start, torch.cuda.Event(enable_timing=start is not None)
        self._event.record(stream)

    def done(self) -> bool:
        """Whether the stream has passed it."""
        return self._event.query()

    def wait_host(self) -> None:
        """Block this thread."""
        self._event.synchronize()

    def wait_stream(self) -> None:
        """Order the current stream after it."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def seconds(self) -> float:
        """The device's own measure."""
        return self._start.elapsed_time(self._event) / 1000 if self._start is not None else 0.0


class Arena(Protocol):
    """Host bytes for copies, allocated once. ``allocated_bytes`` tells what they cost."""

    data: Tensor
    allocated_bytes: int

    def close(self) -> None:
        """Give them back. The caller has waited for the copies."""


class PlainArena:
    """Ordinary memory."""

    def __init__(self, count: int) -> None:
        self.data, self.allocated_bytes = torch.empty(count, dtype=torch.uint8), count

    def close(self) -> None:
        """Let go."""
        self.data = torch.empty(0, dtype=torch.uint8)


class PinnedArena:
    """Whole pages registered with CUDA: torch's own pinned allocator would round up to a power of two."""

    def __init__(self, count: int, remedy: str = _REMEDY) -> None:
        self.allocated_bytes = max(1, -(-count // mmap.PAGESIZE)) * mmap.PAGESIZE
        try:
            pages = mmap.mmap(-1, self.allocated_bytes)
        except (OSError, OverflowError) as error:
            raise SwapError(
                f"cannot allocate {format_bytes(count)} of host memory: {error}; {remedy}"
            ) from error
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        self.data, self._address = whole[:count], whole.data_ptr()
        # 1: for all contexts.
        code = int(torch.cuda.cudart().cudaHostRegister(self._address, self.allocated_bytes, 1))
        if code:
            raise SwapError(
                f"cannot pin {format_bytes(count)} of host memory: CUDA error {code}; {remedy}"
            )
        self._pinned = True

    def close(self) -> None:
        """Unpin; the pages go with the last view of them."""
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self._address)
        self.data = torch.empty(0, dtype=torch.uint8)


class Bounce(Protocol):
    """Host bytes through which device tensors pass on their way to and from a file, piece by piece, on the thread
    that works on the file. A call begun on the training thread is ordered by the event that it took there."""

    waste_bytes: int

    def down(self, data: Tensor, ready: Event, /) -> Iterator[Tensor]:
        """The pieces of ``data``, each valid until the next is asked for."""

    def up(self, target: Tensor, ready: Event, /) -> Iterator[Tensor]:
        """Pieces to fill; what was filled is in ``target`` when the next is asked for."""

    def close(self) -> None:
        """Release the buffers."""


class NoBounce:
    """The device's memory is the host's: its own pieces."""

    waste_bytes = 0

    def __init__(self, piece_bytes: int) -> None:
        self._piece = piece_bytes

    def down(self, data: Tensor, _ready: Event) -> Iterator[Tensor]:
        """Views."""
        return iter(data.split(self._piece))

    def up(self, target: Tensor, _ready: Event) -> Iterator[Tensor]:
        """Views."""
        return iter(target.split(self._piece))

    def close(self) -> None:
        """Nothing is held."""


class BounceRing:
    """A few pinned buffers, one for each thread that may ask, allocated once: pinning takes milliseconds."""

    def __init__(self, copies: CopyEngine, buffers: int, piece_bytes: int) -> None:
        self._copies, self._piece = copies, piece_bytes
        self._arena = copies.arena(buffers * piece_bytes)
        self.waste_bytes = self._arena.allocated_bytes - buffers * piece_bytes
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in self._arena.data.split(piece_bytes):
            self._free.put(buffer)

    def down(self, data: Tensor, ready: Event) -> Iterator[Tensor]:
        """Copy each piece down and wait for it."""
        buffer = self._free.get()
        try:
            ready.wait_host()
            for piece in data.split(self._piece):
                host = buffer[: piece.numel()]
                self._copies.copy(piece, host, ordered=False).wait_host()
                yield host
        finally:
            self._free.put(buffer)

    def up(self, target: Tensor, ready: Event) -> Iterator[Tensor]:
        """Copy each piece up and wait for it, because the buffer is filled again."""
        buffer = self._free.get()
        try:
            for piece in target.split(self._piece):
                host = buffer[: piece.numel()]
                yield host
                ready.wait_host()
                self._copies.copy(host, piece, ordered=False).wait_host()
        finally:
            self._free.put(buffer)

    def close(self) -> None:
        """Unpin."""
        while not self._free.empty():
            self._free.get()
        self._arena.close()


class CopyEngine(Protocol):
    """Copies between device and host memory beside the compute stream."""

    def empty_host(self, count: int) -> Tensor:
        """Host bytes that copies can use at full speed."""

    def arena(self, count: int) -> Arena:
        """Many such bytes, no more than asked, until closed."""

    def bounce(self, buffers: int, piece_bytes: int, /) -> Bounce:
        """The way between the device and files, for as many threads as ``buffers``."""

    def mark(self) -> Event:
        """The end of all work given to the compute stream so far."""

    def copy(self, source: Tensor, target: Tensor, *, ordered: bool = True) -> Event:
        """Copy after all work already given to the compute stream (not ``ordered``: the caller has waited for what
        matters); the event is its end."""

    def adopt(self) -> None:
        """The calling thread works for this device from here on."""

    def synchronize(self) -> None:
        """Wait for the device."""


class CpuCopies:
    """Host to host: finished on return."""

    def empty_host(self, count: int) -> Tensor:
        """Plain memory."""
        return torch.empty(count, dtype=torch.uint8)

    def arena(self, count: int) -> Arena:
        """Plain memory."""
        return PlainArena(count)

    def bounce(self, _buffers: int, piece_bytes: int) -> Bounce:
        """None is needed."""
        return NoBounce(piece_bytes)

    def mark(self) -> Event:
        """Nothing is under way."""
        return DoneEvent()

    def copy(self, source: Tensor, target: Tensor, *, ordered: bool = True) -> Event:
        """An ordinary copy."""
        del ordered  # by its nature
        start = time.perf_counter()
        target.copy_(source)
        return TimedEvent(time.perf_counter() - start)

    def adopt(self) -> None:
        """As every thread does."""

    def synchronize(self) -> None:
        """Nothing runs behind this thread's back."""


class CudaCopies:
    """One side stream for each direction, so that offloads and fetches do not queue behind each other. ``delay``
    holds each copy up on its stream, to show a missing wait."""

    def __init__(
        self, device: torch.device, delay: Callable[[], float] = no_delay, remedy: str = _REMEDY
    ) -> None:
        self._device, self._delay, self._remedy = device, delay, remedy
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def empty_host(self, count: int) -> Tensor:
        """Pinned memory."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def arena(self, count: int) -> Arena:
        """Pinned memory."""
        return PinnedArena(count, self._remedy)

    def bounce(self, buffers: int, piece_bytes: int) -> Bounce:
        """Pinned buffers."""
        return BounceRing(self, buffers, piece_bytes)

    def mark(self) -> Event:
        """An event on the compute stream."""
        return CudaEvent(torch.cuda.current_stream(self._device))

    def copy(self, source: Tensor, target: Tensor, *, ordered: bool = True) -> Event:
        """Asynchronous; the caller keeps both tensors until the event is done. Within the host at once."""
        if not source.is_cuda and not target.is_cuda:
            begun = time.perf_counter()
            target.copy_(source)
            return TimedEvent(time.perf_counter() - begun)
        stream = self._down if source.is_cuda else self._up
        if ordered:
            # The source's last kernel, or the last user of the block that the target was carved from, is on the
            # compute stream: without this wait the allocator's reuse is a race.
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            seconds = self._delay()
            if seconds:
                torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))
            start = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            target.copy_(source, non_blocking=True)
        return CudaEvent(stream, start)

    def adopt(self) -> None:
        """Otherwise a new thread would work for the first device, and make a context there."""
        torch.cuda.set_device(self._device)

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        torch.cuda.synchronize(self._device)


def copies_for(
    device: torch.device, delay: Callable[[], float] = no_delay, remedy: str = _REMEDY
) -> CopyEngine:
    """The copy engine of a device; ``remedy`` for who cannot have so much host memory."""
    return CudaCopies(device, delay, remedy) if device.type == "cuda" else CpuCopies()


def select_device(kind: str, local_rank: int) -> torch.device:
    """The device of a local rank; several ranks may share one GPU."""
    if kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
