"""Write the machines found here as a ``cluster`` option, so that runs can be planned for them on another machine.

On a Slurm login node, Slurm lists all nodes (``sinfo``). Inside a job, and without Slurm, this host is examined. This
gives the kind and the number of devices, and the memory and disk of the hosts. The catalog of devices adds the memory,
speed and links of each kind. The network between nodes remains unknown.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallax.common.files import disk_free_bytes, replacing
from parallax.common.units import format_bytes
from parallax.errors import ConfigError, printable
from parallax.machine.accelerators import present_devices
from parallax.machine.host import available_memory, usable_cores
from parallax.plan.analytic.hardware import DEVICE_KINDS, LINK_KINDS

CPU = "cpu-core"
_MIB = 2**20
_ASK_SECONDS = 60.0
_GPU = re.compile(r"gpu(?::(?P<kind>[^:,()]+))?:(?P<count>\d+)")
_SLICE = re.compile(r"\d+g\.\d+gb")  # a MIG slice, which is not in the catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host with ``devices`` devices of one ``kind`` of the catalog. ``memory_bytes`` is its RAM and ``disk_bytes``
    its disk; 0 if unknown."""

    name: str
    kind: str
    devices: int
    memory_bytes: int
    disk_bytes: int


def write_cluster(path: Path) -> list[str]:
    """Find the hosts and write them as a ``cluster`` option into the YAML file ``path``.

    Returns a line of text for each group of hosts with the same kind and number of devices.
    Raises :class:`ConfigError` if the devices are unknown or not in the catalog.
    """
    if path.suffix != ".yaml":
        raise ConfigError(
            f"--write-cluster {printable(str(path))}: accepted is a name that ends in .yaml, as options have"
        )
    hosts, source = _find_hosts()
    sorts = _sorts(hosts)
    try:
        with replacing(path) as file:
            file.write(_option(sorts, source).encode())
    except OSError as error:
        raise ConfigError(
            f"--write-cluster {printable(str(path))}: cannot be written ({error.strerror})"
        ) from error
    return [f"{source}: {_shown(sort, count)}" for sort, count in sorts.items()]


# -------------------------------------------------------------------------------------------- asking


def _find_hosts() -> tuple[list[Host], str]:
    """Return all hosts, and a text with the source of this list.

    Inside a Slurm job this host is examined, because Slurm's list does not show which devices belong to the job.
    """
    if shutil.which("sinfo") is None or "SLURM_JOB_ID" in os.environ:
        return [this_host()], "this host"
    return slurm_hosts(_sinfo()), "Slurm"


def this_host() -> Host:
    """Return this host with its accelerators or, if it has none, with each usable core as a device."""
    memory, disk = available_memory(), disk_free_bytes(Path.cwd())
    devices = present_devices()
    if not devices:
        cores = max(1, int(usable_cores()))
        return Host(name="", kind=CPU, devices=cores, memory_bytes=memory, disk_bytes=disk)
    kinds = {catalog_kind(each.name, each.total_bytes) for each in devices}
    (kind,) = kinds if len(kinds) == 1 else (_mixed("this host", kinds),)
    return Host(name="", kind=kind, devices=len(devices), memory_bytes=memory, disk_bytes=disk)


def _sinfo() -> str:
    command = ["sinfo", "--noheader", "--Node", "--format=%N|%G|%m|%c|%d"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ASK_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--write-cluster: sinfo has not answered for {_ASK_SECONDS:g} s; try again when it does"
        ) from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"--write-cluster: Slurm does not list its nodes ({printable(reason)}); repair that, or remove sinfo "
            "from PATH to write down this host"
        )
    return done.stdout


def slurm_hosts(text: str) -> list[Host]:
    """Return the nodes in ``text``, the output of ``sinfo``; a node in several partitions appears once.

    Each line of ``text`` is ``name|generic resources|MB of memory|CPUs|MB of disk``. If some nodes have GPUs, the
    others are omitted.
    """
    lines = dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())
    hosts = {host.name: host for host in map(_slurm_host, lines)}
    if not hosts:
        raise ConfigError(
            "--write-cluster: Slurm lists no nodes; see `sinfo` (SINFO_PARTITION chooses a partition)"
        )
    gpus = [host for host in hosts.values() if host.kind != CPU]
    return gpus or list(hosts.values())


def _slurm_host(line: str) -> Host:
    name, resources, memory, cpus, disk = line.split("|")
    found = [(each["kind"], int(each["count"])) for each in _GPU.finditer(resources)]
    counts: Counter[str] = Counter()
    for kind, count in found:
        if kind is None:
            raise ConfigError(
                f"--write-cluster: Slurm does not name the GPUs of {printable(name)} ({printable(resources)}): "
                f"ask the node itself, srun --nodelist={printable(name)} --gpus=1 --exclusive parallax doctor "
                "--write-cluster FILE"
            )
        counts[catalog_kind(kind)] += count
    if len(counts) > 1:
        _mixed(f"node {printable(name)}", set(counts))
    kind, devices = next(iter(counts.items()), (CPU, _number(cpus)))
    return Host(
        name=name,
        kind=kind,
        devices=devices,
        memory_bytes=_number(memory) * _MIB,
        disk_bytes=_number(disk) * _MIB,
    )


