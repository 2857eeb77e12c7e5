"""Read the cores and the memory that this process may use on its host, after all limits.

``/proc/meminfo`` rarely gives the memory that a process may use: containers limit it by control group, batch systems by
rlimit, and a quota may allow half a core. So every limit in force is read, and the tightest one counts.
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
from functools import cache
from pathlib import Path, PurePosixPath

import psutil

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_USUAL_TRIM_BYTES = 128 * 1024  # glibc's M_TRIM_THRESHOLD
# Size of a block. After it is freed, malloc has smaller blocks in its heap, which glibc allows up to 32 MiB.
_FREED_BYTES = 32 * 2**20 - 2**16
_KEPT_BYTES = 2**31 - 1  # free bytes at the end of malloc's heap: the most that mallopt takes
RETURNED_BYTES = 256 * 1024  # the smallest block returned at once, see return_freed_memory
_TOUCHED_BYTES, _TOUCHES = 2**26, 5  # more bytes than caches hold
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # as malloc's: shared pages take twice as long
# bytes of tensors between two reads of the process's memory, which take microseconds each
LOOK_BYTES = 2**20
_PAGE_BYTES = resource.getpagesize()
HUGE_PAGE_BYTES = 2 * 2**20
_TUNABLES = "GLIBC_TUNABLES"
SMALLEST_TRIM = 2 * 2**20  # bytes of freed memory worth a trim
_returns_freed = False  # whether return_freed_memory is in force


def _cgroup_files(controller: str, v1_name: str, v2_name: str, root: Path) -> Iterator[Path]:
    """Yield the files that hold a limit of this process: those of its control group and of all parent groups.

    The files are called ``v1_name`` in version 1 of control groups, where they belong to ``controller``, and
    ``v2_name`` in version 2. ``root`` is the root of the file system, which tests replace.
    """
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
    """Return the number of cores that this process may use: its affinity mask, reduced by control-group quotas.

    The number may be a fraction such as 1.5. ``root`` is the root of the file system, which tests replace.
    """
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
    """A limit on memory, called ``name``, with the bytes that are already used of it. It applies to each process
    separately if ``per_process`` is True; otherwise all ranks of the host share it."""

    name: str
    limit_bytes: int
    used_bytes: int
    per_process: bool

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Return those limits on memory, of control groups and of rlimit, that are below the machine's RAM. ``root`` is the
    root of the file system, which tests replace."""
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
    """Return the bytes charged to the control group with the limit file ``limit``, without caches that the kernel frees
    before it kills a process; 0 if they cannot be read."""
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
    """Return how many bytes of RAM each of ``processes`` new processes can use within all limits, if all use the
    same."""
    shared = [psutil.virtual_memory().available]
    own: list[int] = []
    for limit in memory_limits():
        (own if limit.per_process else shared).append(limit.free_bytes)
    return min([min(shared) // processes, *own])


def shared_memory_bytes() -> int | None:
    """Return the size of ``/dev/shm``; None if there is none."""
    try:
        return psutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _status_bytes(field: str) -> int:
    """Return the value of ``field`` in ``/proc/self/status`` in bytes; 0 if the field is missing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return _status_bytes("VmRSS") or psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Return the peak of resident memory since :func:`reset_peak_resident`, or since the process started if that call
    failed."""
    if peak := _status_bytes("VmHWM"):
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def return_freed_memory() -> bool:
    """Make glibc return every freed block of 256 KiB or more to the system at once; return whether that succeeded.

    By default malloc keeps freed blocks for reuse, so the process may hold 1.4 times the bytes of its tensors.
    Returning the blocks causes a page fault for each page of each tensor. These faults take a quarter to a half of the
    step time of a small model, so this function is used only near a memory budget. :class:`MemoryBound` costs much less
    if a limit is enough. The setting applies to the whole process and cannot be undone, because malloc's previous
    settings cannot be read.
    """
    global _returns_freed  # of the process
    _returns_freed = _set_malloc(
        {_M_MMAP_THRESHOLD: RETURNED_BYTES, _M_TRIM_THRESHOLD: _USUAL_TRIM_BYTES}
    )
    return _returns_freed


def prefer_huge_pages(address: int, size: int) -> None:
    """Ask Linux to back new memory of ``size`` bytes at ``address`` with huge pages.

    Nothing is done unless :func:`return_freed_memory` is in force, which places each large block in a mapping of its
    own. With huge pages, mapping, filling and unmapping a block of 28 MiB costs 14 page faults instead of 7000. A no-op
    on systems without huge pages.
    """
    start, end = -(-address // _PAGE_BYTES), (address + size) // _PAGE_BYTES
    if not _returns_freed or (end - start) * _PAGE_BYTES < HUGE_PAGE_BYTES:
        return
    with contextlib.suppress(OSError, AttributeError):
        first, length = start * _PAGE_BYTES, (end - start) * _PAGE_BYTES
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE
        )


def huge_page_variables() -> dict[str, str]:
    """Return environment variables with which malloc asks Linux for huge pages, for processes to be started.

    Fresh memory of large tensors then takes one page fault for each 2 MiB, except at their ends. The result is empty if
    the user has set variables of glibc.
    """
    return {} if _TUNABLES in os.environ else {_TUNABLES: "glibc.malloc.hugetlb=1"}


def coalescing_variables() -> dict[str, str]:
    """Return environment variables with which malloc always merges a freed tensor with free neighbours, for processes
    to be started.

    torch aligns tensors to 64 bytes. To do so, glibc cuts pieces of at most 96 bytes off both ends of a larger block.
    By default, freed pieces of this size are cached (tcache, fast bins) and count as used. Then the freed tensor
    between them has fewer bytes than another tensor of its size requests, and the heap grows. Without these caches
    small allocations take longer. The result is empty if the user has set variables of glibc.
    """
    if _TUNABLES in os.environ:
        return {}
    return {_TUNABLES: "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}


@cache  # a third of a second with huge pages
def fresh_memory_seconds(*, huge: bool = False) -> float:
    """Return the CPU seconds per byte of allocating memory from the system and freeing it (page faults, zeroing,
    unmapping).

    ``huge``: with huge pages, if the system has them. The result is the minimum over several mappings. The time of a
    second write to the same pages is subtracted.
    """
    found = []
    for _ in range(_TOUCHES):
        start = time.thread_time()
        with mmap.mmap(-1, _TOUCHED_BYTES, flags=_PRIVATE) as fresh:
            if huge:
                with contextlib.suppress(OSError, AttributeError):
                    fresh.madvise(mmap.MADV_HUGEPAGE)
            pages = (ctypes.c_char * _TOUCHED_BYTES).from_buffer(fresh)
            ctypes.memset(pages, 1, _TOUCHED_BYTES)
            touched = time.thread_time()
            ctypes.memset(pages, 2, _TOUCHED_BYTES)
            again = time.thread_time()
            del pages
        found.append(time.thread_time() - start - 2 * (again - touched))
    return max(0.0, min(found) / _TOUCHED_BYTES)


def use_one_arena() -> bool:
    """Make glibc serve all threads started later from the main thread's arena; return whether that succeeded.

    malloc_trim shrinks the end of that arena only; other arenas would keep up to 64 MiB of freed memory each. The
    setting applies to the whole process.
    """
    return _set_malloc({_M_ARENA_MAX: 1})


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse, in a process that repeats the same computation.

    By default, glibc returns the end of its heap to the system when the free memory there reaches twice the largest
    block freed so far, but at most 64 MiB. Then each page of the next block faults, and a step with recomputation took
    1.4 times as long. This function frees one large block, so that tensors of up to 32 MiB are in the heap, and then
    forbids glibc to return its end: :func:`trim_freed_memory` does, near a :class:`MemoryBound`. Allocate long-lived
    tensors such as weights first: otherwise they would lie between freed blocks and fragment the heap. No-op after
    :func:`return_freed_memory`.
    """
    if _returns_freed:
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
        libc.free(libc.malloc(_FREED_BYTES))  # mapped, never written
    _set_malloc({_M_TRIM_THRESHOLD: _KEPT_BYTES})


def _set_malloc(settings: dict[int, int]) -> bool:
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        return all(libc.mallopt(name, value) for name, value in settings.items())
    return False


def data_bytes() -> int:
    """Return the resident bytes that hold data of this process. The call takes a few microseconds.

    Pages of files, shared memory, and memory in :func:`outside_device_memory` are excluded.
    """
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            _, resident, shared, *_ = os.read(file, 256).split()
        finally:
            os.close(file)
    except OSError:
        return resident_bytes()
    return (int(resident) - int(shared)) * _PAGE_BYTES - _outside.bytes


class MemoryBound:
    """Keeps the memory of this process below a bound: freed memory that malloc keeps for reuse is returned to the
    system.

    ::

            data_bytes ▲     bound ───────────────────────
                       │        ╱│  ╱│     below the bound, memory that malloc keeps costs nothing;
                       │     ╱   │╱  │╱    near the bound, all of it is returned (``malloc_trim``)
                       │  ╱  tensors
                       └───────────────────▶ calls of :func:`relieve_memory`

    A loop that stays below the bound has no extra cost. A loop that reaches it has page faults only for pages that were
    returned and are used again. Memory grows unobserved between two calls of :func:`relieve_memory`. So the memory is
    trimmed before it reaches the bound, at a distance equal to the recent growth between two calls (at most a sixteenth
    of ``growth_bytes``). If tensors alone reach the bound, the memory is trimmed again only when at least 2 MiB, or a
    256th of ``growth_bytes`` if that is more, can be freed.

    The ``growth_bytes`` of all open bounds of a process are added. No setting of malloc is changed, so closing the last
    bound restores the default behaviour.
    """

    def __init__(self, growth_bytes: int) -> None:
        """Set the bound to ``growth_bytes`` above the present memory, or below the present memory if the number is
        negative."""
        if not _bounds:
            _freed.start()
        self.growth_bytes, self.before_bytes = growth_bytes, data_bytes()
        self._most = self.before_bytes
        self.begin_high_water()
        self.trims = 0  # number of trims
        _bounds.append(self)
        _freed.move_line()
        self.line_bytes = _freed.line_bytes()

    def begin_high_water(self) -> None:
        self._high_water = peak_resident_bytes()

    def note(self, now: int) -> None:
        """Raise the observed peak to ``now``, a value of :func:`data_bytes`, if it was lower."""
        self._most = max(self._most, now)

    def peak_bytes(self) -> int:
        """Return the peak of :func:`data_bytes` from the opening of the bound until now, or until it was closed.

        It is derived from the kernel's high-water mark if that mark rose. Otherwise it is the largest observed value.
        """
        if self not in _bounds:
            return self._most
        now, high_water = data_bytes(), peak_resident_bytes()
        self.note(now)
        if high_water > self._high_water:
            self.note(high_water - (resident_bytes() - now))
        return self._most

    def close(self) -> None:
        """Remove the bound. A second call is a no-op."""
        self.peak_bytes()
        if self in _bounds:
            _bounds.remove(self)
            _freed.move_line()


class _FreedMemory:
    """State shared by all open :class:`MemoryBound` objects: the sum of their bounds, and the memory at the last
    check."""

    def __init__(self) -> None:
        self._base = self._seen = self._step = self._tensors = self._handled = 0
        self._check_after = 0  # bytes handled

    def start(self) -> None:
        trim_freed_memory()
        self._base = self._seen = self._tensors = data_bytes()
        self._step = 0

    def line_bytes(self) -> int:
        return self._base + self._growth()

    def move_line(self) -> None:
        """Set after how many more bytes of tensors memory is checked again, from the distance between the memory at the
        last check and the sum of the open bounds. Call this method when that sum has changed."""
        self._check_after = max(LOOK_BYTES, (self.line_bytes() - self._seen) // 16)

    def is_due(self, handled: int | None) -> bool:
        """Return whether memory should be checked now, after ``handled`` more bytes of tensors since the last call;
        True if ``handled`` is None, which means that the number is unknown."""
        if handled is None:
            return True
        self._handled += handled
        return self._handled >= self._check_after

    def check(self, coming: int) -> None:
        self._handled = 0
        now, growth = data_bytes(), max(0, self._growth())
        self._step = min(max(self._step - self._step // 256, now - self._seen), growth // 16)
        self._seen, self._tensors = now, min(self._tensors, now)
        for bound in _bounds:
            bound.note(now)
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


_bounds: list[MemoryBound] = []  # open bounds
_freed = _FreedMemory()


def memory_is_bounded() -> bool:
    """Return whether a :class:`MemoryBound` is open."""
    return bool(_bounds)


def relieve_memory(handled: int | None = None, *, coming: int = 0) -> None:
    """Return freed memory to the system if a :class:`MemoryBound` is open and this process is near the bound.

    Call this often while memory grows: when autograd saves a tensor, when a tensor is loaded, after a block.
    ``handled`` is the number of bytes of tensors since the last call, if known; then memory is checked once per MiB of
    tensors, or less often far from the bound. ``coming`` is the number of bytes that other threads are about to
    allocate.
    """
    if _bounds and _freed.is_due(handled):
        _freed.check(coming)


def trim_freed_memory() -> bool:
    """Return all whole freed pages of all malloc arenas to the system; return whether glibc supports that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        return True
    return False


def reset_peak_resident() -> bool:
    """Reset :func:`peak_resident_bytes`; return False if the system cannot, so that the peak only grows."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class ResidentMeter:
    """Measures the peak memory that holds data of this process since the meter was created.

    Pages of files (program code, the text of training rows) are excluded, because the system can reclaim them. Memory
    in :func:`outside_device_memory` is excluded, too. The kernel keeps one high-water mark for all pages, so each
    reading covers the time since the last reading of any meter.
    """

    def __init__(self) -> None:
        with _outside.lock:
            _update_meters()
            self._base, self._peak = resident_bytes() - _uncounted_bytes(), 0
            _outside.meters.add(self)

    def peak_bytes(self) -> int:
        """Return the peak so far; call it about once per step."""
        with _outside.lock:
            _update_meters()
            return self._peak

    def note(self, high_water: int) -> None:
        """Raise the peak to the high-water mark ``high_water``, minus the bytes in use when the meter was created."""
        self._peak = max(self._peak, high_water - self._base)


class _OutsideMemory:
    """The bytes of this process that belong to no stage, and the meters that must subtract these bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self.meters: weakref.WeakSet[ResidentMeter] = weakref.WeakSet()
        self.lock = threading.RLock()  # reentrant: an arena's finalizer may run at any point


_outside = _OutsideMemory()


def _uncounted_bytes() -> int:
    """Return the resident bytes that no meter counts: pages of files, and memory in :func:`outside_device_memory`."""
    return _status_bytes("RssFile") + _outside.bytes


def _update_meters() -> None:
    """Raise the peaks of all meters and bounds to the high-water mark since the last call, and reset that mark."""
    for bound in _bounds:
        bound.peak_bytes()
    high_water = peak_resident_bytes() - _uncounted_bytes()
    for meter in list(_outside.meters):
        meter.note(high_water)
    reset_peak_resident()
    for bound in _bounds:
        bound.begin_high_water()


@contextlib.contextmanager
def outside_device_memory(change: int) -> Iterator[None]:
    """A context for allocating or freeing memory that must not count as memory of the device.

    ``change`` is the number of bytes allocated, negative if they are freed. On a machine whose RAM serves as host and
    device, these bytes belong to the host. If other threads allocate and free memory meanwhile, the meters may miss up
    to ``change`` bytes of that memory.
    """
    with _outside.lock:
        if change > 0:
            _update_meters()
        there = change < 0
        try:
            yield
            there = True
        finally:
            if there:  # otherwise allocating failed, and the bytes are freed
                _outside.bytes += max(change, 0)
                _update_meters()
                _outside.bytes += min(change, 0)


@contextlib.contextmanager
def unmapping_files() -> Iterator[None]:
    """A context for unmapping files whose pages this process has read.

    The high-water mark includes these pages, and their number is known only while they are mapped. So the meters are
    read at the start of the context, and the mark is reset at its end.
    """
    with _outside.lock:
        _update_meters()
        try:
            yield
        finally:
            reset_peak_resident()
            for bound in _bounds:
                bound.begin_high_water()


def boot_identity() -> str:
    """Return the identity of the running kernel, equal in all its containers."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def host_identity() -> str:
    """Return a text that is equal for two processes if and only if they can signal each other and connect over
    loopback."""
    parts = [socket.gethostname(), boot_identity()]
    for read in (
        lambda: os.readlink("/proc/self/ns/pid"),
        lambda: os.readlink("/proc/self/ns/net"),
    ):
        with contextlib.suppress(OSError):
            parts.append(read())
    return " ".join(parts)


def node_name() -> str:
    """Return the name that Slurm gives this node if Slurm started this process, otherwise the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_address(other: str) -> str:
    """Return this host's address on the route to ``other``; '' if that is loopback or if there is no route.

    No packet is sent.
    """
    with contextlib.suppress(OSError):
        if not other:
            return ""
        family, *_, place = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            own = str(probe.getsockname()[0])
        return "" if ipaddress.ip_address(own.partition("%")[0]).is_loopback else own
    return ""


def interface_of(address: str) -> str:
    """Return the network interface that has ``address``, or ''."""
    for name, entries in psutil.net_if_addrs().items() if address else ():
        if address in (entry.address for entry in entries):
            return name
    return ""


def cpu_model() -> str:
    """Return the name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
