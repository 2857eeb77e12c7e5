"""What this process may use of its host: cores, memory, devices, and the limits in force.

The number in ``/proc/meminfo`` is rarely what a process may have: containers limit it by control group, batch
systems by rlimit, and a quota gives half a core. So every limit in force is read, and the smallest wins.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import mmap
import os
import platform
import resource
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_USUAL_TRIM_BYTES = 128 * 1024  # glibc's M_TRIM_THRESHOLD
_FREED_BYTES = (
    16 * 2**20
)  # of a block; afterwards malloc keeps up to twice as much at the end of its heap
RETURNED_BYTES = 256 * 1024  # the smallest block that goes back at once, see return_freed_memory
_TOUCHED_BYTES, _TOUCHES = 2**21, 20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # as malloc's: shared pages take twice as long
# Of tensors between two looks at the process's memory, each of some microseconds.
LOOK_BYTES = 2**20
_PAGE_BYTES = resource.getpagesize()
SMALLEST_TRIM = 2 * 2**20  # bytes of freed memory that are worth a trim


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
            limits.append(
                MemoryLimit(f"cgroup {file}", int(text), _cgroup_used(file), per_process=False)
            )
    for name, status in (("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            limits.append(MemoryLimit(name, soft, _status_bytes(status), per_process=True))
    total = psutil.virtual_memory().total
    return tuple(limit for limit in limits if limit.limit_bytes < total)


def _cgroup_used(limit: Path) -> int:
    """Bytes charged to the group, less the caches that the kernel drops before it kills."""
    name, caches = "memory.current", ["inactive_file", "active_file", "slab_reclaimable"]
    if limit.name == "memory.limit_in_bytes":
        name, caches = "memory.usage_in_bytes", ["total_inactive_file", "total_active_file"]
    try:
        used = int((limit.parent / name).read_text())
        entries = dict(
            line.split() for line in (limit.parent / "memory.stat").read_text().splitlines()
        )
    except OSError:
        return 0
    return max(0, used - sum(int(entries.get(each, 0)) for each in caches))


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
    the bytes of its tensors. The price is a page fault for each page of each tensor (a quarter to a half of the step in
    a small model), so it is paid only near a budget; to stay below a limit, :class:`MemoryBound` costs much less.
    Process-wide, and for good: malloc's settings cannot be read, so there is nothing to go back to.
    """
    return _set_malloc({_M_MMAP_THRESHOLD: RETURNED_BYTES, _M_TRIM_THRESHOLD: _USUAL_TRIM_BYTES})


def fresh_memory_seconds() -> float:
    """Processor seconds for each byte of memory that comes fresh from the system and goes back: page faults, zeroing,
    unmapping. The least of some mappings, each without the time of a second write to the same pages."""
    found = []
    for _ in range(_TOUCHES):
        start = time.thread_time()
        with mmap.mmap(-1, _TOUCHED_BYTES, flags=_PRIVATE) as fresh:
            pages = (ctypes.c_char * _TOUCHED_BYTES).from_buffer(fresh)
            ctypes.memset(pages, 1, _TOUCHED_BYTES)
            touched = time.thread_time()
            ctypes.memset(pages, 2, _TOUCHED_BYTES)
            again = time.thread_time()
            del pages
        found.append(time.thread_time() - start - 2 * (again - touched))
    return max(0.0, min(found) / _TOUCHED_BYTES)


def use_one_arena() -> bool:
    """Make glibc serve threads that start from now on from the main thread's arena; whether it could. malloc_trim gives
    back the end of that arena alone: of another one up to 64 MiB of freed memory would stay. Process-wide."""
    return _set_malloc({_M_ARENA_MAX: 1})


