"""Whether ranks of several hosts meet here, and under which address this host is reached."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from parallax.errors import ConfigError
from parallax.machine import rendezvous
from parallax.machine.rendezvous import main, torchrun_options

OWN, OTHER = "10.0.0.1", "10.0.0.2"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """This host, of the address ``OWN``, where names mean what is given."""

    def named(names: dict[str, str]) -> None:
        def resolve(name: str, port: object, **_: object) -> list[tuple[object, ...]]:
            address = names.get(name, name)
            if not address[0].isdigit():
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, port or 0))]

        own = SimpleNamespace(address=OWN)
        monkeypatch.setattr(rendezvous.socket, "getaddrinfo", resolve)
        monkeypatch.setattr(rendezvous.socket, "gethostname", lambda: "one")
        monkeypatch.setattr(rendezvous.psutil, "net_if_addrs", lambda: {"eth0": [own]})
        monkeypatch.setattr(rendezvous, "_source", lambda family, place, endpoint: OWN)

    return named


@pytest.mark.parametrize(
    ("head", "names", "options"),
    [
        # torchrun finds out itself, and may start several times here.
        (OWN, {"one": OWN}, [f"--local-addr={OWN}"]),
        ("one", {"one": OWN}, ["--local-addr=one"]),
        ("one", {"one": "127.0.1.1"}, ["--local-addr=one"]),
        ("127.0.0.1", {}, ["--local-addr=127.0.0.1"]),
        ("localhost", {"localhost": "127.0.0.1"}, ["--local-addr=localhost"]),
        # It would look for another host, for ever.
        (OWN, {"one": "127.0.1.1"}, ["--rdzv-conf=is_host=1", f"--local-addr={OWN}"]),
        (OWN, {}, ["--rdzv-conf=is_host=1", f"--local-addr={OWN}"]),
        ("head", {"head": OWN, "one": "10.9.9.9"}, ["--rdzv-conf=is_host=1", "--local-addr=head"]),
        ("head", {"head": "127.0.0.1"}, ["--rdzv-conf=is_host=1", "--local-addr=head"]),
        (OTHER, {"one": OWN}, ["--rdzv-conf=is_host=0", f"--local-addr={OWN}"]),
        ("two", {"two": OTHER}, ["--rdzv-conf=is_host=0", f"--local-addr={OWN}"]),
    ],
)
def test_the_head_and_its_address(
    host: Callable[[dict[str, str]], None], head: str, names: dict[str, str], options: list[str]
) -> None:
    host(names)
    assert torchrun_options(f"{head}:29400") == options


def test_the_address_on_the_route_to_another_host_is_this_hosts() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        there.bind(("127.0.0.1", 0))
        place = there.getsockname()
        assert rendezvous._source(socket.AF_INET, place, "") == "127.0.0.1"


@pytest.mark.parametrize(
    "endpoint", ["", "head", "head:", ":29400", "head:x", "head:0", "head:70000", "a\nb:x"]
)
def test_what_is_no_meeting_place_is_refused(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous.sys, "argv", ["rendezvous", endpoint])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "accepted is HOST:PORT such as 10.0.0.1:29400" in line


def test_a_name_without_an_address_is_refused(host: Callable[[dict[str, str]], None]) -> None:
    host({})
    with pytest.raises(ConfigError, match="unknown-host has no address here"):
        torchrun_options("unknown-host:29400")
