"""Streams, events and pinned memory of a device, with no-op equivalents for a CPU.

Callers never distinguish devices. On a CPU every copy is finished when the call returns, so the copy's event is always
done and waiting for it is a no-op. Therefore the code above this module can be tested without a GPU.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from parallax.machine.accelerators import accelerator_of, own_device
from parallax.machine.pinned import PINNING_REMEDY, Arena, PlainArena


def no_delay() -> float:
    """Return 0: copies are not delayed. Tests pass random delays in seconds instead, to reveal missing waits."""
    return 0.0


class Event(Protocol):
    """A point in a stream's queue of work."""

    def done(self) -> bool:
        """Return whether all work before this point has finished."""

    def wait_host(self) -> None:
        """Block this thread until the event is done."""

    def wait_stream(self, stream: torch.Stream | None = None, /) -> None:
        """Make ``stream``, or the current compute stream, wait for the event."""

    def seconds(self) -> float:
        """Return how many seconds the copy that ends with this event took; 0 if the event is not the end of a copy.
        Call this method only when the event is done."""


class DoneEvent:
    """An event that is always done."""

    def done(self) -> bool:
        return True

    def wait_host(self) -> None:
        """No-op, because the event is done."""

    def wait_stream(self, _stream: torch.Stream | None = None) -> None:
        """No-op, because the event is done."""

    def seconds(self) -> float:
        return 0.0


