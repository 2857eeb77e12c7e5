"""Streams, events and pinned memory of a device, and the null objects that stand for them on a CPU.

Callers never ask which device they are on: on a CPU every copy is finished when it returns, so the null event is
always done and waiting for it does nothing. All logic above this file is therefore tested without a GPU.
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
    """Seconds by which a transfer is held up: none. Tests of the waits hold them up at random."""
    return 0.0


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether everything before it has finished."""

    def wait_host(self) -> None:
        """Block this thread until it has."""

    def wait_stream(self, stream: torch.Stream | None = None, /) -> None:
        """Make ``stream`` wait for it, or the current compute stream."""

    def seconds(self) -> float:
        """How long the copy that ends here took; asked once it is done."""


class DoneEvent:
    """Everything has already happened."""

    def done(self) -> bool:
        return True

    def wait_host(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self, _stream: torch.Stream | None = None) -> None:
        """Nothing to wait for."""

    def seconds(self) -> float:
        """No time of its own."""
        return 0.0


class TimedEvent(DoneEvent):
    """A copy that was over when it returned."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds


Stalls = list[tuple[torch.Event, torch.Event]]
"""Before and after each wait of the compute stream for something that was not over."""


class StallBook:
    """The stalls of one engine's copies, noted from when somebody first asks for them: elsewhere they would pile up."""

    def __init__(self) -> None:
        self._pairs: Stalls = []
        self._noting = False

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Let ``stream`` wait for ``event``."""
        if not self._noting:
            stream.wait_event(event)
            return
        before, after = (torch.Event(stream.device, enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._pairs.append((before, after))

    def take(self) -> Stalls:
        """Those since the last call."""
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
        """Whether the stream has passed it."""
        return self._event.query()

    def wait_host(self) -> None:
        self._event.synchronize()

    def wait_stream(self, stream: torch.Stream | None = None) -> None:
        """Order ``stream``, or the current one, after it."""
        stream = stream or torch.accelerator.current_stream(self._index)
        stream.wait_event(self._event)

    def seconds(self) -> float:
        return 0.0


Pair = tuple[torch.Event, torch.Event]
"""Before and after a copy."""


class CopyEvent:
    """The end of a copy. Its two events came from a ``pool``, since a driver takes longer to make an event than to
    record it, and go back there as soon as anybody has seen that the copy is over. Who asks on another thread just
    then may wait for the copy that has them next: later than he has to, and it was begun before he asked."""

    def __init__(
        self, device: torch.device, stalls: StallBook, pool: list[Pair], pair: Pair
    ) -> None:
        self._index, self._stalls, self._pool = device.index, stalls, pool
        self._end, self._pairs = pair[1], [pair]
        self._seconds = 0.0

    def done(self) -> bool:
        """Whether the stream has passed it."""
        if self._pairs:
            if not self._end.query():
                return False
            self._give_back()
        return True

    def wait_host(self) -> None:
        if self._pairs:
            self._end.synchronize()
            self._give_back()

    def wait_stream(self, stream: torch.Stream | None = None) -> None:
        """Order ``stream``, or the current one, after it; that it waits is noted in ``stalls``."""
        if not self.done():
            waiting = stream or torch.accelerator.current_stream(self._index)
            self._stalls.wait(waiting, self._end)

    def seconds(self) -> float:
        return self._seconds if self.done() else 0.0

    def _give_back(self) -> None:
        with contextlib.suppress(IndexError):  # another thread has
            pair = self._pairs.pop()
            self._seconds = pair[0].elapsed_time(pair[1]) / 1000
            self._pool.append(pair)


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
        return iter(data.split(self._piece))

    def up(self, target: Tensor, _ready: Event) -> Iterator[Tensor]:
        return iter(target.split(self._piece))

    def close(self) -> None:
        """Nothing is held."""


_WAITED_FOR = DoneEvent()  # by the thread: a stream that waited would hold up other threads' copies


class BounceRing:
    """A few pinned buffers, one for each thread that may ask, allocated once: pinning takes milliseconds. What is not
    on ``device``, as an optimizer's states, takes no buffer and waits for nothing of the device's."""

    def __init__(
        self, copies: CopyEngine, device: torch.device, buffers: int, piece_bytes: int
    ) -> None:
        self._copies, self._device, self._piece = copies, device, piece_bytes
        self._arena = copies.arena(buffers * piece_bytes)
        self.waste_bytes = self._arena.allocated_bytes - buffers * piece_bytes
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in self._arena.data.split(piece_bytes):
            self._free.put(buffer)

    def down(self, data: Tensor, ready: Event) -> Iterator[Tensor]:
        """Copy each piece down and wait for it."""
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

    def up(self, target: Tensor, ready: Event) -> Iterator[Tensor]:
        """Copy each piece up and wait for it, because the buffer is filled again."""
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
    """Copies between device and host memory beside the compute stream."""

    def arena(self, count: int) -> Arena:
        """Host bytes that copies can use at full speed, no more than asked, until closed."""

    def bounce(self, buffers: int, piece_bytes: int, /) -> Bounce:
        """The way between the device and files, for as many threads as ``buffers``."""

    def mark(self) -> Event:
        """The end of all work given to the compute stream so far."""

    def copy(self, source: Tensor, target: Tensor, after: Event | None = None) -> Event:
        """Copy after ``after``, or after all work already given to the compute stream; the event is its end."""

    def here(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        """What enters, on any thread, the stream that is the compute stream now."""

    def adopt(self) -> None:
        """The calling thread works for this device from here on."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def take_stalls(self) -> Stalls:
        """The compute stream's waits since the last call."""

    def beside(self) -> CopyEngine:
        """Copies that do not queue behind these."""


