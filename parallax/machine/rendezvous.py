"""Where ranks of several hosts meet: whether it is here, and under which address the others reach this host.

torchrun asks the host's own name for both, which on many machines means loopback, or another network card than the one
that was meant. Who types the meeting place's address knows better, so the answers are taken from it::

    python -m parallax.machine.rendezvous HEAD:PORT     -> options of torchrun, one a line

Slurm knows both itself; its script does not ask here.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Set

import psutil

from parallax.errors import ConfigError, UserError, printable


def torchrun_options(endpoint: str) -> list[str]:
    """What to tell torchrun on this host, which meets others at ``endpoint`` (``HOST:PORT``)."""
    host, port = parse_endpoint(endpoint)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(
            f"{printable(endpoint)}: {printable(host)} has no address here ({error.strerror}); give an address that "
            "all hosts reach, as in 10.0.0.1:29400"
        ) from error
    addresses = {str(place[0]) for *_, place in found}
    if _here(addresses):
        # To others the name means this host, whatever it means here.
        hosts = [] if _torch_knows(host, addresses) else ["--rdzv-conf=is_host=1"]
        return [*hosts, f"--local-addr={host}"]
    family, *_, place = found[0]
    return ["--rdzv-conf=is_host=0", f"--local-addr={_source(family, place, endpoint)}"]


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """``HOST:PORT``; an IPv6 address is in brackets."""
    host, colon, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{printable(endpoint)}: accepted is HOST:PORT such as 10.0.0.1:29400, the same on every host"
        )
    return host, int(port)


def _here(addresses: Set[str]) -> bool:
    """Whether they are this host's. A name that means loopback means this host."""
    own = {each.address for found in psutil.net_if_addrs().values() for each in found}
    return any(each in own or _is_loopback(each) for each in addresses)


def _torch_knows(host: str, addresses: Set[str]) -> bool:
    """Whether torchrun finds out that this is the meeting place; then several of one host may meet there, of which one
    opens the port, while ``is_host=1`` is for one alone."""
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
    """This host's address on the way to ``place``; connecting a datagram socket sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        try:
            way.connect(place)
        except OSError as error:
            raise ConfigError(
                f"{printable(endpoint)}: there is no way from here ({error.strerror}); give an address on a network "
                "that all hosts are in"
            ) from error
        return str(way.getsockname()[0])


def main() -> int:
    """Print the options; the exit code."""
    try:
        print("\n".join(torchrun_options(*sys.argv[1:2] or [""])))
    except UserError as error:
        print(f"parallax: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
