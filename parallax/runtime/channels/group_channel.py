"""Channels over gloo: between hosts, and for device tensors that are staged through the host.

A message is packed behind a header that describes it. Shapes rarely change, so the receiver posts the receive of the
next message before it is needed, and the bytes arrive while the receiver computes. For this, the receiver must guess
the size of the next message. It assumes the types and shapes of the previous message, with another number of rows. The
sender makes the same guess. A message that fits is sent into the posted buffer. If a message is larger, only the start
of its header is sent into that buffer. Then the whole message is sent into a second, larger buffer.

Header and payload share one buffer because gloo's cost is per message, not per byte: with two messages, a round trip
took three times as long.

gloo carries host buffers only. Device tensors are copied through host memory (:mod:`parallax.runtime.channels.staging`)
if the devices have no link, or if ranks share a device. Devices with links use
:mod:`parallax.runtime.channels.direct_channel`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

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
from parallax.runtime.channels.staging import Lease, Staging


class _Guess:
    """Predicts the size of the next message from the types and shapes of the previous one, with another number of rows.
    Both ends of a channel make the same guess."""

    def __init__(self) -> None:
        self._spec: Spec = ()
        self._rows = 0

    def size(self, rows: int) -> int:
        """Return the expected bytes of a message of ``rows`` rows."""
        spec = tuple([(d, (rows, *s[1:]) if s[:1] == (self._rows,) else s) for d, s in self._spec])
        return max(LEAST, header_of(spec).numel() + lay_out(spec).size)

    def learn(self, spec: Spec, rows: int) -> None:
        self._spec, self._rows = spec, rows


@dataclass(frozen=True, slots=True)
class Address:
    """The other end of a channel: a process group, the peer's rank in the group, and the channel's tag."""

    group: dist.ProcessGroup | None
    peer: int
    tag: int

    def send(self, buffer: Tensor) -> dist.Work:
        """Start to send ``buffer``, which must stay allocated and unchanged until the returned work ends."""
        assert self.group is not None
        return self.group.send([buffer], self.peer, self.tag)

    def receive(self, buffer: Tensor) -> dist.Work:
        assert self.group is not None
        return self.group.recv([buffer], self.peer, self.tag)


class Underway:
    """The messages that were sent and have possibly not been received yet. Their buffers must stay allocated and
    unchanged."""

    def __init__(self) -> None:
        self._sent: deque[tuple[list[tuple[dist.Work, Tensor]], Callable[[], object]]] = deque()

    def add(
        self, sent: list[tuple[dist.Work, Tensor]], received: Callable[[], object] = lambda: None
    ) -> None:
        """Add a message, given as pairs of work and buffer. ``received`` is called when the peer has received the
        message."""
        self._sent.append((sent, received))

    def wait(self, left: int) -> None:
        """Wait, oldest message first, until at most ``left`` messages have not been received. The order is fixed
        because gloo cannot be polled."""
        while len(self._sent) > left:
            sent, received = self._sent.popleft()
            for work, _ in sent:
                work.wait()
            received()


class GroupSender:
    """The sending end of one channel. At most ``ahead`` messages are sent but not yet received.

    ``staging`` copies device tensors to the host buffers that gloo sends.
    """

    def __init__(self, address: Address, staging: Staging, ahead: int) -> None:
        self._address, self._staging, self._ahead = address, staging, ahead
        self._buffers = staging.buffers()
        self._guess, self._underway = _Guess(), Underway()

    def send(self, tensors: Sequence[Tensor], rows: int) -> None:
        """Send one message; blocks only while the peer is ``ahead`` messages behind. ``rows``: the number of rows from
        which both ends guess the message's size."""
        spec = spec_of(tensors)
        layout, header = lay_out(spec), header_of(spec)
        whole, guess = header.numel() + layout.size, self._guess.size(rows)
        self._guess.learn(spec, rows)
        sizes = [guess] if whole <= guess else [guess, whole]
        buffers = [self._buffers.acquire(size) for size in sizes]
        for lease in buffers:
            begin = min(guess, header.numel())
            lease.data[:begin].copy_(header[:begin])
        last = buffers[-1].data
        last[: header.numel()].copy_(header)
        self._staging.send(tensors, layout.views(last, header.numel()), lambda: self._post(buffers))

    def flush(self) -> None:
        """Wait until the peer has received all messages. Call it after :meth:`Channels.drain`."""
        self._underway.wait(0)

    def _post(self, buffers: list[Lease]) -> None:
        self._underway.wait(self._ahead - 1)
        self._underway.add(
            [(self._address.send(lease.data), lease.data) for lease in buffers],
            partial(self._buffers.release, buffers),
        )


class GroupReceiver:
    """The receiving end of one channel."""

    posts = True

    def __init__(self, address: Address, staging: Staging) -> None:
        self._address = address
        self._buffers, self._device_buffer = staging.buffers(), staging.device_buffer()
        self._guess = _Guess()
        self._posted: tuple[dist.Work, Lease] | None = None

    def post(self, rows: int) -> None:
        """Post the receive of the next message. ``rows``: the number of rows from which both ends guess the message's
        size."""
        if self._posted is None:
            self._posted = self._begin(self._guess.size(rows))

    def receive(self, rows: int, copy: Copy = torch.clone) -> tuple[Tensor, ...]:
        self.post(rows)
        assert self._posted is not None
        (work, lease), self._posted = self._posted, None
        work.wait()
        whole, numbers = read_header(lease.data)
        if whole > lease.data.numel():
            self._buffers.release([lease])
            work, lease = self._begin(whole)
            work.wait()
            whole, numbers = read_header(lease.data)
        layout = read_numbers(numbers)
        self._guess.learn(layout.spec, rows)
        message, arrived = self._device_buffer.upload(lease.data[whole - layout.size : whole])
        self._buffers.release([lease], arrived)
        # Each tensor gets its own memory: offloading it, or changing it in place, must not affect the others.
        found = tuple([copy(part) for part in layout.views(message)])
        self._device_buffer.mark_read()
        return found

    def _begin(self, size: int) -> tuple[dist.Work, Lease]:
        lease = self._buffers.acquire(size)
        return self._address.receive(lease.data), lease
