"""Channels between two processes of one host, through memory that both have mapped.

A process group sends bytes through the kernel on its own thread, so each message wakes two threads. Here the sender
copies its tensors into a free slot of a shared ring buffer, and writes one byte, the number of the slot, to a Unix
socket. The receiver copies the tensors out and writes one byte back. A changed layout is sent before the message, and a
larger ring replaces one that is too small. ::

    sender                          socket                     receiver
    copy into slot 3                ring, layout, 3  ->        copy out of slot 3
    (slot 3 is free again)          <- 1 byte

Received tensors are in the receiver's own memory, so they may be saved, offloaded and freed like all others.

The ring is an anonymous file in memory, whose descriptor is passed through the socket. The socket has an abstract name.
So no file remains however a process ends, and its peer reads end-of-file at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import socket
import struct
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from parallax import mesh
from parallax.errors import TransportError
from parallax.mesh import Route
from parallax.plan.edge import Edge
from parallax.runtime.channels.message import Copy, Layout, Spec, lay_out, read_numbers, spec_of

_MOST = 128  # messages under way, whose bytes fit into the buffer of any socket
_LAYOUT, _RING = 254, 255  # in place of a slot's number: a layout or a ring follows
_BYTES = [bytes([number]) for number in range(256)]
_HELLO = struct.Struct("qqqqq?")
_RECEIVED = _BYTES[0]
_SIZES = struct.Struct("qq")  # of a ring: slots, and the bytes of one
_COUNT = struct.Struct("q")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
# Bytes. Smaller messages fill the slots in turn; larger ones reuse a slot as soon as it is free.
_LARGE = 64 * 1024
_KEPT = 32  # layouts with cached views into the ring
# Seconds of polling before a blocking wait; a wake-up takes half of it on each side.
_PATIENCE = 100e-6

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_all() -> None:
    """Close the sockets that a forked child has inherited. As long as the child keeps them open, the peers cannot see
    that the parent process has ended."""
    for each in list(_sockets):
        each.close()


os.register_at_fork(after_in_child=_close_all)


class Contact(NamedTuple):
    """The address of the process with id ``process``. Processes with the same ``place`` can share memory; senders
    connect to the socket named ``listener``. ``place`` is None if the process cannot share memory."""

    place: str | None
    listener: str
    process: int


class Listener:
    """The socket to which senders to this process connect."""

    def __init__(self) -> None:
        self._socket = _new_socket()
        self._connections: dict[Route, socket.socket] = {}
        self.close = weakref.finalize(self, _close, self._socket, self._connections)
        # \0: an abstract name, not a file.
        self.contact = Contact(_place(), f"\0parallax-{secrets.token_hex(16)}", os.getpid())
        if self.contact.place is not None:
            self._socket.bind(self.contact.listener)
            self._socket.listen(socket.SOMAXCONN)

    def accept(self, route: Route, process: int) -> socket.socket:
        """Accept and return the connection of ``route``; its sender is the process with id ``process``."""
        while route not in self._connections:
            self._wait(process)
            found, _ = self._socket.accept()
            if not _is_own(found):
                found.close()
                continue
            _limit_waits(found)
            sender, receiver, *edge, backward = _HELLO.unpack(_read(found, _HELLO.size))
            self._connections[Route(sender, receiver, Edge(*edge), backward)] = found
        return self._connections[route]

    def _wait(self, process: int) -> None:
        """Wait for a connection. Raises EOFError if the process with id ``process`` ends before it connects, and
        BlockingIOError after the timeout of process groups."""
        connected, either, events = select.poll(), select.poll(), [(0, 0)]
        connected.register(self._socket, select.POLLIN)
        with contextlib.suppress(ProcessLookupError), _open_process(process) as life:
            either.register(self._socket, select.POLLIN)
            either.register(life, select.POLLIN)
            events = either.poll(mesh.TIMEOUT.total_seconds() * 1000)
        if not connected.poll(0):  # the process may have connected and then ended
            raise EOFError if events else BlockingIOError


class SharedSender:
    """The sending end of the channel along ``route``. At most ``ahead`` messages are sent but not yet received.

    ``contact`` is the address of the receiving process.
    """

    def __init__(self, route: Route, contact: Contact, ahead: int) -> None:
        self._peer, self._slots = route.receiver, min(ahead, _MOST)
        self._ring: _Ring | None = None
        self._targets: _Views | None = None
        self._last: Spec | None = None
        self._large = False
        self._free: list[int] = []
        self._sent: deque[int] = deque()  # slots of the messages under way; -1: of a replaced ring
        self._socket = _new_socket()
        self.close = weakref.finalize(self, self._socket.close)
        try:
            self._socket.connect(contact.listener)
            if not _is_own(self._socket):
                raise TransportError(
                    f"a process of another user accepts connections for rank {self._peer}: no channel is opened"
                )
            self._socket.sendall(
                _HELLO.pack(route.sender, route.receiver, *route.edge, route.backward)
            )
        except OSError as error:
            raise _failure(self._peer, error) from error

    def send(self, tensors: Sequence[Tensor], rows: int) -> None:
        """Send one message; blocks only while the peer is ``ahead`` messages behind."""
        del rows  # sizes are not guessed
        spec = spec_of(tensors)
        try:
            if spec != self._last:
                self._describe(spec)
            if self._sent and (self._large or len(self._sent) == self._slots):
                self._settle()
            slot = self._free.pop()
            assert self._targets is not None
            for target, tensor in zip(self._targets[slot], tensors):
                target.copy_(tensor.detach() if tensor.requires_grad else tensor)
            self._sent.append(slot)
            self._socket.send(_BYTES[slot])
        except (OSError, EOFError) as error:
            raise _failure(self._peer, error) from error

    def flush(self) -> None:
        """No-op: a sent message is already in memory that the peer can read."""

    def _settle(self) -> None:
        """Free the slots of messages that the peer has received. If no slot is free, wait for one."""
        full = len(self._sent) == self._slots
        try:
            received = self._socket.recv(_MOST, 0 if full else socket.MSG_DONTWAIT)
        except BlockingIOError:
            if full:
                raise
            return
        if not received:
            raise EOFError
        for _ in received:
            slot = self._sent.popleft()
            if slot >= 0:
                self._free.append(slot)

    def _describe(self, spec: Spec) -> None:
        """Send the layout of the following messages, whose types and shapes are ``spec``. If the ring is too small for
        them, send a larger ring first."""
        layout = lay_out(spec)
        if self._ring is None or layout.size > self._ring.size:
            self._ring = self._grow(layout.size)
        numbers = array("q", layout.numbers).tobytes()
        self._socket.sendall(_BYTES[_LAYOUT] + _COUNT.pack(len(numbers)) + numbers)
        self._last, self._large = spec, layout.size >= _LARGE
        self._targets = self._ring.views(layout)

    def _grow(self, count: int) -> _Ring:
        """Return a new ring with slots of ``count`` bytes. The peer keeps the old ring until it has received all
        messages in it."""
        size = 1 << max(12, (count - 1).bit_length())  # untouched pages use no memory
        file = os.memfd_create("parallax-ring")
        try:
            os.ftruncate(file, size * self._slots)
            self._socket.sendall(_BYTES[_RING])
            socket.send_fds(self._socket, [_SIZES.pack(self._slots, size)], [file])
            ring = _Ring(file, self._slots, size)
        finally:
            os.close(file)
        self._free = list(range(self._slots))
        self._sent = deque([-1] * len(self._sent))
        return ring


class SharedReceiver:
    """The receiving end of the channel along ``route``. It accepts the sender's connection when the first message is
    requested, so that ranks cannot deadlock by creating their channels in different orders.

    ``listener`` is this process's socket, and ``contact`` the address of the sending process.
    """

    posts = False  # messages wait in the ring

    def __init__(self, route: Route, listener: Listener, contact: Contact) -> None:
        self._route, self._listener, self._process = route, listener, contact.process
        self._connection: socket.socket | None = None  # the listener closes it
        self._ring: _Ring | None = None
        self._sources: _Views | None = None
        self._awake = True

    def post(self, rows: int) -> None:
        """No-op: messages arrive in the ring without a posted receive."""

    def receive(self, rows: int, copy: Copy = torch.clone) -> tuple[Tensor, ...]:
        del rows  # sizes are not guessed
        try:
            connection = self._connection
            if connection is None:
                connection = self._connection = self._listener.accept(self._route, self._process)
            slot = self._next_byte(connection)
            while slot >= _LAYOUT:
                self._learn(connection, slot)
                slot = self._next_byte(connection)
            assert self._sources is not None
            tensors = tuple([copy(source) for source in self._sources[slot]])
        except (OSError, EOFError) as error:
            raise _failure(self._route.sender, error) from error
        # The sender may have ended after this message; the next receive reports it.
        with contextlib.suppress(OSError):
            connection.send(_RECEIVED)
        return tensors

    def _next_byte(self, connection: socket.socket) -> int:
        try:
            found = connection.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            found = self._wait(connection)
        if not found:
            raise EOFError
        return found[0]

    def _wait(self, connection: socket.socket) -> bytes:
        """Wait for the next byte from the peer, and return it; b"" if the peer has ended. If the previous wait took
        microseconds, poll and yield the core instead of sleeping."""
        start = time.perf_counter()
        while self._awake and time.perf_counter() < start + _PATIENCE:
            os.sched_yield()
            try:
                return connection.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
        found = connection.recv(1)
        self._awake = time.perf_counter() < start + 2 * _PATIENCE
        return found

    def _learn(self, connection: socket.socket, what: int) -> None:
        """Read a new ring or a new layout from the socket. ``what`` is the byte that announces which of them
        follows."""
        if what == _RING:
            sizes, (file,), _, _ = socket.recv_fds(connection, _SIZES.size, 1)
            try:
                self._ring = _Ring(file, *_SIZES.unpack(sizes))
            finally:
                os.close(file)
        else:
            assert self._ring is not None
            (count,) = _COUNT.unpack(_read(connection, _COUNT.size))
            numbers = tuple(array("q", _read(connection, count)))
            self._sources = self._ring.views(read_numbers(numbers))


class _Ring:
    """A ring of ``slots`` slots of ``size`` bytes each, in the memory of the open file ``file``. Sender and receiver
    both map this memory, and each of the two processes has its own object of this class."""

    def __init__(self, file: int, slots: int, size: int) -> None:
        self.size = size
        self._memory = torch.frombuffer(mmap.mmap(file, slots * size), dtype=torch.uint8)
        self._views: dict[Layout, _Views] = {}

    def views(self, layout: Layout) -> _Views:
        """Return a dict from each slot's number to the tensors in this slot, for messages with ``layout``."""
        if layout not in self._views:
            if len(self._views) == _KEPT:
                self._views.clear()
            self._views[layout] = _Views(self._memory, self.size, layout)
        return self._views[layout]


