"""Decide whether this host is the rendezvous host, and which address other hosts use for this host.

torchrun derives both from the host name, which often means loopback or the wrong network card. So this module derives
them from the endpoint that the user typed::

    python -m parallax.machine.rendezvous HEAD:PORT     -> options of torchrun, one a line

Under Slurm this module is not needed.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Set

import psutil

from parallax.errors import ConfigError, UserError, printable


def torchrun_options(endpoint: str) -> list[str]:
    """Return the options for torchrun on this host, given the endpoint ``HOST:PORT`` of the rendezvous."""
    host, port = parse_endpoint(endpoint)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(
            f"{printable(endpoint)}: {printable(host)} has no address here ({error.strerror}); give an address that "
            "all hosts reach, as in 10.0.0.1:29400"
        ) from error
    addresses = {str(place[0]) for *_, place in found}
    if _is_this_host(addresses):
        # other hosts resolve the name to this host, whatever it resolves to here
        hosts = [] if _torch_knows(host, addresses) else ["--rdzv-conf=is_host=1"]
        return [*hosts, f"--local-addr={host}"]
    family, *_, place = found[0]
    return ["--rdzv-conf=is_host=0", f"--local-addr={_source(family, place, endpoint)}"]


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``endpoint``, which is ``HOST:PORT``. An IPv6 address is in brackets."""
    host, colon, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{printable(endpoint)}: accepted is HOST:PORT such as 10.0.0.1:29400, the same on every host"
        )
    return host, int(port)


def _is_this_host(addresses: Set[str]) -> bool:
    """Return whether any of ``addresses`` belongs to this host or is loopback."""
    own = {each.address for found in psutil.net_if_addrs().values() for each in found}
    return any(each in own or _is_loopback(each) for each in addresses)


def _torch_knows(host: str, addresses: Set[str]) -> bool:
    """Return whether torchrun itself recognises this host as the rendezvous host ``host``, whose addresses are
    ``addresses``.

    If so, the caller does not set the option ``is_host``. Then several torchrun agents on this host can join, and one
    of them opens the port. With ``is_host=1`` only one agent could join.
    """
    if host in ("localhost", socket.gethostname()) or _is_loopback(host):
        return True
    try:
        named = {str(place[0]) for *_, place in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return False
    return bool(named & addresses)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _source(family: int, place: tuple[object, ...], endpoint: str) -> str:
    """Return this host's address on the route to ``place``, a socket address of ``family``. Error messages name the
    rendezvous ``endpoint``. No packet is sent, because connecting a datagram socket sends none."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place)
        except OSError as error:
            raise ConfigError(
                f"{printable(endpoint)}: there is no route from here ({error.strerror}); give an address on a network "
                "that all hosts are in"
            ) from error
        return str(probe.getsockname()[0])


def main() -> int:
    """Print the options for torchrun, given the endpoint ``HOST:PORT`` on the command line; return the exit code."""
    try:
        print("\n".join(torchrun_options(*sys.argv[1:2] or [""])))
    except UserError as error:
        print(f"parallax: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
