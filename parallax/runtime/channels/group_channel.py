"""Channels over gloo: between hosts, and for tensors of devices that are staged through the host.

A message is packed behind a header that says what it holds. Because shapes rarely change, the receiver posts the
buffer of the next message before it is due, guessing that it is like the last one but for its number of rows, so that
bytes flow while it computes. The sender makes the same guess: a message that fits travels in that buffer; of a longer
one only the header's beginning does, and the whole message follows. One buffer, because gloo charges for messages, not
for bytes: header and payload apart made a round trip three times as long.

gloo carries host buffers only: tensors of a device are staged through pinned memory, which is the way between devices
that have no link, or where ranks share one. Devices that have links: :mod:`parallax.runtime.channels.direct_channel`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.machine.device import CopyEngine, Event
from parallax.mesh import Mesh
from parallax.runtime.channels.message import (
    LEAST,
    Copy,
    Spec,
    header_of,
    lay_out,
    read_header,
    read_numbers,
    spec_of,
)

_QUEUED = 4  # messages that may wait for their copies down


class Staging(Protocol):
    """The way between a device's tensors and buffers that a process group can carry."""

    def buffer(self, count: int) -> Tensor:
        """An empty buffer of ``count`` bytes."""

    def send(
        self, tensors: Sequence[Tensor], targets: Sequence[Tensor], post: Callable[[], None]
    ) -> None:
        """Copy ``tensors`` into ``targets``, parts of a buffer, then call ``post``: in order with all earlier sends,
        and without blocking the device."""

    def up(self, buffer: Tensor) -> Tensor:
        """A received buffer on the device."""

    def drain(self) -> None:
        """Wait until everything has been handed to the group; raise what a send raised."""

    def close(self) -> None:
        """Nothing more will be sent."""


class NoStaging:
    """The device's memory is the host's: gloo sends by itself."""

    def buffer(self, count: int) -> Tensor:
        """Host memory."""
        return torch.empty(count, dtype=torch.uint8)

    def send(
        self, tensors: Sequence[Tensor], targets: Sequence[Tensor], post: Callable[[], None]
    ) -> None:
        """Pack and post."""
        for tensor, target in zip(tensors, targets):
            target.copy_(tensor)
        post()

    def up(self, buffer: Tensor) -> Tensor:
        """Already there."""
        return buffer

    def drain(self) -> None:
        """Nothing is queued on the host."""

    def close(self) -> None:
        """Nothing is held."""


class PinnedStaging:
    """Through pinned memory; one thread waits for the copies down, so that the main thread keeps feeding the device."""

    def __init__(self, device: torch.device, copies: CopyEngine) -> None:
        self._device, self._copies = device, copies
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parallax-send")
        self._queued: deque[Future[None]] = deque()

    def buffer(self, count: int) -> Tensor:
        """Pinned memory."""
        return self._copies.empty_host(count)

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

    def up(self, buffer: Tensor) -> Tensor:
        """Copy up; the compute stream waits, this thread does not."""
        target = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
        self._copies.copy(buffer, target).wait_stream()
        return target

    def drain(self) -> None:
        """Wait for the thread."""
        while self._queued:
            self._queued.popleft().result()

    def close(self) -> None:
        """End the thread, but not by waiting for a peer that may be gone."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def staging_for(mesh: Mesh, copies: CopyEngine) -> Staging:
    """The staging of a rank's device."""
    return NoStaging() if mesh.device.type == "cpu" else PinnedStaging(mesh.device, copies)


class _Guess:
    """What both ends expect the next message to take: that of the last one with another number of rows."""

    def __init__(self) -> None:
        self._spec: Spec = ()
        self._rows = 0

    def size(self, rows: int) -> int:
        """Bytes, if it will have ``rows`` rows."""
        spec = tuple([(d, (rows, *s[1:]) if s[:1] == (self._rows,) else s) for d, s in self._spec])
        return max(LEAST, header_of(spec).numel() + lay_out(spec).size)

    def learn(self, spec: Spec, rows: int) -> None:
        """A message has passed."""
        self._spec, self._rows = spec, rows


