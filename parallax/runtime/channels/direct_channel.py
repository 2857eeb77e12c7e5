"""Channels between devices, over a backend such as NCCL, for which no rank waits on its host.

The tensors of a message travel as one buffer from device to device, in the order in which they were given to the
group. What they are is told beside it, from host to host over gloo: a receiver that read it from the device would wait
for everything that was given to the device before. A device receives when its buffer is asked for, not ahead: a receive
that NCCL has been given occupies part of the device until its message comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.runtime.channels.group_channel import Address, Underway
from parallax.runtime.channels.message import (
    LEAST,
    Copy,
    header_of,
    header_size,
    lay_out,
    read_header,
    read_numbers,
    spec_of,
)


class DirectSender:
    """The sending end; at most ``ahead`` messages wait for the peer to take them. ``described`` is the way that
    headers take."""

    def __init__(
        self, address: Address, described: Address, device: torch.device, ahead: int
    ) -> None:
        self._address, self._described = address, described
        self._device, self._ahead = device, ahead
        self._underway = Underway()

    def send(self, tensors: Sequence[Tensor], rows: int) -> None:
        """Give one message to the device."""
        del rows  # no size is guessed
        spec = spec_of(tensors)
        layout, header = lay_out(spec), header_of(spec)
        headers = [torch.zeros(LEAST, dtype=torch.uint8)]
        begin = min(LEAST, header.numel())
        headers[0][:begin].copy_(header[:begin])
        if header.numel() > LEAST:
            headers.append(header)
        sent = [(self._described.send(each), each) for each in headers]
        if layout.size:
            buffer = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
            for tensor, target in zip(tensors, layout.views(buffer)):
                target.copy_(tensor)
            sent.append((self._address.send(buffer), buffer))
        self._underway.add(sent)
        self._underway.wait(self._ahead)

    def flush(self) -> None:
        """Wait until the peer has all headers; the device goes on when it has sent everything."""
        self._underway.wait(0)


class DirectReceiver:
    """The receiving end."""

    posts = True

    def __init__(self, address: Address, described: Address, device: torch.device) -> None:
        self._address, self._described, self._device = address, described, device
        self._posted: tuple[dist.Work, Tensor] | None = None

    def post(self, rows: int) -> None:
        """Get ready for the next header; nothing on the device."""
        del rows  # no size is guessed
        if self._posted is None:
            header = torch.empty(LEAST, dtype=torch.uint8)
            self._posted = self._described.receive(header), header

    def receive(self, rows: int, copy: Copy = torch.clone) -> tuple[Tensor, ...]:
        """Wait for the header; the device waits for the message."""
        self.post(rows)
        assert self._posted is not None
        (work, header), self._posted = self._posted, None
        work.wait()
        if header_size(header) > LEAST:
            header = torch.empty(header_size(header), dtype=torch.uint8)
            self._described.receive(header).wait()
        layout = read_numbers(read_header(header)[1])
        buffer = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
        if layout.size:
            self._address.receive(buffer).wait()
        # Memory of their own: what swaps them out, or changes them in place, is to see no more than one of them.
        return tuple(copy(part) for part in layout.views(buffer))
