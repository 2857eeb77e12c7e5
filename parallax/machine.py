"""What this machine has: devices, cores, memory, limits, disk; and the cluster that a run on it can use.

The number in ``/proc/meminfo`` is rarely what a process may have: containers limit it by control group, batch
systems by rlimit, and a quota gives half a core. So every limit in force is read, and the smallest wins.
Bandwidths are measured, not looked up, in the way the swap will use them: through the page cache, 4 MiB at
a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import psutil
import torch

from parallax.errors import ConfigError, check_choice, check_positive
from parallax.plan.cluster import Cluster, Device, Link, Node
from parallax.units import parse_bytes

AUTO = "auto"
_M_MMAP_THRESHOLD = -3  # malloc.h
CPU_RESERVE = 6 * 2**20  # small blocks of malloc, stacks of transfer threads: 3 to 5 MiB measured


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The devices to use; ``auto`` asks the machine.

    ``kind``: cuda or cpu (auto: cuda where present). ``devices``: how many; every one of them works. On a CPU
    a device is a process that computes on ``threads`` cores. ``device_memory``: the budget of each device, a
    hard limit for parameters, gradients, optimizer states and activations. ``host_memory`` and ``disk``:
    bytes that all offloaded data of this machine may take in either tier.
    """

    kind: str = AUTO
    devices: int | str = AUTO
    threads: int | str = AUTO
    device_memory: int | str = AUTO
    host_memory: int | str = AUTO
    disk: int | str = AUTO

    def __post_init__(self) -> None:
        check_choice("cluster.kind", self.kind, [AUTO, "cpu", "cuda"])
        for key in ("devices", "threads"):
            value = getattr(self, key)
            if value != AUTO:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise ConfigError(f"cluster.{key}={value}: accepted are auto or a whole number")
                check_positive(f"cluster.{key}", value)
        for key in ("device_memory", "host_memory", "disk"):
            if getattr(self, key) != AUTO:
                parse_bytes(getattr(self, key), f"cluster.{key}")


# ---------------------------------------------------------------------------------------------- files


def cache_directory() -> Path:
    """Where what can be made again is kept: ``$XDG_CACHE_HOME/parallax`` or ``~/.cache/parallax``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parallax"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends well: temporary file, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def existing_parent(path: Path) -> Path:
    """``path`` or the nearest folder above it that exists: the file system that ``path`` will be on."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def disk_free_bytes(path: Path) -> int:
    """Bytes that this user can still write on the file system of ``path`` (which need not exist yet)."""
    return psutil.disk_usage(str(existing_parent(path))).free


# ------------------------------------------------------------------------------------- cores and memory