@dataclass(frozen=True, slots=True)
class Address:
    """Where a channel leads: its group, the place in it of the rank at the other end, and its tag."""

    group: dist.ProcessGroup | None
    peer: int
    tag: int

    def send(self, buffer: Tensor) -> dist.Work:
        """Begin to send; ``buffer`` must live and stay as it is until that has ended."""
        assert self.group is not None
        return self.group.send([buffer], self.peer, self.tag)

    def receive(self, buffer: Tensor) -> dist.Work:
        """Begin to receive."""
        assert self.group is not None
        return self.group.recv([buffer], self.peer, self.tag)


class Underway:
    """Messages that the peer has perhaps not taken yet: buffers that must stay as they are until then."""

    def __init__(self) -> None:
        self._sent: deque[list[tuple[dist.Work, Tensor]]] = deque()

    def add(self, sent: list[tuple[dist.Work, Tensor]]) -> None:
        """One more message has begun."""
        self._sent.append(sent)

    def wait(self, left: int) -> None:
        """Wait until no more than ``left`` messages are under way: gloo does not tell without waiting."""
        while len(self._sent) > left:
            for work, _ in self._sent.popleft():
                work.wait()


class GroupSender:
    """The sending end of one channel; at most ``ahead`` messages wait for the peer to take them."""

    def __init__(self, address: Address, staging: Staging, ahead: int) -> None:
        self._address, self._staging, self._ahead = address, staging, ahead
        self._guess, self._underway = _Guess(), Underway()

    def send(self, tensors: Sequence[Tensor], rows: int) -> None:
        """Send one message, due to have ``rows`` rows; blocks only while the peer is ``ahead`` messages behind."""
        spec = spec_of(tensors)
        layout, header = lay_out(spec), header_of(spec)
        whole, guess = header.numel() + layout.size, self._guess.size(rows)
        self._guess.learn(spec, rows)
        buffers = [
            self._staging.buffer(size) for size in ([guess] if whole <= guess else [guess, whole])
        ]
        for buffer in buffers:
            begin = min(guess, header.numel())
            buffer[:begin].copy_(header[:begin])
        buffers[-1][: header.numel()].copy_(header)
        self._staging.send(
            tensors, layout.views(buffers[-1], header.numel()), lambda: self._post(buffers)
        )

    def flush(self) -> None:
        """Wait until the peer has everything; the caller has drained the staging."""
        self._underway.wait(0)

    def _post(self, buffers: list[Tensor]) -> None:
        self._underway.wait(self._ahead - 1)
        self._underway.add([(self._address.send(buffer), buffer) for buffer in buffers])


class GroupReceiver:
    """The receiving end of one channel."""

    posts = True

    def __init__(self, address: Address, staging: Staging) -> None:
        self._address, self._staging = address, staging
        self._guess = _Guess()
        self._posted: tuple[dist.Work, Tensor] | None = None

    def post(self, rows: int) -> None:
        """Post the buffer of the next message, expected to have ``rows`` rows."""
        if self._posted is None:
            self._posted = self._begin(self._guess.size(rows))

    def receive(self, rows: int, copy: Copy = torch.clone) -> tuple[Tensor, ...]:
        """Wait for the next message."""
        self.post(rows)
        assert self._posted is not None
        (work, buffer), self._posted = self._posted, None
        work.wait()
        whole, numbers = read_header(buffer)
        if whole > buffer.numel():
            work, buffer = self._begin(whole)
            work.wait()
            whole, numbers = read_header(buffer)
        layout = read_numbers(numbers)
        self._guess.learn(layout.spec, rows)
        # Memory of their own: what swaps them out, or changes them in place, is to see no more than one of them.
        return tuple(
            copy(part) for part in layout.views(self._staging.up(buffer), whole - layout.size)
        )

    def _begin(self, size: int) -> tuple[dist.Work, Tensor]:
        buffer = self._staging.buffer(size)
        return self._address.receive(buffer), buffer