class CpuCopies:
    """Host to host: finished on return."""

    def arena(self, count: int) -> Arena:
        return PlainArena(count)

    def bounce(self, _buffers: int, piece_bytes: int) -> Bounce:
        return NoBounce(piece_bytes)

    def mark(self) -> Event:
        return DoneEvent()

    def copy(self, source: Tensor, target: Tensor, after: Event | None = None) -> Event:
        del after  # by its nature
        start = time.perf_counter()
        target.copy_(source)
        return TimedEvent(time.perf_counter() - start)

    def here(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        return contextlib.nullcontext

    def adopt(self) -> None:
        """As every thread does."""

    def synchronize(self) -> None:
        """Nothing runs behind this thread's back."""

    def take_stalls(self) -> Stalls:
        return []

    def beside(self) -> CopyEngine:
        return self


class StreamCopies:
    """One side stream for each direction, so that offloads and fetches do not queue behind each other. ``delay``
    holds each copy up on its stream, to show a missing wait."""

    def __init__(
        self,
        device: torch.device,
        delay: Callable[[], float] = no_delay,
        remedy: str = PINNING_REMEDY,
        stalls: StallBook | None = None,
    ) -> None:
        # Threads select it by its number, which torch need not look up then.
        self._device = own_device(device.type) if device.index is None else device
        self._index, self._delay, self._remedy = self._device.index, delay, remedy
        self._accelerator = accelerator_of(device)
        self._stalls = stalls or StallBook()
        self._down, self._up = torch.Stream(device), torch.Stream(device)
        self._pool: list[Pair] = []

    def arena(self, count: int) -> Arena:
        return self._accelerator.arena(self._device, count, self._remedy)

    def bounce(self, buffers: int, piece_bytes: int) -> Bounce:
        return BounceRing(self, self._device, buffers, piece_bytes)

    def mark(self) -> Event:
        """An event on the compute stream."""
        return StreamEvent(torch.accelerator.current_stream(self._index))

    def copy(self, source: Tensor, target: Tensor, after: Event | None = None) -> Event:
        """Asynchronous; the caller keeps both tensors until the event is done. Within the host at once."""
        if source.is_cpu and target.is_cpu:
            begun = time.perf_counter()
            target.copy_(source)
            return TimedEvent(time.perf_counter() - begun)
        stream = self._up if source.is_cpu else self._down
        if after is not None:
            after.wait_stream(stream)
        else:
            # The source's last kernel, or the last user of the block that the target was carved from, is on the
            # compute stream: without this wait the allocator's reuse is a race.
            stream.wait_stream(torch.accelerator.current_stream(self._index))
        start, end = pair = self._take_pair()
        with own_handle(stream):
            self._accelerator.hold(self._delay())
            start.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        return CopyEvent(self._device, self._stalls, self._pool, pair)

    def _take_pair(self) -> Pair:
        try:
            return self._pool.pop()
        except IndexError:
            start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
            return start, end

    def here(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        """Otherwise another thread gives its work to the device's first stream."""
        stream = torch.accelerator.current_stream(self._index)
        return lambda: own_handle(stream)

    def adopt(self) -> None:
        """Otherwise a new thread would work for the first device, and make a context there."""
        torch.accelerator.set_device_index(self._device)

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        torch.accelerator.synchronize(self._device)

    def take_stalls(self) -> Stalls:
        """Those of the thread that computes, as autograd has it: one at a time."""
        return self._stalls.take()

    def beside(self) -> CopyEngine:
        """On streams of their own; their stalls are told here."""
        return StreamCopies(self._device, self._delay, self._remedy, self._stalls)


def own_handle(stream: torch.Stream) -> torch.Stream:
    """The same stream, for one thread to enter. Entered, the object remembers where that thread was: of two threads in
    one object, the first to leave would go to where the other came from, and torch before 2.13 refuses the second."""
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def copies_for(
    device: torch.device, delay: Callable[[], float] = no_delay, remedy: str = PINNING_REMEDY
) -> CopyEngine:
    """The copy engine of a device; ``remedy`` for who cannot have so much host memory."""
    return CpuCopies() if device.type == "cpu" else StreamCopies(device, delay, remedy)


def private_random_state(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Keep the caller's random state on the host and on ``device`` untouched by what is seeded and drawn in here."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
