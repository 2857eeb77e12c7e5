"""Channels over gloo: between hosts, and for tensors of devices that are staged through the host.

A message is packed behind a header that says what it holds. Because shapes rarely change, the receiver posts the
buffer of the next message before it is due, guessing that it is like the last one but for its number of rows, so that
bytes flow while it computes. The sender makes the same guess: a message that fits travels in that buffer; of a longer
one only the header's beginning does, and the whole message follows. One buffer, because gloo charges for messages, not
for bytes: header and payload apart made a round trip three times as long.

gloo carries host buffers only: tensors of a device are staged (:mod:`parallax.runtime.channels.staging`), which is the
way between devices that have no link, or where ranks share one. Devices that have links:
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
from parallax.runtime.channels.staging import Lent, Staging


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
        assert self.group is not None
        return self.group.recv([buffer], self.peer, self.tag)


class Underway:
    """Messages that the peer has perhaps not taken yet: buffers that must stay as they are until then."""

    def __init__(self) -> None:
        self._sent: deque[tuple[list[tuple[dist.Work, Tensor]], Callable[[], object]]] = deque()

    def add(
        self, sent: list[tuple[dist.Work, Tensor]], taken: Callable[[], object] = lambda: None
    ) -> None:
        """One more message has begun; ``taken`` is called when the peer has it."""
        self._sent.append((sent, taken))

    def wait(self, left: int) -> None:
        """Wait until no more than ``left`` messages are under way: gloo does not tell without waiting."""
        while len(self._sent) > left:
            sent, taken = self._sent.popleft()
            for work, _ in sent:
                work.wait()
            taken()


class GroupSender:
    """The sending end of one channel; at most ``ahead`` messages wait for the peer to take them."""

    def __init__(self, address: Address, staging: Staging, ahead: int) -> None:
        self._address, self._staging, self._ahead = address, staging, ahead
        self._buffers = staging.buffers()
        self._guess, self._underway = _Guess(), Underway()

    def send(self, tensors: Sequence[Tensor], rows: int) -> None:
        """Send one message, due to have ``rows`` rows; blocks only while the peer is ``ahead`` messages behind."""
        spec = spec_of(tensors)
        layout, header = lay_out(spec), header_of(spec)
        whole, guess = header.numel() + layout.size, self._guess.size(rows)
        self._guess.learn(spec, rows)
        sizes = [guess] if whole <= guess else [guess, whole]
        buffers = [self._buffers.take(size) for size in sizes]
        for lent in buffers:
            begin = min(guess, header.numel())
            lent.data[:begin].copy_(header[:begin])
        last = buffers[-1].data
        last[: header.numel()].copy_(header)
        self._staging.send(tensors, layout.views(last, header.numel()), lambda: self._post(buffers))

    def flush(self) -> None:
        """Wait until the peer has everything; the caller has drained the staging."""
        self._underway.wait(0)

    def _post(self, buffers: list[Lent]) -> None:
        self._underway.wait(self._ahead - 1)
        self._underway.add(
            [(self._address.send(lent.data), lent.data) for lent in buffers],
            partial(self._buffers.give, buffers),
        )


class GroupReceiver:
    """The receiving end of one channel."""

    posts = True

    def __init__(self, address: Address, staging: Staging) -> None:
        self._address = address
        self._buffers, self._landing = staging.buffers(), staging.landing()
        self._guess = _Guess()
        self._posted: tuple[dist.Work, Lent] | None = None

    def post(self, rows: int) -> None:
        """Post the buffer of the next message, expected to have ``rows`` rows."""
        if self._posted is None:
            self._posted = self._begin(self._guess.size(rows))

    def receive(self, rows: int, copy: Copy = torch.clone) -> tuple[Tensor, ...]:
        """Wait for the next message."""
        self.post(rows)
        assert self._posted is not None
        (work, lent), self._posted = self._posted, None
        work.wait()
        whole, numbers = read_header(lent.data)
        if whole > lent.data.numel():
            self._buffers.give([lent])
            work, lent = self._begin(whole)
            work.wait()
            whole, numbers = read_header(lent.data)
        layout = read_numbers(numbers)
        self._guess.learn(layout.spec, rows)
        message, arrived = self._landing.up(lent.data[whole - layout.size : whole])
        self._buffers.give([lent], arrived)
        # Memory of their own: what swaps them out, or changes them in place, is to see no more than one of them.
        found = tuple([copy(part) for part in layout.views(message)])
        self._landing.left()
        return found

    def _begin(self, size: int) -> tuple[dist.Work, Lent]:
        lent = self._buffers.take(size)
        return self._address.receive(lent.data), lent
