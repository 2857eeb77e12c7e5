"""The way of messages between a device and a process group that carries host memory alone.

Each end of a channel keeps the host buffers that its messages pass through: to pin one takes milliseconds, and torch's
own pinned memory comes in powers of two. A message takes a buffer that is free and large enough; where there is none
one more is made, in the place of those that were too small.

A received message comes up on a stream of its channel, into memory of the device that the channel keeps. Such a copy
waits for no more than the last reader of that memory and passes what the device has still to compute; into memory that
was just allocated it would have to wait for all of that, because the device may still use what it was before.
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

_QUEUED = 4  # messages that may wait for their copies down
_PARTS = 8  # sizes of buffers between a power of two and the next


class Lent(NamedTuple):
    """A buffer of one message, which is the beginning of ``arena``."""

    data: Tensor
    arena: Arena


class Buffers:
    """The host buffers of one end of a channel. They are taken by one thread, and given back by any."""

    def __init__(self, copies: CopyEngine) -> None:
        self._copies = copies
        self._size = 0  # of new ones: that of the largest message so far
        self._back: deque[tuple[Arena, Event]] = deque()

    def take(self, count: int) -> Lent:
        """A buffer of ``count`` bytes. Raises :class:`SwapError` where so much cannot be pinned."""
        while self._back and self._back[0][1].done():
            arena, _ = self._back.popleft()
            if arena.data.numel() >= count:
                return Lent(arena.data[:count], arena)
            arena.close()
        self._size = max(self._size, _rounded(count))
        arena = self._copies.arena(self._size)
        return Lent(arena.data[:count], arena)

    def give(self, lent: Iterable[Lent], read: Event | None = None) -> None:
        """What :meth:`take` lent may be filled again after ``read``."""
        self._back.extend([(each.arena, read or DoneEvent()) for each in lent])

    def close(self) -> None:
        """Release those that were given back and are no longer read; the others go with who has them."""
        with contextlib.suppress(RuntimeError):  # a device that failed tells nothing any more
            while self._back and self._back[0][1].done():
                self._back.popleft()[0].close()


class Landing(Protocol):
    """Where the messages of one channel come up."""

    def up(self, data: Tensor) -> tuple[Tensor, Event]:
        """``data`` on the device, for the stream that computes, and the event after which the host's bytes are free."""

    def left(self) -> None:
        """All that reads what came up last has been given to the stream that computes."""


class Staging(Protocol):
    """The way between a device's tensors and buffers that a process group can carry."""

    def buffers(self) -> Buffers:
        """Those of one end of a channel."""

    def landing(self) -> Landing:
        """That of one receiving end."""

    def send(
        self, tensors: Sequence[Tensor], targets: Sequence[Tensor], post: Callable[[], None]
    ) -> None:
        """Copy ``tensors`` into ``targets``, parts of a buffer, then call ``post``: in order with all earlier sends,
        and without blocking the device."""

    def drain(self) -> None:
        """Wait until everything has been handed to the group; raise what a send raised."""

    def close(self) -> None:
        """Nothing more will be sent."""


class _InPlace:
    """The host's memory is the device's."""

    def up(self, data: Tensor) -> tuple[Tensor, Event]:
        return data, DoneEvent()

    def left(self) -> None:
        """Nothing is kept."""


class NoStaging:
    """The device's memory is the host's: gloo sends by itself."""

    def buffers(self) -> Buffers:
        return Buffers(CpuCopies())

    def landing(self) -> Landing:
        return _InPlace()

    def send(
        self, tensors: Sequence[Tensor], targets: Sequence[Tensor], post: Callable[[], None]
    ) -> None:
        for tensor, target in zip(tensors, targets):
            target.copy_(tensor)
        post()

    def drain(self) -> None:
        """Nothing is queued on the host."""

    def close(self) -> None:
        """Nothing is held."""


class DeviceLanding:
    """Memory of ``device``, as much as the largest message so far took, beside which ``copies`` have their streams."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._read: Event | None = None

    def up(self, data: Tensor) -> tuple[Tensor, Event]:
        """Copy beside the stream that computes, which waits for it; this thread does not."""
        if self._memory.numel() < data.numel():
            self._memory = torch.empty(data.numel(), dtype=torch.uint8, device=self._device)
            self._read = None  # whoever had these bytes before
        target = self._memory[: data.numel()]
        arrived = self._copies.copy(data, target, self._read)
        arrived.wait_stream()
        return target, arrived

    def left(self) -> None:
        """The next message comes up after that."""
        self._read = self._copies.mark()


class PinnedStaging:
    """Through pinned memory; one thread waits for the copies down, so that the main thread keeps feeding the device."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._thread = ThreadPoolExecutor(1, "parallax-send", initializer=copies.bind_thread)
        self._queued: deque[Future[None]] = deque()
        self._buffers: list[Buffers] = []

    def buffers(self) -> Buffers:
        self._buffers.append(Buffers(self._copies))
        return self._buffers[-1]

    def landing(self) -> Landing:
        """Memory of the device, and a stream of its own."""
        return DeviceLanding(self._device, self._copies.on_own_streams())

    def send(
        self, tensors: Sequence[Tensor], targets: Sequence[Tensor], post: Callable[[], None]
    ) -> None:
        """Copy down on the side stream and post from the thread."""
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
        """End the thread, but not by waiting for a peer that may be gone: only for the device, since what waits to be
        sent is let go of."""
        with contextlib.suppress(RuntimeError):  # a device that failed copies nothing any more
            self._copies.synchronize()
        self._thread.shutdown(wait=False, cancel_futures=True)
        for each in self._buffers:
            each.close()


def staging_for(device: torch.device, copies: CopyEngine) -> Staging:
    """The staging of a rank's device."""
    return NoStaging() if device.type == "cpu" else PinnedStaging(device, copies)


def _rounded(count: int) -> int:
    """``count`` up to the next size of a buffer: messages that grow little by little are not worth a new one each."""
    step = max(1, (1 << max(0, count - 1).bit_length()) // (2 * _PARTS))
    return -(-count // step) * step
