"""Channels between devices, over a backend such as NCCL. Neither host waits for its device.

The tensors of a message travel as one buffer from device to device. The process group sends these buffers in the order
in which they were queued. The header, which describes the tensors, travels from host to host over gloo: reading a
header from the device would wait for all work queued before. A device receive is queued only when the caller asks for
the message, because a queued NCCL receive occupies a part of the device until its message arrives.
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
    """The sending end of one channel. At most ``ahead`` messages are sent but not yet received.

    ``address`` is the destination of device tensors, and ``headers`` the gloo address to which headers are sent.
    """

    def __init__(
        self, address: Address, headers: Address, device: torch.device, ahead: int
    ) -> None:
        self._address, self._headers = address, headers
        self._device, self._ahead = device, ahead
        self._underway = Underway()

    def send(self, tensors: Sequence[Tensor], rows: int) -> None:
        """Queue one message on the device, and then wait until at most ``ahead`` messages have not been received.

        ``rows`` is ignored.
        """
        del rows  # no size is guessed
        spec = spec_of(tensors)
        layout, header = lay_out(spec), header_of(spec)
        parts = [torch.zeros(LEAST, dtype=torch.uint8)]
        begin = min(LEAST, header.numel())
        parts[0][:begin].copy_(header[:begin])
        if header.numel() > LEAST:
            parts.append(header)
        sent = [(self._headers.send(each), each) for each in parts]
        if layout.size:
            buffer = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
            for tensor, target in zip(tensors, layout.views(buffer)):
                target.copy_(tensor)
            sent.append((self._address.send(buffer), buffer))
        self._underway.add(sent)
        self._underway.wait(self._ahead)

    def flush(self) -> None:
        """Wait until the peer has received all headers. The device completes the queued sends without the host."""
        self._underway.wait(0)


class DirectReceiver:
    """The receiving end of one channel."""

    posts = True

    def __init__(self, address: Address, headers: Address, device: torch.device) -> None:
        self._address, self._headers, self._device = address, headers, device
        self._posted: tuple[dist.Work, Tensor] | None = None

    def post(self, rows: int) -> None:
        """Post the receive of the next header; nothing is queued on the device. ``rows`` is ignored."""
        del rows  # no size is guessed
        if self._posted is None:
            header = torch.empty(LEAST, dtype=torch.uint8)
            self._posted = self._headers.receive(header), header

    def receive(self, rows: int, copy: Copy = torch.clone) -> tuple[Tensor, ...]:
        """Return the tensors of the next message, with the shapes and dtypes in its header.

        The host waits only for the header. The device receives the values before it runs any work that the caller then
        queues on its stream. ``copy`` is called with each tensor and returns it in memory of its own. ``rows`` is
        ignored.
        """
        self.post(rows)
        assert self._posted is not None
        (work, header), self._posted = self._posted, None
        work.wait()
        if header_size(header) > LEAST:
            header = torch.empty(header_size(header), dtype=torch.uint8)
            self._headers.receive(header).wait()
        layout = read_numbers(read_header(header)[1])
        buffer = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
        if layout.size:
            self._address.receive(buffer).wait()
        # Each tensor gets its own memory: offloading it, or changing it in place, must not affect the others.
        return tuple(copy(part) for part in layout.views(buffer))