class _Views(dict[int, list[Tensor]]):
    """A dict from each slot's number to the tensors in this slot, which are created on first access.

    ``memory`` is the whole ring, ``size`` the bytes of a slot, and ``layout`` the layout of the tensors in a slot.
    """

    def __init__(self, memory: Tensor, size: int, layout: Layout) -> None:
        super().__init__()
        self._memory, self._size, self._layout = memory, size, layout

    def __missing__(self, slot: int) -> list[Tensor]:
        found = self[slot] = self._layout.views(self._memory, slot * self._size)
        return found


def _place() -> str | None:
    """Return a string that is equal in all processes that can share memory with this one; None if memory cannot be
    shared."""
    try:
        os.close(os.memfd_create("parallax"))
        os.close(os.pidfd_open(os.getpid()))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    except (AttributeError, OSError):
        return None
    return " ".join([boot, *spaces, str(os.geteuid())])


@contextlib.contextmanager
def _open_process(process: int) -> Iterator[int]:
    """Yield a descriptor that becomes readable when ``process`` ends."""
    life = os.pidfd_open(process)
    try:
        yield life
    finally:
        os.close(life)


def _read(connection: socket.socket, count: int) -> bytes:
    """Wait until ``count`` bytes have arrived on ``connection``, and return them."""
    found = connection.recv(count, socket.MSG_WAITALL)
    if len(found) < count:
        raise EOFError
    return found


def _new_socket() -> socket.socket:
    """Return a socket whose operations time out after the timeout of process groups."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _limit_waits(made)
    return made


def _limit_waits(connection: socket.socket) -> None:
    """Set the socket's timeouts to that of process groups. They are set in the kernel, because Python's own would cost
    another system call for each wait."""
    _sockets.add(connection)
    limit = struct.pack("ll", int(mesh.TIMEOUT.total_seconds()), mesh.TIMEOUT.microseconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user. Any user may connect to an abstract socket name."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


def _close(listener: socket.socket, connections: dict[Route, socket.socket]) -> None:
    for each in (listener, *connections.values()):
        each.close()


def _failure(rank: int, error: Exception) -> TransportError:
    """Return a :class:`TransportError` that describes ``error``, which the channel to or from ``rank`` has raised."""
    if isinstance(error, EOFError | BrokenPipeError | ConnectionError):
        return TransportError(f"rank {rank} has ended or given up: its own messages say why")
    if isinstance(error, BlockingIOError):
        return TransportError(
            f"rank {rank} did not answer within {mesh.TIMEOUT}: is it still at work?"
        )
    return TransportError(f"the channel to rank {rank} failed: {error}")
