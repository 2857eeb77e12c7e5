"""Connections between the ranks' watches, which are the threads that detect failed ranks. Each message is one line of
JSON. The connections form a star around rank 0.

The end of a process must close its connection at once, even while its main thread or torch's own connections are
blocked. So the watches use their own sockets. The listening port is open only while the ranks connect: on the loopback
address if all ranks are on one host, otherwise on the address of the interface that torch is configured to use. A
connection that does not present the token of rank 0 is rejected.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch.distributed as dist

from parallax.errors import TransportError
from parallax.machine.host import host_identity, node_name, own_address
from parallax.nodes.together import all_gather_result, broadcast_result, rank_and_size

MEETING_SECONDS = 30.0  # for all ranks to connect
_ANSWER_SECONDS = 3.0  # for one address to connect and answer
# The buffers of a stopped peer hold more than is ever sent, so a send need not wait for it.
_SEND_SECONDS = 1.0
_LONGEST_LINE = 1 << 16
# Without an answer of the other host's kernel: the network is partitioned, or the host is down.
UNREACHABLE_SECONDS = 8.0
_PARTITION_ERRORS = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}


class UnreachableError(ConnectionError):
    """The network no longer reaches the peer, although the peer has not closed the connection."""


class PeerLink:
    """One end of a connection between the watches (the threads that detect failed ranks) of two ranks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            limit = round(UNREACHABLE_SECONDS * 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        self.socket = connection
        self._half = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Errors are ignored: the end of a peer is detected by receiving."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the received messages. Call this method when the socket is readable.

        Raises ConnectionError if the peer has closed the connection, and :class:`UnreachableError` if the network no
        longer reaches the peer.
        """
        try:
            part = self.socket.recv(_LONGEST_LINE)
        except OSError as error:
            if error.errno in _PARTITION_ERRORS:
                raise UnreachableError(error.strerror) from error
            if isinstance(error, TimeoutError):
                return
            raise
        if not part:
            raise ConnectionError("the peer has closed the connection")
        *lines, self._half = (self._half + part).split(b"\n")
        if len(self._half) > _LONGEST_LINE:
            raise ConnectionError("the peer sent a line that is too long")
        yield from map(json.loads, lines)

    @property
    def ended(self) -> bool:
        """Whether the peer has closed the connection and no message is left to read."""
        try:
            self.socket.setblocking(False)
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.socket.settimeout(_SEND_SECONDS)

    def close(self) -> None:
        self.socket.close()


@dataclass(frozen=True, slots=True)
class Meeting:
    """The result of connecting the ranks: the process id, the host and the node name of every rank, and the links of
    this rank."""

    rank: int
    pids: tuple[int, ...]
    hosts: tuple[str, ...]
    names: tuple[str, ...]
    links: dict[int, PeerLink]


def meet() -> Meeting:
    """Connect rank 0 with all other ranks of torch's default group. Every rank calls this function."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Meeting(0, (os.getpid(),), (host_identity(),), (node_name(),), {})
    rank, size = rank_and_size()
    pids, hosts, names = zip(
        *all_gather_result(lambda: (os.getpid(), host_identity(), node_name()))
    )
    one_host = len(set(hosts)) == 1
    invitation: Any = None
    listener = None
    if rank == 0:
        where = addresses(one_host)
        listener = listen_at(where)
        invitation = (where, listener.getsockname()[1], secrets.token_hex())
    where, port, token = broadcast_result(lambda: invitation)
    if listener is None:
        links = {0: reach(where, port, token, rank)}
    else:
        with listener:
            links = welcome(listener, token, size - 1)
    dist.barrier()  # no other message is sent before every rank has read its welcome
    return Meeting(rank, pids, hosts, names, links)


def addresses(one_host: bool) -> list[str]:
    """Return the addresses at which other hosts may reach this host, best first.

    If torch is configured to use certain interfaces, the result is one address of the first of them that exists.
    Otherwise the result has the addresses of all interfaces that are up. Loopback addresses come last, because
    containers may share them. ``one_host`` is True if all ranks are on this host; then the result is the loopback
    address.
    """
    if one_host:
        return ["127.0.0.1"]
    configured = [
        name for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") for name in _listed(key)
    ]
    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    families = (socket.AF_INET, socket.AF_INET6)
    by_name = {
        name: [entry.address for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }
    for name in configured:
        own = by_name.get(name.removeprefix("="), [])
        named = [each for each in own if not _is_loopback(each) and "%" not in each]
        if named:
            # The other ranks reached the store by this address.
            met = own_address(os.environ.get("MASTER_ADDR", ""))
            return [met] if met in named else sorted(named, key=lambda each: ":" in each)[:1]
    found = [address for name in by_name for address in by_name[name]]
    return sorted(found, key=_is_loopback)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _listed(variable: str) -> list[str]:
    return [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]


def listen_at(where: list[str]) -> socket.socket:
    """Return a socket that listens at the only address in ``where``, or at all addresses of the host if ``where`` has
    several."""
    if len(where) == 1:
        family, *_, place = socket.getaddrinfo(where[0], 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", 0), backlog=1024)


def reach(hosts: list[str], port: int, token: str, rank: int) -> PeerLink:
    """Connect to rank 0 at ``port`` of the first of ``hosts`` that accepts ``token``. This rank is ``rank``."""
    refused: list[str] = []
    for host in hosts:
        try:
            link = PeerLink(socket.create_connection((host, port), _ANSWER_SECONDS))
        except OSError as error:
            refused.append(f"{host}: {error}")
            continue
        link.send({"rank": rank, "token": token})
        answer = _first_message(link, MEETING_SECONDS if host == hosts[-1] else _ANSWER_SECONDS)
        if answer.get("welcome") is True:
            return link
        link.close()
        refused.append(f"{host}: no answer")
    raise TransportError(
        f"rank {rank} cannot reach rank 0 to watch the run ({'; '.join(refused)}, port {port}): open the network "
        "between the hosts, or name the interface that connects them in GLOO_SOCKET_IFNAME"
    )


def welcome(listener: socket.socket, token: str, count: int) -> dict[int, PeerLink]:
    """Accept ``count`` connections to ``listener`` that present ``token``, and reject all others. Return a dict from
    the rank that has connected to its link."""
    links: dict[int, PeerLink] = {}
    end = time.monotonic() + MEETING_SECONDS
    while len(links) < count:
        listener.settimeout(max(0.0, end - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise TransportError(
                f"{count - len(links)} of {count} ranks did not connect to rank 0 within {MEETING_SECONDS:.0f} s to "
                "watch the run: open the network between the hosts, or name the interface that connects them in "
                "GLOO_SOCKET_IFNAME"
            ) from None
        link = PeerLink(connection)
        hello = _first_message(link, _ANSWER_SECONDS)
        if hmac.compare_digest(str(hello.get("token")).encode(), token.encode()):
            links[int(hello["rank"])] = link
            link.send({"welcome": True})
        else:
            link.close()
    return links


def _first_message(link: PeerLink, patience_seconds: float) -> dict[str, Any]:
    """Return the first message of the new connection ``link``. The result is an empty dict if no message arrives within
    ``patience_seconds`` or if the message is malformed."""
    end = time.monotonic() + patience_seconds
    while time.monotonic() < end:
        try:
            for message in link.receive():
                return message if isinstance(message, dict) else {}
        except (OSError, ValueError):
            return {}
    return {}
