"""Channels between stages. Each channel carries ordered messages along one route: from one rank to another, either
activations or gradients.

A message is a flat tuple of tensors of any shapes. The transport depends on the two ranks: shared memory within a host,
gloo between hosts, NCCL between GPUs. All transports have the same interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.machine.device import CopyEngine
from parallax.mesh import Mesh, Route, routes_of
from parallax.runtime.channels.direct_channel import DirectReceiver, DirectSender
from parallax.runtime.channels.group_channel import Address, GroupReceiver, GroupSender
from parallax.runtime.channels.message import Copy
from parallax.runtime.channels.shared_channel import Contact, Listener, SharedReceiver, SharedSender
from parallax.runtime.channels.staging import staging_for


class Sender(Protocol):
    """The sending end of one channel."""

    def send(self, tensors: Sequence[Tensor], rows: int) -> None:
        """Send one message of a micro-batch's ``rows`` rows. The call blocks only while the peer is too many messages
        behind. The caller may drop the tensors at once, but must not change them before :meth:`Channels.drain`
        returns."""

    def flush(self) -> None:
        """Wait until the peer has received all messages. Call it after :meth:`Channels.drain`."""


class Receiver(Protocol):
    """The receiving end of one channel. ``posts``: whether :meth:`post` has an effect."""

    posts: bool

    def post(self, rows: int) -> None:
        """Post the receive of the next message, expected to be of ``rows`` rows."""

    def receive(self, rows: int, copy: Copy = torch.clone) -> tuple[Tensor, ...]:
        """Wait for the next message and return its tensors. The caller owns them, and each has its own version counter.

        If the channel keeps its own memory, ``copy`` copies each tensor out of that memory.
        """


class Channels:
    """All channels of one rank. Construction is collective over the mesh."""

    def __init__(self, mesh: Mesh, copies: CopyEngine) -> None:
        # Streams of their own: messages do not queue behind swap traffic.
        self._mesh, self._staging = mesh, staging_for(mesh.device, copies.on_own_streams())
        self._senders: list[SharedSender] = []
        self._listener: Listener | None = None
        self._contacts: list[Contact] = []
        if mesh.world is not None and mesh.device.type == "cpu":
            self._listener = Listener()
            self._contacts = mesh.all_gather_object(self._listener.contact)

    def sender(self, route: Route, ahead: int) -> Sender:
        """Return the sending end of ``route`` on this rank. At most ``ahead`` messages are sent but not yet
        received."""
        if self._mesh.direct(route):
            return DirectSender(*self._addresses(route), self._mesh.device, ahead)
        if not self._shares_memory(route.receiver):
            return GroupSender(Address(*self._mesh.channel(route)), self._staging, ahead)
        self._senders.append(SharedSender(route, self._contacts[route.receiver], ahead))
        return self._senders[-1]

    def receiver(self, route: Route) -> Receiver:
        """Return the receiving end of ``route`` on this rank."""
        if self._mesh.direct(route):
            return DirectReceiver(*self._addresses(route), self._mesh.device)
        if self._listener is None or not self._shares_memory(route.sender):
            return GroupReceiver(Address(*self._mesh.channel(route)), self._staging)
        return SharedReceiver(route, self._listener, self._contacts[route.sender])

    def transports(self) -> dict[str, str]:
        """Return the name of the transport to each rank to which this rank sends, for example {"0 -> 1": "shared
        memory"}."""
        routes = (each for each in routes_of(self._mesh.plan) if each.sender == self._mesh.rank)
        return {f"{each.sender} -> {each.receiver}": self._transport(each) for each in routes}

    def _transport(self, route: Route) -> str:
        if self._mesh.direct(route):
            return dist.get_backend(self._mesh.routes[route])
        if self._shares_memory(route.receiver):
            return "shared memory"
        return "gloo" if self._mesh.device.type == "cpu" else "gloo, staged through the host"

    def drain(self) -> None:
        """Wait until the tensors of all sent messages have been copied, so that the caller may change them. Raise the
        error of a failed send."""
        self._staging.drain()

    def close(self) -> None:
        """Release all channels. A peer that still waits for this rank gets an error."""
        for sender in self._senders:
            sender.close()
        if self._listener is not None:
            self._listener.close()
        self._staging.close()

    def _addresses(self, route: Route) -> tuple[Address, Address]:
        """Return two addresses of ``route``: for device buffers and for headers."""
        return Address(*self._mesh.channel(route)), Address(*self._mesh.host_channel(route))

    def _shares_memory(self, rank: int) -> bool:
        if self._listener is None:
            return False
        mine, theirs = self._listener.contact, self._contacts[rank]
        return mine.place is not None and mine.place == theirs.place