class TimedEvent(DoneEvent):
    """The event of a synchronous copy, with the seconds that the copy took."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds


Stalls = list[tuple[torch.Event, torch.Event]]
"""The events before and after each wait of the compute stream for unfinished work."""


class StallLog:
    """Records a pair of device events around each wait of the compute stream, to measure how long the stream stalls.

    Recording starts with the first call of :meth:`take_stalls`, because events that no caller takes would accumulate.
    """

    def __init__(self) -> None:
        self._pairs: Stalls = []
        self._noting = False

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Make ``stream`` wait for ``event``, and record the wait if recording has started."""
        if not self._noting:
            stream.wait_event(event)
            return
        before, after = (torch.Event(stream.device, enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._pairs.append((before, after))

    def take_stalls(self) -> Stalls:
        """Return the event pairs recorded since the last call of this method."""
        self._noting = True
        taken = self._pairs[:]
        del self._pairs[: len(taken)]
        return taken


class StreamEvent:
    """An event recorded on a stream."""

    def __init__(self, stream: torch.Stream) -> None:
        self._index = stream.device.index
        self._event = torch.Event(stream.device)
        self._event.record(stream)

    def done(self) -> bool:
        return self._event.query()

    def wait_host(self) -> None:
        self._event.synchronize()

    def wait_stream(self, stream: torch.Stream | None = None) -> None:
        """Make ``stream``, or the current stream, wait for the event."""
        stream = stream or torch.accelerator.current_stream(self._index)
        stream.wait_event(self._event)

    def seconds(self) -> float:
        return 0.0


Pair = tuple[torch.Event, torch.Event]
"""The events before and after a copy."""


class CopyEvent:
    """The event at the end of a copy on ``device``, which also measures the copy's seconds. Waits of streams for it are
    recorded in ``stalls``.

    ``pair`` are two device events, before and after the copy. They are reused through a ``pool``, because a driver
    takes longer to create an event than to record one. The first thread that sees the end of the copy returns both
    events to the pool. If the next copy then records them again, a second thread that still waits for this copy waits
    for that one: longer than necessary, but still correct.
    """

    def __init__(
        self, device: torch.device, stalls: StallLog, pool: list[Pair], pair: Pair
    ) -> None:
        self._index, self._stalls, self._pool = device.index, stalls, pool
        self._end, self._pairs = pair[1], [pair]
        self._seconds = 0.0

    def done(self) -> bool:
        if self._pairs:
            if not self._end.query():
                return False
            self._return_events()
        return True

    def wait_host(self) -> None:
        if self._pairs:
            self._end.synchronize()
            self._return_events()

    def wait_stream(self, stream: torch.Stream | None = None) -> None:
        """Make ``stream``, or the current stream, wait for the copy, and record the wait in the stall log."""
        if not self.done():
            waiting = stream or torch.accelerator.current_stream(self._index)
            self._stalls.wait(waiting, self._end)

    def seconds(self) -> float:
        return self._seconds if self.done() else 0.0

    def _return_events(self) -> None:
        with contextlib.suppress(IndexError):  # another thread has returned them
            pair = self._pairs.pop()
            self._seconds = pair[0].elapsed_time(pair[1]) / 1000
            self._pool.append(pair)


class FileStaging(Protocol):
    """Host buffers through which device tensors are copied to and from a file in pieces.

    The methods are called by the thread that accesses the file. Their argument ``ready`` is the event that the training
    thread recorded when it requested the transfer. ``waste_bytes`` is the number of bytes that were allocated in
    addition to the buffers.
    """

    waste_bytes: int

    def to_host(self, data: Tensor, ready: Event, /) -> Iterator[Tensor]:
        """Yield the content of ``data``, as it is after the event ``ready``, in pieces of host memory, to be written to
        the file. Each piece is valid until the next one is requested."""

    def to_device(self, target: Tensor, ready: Event, /) -> Iterator[Tensor]:
        """Yield pieces of host memory for the caller to fill from the file.

        Each piece is copied to its place in ``target``, after the event ``ready``, before the next one is yielded.
        """

    def close(self) -> None:
        """Release the buffers."""


class DirectFileStaging:
    """The staging of a CPU, which needs no buffers: the pieces are views of the tensor, of ``piece_bytes`` bytes
    each."""

    waste_bytes = 0

    def __init__(self, piece_bytes: int) -> None:
        self._piece = piece_bytes

    def to_host(self, data: Tensor, _ready: Event) -> Iterator[Tensor]:
        return iter(data.split(self._piece))

    def to_device(self, target: Tensor, _ready: Event) -> Iterator[Tensor]:
        return iter(target.split(self._piece))

    def close(self) -> None:
        """No-op: no buffer is held."""


_WAITED_FOR = (
    DoneEvent()
)  # the thread waits itself: a waiting stream would delay other threads' copies


class StagingRing:
    """Pinned host buffers of ``piece_bytes`` bytes each, allocated once because pinning takes milliseconds. ``buffers``
    is their number, one for each thread that accesses files.

    Tensors that are not on ``device``, such as optimizer states in host memory, need no buffer and no wait.
    """

    def __init__(
        self, copies: CopyEngine, device: torch.device, buffers: int, piece_bytes: int
    ) -> None:
        self._copies, self._device, self._piece = copies, device, piece_bytes
        self._arena = copies.arena(buffers * piece_bytes)
        self.waste_bytes = self._arena.allocated_bytes - buffers * piece_bytes
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in self._arena.data.split(piece_bytes):
            self._free.put(buffer)

    def to_host(self, data: Tensor, ready: Event) -> Iterator[Tensor]:
        """Copy each piece of ``data`` to a host buffer, wait for the copy, and yield the buffer."""
        if data.device.type != self._device.type:
            yield from data.split(self._piece)
            return
        buffer = self._free.get()
        try:
            ready.wait_host()
            for piece in data.split(self._piece):
                host = buffer[: piece.numel()]
                self._copies.copy(piece, host, _WAITED_FOR).wait_host()
                yield host
        finally:
            self._free.put(buffer)

    def to_device(self, target: Tensor, ready: Event) -> Iterator[Tensor]:
        """Yield a host buffer for each piece of ``target``. When the caller has filled the buffer, copy it to the piece
        on the device and wait for the copy."""
        if target.device.type != self._device.type:
            yield from target.split(self._piece)
            return
        buffer = self._free.get()
        try:
            for piece in target.split(self._piece):
                host = buffer[: piece.numel()]
                yield host
                ready.wait_host()
                self._copies.copy(host, piece, _WAITED_FOR).wait_host()
        finally:
            self._free.put(buffer)

    def close(self) -> None:
        while not self._free.empty():
            self._free.get()
        self._arena.close()


class CopyEngine(Protocol):
    """The interface for copies between device and host memory that run concurrently with the compute stream."""

    def arena(self, count: int) -> Arena:
        """Allocate ``count`` bytes of host memory, pinned if the device needs that for copies at full speed."""

    def file_staging(self, buffers: int, piece_bytes: int, /) -> FileStaging:
        """Return new staging for transfers between the device and files: ``buffers`` host buffers of ``piece_bytes``
        bytes each, one for each thread that accesses files."""

    def mark(self) -> Event:
        """Return an event at the end of all work queued on the compute stream."""

    def copy(self, source: Tensor, target: Tensor, after: Event | None = None) -> Event:
        """Start to copy ``source`` to ``target``, and return the event at the end of the copy.

        The copy begins after the event ``after``; by default, after all work queued on the compute stream.
        """

    def compute_stream_context(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        """Return a function that creates context managers for the compute stream that is current now.

        Any thread may call the function. Work that a thread queues inside such a context runs on that stream.
        """

    def bind_thread(self) -> None:
        """Make this engine's device the current device of the calling thread."""

    def synchronize(self) -> None:
        """Wait for all work queued on the device."""

    def take_stalls(self) -> Stalls:
        """Return the event pairs around each wait of the compute stream since the last call."""

    def on_own_streams(self) -> CopyEngine:
        """Return an engine with separate streams, whose copies do not queue behind the copies of this engine."""


class CpuCopies:
    """The copy engine of a CPU. Each copy is finished when the call returns."""

    def arena(self, count: int) -> Arena:
        return PlainArena(count)

    def file_staging(self, _buffers: int, piece_bytes: int) -> FileStaging:
        return DirectFileStaging(piece_bytes)

    def mark(self) -> Event:
        return DoneEvent()

    def copy(self, source: Tensor, target: Tensor, after: Event | None = None) -> Event:
        del after  # a DoneEvent: all work is finished
        start = time.perf_counter()
        target.copy_(source)
        return TimedEvent(time.perf_counter() - start)

    def compute_stream_context(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        return contextlib.nullcontext

    def bind_thread(self) -> None:
        """No-op, because a CPU is not selected per thread."""

    def synchronize(self) -> None:
        """No-op: every copy is finished on return."""

    def take_stalls(self) -> Stalls:
        return []

    def on_own_streams(self) -> CopyEngine:
        return self


class StreamCopies:
    """The copy engine of an accelerator, with one stream per direction so that offloads and prefetches run
    concurrently.

    ``delay`` returns seconds by which each copy is delayed on its stream, to reveal missing waits in tests.
    """

    def __init__(
        self,
        device: torch.device,
        delay: Callable[[], float] = no_delay,
        remedy: str = PINNING_REMEDY,
        stalls: StallLog | None = None,
    ) -> None:
        # with an index, which torch need not look up for each thread
        self._device = own_device(device.type) if device.index is None else device
        self._index, self._delay, self._remedy = self._device.index, delay, remedy
        self._accelerator = accelerator_of(device)
        self._stalls = stalls or StallLog()
        self._to_host_stream, self._to_device_stream = torch.Stream(device), torch.Stream(device)
        self._pool: list[Pair] = []

    def arena(self, count: int) -> Arena:
        return self._accelerator.arena(self._device, count, self._remedy)

    def file_staging(self, buffers: int, piece_bytes: int) -> FileStaging:
        return StagingRing(self, self._device, buffers, piece_bytes)

    def mark(self) -> Event:
        """Return an event recorded on the compute stream."""
        return StreamEvent(torch.accelerator.current_stream(self._index))

    def copy(self, source: Tensor, target: Tensor, after: Event | None = None) -> Event:
        """Start an asynchronous copy of ``source`` to ``target`` after the event ``after``, by default after all queued
        work, and return the event at its end. The caller keeps both tensors until this event is done.

        Host-to-host copies are synchronous.
        """
        if source.is_cpu and target.is_cpu:
            begun = time.perf_counter()
            target.copy_(source)
            return TimedEvent(time.perf_counter() - begun)
        stream = self._to_device_stream if source.is_cpu else self._to_host_stream
        if after is not None:
            after.wait_stream(stream)
        else:
            # The source's last kernel, or the last user of the memory block of the target, is on the
            # compute stream: without this wait the allocator's reuse is a race.
            stream.wait_stream(torch.accelerator.current_stream(self._index))
        start, end = pair = self._event_pair()
        with own_handle(stream):
            self._accelerator.hold(self._delay())
            start.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        return CopyEvent(self._device, self._stalls, self._pool, pair)

    def _event_pair(self) -> Pair:
        try:
            return self._pool.pop()
        except IndexError:
            start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
            return start, end

    def compute_stream_context(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        """Return a function that creates context managers for the compute stream that is current now.

        Any thread may call the function. Without the context, another thread would use the device's default stream.
        """
        stream = torch.accelerator.current_stream(self._index)
        return lambda: own_handle(stream)

    def bind_thread(self) -> None:
        """Make this engine's device the current device of the calling thread.

        A new thread would otherwise use the first device, and create a context there.
        """
        torch.accelerator.set_device_index(self._device)

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        torch.accelerator.synchronize(self._device)

    def take_stalls(self) -> Stalls:
        """Return the event pairs around each wait of the compute stream since the last call.

        Only one thread at a time may call this.
        """
        return self._stalls.take_stalls()

    def on_own_streams(self) -> CopyEngine:
        """Return an engine with separate streams that records stalls in the same log."""
        return StreamCopies(self._device, self._delay, self._remedy, self._stalls)


def own_handle(stream: torch.Stream) -> torch.Stream:
    """Return another handle of ``stream``, for one thread to enter as a context.

    A handle remembers the previous stream of the thread that entered it. If two threads enter one handle, the first to
    exit would switch to the other thread's stream, and torch before 2.13 rejects the second.
    """
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def copies_for(
    device: torch.device, delay: Callable[[], float] = no_delay, remedy: str = PINNING_REMEDY
) -> CopyEngine:
    """Return the copy engine of ``device``. ``delay()`` returns the seconds by which each copy is delayed, for tests.
    Error messages about pinned memory end with ``remedy``."""
    return CpuCopies() if device.type == "cpu" else StreamCopies(device, delay, remedy)


def private_random_state(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context that restores the random state of the host and of ``device`` on exit."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
