"""The ranks' failure links connect, and reject other connections."""

from __future__ import annotations

import contextlib
import errno
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from parallax.errors import TransportError
from parallax.runtime.failure import links
from parallax.runtime.failure.links import PeerLink, addresses, reach, welcome


def everything(end: PeerLink) -> list[dict[str, Any]]:
    """What comes until the peer has gone."""
    messages: list[dict[str, Any]] = []
    with contextlib.suppress(ConnectionError):
        while True:
            messages += end.receive()
    return messages


def test_strangers_are_turned_away_and_ranks_are_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(3) as threads:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as nonsense:
            nonsense.sendall(b"GET / HTTP/1.1\n")
            welcoming = threads.submit(welcome, listener, "word", 2)
            with pytest.raises(TransportError, match="rank 1 cannot reach rank 0"):
                reach(["127.0.0.1"], port, "guess", 1)
            right = [threads.submit(reach, ["127.0.0.1"], port, "word", rank) for rank in (1, 2)]
            found = welcoming.result()
        assert sorted(found) == [1, 2]
        ends = [future.result() for future in right]
        for rank, end in enumerate(ends, 1):
            found[rank].send({"verdict": rank})
            found[rank].send({"bye": True})
            found[rank].close()
            assert everything(end) == [{"verdict": rank}, {"bye": True}]
            end.close()


def test_the_first_address_that_answers_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        port = listener.getsockname()[1]
        joining = threads.submit(
            reach, ["127.0.0.2", "no such host.", "127.0.0.1"], port, "word", 1
        )
        ends: list[PeerLink] = [*welcome(listener, "word", 1).values(), joining.result()]
        assert ends[1].socket.getpeername()[0] == "127.0.0.1"
        for end in ends:
            end.close()


def test_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MEETING_SECONDS", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(TransportError, match="1 of 1 ranks did not"),
    ):
        welcome(listener, "word", 1)


def test_addresses_begin_with_the_interface_set_for_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert addresses(one_host=True) == ["127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing,lo")
    found = addresses(one_host=False)
    assert "127.0.0.1" in found
    assert not [a for a in found[: found.index("127.0.0.1")] if a.startswith("127.") or a == "::1"]


def test_a_port_is_open_on_the_named_interface_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    outside = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family is socket.AF_INET
        and not entry.address.startswith("127.")
        and psutil.net_if_stats()[name].isup
    ]
    if not outside:
        pytest.skip("this host has no address but loopback")
    name, address = outside[0]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", f"={name}")
    assert addresses(one_host=False) == [address]
    with links.listen_at([address]) as listener:
        assert listener.getsockname()[0] == address
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5)


def linked() -> tuple[PeerLink, PeerLink]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return PeerLink(one), PeerLink(other)


def test_a_link_has_ended_when_all_was_read() -> None:
    here, there = linked()
    with contextlib.closing(here):
        assert not here.ended
        there.send({"last": "message"})
        there.close()
        assert not here.ended
        assert list(here.receive()) == [{"last": "message"}]
        assert here.ended
        with pytest.raises(ConnectionError, match="closed the connection"):
            list(here.receive())


class _Cut:
    """A socket whose kernel has had no answer."""

    def recv(self, count: int) -> bytes:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")


class _Slow:
    """One on which nothing has come yet."""

    def recv(self, count: int) -> bytes:
        raise TimeoutError("timed out")


def test_a_network_partition_is_no_slow_peer() -> None:
    here, there = linked()
    with contextlib.closing(there), contextlib.closing(here.socket):
        here.socket, real = _Slow(), here.socket  # type: ignore[assignment]
        assert list(here.receive()) == []
        here.socket = _Cut()  # type: ignore[assignment]
        with pytest.raises(links.UnreachableError):
            list(here.receive())
        real.close()
