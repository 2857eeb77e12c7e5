"""Staging of messages between a device and a process group that carries only host memory.

Each end of a channel reuses its host buffers, because pinning one takes milliseconds and torch rounds pinned memory up
to powers of two. A message leases a free buffer that is large enough. Free buffers that are too small are replaced by a
new one.

A received message is copied to the device on the channel's stream, into device memory that the channel keeps. This copy
waits only for the last operation that reads that memory, so it overlaps with queued computation. A copy into newly
allocated memory would wait for all queued work, because queued operations may still use that memory.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parallax.machine.device import CopyEngine, CpuCopies, DoneEvent, Event
from parallax.machine.pinned import Arena

_QUEUED = 4  # messages that may wait for their copies to the host
_PARTS = 8  # buffer sizes between a power of two and the next


class Lease(NamedTuple):
    """A host buffer that is leased for one message. ``data``: the message's bytes, at the start of ``arena``."""

    data: Tensor
    arena: Arena


class Buffers:
    """The host buffers of one end of a channel. One thread acquires them; any thread may release them."""

    def __init__(self, copies: CopyEngine) -> None:
        self._copies = copies
        self._size = 0  # bytes of a new buffer: the largest message so far
        self._released: deque[tuple[Arena, Event]] = deque()

    def acquire(self, count: int) -> Lease:
        """Lease a buffer of ``count`` bytes. Raises :class:`SwapError` if memory cannot be pinned."""
        while self._released and self._released[0][1].done():
            arena, _ = self._released.popleft()
            if arena.data.numel() >= count:
                return Lease(arena.data[:count], arena)
            arena.close()
        self._size = max(self._size, _rounded(count))
        arena = self._copies.arena(self._size)
        return Lease(arena.data[:count], arena)

    def release(self, leases: Iterable[Lease], read: Event | None = None) -> None:
        """Release ``leases``, so that other messages may use their buffers.

        ``read``: an event on the device after its last read of these buffers, which are not reused before this event
        has occurred. None: they may be reused at once.
        """
        self._released.extend([(each.arena, read or DoneEvent()) for each in leases])

    def close(self) -> None:
        """Free all released buffers that the device has finished reading. A leased buffer is freed when its lease is
        dropped."""
        with contextlib.suppress(RuntimeError):  # queries of a failed device raise
            while self._released and self._released[0][1].done():
                self._released.popleft()[0].close()


class StagingBuffer(Protocol):
    """The device memory into which the messages of one channel are copied."""

    def upload(self, data: Tensor) -> tuple[Tensor, Event]:
        """Return ``data`` on the device, for use on the compute stream, and the event after which ``data`` may be
        overwritten."""

    def mark_read(self) -> None:
        """Record that all reads of the latest upload are queued on the compute stream."""


class Staging(Protocol):
    """Copies tensors between a device and the host buffers that a process group sends and receives."""

    def buffers(self) -> Buffers:
        """Return new host buffers for one end of a channel."""

    def device_buffer(self) -> StagingBuffer:
        """Return new device memory for one receiving end."""

    def send(
        self, tensors: Sequence[Tensor], targets: Sequence[Tensor], post: Callable[[], None]
    ) -> None:
        """Copy ``tensors`` into ``targets``, which are views of a host buffer, and then call ``post``, which sends the
        buffer.

        Several sends call their ``post`` in the order of the sends. Work that is queued on the device later does not
        wait for the copy.
        """

    def drain(self) -> None:
        """Wait until the ``post`` function of each send has been called; raise the error of a failed send."""

    def close(self) -> None:
        """Stop the staging; no more messages are sent."""


class _InPlace:
    """Returns messages unchanged: on a CPU, host memory is device memory."""

    def upload(self, data: Tensor) -> tuple[Tensor, Event]:
        return data, DoneEvent()

    def mark_read(self) -> None:
        """No-op: :meth:`upload` copies nothing."""


class NoStaging:
    """Sends tensors directly: on a CPU, gloo can send from device memory."""

    def buffers(self) -> Buffers:
        return Buffers(CpuCopies())

    def device_buffer(self) -> StagingBuffer:
        return _InPlace()

    def send(
        self, tensors: Sequence[Tensor], targets: Sequence[Tensor], post: Callable[[], None]
    ) -> None:
        for tensor, target in zip(tensors, targets):
            target.copy_(tensor)
        post()

    def drain(self) -> None:
        """No-op: :meth:`send` has called ``post`` on return."""

    def close(self) -> None:
        """No-op: there is no background thread to stop."""


class DeviceBuffer:
    """Memory on ``device``, as large as the largest message so far. ``copies`` queues the copies on its own streams."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._read: Event | None = None

    def upload(self, data: Tensor) -> tuple[Tensor, Event]:
        """Queue the copy of ``data`` to the device on a side stream. The compute stream waits for the copy; this thread
        does not."""
        if self._memory.numel() < data.numel():
            self._memory = torch.empty(data.numel(), dtype=torch.uint8, device=self._device)
            self._read = None  # the copy then waits for all queued work, whichever used this memory
        target = self._memory[: data.numel()]
        arrived = self._copies.copy(data, target, self._read)
        arrived.wait_stream()
        return target, arrived

    def mark_read(self) -> None:
        """Make the next upload wait for all reads that are queued now."""
        self._read = self._copies.mark()


class PinnedStaging:
    """Stages messages through pinned memory. A background thread waits for the copies to the host, so that the main
    thread can queue more work."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._thread = ThreadPoolExecutor(1, "parallax-send", initializer=copies.bind_thread)
        self._queued: deque[Future[None]] = deque()
        self._buffers: list[Buffers] = []

    def buffers(self) -> Buffers:
        self._buffers.append(Buffers(self._copies))
        return self._buffers[-1]

    def device_buffer(self) -> StagingBuffer:
        return DeviceBuffer(self._device, self._copies.on_own_streams())

    def send(
        self, tensors: Sequence[Tensor], targets: Sequence[Tensor], post: Callable[[], None]
    ) -> None:
        """Copy ``tensors`` to ``targets``, views of a host buffer, on a side stream. The background thread calls
        ``post`` after the copies."""
        sources = list(tensors)
        events: list[Event] = [
            self._copies.copy(source, target) for source, target in zip(sources, targets)
        ]

        def run() -> None:
            for event in events:
                event.wait_host()
            sources.clear()
            post()

        while len(self._queued) >= _QUEUED:
            self._queued.popleft().result()
        self._queued.append(self._thread.submit(run))

    def drain(self) -> None:
        while self._queued:
            self._queued.popleft().result()

    def close(self) -> None:
        """End the thread and drop queued sends. The thread waits for the device only, never for a peer that may have
        failed."""
        with contextlib.suppress(RuntimeError):  # a failed device raises
            self._copies.synchronize()
        self._thread.shutdown(wait=False, cancel_futures=True)
        for each in self._buffers:
            each.close()


def staging_for(device: torch.device, copies: CopyEngine) -> Staging:
    """Return the staging of messages for a rank on ``device``."""
    return NoStaging() if device.type == "cpu" else PinnedStaging(device, copies)


def _rounded(count: int) -> int:
    """Return ``count`` bytes rounded up to a coarser size, so that slowly growing messages reuse a buffer."""
    step = max(1, (1 << max(0, count - 1).bit_length()) // (2 * _PARTS))
    return -(-count // step) * step
