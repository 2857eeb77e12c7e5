"""Connections between the ranks' watches: one line of JSON per message, a star around rank 0.

They must tell that a process has ended the moment it ends, whatever its main thread does and whichever way torch's own
connections are blocked, so they are sockets of their own. A listening port is open only while the ranks meet, on the
loopback address alone where all are on one host, otherwise on that of the interface that torch is told to use, and
whoever does not know the word that rank 0 gave the others is turned away.
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
from parallax.nodes.together import from_all, from_first, rank_and_size

MEETING_SECONDS = 30.0  # for all ranks to connect
_ANSWER_SECONDS = 3.0  # for one address to connect and to answer
# For a peer that has been stopped: its buffers take more than is ever sent to it.
_SEND_SECONDS = 1.0
_LONGEST_LINE = 1 << 16
# Without an answer of the other host's kernel, whatever its processes do: the network is cut, or the host has gone.
UNREACHABLE_SECONDS = 8.0
_CUT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}


class UnreachableError(ConnectionError):
    """Nothing goes to the other end any more, and nobody there has closed it."""


class PeerLink:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            limit = round(UNREACHABLE_SECONDS * 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        self.socket = connection
        self._half = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send it. To a peer that has gone nothing is sent: that it has gone is read, not noticed here."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have come; ConnectionError where the peer has gone, :class:`UnreachableError` where nothing
        reaches it. Call it when there is something to read."""
        try:
            part = self.socket.recv(_LONGEST_LINE)
        except OSError as error:
            if error.errno in _CUT:
                raise UnreachableError(error.strerror) from error
            if isinstance(error, TimeoutError):
                return
            raise
        if not part:
            raise ConnectionError("the peer has gone")
        *lines, self._half = (self._half + part).split(b"\n")
        if len(self._half) > _LONGEST_LINE:
            raise ConnectionError("no line of a message ends")
        yield from map(json.loads, lines)

    @property
    def ended(self) -> bool:
        """Whether the peer has gone and all that it said has been read."""
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
    """What a rank knows after it has met the others: of every rank the process, its host and what that is called, and
    its own links."""

    rank: int
    pids: tuple[int, ...]
    hosts: tuple[str, ...]
    names: tuple[str, ...]
    links: dict[int, PeerLink]


def meet() -> Meeting:
    """Connect rank 0 with all others of torch's world. Called by every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Meeting(0, (os.getpid(),), (host_identity(),), (node_name(),), {})
    rank, size = rank_and_size()
    pids, hosts, names = zip(*from_all(lambda: (os.getpid(), host_identity(), node_name())))
    one_host = len(set(hosts)) == 1
    told: Any = None
    listener = None
    if rank == 0:
        where = addresses(one_host)
        listener = _listener(where)
        told = (where, listener.getsockname()[1], secrets.token_hex())
    where, port, word = from_first(lambda: told)
    if listener is None:
        links = {0: reach(where, port, word, rank)}
    else:
        with listener:
            links = welcome(listener, word, size - 1)
    dist.barrier()  # nothing else is sent before every rank has read its welcome
    return Meeting(rank, pids, hosts, names, links)


def addresses(one_host: bool) -> list[str]:
    """Where this host may be reached from the others, best first: an address of the first interface that torch is told
    to use and that is here; where it is told none, of all that are up. The loopback comes last: containers may share
    it."""
    if one_host:
        return ["127.0.0.1"]
    told = [name for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") for name in _listed(key)]
    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    families = (socket.AF_INET, socket.AF_INET6)
    by_name = {
        name: [entry.address for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }
    for name in told:
        own = by_name.get(name.removeprefix("="), [])
        named = [each for each in own if not _is_loopback(each) and "%" not in each]
        if named:
            met = own_address(
                os.environ.get("MASTER_ADDR", "")
            )  # by which the others reached the store
            return [met] if met in named else sorted(named, key=lambda each: ":" in each)[:1]
    found = [address for name in by_name for address in by_name[name]]
    return sorted(found, key=_is_loopback)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _listed(variable: str) -> list[str]:
    return [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]


def _listener(where: list[str]) -> socket.socket:
    """At the one address that the others are told; at all where they are told several."""
    if len(where) == 1:
        family, *_, place = socket.getaddrinfo(where[0], 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", 0), backlog=1024)


def reach(hosts: list[str], port: int, word: str, rank: int) -> PeerLink:
    """Connect with rank 0 at the first of ``hosts`` where it is, and not a stranger, that answers."""
    refused: list[str] = []
    for host in hosts:
        try:
            link = PeerLink(socket.create_connection((host, port), _ANSWER_SECONDS))
        except OSError as error:
            refused.append(f"{host}: {error}")
            continue
        link.send({"rank": rank, "word": word})
        answer = _first_message(link, MEETING_SECONDS if host == hosts[-1] else _ANSWER_SECONDS)
        if answer.get("welcome") is True:
            return link
        link.close()
        refused.append(f"{host}: no answer")
    raise TransportError(
        f"rank {rank} cannot reach rank 0 to watch over the run ({'; '.join(refused)}, port {port}): open the network "
        "between the hosts, or name the interface that connects them in GLOO_SOCKET_IFNAME"
    )


def welcome(listener: socket.socket, word: str, count: int) -> dict[int, PeerLink]:
    """The links of ``count`` ranks that know the word; whoever does not is turned away."""
    links: dict[int, PeerLink] = {}
    end = time.monotonic() + MEETING_SECONDS
    while len(links) < count:
        listener.settimeout(max(0.0, end - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise TransportError(
                f"{count - len(links)} of {count} ranks did not meet rank 0 within {MEETING_SECONDS:.0f} s to watch "
                "over the run: open the network between the hosts, or name the interface that connects them in "
                "GLOO_SOCKET_IFNAME"
            ) from None
        link = PeerLink(connection)
        hello = _first_message(link, _ANSWER_SECONDS)
        if hmac.compare_digest(str(hello.get("word")).encode(), word.encode()):
            links[int(hello["rank"])] = link
            link.send({"welcome": True})
        else:
            link.close()
    return links


def _first_message(link: PeerLink, patience_seconds: float) -> dict[str, Any]:
    """The first message; an empty one where none comes, or something else than a message."""
    end = time.monotonic() + patience_seconds
    while time.monotonic() < end:
        try:
            for message in link.receive():
                return message if isinstance(message, dict) else {}
        except (OSError, ValueError):
            return {}
    return {}
