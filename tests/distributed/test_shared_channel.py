"""A channel through shared memory when its peer dies, stays silent or is not who it should be."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from parallax import mesh
from parallax.errors import TransportError
from parallax.mesh import Route
from parallax.plan.edge import Edge, chain
from parallax.runtime.channels.shared_channel import Contact, Listener, SharedReceiver, SharedSender

ROUTE = Route(3, 4, Edge(1, 2, 3), backward=False)
MESSAGE = [torch.ones(2, 3)]
Job = Callable[[Contact, Connection], Any]


@pytest.fixture(autouse=True)
def timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is noticed only then has another message: that a peer did not answer."""
    monkeypatch.setattr(mesh, "TIMEOUT", timedelta(seconds=20))


@contextmanager
def peer(job: Job) -> Iterator[tuple[Listener, Connection, int]]:
    """A process that runs ``job`` with this one's contact, and then dies without any farewell."""
    listener = Listener()
    mine, theirs = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        mine.close()
        job(listener.contact, theirs)
        os.kill(os.getpid(), signal.SIGKILL)
    theirs.close()
    try:
        yield listener, mine, child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listener.close()
        mine.close()


def send_two(contact: Contact, connection: Connection) -> None:
    sender = SharedSender(ROUTE, contact, 4)
    sender.send(MESSAGE, 2)
    sender.send(MESSAGE, 2)


def test_what_a_dead_sender_had_sent_arrives_and_then_its_end() -> None:
    with peer(send_two) as (listener, _, child):
        receiver = SharedReceiver(ROUTE, listener, Contact(None, "", child))
        for _ in range(2):
            assert torch.equal(receiver.receive(2)[0], MESSAGE[0])
        with pytest.raises(TransportError, match="rank 3 has ended"):
            receiver.receive(2)


def send_and_leave_a_child(contact: Contact, connection: Connection) -> None:
    """As a rank does that has data loaders: they live a little longer."""
    send_two(contact, connection)
    child = os.fork()
    if child == 0:
        time.sleep(600)
    connection.send(child)


def test_a_child_of_the_dead_does_not_hide_its_end() -> None:
    with peer(send_and_leave_a_child) as (listener, connection, child):
        grandchild = connection.recv()
        receiver = SharedReceiver(ROUTE, listener, Contact(None, "", child))
        receiver.receive(2)
        receiver.receive(2)
        try:
            with pytest.raises(TransportError, match="rank 3 has ended"):
                receiver.receive(2)
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_a_peer_that_dies_before_it_has_connected() -> None:
    with peer(lambda contact, connection: time.sleep(0.3)) as (listener, _, child):
        receiver = SharedReceiver(ROUTE, listener, Contact(None, "", child))
        with pytest.raises(TransportError, match="rank 3 has ended"):
            receiver.receive(2)
        with pytest.raises(TransportError, match="rank 4 has ended"):
            SharedSender(ROUTE, Contact(None, "\0no-listener", child), 2)


def receive_one(contact: Contact, connection: Connection) -> None:
    listener = Listener()
    connection.send(listener.contact)
    SharedReceiver(ROUTE, listener, Contact(None, "", os.getppid())).receive(2)
    time.sleep(0.3)


def test_a_dead_receiver() -> None:
    with peer(receive_one) as (_, connection, _):
        sender = SharedSender(ROUTE, connection.recv(), 2)
        with pytest.raises(TransportError, match="rank 4 has ended"):  # noqa: PT012
            for _ in range(4):  # it takes one, two may wait
                sender.send(MESSAGE, 2)
        sender.close()


def stay_silent(contact: Contact, connection: Connection) -> None:
    sender = SharedSender(ROUTE, contact, 4)
    listener = Listener()
    connection.send(listener.contact)
    connection.poll(10)
    del sender


def test_a_silent_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "TIMEOUT", timedelta(seconds=0.3))
    with peer(stay_silent) as (listener, connection, child):
        receiver = SharedReceiver(ROUTE, listener, Contact(None, "", child))
        with pytest.raises(TransportError, match="rank 3 did not answer within"):
            receiver.receive(2)
        sender = SharedSender(ROUTE, connection.recv(), 1)
        sender.send(MESSAGE, 2)
        with pytest.raises(TransportError, match="rank 4 did not answer within"):
            sender.send(MESSAGE, 2)
        sender.close()
        connection.send("enough")


def test_a_peer_that_never_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "TIMEOUT", timedelta(seconds=0.3))
    listener = Listener()
    with pytest.raises(TransportError, match="rank 3 did not answer"):
        SharedReceiver(ROUTE, listener, listener.contact).receive(2)
    listener.close()


def test_channels_that_connect_in_another_order() -> None:
    listener = Listener()
    routes = [
        Route(3, 4, edge, backward) for edge in chain(range(1, 5)) for backward in (False, True)
    ]
    senders = {route: SharedSender(route, listener.contact, 2) for route in routes}
    for number, sender in enumerate(senders.values()):
        sender.send([torch.full((2,), float(number))], 2)
    for number, route in reversed(list(enumerate(routes))):
        assert (
            SharedReceiver(route, listener, listener.contact).receive(2)[0].tolist()
            == [float(number)] * 2
        )
        senders[route].close()
    listener.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_are_turned_away() -> None:
    def intrude(contact: Contact, connection: Connection) -> None:
        os.setresuid(65534, 65534, 65534)
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(contact.listener)
        connection.send(stranger.recv(1))  # the end: it is not served
        listener = Listener()
        connection.send(listener.contact)
        connection.poll(10)

    with peer(intrude) as (listener, connection, _):
        time.sleep(0.2)
        sender = SharedSender(ROUTE, listener.contact, 1)
        sender.send(MESSAGE, 2)
        assert SharedReceiver(ROUTE, listener, listener.contact).receive(2)[0].shape == (2, 3)
        assert connection.recv() == b""
        with pytest.raises(TransportError, match="another user"):
            SharedSender(ROUTE, connection.recv(), 1)
        connection.send("enough")
        sender.close()
