"""``parallax doctor``: report the resources of this machine, their speeds, and problems to expect.

Most failures of a first run are caused by the machine: a limit, a host name that resolves to loopback, threads that
compete for two cores. Each cause has a check here, and each finding names a remedy. Findings are advice: the exit code
is 0.
"""

from __future__ import annotations

import json
import platform
import resource
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed
from rich import box
from rich.console import Console
from rich.table import Table

from parallax.common.files import disk_free_bytes, existing_parent
from parallax.common.terminal import safe_console
from parallax.common.units import format_bytes, plural
from parallax.errors import ConfigError
from parallax.machine.accelerators import present_devices, present_kind, unusable_device
from parallax.machine.host import (
    MemoryLimit,
    available_memory,
    cpu_model,
    memory_limits,
    reset_peak_resident,
    shared_memory_bytes,
    usable_cores,
)
from parallax.machine.local import ClusterConfig, choose_devices
from parallax.machine.preflight.disk import check_clock, quota_free_bytes
from parallax.machine.preflight.finding import Finding
from parallax.machine.preflight.memory import check_limits
from parallax.machine.preflight.needs import HostNeeds, RankNeeds
from parallax.machine.probes import Probes, measure_probes

RUNS = Path("runs")
SHARED_MEMORY_WANTED = 64 * 2**20
DISK_WANTED = 20 * 2**30
LOCKED_MEMORY_WANTED = 2**30
TORCH_WANTED = (2, 10)
RAM_FILE_SYSTEMS = {"tmpfs", "ramfs"}
REMOTE_FILE_SYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "ceph",
    "9p",
    "fuse.sshfs",
    "beegfs",
    "gpfs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of all checks.

    ``devices`` lists kind, name, and total and free bytes of each device. ``memory`` holds the available bytes of RAM,
    the size of /dev/shm, and the free bytes of the disk. ``cores`` is the number of usable cores, ``limits`` the limits
    on memory below the RAM. ``probes`` is None if no file can be written to measure the disk. ``findings`` are the
    problems to expect.
    """

    devices: list[dict[str, str | int]]
    cores: float
    memory: dict[str, int | None]
    limits: tuple[MemoryLimit, ...]
    probes: Probes | None
    versions: dict[str, str]
    findings: list[Finding]


def run_doctor(as_json: bool) -> int:
    """Examine this machine, with ``./runs`` as the folder of runs, and print the report: as JSON if ``as_json`` is
    True, otherwise as tables. Return the exit code, 0."""
    report = examine(RUNS)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print_report(report, safe_console())
    return 0


def examine(runs: Path) -> Report:
    """Read this machine's limits, measure it for about two seconds, run the checks, and return the report. ``runs`` is
    the folder of runs, whose disk is checked and measured."""
    findings = [finding for check in (_torch, _devices, _memory, _network) for finding in check()]
    findings += _disk(runs)
    probes = None
    try:
        probes = measure_probes(runs, fresh=True)
    except ConfigError as error:
        findings.append(Finding("the disk could not be measured", str(error)))
    return Report(
        devices=_device_facts(),
        cores=usable_cores(),
        memory={
            "available_bytes": available_memory(),
            "shared_memory_bytes": shared_memory_bytes(),
            "disk_free_bytes": disk_free_bytes(runs),
        },
        limits=memory_limits(),
        probes=probes,
        versions=_versions(),
        findings=findings,
    )


# ---------------------------------------------------------------------------------------------- facts


def _device_facts() -> list[dict[str, str | int]]:
    kind = present_kind() or "cpu"
    found: list[dict[str, str | int]] = [
        {
            "kind": kind,
            "name": f"{device.index}: {device.name}",
            "total_bytes": device.total_bytes,
            # this call creates a context (some hundred MiB) in this process
            "free_bytes": torch.accelerator.get_memory_info(device.index)[0],
        }
        for device in (present_devices(kind) if kind != "cpu" else ())
    ]
    if found:
        return found
    choice = choose_devices(ClusterConfig())
    name = f"{plural(choice.count, 'process')} with {plural(choice.threads, 'thread')} each on {cpu_model()}"
    free = available_memory(choice.count)
    return [{"kind": "cpu", "name": name, "total_bytes": free * choice.count, "free_bytes": free}]


def _versions() -> dict[str, str]:
    distributed = torch.distributed.is_available()
    nccl = distributed and torch.distributed.is_nccl_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gloo": "yes" if distributed and torch.distributed.is_gloo_available() else "no",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "no",
        "cuda": torch.version.cuda or "no",
        "cudnn": str(torch.backends.cudnn.version() or "no"),
    }


def file_system(path: Path) -> str:
    """Return the type of the file system that holds ``path``; '' if unknown."""
    folder, best = existing_parent(path).resolve(), ("", "")
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in mounts:
        place, kind = line.split()[1:3]
        if folder.is_relative_to(place) and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]


# --------------------------------------------------------------------------------------------- checks


def _torch() -> Iterator[Finding]:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < TORCH_WANTED:
        yield Finding(
            f"torch {torch.__version__}: versions before 2.10 have security advisories on loading weights",
            "pip install 'torch>=2.10'",
        )
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        yield Finding(
            "this torch has no gloo: ranks on CPUs cannot communicate",
            "install an official torch wheel",
        )
    if unusable := unusable_device():
        yield Finding(*unusable)


def _devices() -> Iterator[Finding]:
    choice, cores = choose_devices(ClusterConfig()), usable_cores()
    if choice.kind == "cpu" and choice.count * choice.threads > cores:
        yield Finding(
            f"cluster.devices=auto means {choice.count} processes here, but {cores:g} cores can be used",
            f"fine for trying things; for speed use cluster.devices={max(1, int(cores))} or fewer",
        )
    if choice.kind != "cpu":
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if locked != resource.RLIM_INFINITY and locked < LOCKED_MEMORY_WANTED:
            yield Finding(
                f"locked memory ends at {format_bytes(locked)} (ulimit -l): NCCL over InfiniBand may fail",
                "ulimit -l unlimited, or docker run --ulimit memlock=-1",
            )


def _memory() -> Iterator[Finding]:
    for limit in memory_limits():
        whose = "each rank" if limit.per_process else "all ranks together"
        yield Finding(
            f"{limit.name} allows {whose} {format_bytes(limit.limit_bytes)} "
            f"({format_bytes(limit.free_bytes)} of it free)",
            "device_memory=auto respects it; for more raise it (docker --memory, sbatch --mem, ulimit)",
        )
    count = choose_devices(ClusterConfig()).count
    one = RankNeeds(memory_bytes=0)  # a minimal plan
    yield from check_limits(HostNeeds(ranks=(one,) * count, world=count))
    shared = shared_memory_bytes()
    if shared is not None and shared < SHARED_MEMORY_WANTED:
        yield Finding(
            f"/dev/shm has {format_bytes(shared)}, under {format_bytes(SHARED_MEMORY_WANTED)}: NCCL and data "
            "loaders may crash with a bus error",
            "docker run --shm-size=1g (or --ipc=host)",
        )
    if not reset_peak_resident():
        yield Finding(
            "/proc/self/clear_refs cannot be written: memory peaks are of the whole run, not per step",
            "nothing breaks; compare peaks of whole runs only",
        )


def _network() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        address = ""
        what = f"for several hosts: the host name {name} does not resolve ({error.strerror})"
    else:
        what = f"for several hosts: the host name {name} resolves to {address}, where others cannot rendezvous"
    if not address or address.startswith("127."):
        yield Finding(
            what,
            "add --rdzv-conf=is_host=1 on the rendezvous host and "
            "is_host=0 on the others, or correct /etc/hosts",
        )


def _disk(runs: Path) -> Iterator[Finding]:
    folder, kind, free = existing_parent(runs), file_system(runs), disk_free_bytes(runs)
    quota = quota_free_bytes(runs)
    free = free if quota is None else min(free, quota)
    yield from check_clock(runs)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding(
            f"no file can be made in {folder} ({error.strerror}): runs cannot be stored",
            "start in a folder that can be written, or name another run directory",
        )
    if free < DISK_WANTED:
        yield Finding(
            f"{format_bytes(free)} free for swap in {folder}, under {format_bytes(DISK_WANTED)}",
            "free some space, set swap.directory to a larger disk, or set cluster.disk to what may be used",
        )
    if kind in RAM_FILE_SYSTEMS:
        yield Finding(
            f"{folder} is on {kind}, which is RAM: swapping there frees nothing",
            "set swap.directory to a folder on a real disk",
        )
    if kind in REMOTE_FILE_SYSTEMS:
        yield Finding(
            f"{folder} is on {kind}, a network file system: swap will be slow and disturb others",
            "set swap.directory to a local disk of the node",
        )


# ------------------------------------------------------------------------------------------- printing


def print_report(report: Report, console: Console) -> None:
    """Print the report as tables."""
    _print_rows(console, "devices", [(str(d["name"]), _device_memory(d)) for d in report.devices])
    memory = [
        (key.removesuffix("_bytes").replace("_", " "), value)
        for key, value in report.memory.items()
    ]
    rows = [("cores usable", f"{report.cores:g}")]
    rows += [(name, "none" if value is None else format_bytes(value)) for name, value in memory]
    rows += [(limit.name, f"{format_bytes(limit.limit_bytes)} in force") for limit in report.limits]
    _print_rows(console, "memory", rows)
    if report.probes:
        apart = any(device["kind"] != "cpu" for device in report.devices)
        _print_rows(console, "bandwidths", _bandwidths(report.probes, apart=apart))
    _print_rows(console, "versions", list(report.versions.items()))
    console.print("problems to expect", style="bold")
    for finding in report.findings:
        console.print(f"  - {finding.what}", highlight=False, markup=False)
        console.print(f"    remedy: {finding.remedy}", style="green", highlight=False, markup=False)
    if not report.findings:
        console.print("  none found")


def _device_memory(device: dict[str, str | int]) -> str:
    free = format_bytes(int(device["free_bytes"]))
    if device["kind"] == "cpu":
        return f"{free} each"
    return f"{free} free of {format_bytes(int(device['total_bytes']))}"


def _bandwidths(probes: Probes, *, apart: bool) -> list[tuple[str, str]]:
    """Return the name and the text of each bandwidth. ``apart``: whether devices have memory of their own."""
    rates = {
        "memory copy": probes.copy,
        "disk write (page cache)": probes.disk_write,
        "disk write (with fsync)": probes.disk_write_synced,
        "disk read (page cache)": probes.disk_read,
        **(
            {"device to host": probes.host_write, "host to device": probes.host_read}
            if apart
            else {}
        ),
        "between ranks": probes.local,
    }
    rows = [(name, f"{format_bytes(rate)}/s") for name, rate in rates.items()]
    return [*rows, ("latency between ranks", f"{probes.local_latency_seconds * 1e6:.0f} µs")]


def _print_rows(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False
    )
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