def _cgroup_files(controller: str, v1_name: str, v2_name: str, root: Path) -> Iterator[Path]:
    """The files that limit this process: its own control group's and those of every group above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, group = line.split(":", 2)
        parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
        bases = [(mounts, v2_name), (mounts / "unified", v2_name)]
        if controllers:
            bases = [(mounts / folder, v1_name) for folder in sorted({controller, controllers})]
            if controller not in controllers.split(","):
                continue
        for base, name in bases:
            folders = [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
            yield from (folder / name for folder in folders if (folder / name).is_file())


def usable_cores(root: Path = Path("/")) -> float:
    """Cores this process may keep busy: its affinity mask, cut by control-group quotas (so it may be 1.5)."""
    getaffinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(getaffinity(0)) if getaffinity else os.cpu_count() or 1)
    for file in _cgroup_files("cpu", "cpu.cfs_quota_us", "cpu.max", root):
        fields = file.read_text().split()
        if file.name == "cpu.cfs_quota_us":
            fields.append((file.parent / "cpu.cfs_period_us").read_text().strip())
        if fields[0] not in ("max", "-1"):
            cores = min(cores, int(fields[0]) / int(fields[1]))
    return cores


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit in force. ``per_process``: each rank has it for itself; otherwise all ranks share it."""

    name: str
    limit_bytes: int
    used_bytes: int
    per_process: bool

    @property
    def free_bytes(self) -> int:
        """What is left of it."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Control-group and rlimit limits that are tighter than the machine's RAM."""
    limits = []
    for file in _cgroup_files("memory", "memory.limit_in_bytes", "memory.max", root):
        text = file.read_text().strip()
        if text != "max":
            limits.append(MemoryLimit(f"cgroup {file}", int(text), _cgroup_used(file), per_process=False))
    for name, status in (("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            limits.append(MemoryLimit(name, soft, _status_bytes(status), per_process=True))
    total = psutil.virtual_memory().total
    return tuple(limit for limit in limits if limit.limit_bytes < total)


def _cgroup_used(limit: Path) -> int:
    """Bytes charged to the group, less page cache that the kernel drops before it kills."""
    name, cache = ("memory.current", "inactive_file")
    if limit.name == "memory.limit_in_bytes":
        name, cache = ("memory.usage_in_bytes", "total_inactive_file")
    try:
        used = int((limit.parent / name).read_text())
        entries = dict(line.split() for line in (limit.parent / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return max(0, used - int(entries.get(cache, 0)))


def available_memory(processes: int = 1) -> int:
    """RAM that each of ``processes`` new processes can take before a limit or the machine stops it."""
    shared = [psutil.virtual_memory().available]
    own: list[int] = []
    for limit in memory_limits():
        (own if limit.per_process else shared).append(limit.free_bytes)
    return min([min(shared) // processes, *own])


def shared_memory_bytes() -> int | None:
    """Size of ``/dev/shm``; None where there is none."""
    try:
        return psutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _status_bytes(field: str) -> int:
    """A field of ``/proc/self/status`` in bytes; 0 where it is missing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS") or psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """The most resident memory since :func:`reset_peak_resident`, or since the start where that failed."""
    if peak := _status_bytes("VmHWM"):
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def return_freed_memory() -> bool:
    """Make glibc give every freed block of 256 KiB or more back to the system at once; whether it could.

    By default the allocator keeps them for reuse and the holes between them: the process then holds up to 1.4 times
    what its tensors need, which no plan can prove. The price is a page fault for each page of each tensor (about a
    quarter of the step in a small model), so it is paid only where a budget has to be kept.
    """
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 256 * 1024))
    return False


def reset_peak_resident() -> bool:
    """Let :func:`peak_resident_bytes` start anew; False where the system cannot (it then only grows)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class ResidentMeter:
    """The most memory that this process has taken for data since the meter was made.

    Pages of files (code that an operator's first use maps, the text that rows are read from) are left out: the
    system can take them back. The kernel keeps a high water only for all pages together, so each reading covers
    the time since the last one.
    """

    def __init__(self) -> None:
        reset_peak_resident()
        self._base, self._peak = resident_bytes() - _status_bytes("RssFile"), 0

    def peak_bytes(self) -> int:
        """The high water so far; call it about once per step."""
        now = peak_resident_bytes() - _status_bytes("RssFile") - self._base
        reset_peak_resident()
        self._peak = max(self._peak, now)
        return self._peak


# --------------------------------------------------------------------------------------------- devices


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA device as torch sees it."""

    index: int
    name: str
    total_bytes: int


def cuda_devices() -> tuple[CudaDevice, ...]:
    """The visible CUDA devices. Only their properties are read: no context is made, so no memory is taken."""
    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(CudaDevice(i, found.name, found.total_memory) for i, found in enumerate(properties))


def cuda_free_bytes(index: int) -> int:
    """Free memory of a CUDA device; asking makes a context on it (some hundred MiB) in this process."""
    return torch.cuda.mem_get_info(index)[0]


def cpu_model() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


# ---------------------------------------------------------------------------------------------- probes

PROBE_BYTES = 64 * 2**20
PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """Measured bandwidths in bytes per second.

    ``disk_write`` and ``disk_read`` go through the page cache, as the swap does; ``disk_write_synced``
    includes the fsync. ``host_write`` and ``host_read`` are copies to and from pinned host memory on CUDA,
    plain copies elsewhere. ``local_*`` is the link between two ranks of this host.
    """

    directory: str
    copy: float
    disk_write: float
    disk_read: float
    disk_write_synced: float
    host_write: float
    host_read: float
    local: float
    local_latency_seconds: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "directory":
                check_positive(f"probe {name}", float(value))


def _rate(count: int, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return count / max(time.perf_counter() - start, 1e-9)


def probe_copy() -> float:
    """Bytes per second of a memory copy on one thread; the best of four, since noise only slows it down."""
    source = memoryview(bytearray(PROBE_BYTES))
    target = memoryview(bytearray(PROBE_BYTES))

    def copy() -> None:
        target[:] = source

    return max(_rate(PROBE_BYTES, copy) for _ in range(4))


def probe_disk(directory: Path) -> tuple[float, float, float]:
    """(write, read, write with fsync) in bytes per second on the file system of ``directory``.

    Writing is the median of three passes over one file: the first allocates, the others overwrite, as a swap
    file does; a single pass was seen to differ by a factor of ten.
    """
    folder = existing_parent(directory)
    piece = os.urandom(PIECE_BYTES)
    offsets = range(0, PROBE_BYTES, PIECE_BYTES)
    target = bytearray(PIECE_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            handle = file.fileno()

            def write() -> None:
                for offset in offsets:
                    os.pwrite(handle, piece, offset)

            def read() -> None:
                for offset in offsets:
                    os.preadv(handle, [target], offset)

            passes = [_rate(PROBE_BYTES, write) for _ in range(3)]
            seconds = PROBE_BYTES / passes[-1]
            synced = PROBE_BYTES / (seconds + PROBE_BYTES / _rate(PROBE_BYTES, lambda: os.fsync(handle)))
            return statistics.median(passes), _rate(PROBE_BYTES, read), synced
    except OSError as error:
        raise ConfigError(
            f"cannot write {PROBE_BYTES >> 20} MiB in {folder} ({error.strerror}): "
            "free some space or name another folder (swap.directory, run directory)"
        ) from error


def probe_local_link() -> tuple[float, float]:
    """(bytes per second, latency in seconds) of loopback TCP between two threads: an upper bound for gloo."""
    pieces, pings = PROBE_BYTES // PIECE_BYTES, 50
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    with here, there:
        for end in (here, there):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.settimeout(10)

        def answer() -> None:
            for _ in range(pings):
                there.sendall(there.recv(1))
            buffer = memoryview(bytearray(PIECE_BYTES))
            left = PROBE_BYTES
            while left and (count := there.recv_into(buffer, min(left, PIECE_BYTES))):
                left -= count
            there.sendall(b"!")

        def ping() -> None:
            here.sendall(b"?")
            here.recv(1)

        def pour() -> None:
            payload = bytes(PIECE_BYTES)
            for _ in range(pieces):
                here.sendall(payload)
            here.recv(1)

        peer = threading.Thread(target=answer, daemon=True)
        peer.start()
        # The fastest trip: everything slower measures the scheduler of a busy machine, not the link.
        latency = min(1 / _rate(1, ping) for _ in range(pings)) / 2
        rate = _rate(PROBE_BYTES, pour)
        peer.join()
    return rate, latency


def probe_cuda_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    """Bytes per second of copies that involve a CUDA device (pinned host memory or another device)."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        for tensor in (source, target):
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)

    copy()  # the first copy also makes contexts and opens the peer path
    return max(_rate(source.nbytes, copy) for _ in range(4))


def _probe(directory: Path) -> Probes:
    copy = probe_copy()
    write, read, synced = probe_disk(directory)
    local, latency = probe_local_link()
    host_write = host_read = copy
    if torch.cuda.is_available():
        host = torch.zeros(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
        device = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device="cuda:0")
        host_write, host_read = probe_cuda_copy(device, host), probe_cuda_copy(host, device)
        if torch.cuda.device_count() > 1:
            local = probe_cuda_copy(device, device.to("cuda:1"))
    return Probes(
        directory=str(directory),
        copy=copy,
        disk_write=write,
        disk_read=read,
        disk_write_synced=synced,
        host_write=host_write,
        host_read=host_read,
        local=local,
        local_latency_seconds=latency,
    )


def measure_probes(directory: Path, *, fresh: bool = False) -> Probes:
    """The bandwidths of this machine, ``directory`` for the disk; measured once, then read from the cache.

    A plan should not change because the machine was busy for a second, so the first answer is kept per host,
    CPU, torch version and file system; ``fresh`` measures again and keeps the new one.
    """
    device = existing_parent(directory).stat().st_dev
    known = [socket.gethostname(), cpu_model(), torch.__version__, str(device), str(cuda_devices())]
    cache = cache_directory() / f"machine-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}.json"
    if not fresh:
        with contextlib.suppress(OSError, ValueError, TypeError, ConfigError):
            return Probes(**json.loads(cache.read_text()) | {"directory": str(directory)})
    probes = _probe(directory)
    with (
        contextlib.suppress(OSError),
        replacing(cache) as file,
    ):  # a home that cannot be written costs a second
        file.write(json.dumps(asdict(probes), indent=1).encode())
    return probes


# --------------------------------------------------------------------------------------------- cluster


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The devices of a run on this machine: what kind, how many, and how many cores each computes on. ``exact``:
    the RAM of a process is a device with a budget of its own."""

    kind: str
    count: int
    threads: int
    exact: bool


def choose_devices(config: ClusterConfig) -> DeviceChoice:
    """Resolve ``auto``. Raises :class:`ConfigError` when more CUDA devices are asked for than there are."""
    present = len(cuda_devices())
    kind = config.kind if config.kind != AUTO else "cuda" if present else "cpu"
    cores = usable_cores()
    # Three processes even on one core: a pipeline with a replicated stage then shows on any machine.
    count = present if kind == "cuda" else min(8, max(3, int(cores)))
    if config.devices != AUTO:
        count = int(config.devices)
    if kind == "cuda" and not 0 < count <= present:
        asked = "cluster.kind=cuda" if config.devices == AUTO else f"cluster.devices={count}"
        remedy = f"use {present} or fewer, or cluster.kind=cpu" if present else "use cluster.kind=cpu"
        raise ConfigError(f"{asked}: torch {torch.__version__} sees {present} CUDA devices here; {remedy}")
    threads = max(1, int(cores) // count) if config.threads == AUTO else int(config.threads)
    return DeviceChoice(kind, count, threads, exact=kind == "cpu" and config.device_memory != AUTO)


def build_cluster(config: ClusterConfig, *, tier: str, probes: Probes) -> Cluster:
    """This machine as a cluster of one node. ``tier``: auto, host, disk or none (``swap.tier``).

    A budget left at auto keeps a margin for what no plan counts: the CUDA context and the allocator's gaps (a
    tenth of the device), the interpreter and torch itself (a fifth of the available RAM).
    """
    check_choice("swap.tier", tier, [AUTO, "host", "disk", "none"])
    choice = choose_devices(config)
    if tier == "host" and choice.kind == "cpu":
        raise ConfigError("swap.tier=host: on a CPU the RAM is the device itself; use swap.tier=disk")
    tier = tier if tier != AUTO else "host" if choice.kind == "cuda" else "disk"
    disk = (probes.disk_write, probes.disk_read)
    write, read = {"host": (probes.host_write, probes.host_read)}.get(tier, disk)
    tier_bytes = _tier_bytes(config, tier, probes) // choice.count
    devices = tuple(
        Device(
            kind=choice.kind,
            memory_bytes=memory,
            tier=tier,
            tier_bytes=tier_bytes,
            write=Link(bytes_per_second=write),
            read=Link(bytes_per_second=read),
            reserve_bytes=CPU_RESERVE if choice.kind == "cpu" else 0,
        )
        for memory in _device_memory(config, choice)
    )
    concurrent = choice.count if choice.kind == "cuda" else min(choice.count, usable_cores() / choice.threads)
    local = Link(bytes_per_second=probes.local, latency_seconds=probes.local_latency_seconds)
    node = Node(name=socket.gethostname(), devices=devices, concurrent=concurrent)
    return Cluster(nodes=(node,), local=local, remote=local)


def _device_memory(config: ClusterConfig, choice: DeviceChoice) -> list[int]:
    if config.device_memory != AUTO:
        return [parse_bytes(config.device_memory, "cluster.device_memory")] * choice.count
    if choice.kind == "cuda":
        return [device.total_bytes * 9 // 10 for device in cuda_devices()[: choice.count]]
    return [available_memory(choice.count) * 8 // 10] * choice.count


def _tier_bytes(config: ClusterConfig, tier: str, probes: Probes) -> int:
    """What all ranks together may offload; auto leaves a fifth of what is free to others."""
    if tier == "none":
        return 0
    if tier == "host":
        asked, free, key = config.host_memory, available_memory(), "cluster.host_memory"
    else:
        asked, free, key = config.disk, disk_free_bytes(Path(probes.directory)), "cluster.disk"
    return free * 8 // 10 if asked == AUTO else parse_bytes(asked, key)