def _number(text: str) -> int:
    """Return the number in ``text``, as ``sinfo`` prints it. The text may end with a +, which ``sinfo`` appends if
    nodes differ."""
    return int(re.sub(r"\D", "", text) or 0)


def catalog_kind(name: str, memory_bytes: int = 0) -> str:
    """Return the catalog's name of a device, given the name that a driver or batch system uses.

    ``name`` is, for example, ``NVIDIA H100 80GB HBM3``, ``tesla_v100-sxm2-32gb`` or ``rtx4090``. Kinds that differ only
    in memory are distinguished by ``memory_bytes``, or by a number in ``name``.
    """
    text = name.lower()
    families = sorted({kind.partition("-")[0] for kind in DEVICE_KINDS if kind != CPU})
    variants = {
        re.sub(r"([a-z])[ _-](?=\d)", r"\1", word) for word in (text, text.replace("_", "-"))
    }
    fits = [
        family
        for family in families
        if any(re.search(rf"(?<![a-z0-9]){family}(?![0-9a-z])", word) for word in variants)
    ]
    if len(fits) != 1 or _SLICE.search(text):
        raise ConfigError(
            f"--write-cluster: the catalog has no device {printable(name)}; accepted are "
            f"{', '.join(kind for kind in DEVICE_KINDS if kind != CPU)}"
        )
    kinds = [kind for kind in DEVICE_KINDS if kind.partition("-")[0] == fits[0]]
    if memory_bytes:
        return min(kinds, key=lambda kind: abs(DEVICE_KINDS[kind].memory_bytes - memory_bytes))
    sized = [kind for kind in kinds if re.search(rf"(?<!\d){kind.partition('-')[2] or '0'}g", text)]
    return (sized or kinds[-1:])[0]


def _mixed(where: str, kinds: set[str]) -> str:
    raise ConfigError(
        f"--write-cluster: {where} has devices of several kinds ({', '.join(sorted(kinds))}), which no cluster to plan "
        "for can have in one node; write the file by hand for one of them"
    )


# ------------------------------------------------------------------------------------------- writing

Sorts = dict[Host, int]


def _sorts(hosts: Sequence[Host]) -> Sorts:
    """Return a dict from each sort of host to the number of its hosts, fastest sort first.

    Hosts with the same kind and number of devices are one sort. Its memory and disk are the smallest among its hosts.
    """
    found: dict[tuple[str, int], list[Host]] = {}
    for host in hosts:
        found.setdefault((host.kind, host.devices), []).append(host)
    alike = {
        Host(
            name=same[0].name,
            kind=kind,
            devices=devices,
            memory_bytes=_least(host.memory_bytes for host in same),
            disk_bytes=_least(host.disk_bytes for host in same),
        ): len(same)
        for (kind, devices), same in found.items()
    }
    order = sorted(alike, key=lambda host: -DEVICE_KINDS[host.kind].peak("bf16") * host.devices)
    return {host: alike[host] for host in order}


def _option(sorts: Sorts, source: str) -> str:
    hosts = list(sorts)
    what = ", ".join(_shown(host, count) for host, count in sorts.items())
    keys = {
        "device": _listed([host.kind for host in hosts]),
        "nodes": _listed(list(sorts.values())),
        "devices_per_node": _listed([host.devices for host in hosts]),
        "host_memory": _gibibytes(_least(host.memory_bytes for host in hosts)),
        "disk": _gibibytes(_least(host.disk_bytes for host in hosts)),
    }
    if hosts[0].kind == CPU:  # the device is a core with its share of the host's memory
        share = min(host.memory_bytes // host.devices for host in hosts)
        keys["device_memory"] = f"{share // _MIB}MiB" if share else ""
    lines = [f"{key}: {value}" for key, value in keys.items() if value]
    return "\n".join(
        [
            f"# To plan for, not to train on: the devices of {source}, {what}.",
            "defaults: [/parallax/cluster/catalog@_here_]",
            *lines,
            f"remote: ethernet-10g  # unknown; one of {', '.join(LINK_KINDS)}",
            "",
        ]
    )


def _listed(values: Sequence[str | int]) -> str:
    return f"[{', '.join(map(str, values))}]" if len(values) > 1 else str(values[0])


def _least(sizes: Iterable[int]) -> int:
    """Return the smallest known size; 0 if all are unknown."""
    return min((size for size in sizes if size), default=0)


def _gibibytes(size: int) -> str:
    """Return a size as text in GiB; '' if it is unknown, so that the catalog's default is used."""
    return f"{size // 2**30}GiB" if size >= 2**30 else ""


def _shown(host: Host, count: int) -> str:
    memory = f", {format_bytes(host.memory_bytes)} of memory" if host.memory_bytes else ""
    return f"{count} node(s) of {host.devices} × {host.kind}{memory}"
