"""Two hosts on one machine: network namespaces, joined by a link whose bandwidth is limited.

Each host has a name, an address, a folder and a core of its own; what they share is the kernel. Making them needs root
and iproute2's ip and tc.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORT = 29400
_BURST_AND_DELAY = ("burst", "256kb", "latency", "50ms")  # 0.95 Gbit/s of 1 come through
_SECONDS = 20.0


class HostError(RuntimeError):
    """Raised if network namespaces are not available."""


@dataclass(frozen=True)
class Host:
    """One of the two; ``folder`` is where its processes start."""

    name: str
    namespace: str
    interface: str
    address: str
    core: int
    folder: Path

    def start(self, *command: str, log: Path) -> subprocess.Popen[bytes]:
        """A process of this host."""
        inside = f"hostname {self.name}; exec taskset -c {self.core} " + ' "$@"'
        prefix = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "bash", "-c", inside]
        environment = {
            key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"
        }
        own = self.folder / "tmp"  # of which nothing is left when its power fails
        own.mkdir(exist_ok=True)
        with log.open("ab") as file:
            return subprocess.Popen(
                [*prefix, "bash", *command],
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**environment, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "TMPDIR": str(own)},
            )

    def processes(self) -> list[int]:
        """Return the processes of this host."""
        found = _run("ip", "netns", "pids", self.namespace, check=False)
        return [int(word) for word in found.split()]

    def kill(self) -> None:
        """Kill all processes of the host. Unlike after a power failure, the kernel closes their connections."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def set_link(self, *, up: bool) -> None:
        """Disable or enable the link at this host."""
        state = "up" if up else "down"
        _run("ip", "-n", self.namespace, "link", "set", self.interface, state)


class TwoHosts(contextlib.AbstractContextManager["TwoHosts"]):
    """The hosts ``a`` and ``b``, with folders in ``folder``, until the block ends. Raises :class:`HostError` with
    the reason where there can be none."""

    def __init__(self, folder: Path, rate: str = "1gbit") -> None:
        mark = f"px{os.getpid() % 100000}"
        cores = sorted(os.sched_getaffinity(0))
        self.hosts = tuple(
            Host(
                f"node-{letter}",
                f"{mark}{letter}",
                f"{mark}{letter}",
                f"10.77.0.{number}",
                cores[min(number, len(cores)) - 1],
                folder / letter,
            )
            for number, letter in enumerate("ab", 1)
        )
        self._rate = rate
        self.started: list[subprocess.Popen[bytes]] = []
        self._made = contextlib.ExitStack()

    @property
    def a(self) -> Host:
        """The host at which ranks join."""
        return self.hosts[0]

    @property
    def b(self) -> Host:
        """The other one."""
        return self.hosts[1]

    def move(self, folder: Path) -> None:
        """Let processes that start from now on do so in other folders inside ``folder``."""
        self.hosts = tuple(
            replace(host, folder=folder / letter) for host, letter in zip(self.hosts, "ab")
        )
        for host in self.hosts:
            host.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> TwoHosts:
        check_possible()
        with contextlib.ExitStack() as made:
            for host in self.hosts:
                host.folder.mkdir(parents=True, exist_ok=True)
                _run("ip", "netns", "add", host.namespace)
                made.callback(_run, "ip", "netns", "del", host.namespace, check=False)
            self._join()
            self._made = made.pop_all()
        return self

    def _join(self) -> None:
        a, b = self.hosts
        _run("ip", "link", "add", a.interface, "type", "veth", "peer", "name", b.interface)
        for host in self.hosts:
            space = ("ip", "-n", host.namespace)
            _run("ip", "link", "set", host.interface, "netns", host.namespace)
            _run(*space, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _run(*space, "link", "set", interface, "up")
            limit = ("root", "tbf", "rate", self._rate, *_BURST_AND_DELAY)
            inside = ("ip", "netns", "exec", host.namespace)
            try:
                _run(*inside, "tc", "qdisc", "add", "dev", host.interface, *limit)
            except subprocess.CalledProcessError as error:
                reason = error.stderr.decode().strip()
                raise HostError(f"a link cannot be limited here: {reason}") from error

    def __exit__(self, *args: object) -> None:
        with self._made:
            self.stop()

    def start(
        self,
        processes: int,
        settings: Sequence[str],
        *,
        nodes: str = "2",
        on: Sequence[Host] | None = None,
    ) -> list[subprocess.Popen[bytes]]:
        """The same line on both hosts, or ``on`` some, with so many ranks on each, of a run over ``nodes``; what they
        print goes to ``out.txt`` in their folders."""
        command = [str(ROOT / "launch" / "torchrun.sh"), f"{self.a.address}:{PORT}", nodes]
        started = [
            host.start(*command, str(processes), *settings, log=host.folder / "out.txt")
            for host in (self.hosts if on is None else on)
        ]
        self.started += started
        return started

    def stop(self) -> None:
        """End all processes of both hosts, and enable the link."""
        for host in self.hosts:
            host.kill()
            host.set_link(up=True)
        while self.started:
            self.started.pop().wait(_SECONDS)


def check_possible() -> None:
    """Raise :class:`HostError` with the reason where no such hosts can be made."""
    missing = [tool for tool in ("ip", "tc", "unshare", "taskset") if shutil.which(tool) is None]
    if missing:
        raise HostError(f"{', '.join(missing)} not found: install iproute2 and util-linux")
    if os.geteuid() != 0:
        raise HostError("network namespaces need root")
    name = f"px{os.getpid() % 100000}t"
    try:
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode().strip()
        raise HostError(f"network namespaces cannot be made here: {reason}") from error
    _run("ip", "netns", "del", name, check=False)


def _run(*command: str, check: bool = True) -> str:
    found = subprocess.run(command, check=check, capture_output=True, timeout=_SECONDS)
    return found.stdout.decode()