def keep_freed_memory() -> None:
    """Make glibc keep what is freed for reuse, in a process that computes the same again and again.

    It gives the end of its heap back when twice the largest block that was freed so far is free there: a few MiB in a
    small model, and a page fault for each page follows in the next block, so that a step that recomputes took 1.17
    times as long. So one block of 16 MiB is freed at once. What is to stay, such as weights, is best allocated before:
    it would lie between what is freed, which then has holes.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
        libc.free(libc.malloc(_FREED_BYTES))  # it is mapped, and nothing is written


def _set_malloc(settings: dict[int, int]) -> bool:
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        return all(libc.mallopt(name, value) for name, value in settings.items())
    return False


def data_bytes() -> int:
    """Resident memory of this process now, without pages of files and shared memory, which it may not be alone to
    hold, and without what is :func:`kept_apart`. A few microseconds, so it may be asked often."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            _, resident, shared, *_ = os.read(file, 256).split()
        finally:
            os.close(file)
    except OSError:
        return resident_bytes()
    return (int(resident) - int(shared)) * _PAGE_BYTES - _apart.bytes


class MemoryBound:
    """A line that this process stays below as far as that is a matter of freed memory, which malloc keeps for reuse.

    ::

        data_bytes ▲     line ────────────────────────
                   │        ╱│  ╱│     below the line, what malloc keeps costs nothing;
                   │     ╱   │╱  │╱    near the line, all of it goes back at once (``malloc_trim``)
                   │  ╱  tensors
                   └───────────────────▶ calls of :func:`relieve_memory`

    A loop that stays below never pays, and one that lives at the line pays a page fault only for pages that went back
    and are used again. Memory grows unseen between two calls, so it goes back as much ahead of the line as it was
    lately seen to grow at one time, to a sixteenth of what is allowed. Where tensors alone fill the line, a trim has
    to be worth it: 2 MiB, or a 256th of what is allowed.

    Memory is the process's, so bounds that are open at the same time add up. No setting of malloc is changed:
    nothing is left over when the last one is closed.
    """

    def __init__(self, growth_bytes: int) -> None:
        """Allow this many bytes beyond what is there now; below zero where what is there counts against them."""
        if not _bounds:
            _freed.start()
        self.growth_bytes, self.before_bytes = growth_bytes, data_bytes()
        self._most = self.before_bytes
        self.begin_high_water()
        self.trims = 0  # times that freed memory went back
        _bounds.append(self)
        _freed.move_line()
        self.line_bytes = _freed.line_bytes()

    def begin_high_water(self) -> None:
        self._high_water = peak_resident_bytes()

    def see(self, now: int) -> None:
        """Remember the most there was."""
        self._most = max(self._most, now)

    def peak_bytes(self) -> int:
        """The most :func:`data_bytes` until it was closed: by the kernel's high water where that rose since it was
        opened, otherwise as seen."""
        if self not in _bounds:
            return self._most
        now, high_water = data_bytes(), peak_resident_bytes()
        self.see(now)
        if high_water > self._high_water:
            self.see(high_water - (resident_bytes() - now))
        return self._most

    def close(self) -> None:
        """Bound no more; a second time does nothing."""
        self.peak_bytes()
        if self in _bounds:
            _bounds.remove(self)
            _freed.move_line()


class _FreedMemory:
    """What all bounds share: where the line is, and when freed memory goes back."""

    def __init__(self) -> None:
        self._base = self._seen = self._step = self._tensors = self._handled = 0
        self._look_after = 0  # bytes handled

    def start(self) -> None:
        trim_freed_memory()
        self._base = self._seen = self._tensors = data_bytes()
        self._step = 0

    def line_bytes(self) -> int:
        return self._base + self._growth()

    def move_line(self) -> None:
        """To where the bounds that are open put it."""
        self._look_after = max(LOOK_BYTES, (self.line_bytes() - self._seen) // 16)

    def due(self, handled: int | None) -> bool:
        """Whether it is worth looking."""
        if handled is None:
            return True
        self._handled += handled
        return self._handled >= self._look_after

    def relieve(self, coming: int) -> None:
        self._handled = 0
        now, growth = data_bytes(), max(0, self._growth())
        self._step = min(max(self._step - self._step // 256, now - self._seen), growth // 16)
        self._seen, self._tensors = now, min(self._tensors, now)
        for bound in _bounds:
            bound.see(now)
        worth = max(SMALLEST_TRIM, growth // 256)
        if now + coming > max(self.line_bytes() - self._step, self._tensors + worth):
            trim_freed_memory()
            for bound in _bounds:
                bound.trims += 1
            self._seen = self._tensors = data_bytes()
        self.move_line()

    @staticmethod
    def _growth() -> int:
        return sum(bound.growth_bytes for bound in _bounds)


_bounds: list[MemoryBound] = []  # that are open
_freed = _FreedMemory()


def memory_is_bounded() -> bool:
    """Whether a :class:`MemoryBound` is open."""
    return bool(_bounds)


def relieve_memory(handled: int | None = None, *, coming: int = 0) -> None:
    """Give freed memory back if a :class:`MemoryBound` is open and its line is near. For places that are passed
    often while memory grows: where autograd saves a tensor, where one comes back, where a block has run.
    ``handled``: bytes of the tensors that passed here since the last call, where the caller knows: the process's memory
    is then looked at for each MiB of them, and the less often the farther the line is. ``coming``: bytes that other
    threads are about to take."""
    if _bounds and _freed.due(handled):
        _freed.relieve(coming)


def trim_freed_memory() -> bool:
    """Give back every whole page of freed memory in all of malloc's arenas; whether it could (glibc can)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        return True
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
    system can take them back; so is what is :func:`kept_apart`. The kernel keeps a high water only for all pages
    together, so each reading covers the time since the last one, of whichever meter.
    """

    def __init__(self) -> None:
        with _apart.lock:
            _look()
            self._base, self._peak = resident_bytes() - _others(), 0
            _apart.meters.add(self)

    def peak_bytes(self) -> int:
        """The high water so far; call it about once per step."""
        with _apart.lock:
            _look()
            return self._peak

    def see(self, high_water: int) -> None:
        """Remember the most there was of what meters count."""
        self._peak = max(self._peak, high_water - self._base)


class _KeptApart:
    """Bytes that are there, and the meters that leave them out."""

    def __init__(self) -> None:
        self.bytes = 0
        self.meters: weakref.WeakSet[ResidentMeter] = weakref.WeakSet()
        self.lock = threading.RLock()  # an owner may be collected anywhere


_apart = _KeptApart()


def _others() -> int:
    """Resident bytes that no meter counts."""
    return _status_bytes("RssFile") + _apart.bytes


def _look() -> None:
    """Show all meters the high water since the last look, which begins anew."""
    for bound in _bounds:
        bound.peak_bytes()
    high_water = peak_resident_bytes() - _others()
    for meter in list(_apart.meters):
        meter.see(high_water)
    reset_peak_resident()
    for bound in _bounds:
        bound.begin_high_water()


@contextlib.contextmanager
def kept_apart(change: int) -> Iterator[None]:
    """Inside, so many bytes of this process become resident, or go where ``change`` is below zero, that are its host's,
    not its device's, where one memory is both: no meter counts them. Of what other threads take meanwhile, and give
    back, so much may be missed."""
    with _apart.lock:
        if change > 0:
            _look()
        there = change < 0
        try:
            yield
            there = True
        finally:
            if there:  # otherwise its owner has failed, and it goes
                _apart.bytes += max(change, 0)
                _look()
                _apart.bytes += min(change, 0)


def boot_identity() -> str:
    """Of the running kernel, whatever containers call their hosts."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def host_identity() -> str:
    """Equal for two processes exactly when they can signal each other and meet on the loopback address."""
    parts = [socket.gethostname(), boot_identity()]
    for read in (
        lambda: os.readlink("/proc/self/ns/pid"),
        lambda: os.readlink("/proc/self/ns/net"),
    ):
        with contextlib.suppress(OSError):
            parts.append(read())
    return " ".join(parts)


def node_name() -> str:
    """What this node is called: by Slurm where it started this process, otherwise by itself."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_address(other: str) -> str:
    """This host's address on the way to ``other``, which may be its own; empty where that is loopback or there is no
    way. Nothing is sent."""
    with contextlib.suppress(OSError):
        if not other:
            return ""
        family, *_, place = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(place)
            own = str(way.getsockname()[0])
        return "" if ipaddress.ip_address(own.partition("%")[0]).is_loopback else own
    return ""


def interface_of(address: str) -> str:
    """The network card that has ``address``; empty where none has."""
    for name, entries in psutil.net_if_addrs().items() if address else ():
        if address in (entry.address for entry in entries):
            return name
    return ""


def cpu_model() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
