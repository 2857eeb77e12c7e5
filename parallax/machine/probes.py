"""Measure the bandwidths of this machine with the access patterns of offloading, and the slow-down of concurrent
ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from parallax.common.documents import SMALL_BYTES, read_json
from parallax.common.files import cache_directory, existing_parent, replacing
from parallax.errors import ConfigError, check_positive
from parallax.machine.accelerators import accelerator_of, own_device, present_devices, present_kind
from parallax.machine.host import cpu_model, usable_cores

PROBE_BYTES = 64 * 2**20
PIECE_BYTES = 4 * 2**20
_AS_MALLOC = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared pages take twice as long
_EDITION = 2  # version of cached bandwidths; others are measured again
TOGETHER = 8  # most processes measured at once; more are assumed to be as slow as the last
TURNS = 5
TURN_SECONDS = 0.25
SUMS = 4  # number of all-reduces of few numbers in a turn
_MATRIX_SIZE = 384  # of a product that takes about a millisecond
EXCHANGES = 32  # number of all-reduces of few numbers in close succession in a turn
_TOGETHER_EDITION = 2  # of the cached speeds of concurrent processes; others are measured again
REDUCED_BYTES = 16 * 2**20  # bytes of gradients in the all-reduce that ends a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """Measured bandwidths in bytes per second.

    ``copy`` is a memory copy on one thread. ``disk_write`` and ``disk_read`` go through the page cache, as offloading
    does; ``disk_write_synced`` includes fsync. ``host_write`` and ``host_read`` are copies from the device to host
    memory and back; the host memory is pinned if there is an accelerator. ``local`` and ``local_latency_seconds``
    describe the link between two ranks of this host. ``context_bytes`` is the device memory outside torch's allocator
    after libraries were used; 0 if unknown.
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
    context_bytes: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("directory", "context_bytes"):
                check_positive(f"probe {name}", float(value))


def _rate(count: int, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return count / max(time.perf_counter() - start, 1e-9)


def probe_copy() -> float:
    """Return the bytes per second of a memory copy on one thread: the best of four measurements."""
    source = memoryview(bytearray(PROBE_BYTES))
    target = memoryview(bytearray(PROBE_BYTES))

    def copy() -> None:
        target[:] = source

    return max(_rate(PROBE_BYTES, copy) for _ in range(4))


def probe_disk(directory: Path) -> tuple[float, float, float]:
    """Return (write, read, write with fsync) in bytes per second on the file system of ``directory``, on one thread.

    The access pattern is that of offloading. Data to write is in main memory, not in a core's cache, and its checksum
    is computed before each write. Data is read into newly allocated memory, and its checksum is computed after each
    read. The results of writing and reading are medians of three passes over one file, because single passes differed
    by a factor of ten. The first pass of writing allocates the file, and the others overwrite it.
    """
    folder = existing_parent(directory)
    source = np.frombuffer(os.urandom(PIECE_BYTES) * (PROBE_BYTES // PIECE_BYTES), np.uint8)
    offsets = range(0, PROBE_BYTES, PIECE_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            handle = file.fileno()

            def write() -> None:
                for offset in offsets:
                    piece = source[offset : offset + PIECE_BYTES]
                    np.add.reduce(piece.view(np.uint64))
                    os.pwrite(handle, piece.data, offset)

            def read() -> None:
                for offset in offsets:
                    fresh = mmap.mmap(-1, PIECE_BYTES, flags=_AS_MALLOC)
                    target = np.frombuffer(fresh, np.uint8)
                    os.preadv(handle, [target.data], offset)
                    np.add.reduce(target.view(np.uint64))

            written = [_rate(PROBE_BYTES, write) for _ in range(3)]
            seconds = PROBE_BYTES / written[-1]
            synced = PROBE_BYTES / (
                seconds + PROBE_BYTES / _rate(PROBE_BYTES, lambda: os.fsync(handle))
            )
            return (
                statistics.median(written),
                statistics.median(_rate(PROBE_BYTES, read) for _ in range(3)),
                synced,
            )
    except OSError as error:
        raise ConfigError(
            f"cannot write {PROBE_BYTES >> 20} MiB in {folder} ({error.strerror}): "
            "free some space or name another folder (swap.directory, run directory)"
        ) from error


def probe_local_link() -> tuple[float, float]:
    """Return (bytes per second, latency in seconds) of loopback TCP between two threads. Messages of gloo between two
    ranks of this host are no faster."""
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
        # the minimum: slower round trips measure the scheduler of a busy machine, not the link
        latency = min(1 / _rate(1, ping) for _ in range(pings)) / 2
        rate = _rate(PROBE_BYTES, pour)
        peer.join()
    return rate, latency


def probe_device_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the bytes per second of copies from ``source`` to ``target``: the best of four measurements.

    One of the two tensors is on an accelerator, the other in pinned host memory or on another device.
    """

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        for tensor in (source, target):
            if not tensor.is_cpu:
                torch.accelerator.synchronize(tensor.device)

    copy()  # the first copy also creates contexts and opens the peer connection
    return max(_rate(source.nbytes, copy) for _ in range(4))


def probe_peers(kind: str) -> float:
    """Return the bytes per second between the first two devices of ``kind``; 0 if that cannot be measured.

    A separate process measures. This process may be the rank of the first device, and a context that it creates on the
    second device would occupy memory there until it ends.
    """
    code = f"from parallax.machine.probes import print_peer_rate; print_peer_rate({kind!r})"
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": _import_path()},
        )
        return float(done.stdout.split()[-1])
    return 0.0


def _peer_rate(tensor: torch.Tensor) -> float:
    """Return the bytes per second between two devices of the kind on which ``tensor`` is; 0 if unknown.

    A new process measures. If that fails because only this process has registered the kind of device, this process
    measures instead, unless it is a rank.
    """
    found = probe_peers(tensor.device.type)
    if found or dist.is_initialized():
        return found
    return probe_device_copy(tensor, tensor.to(_neighbour(tensor)))


def print_peer_rate(kind: str) -> None:
    """Entry point of the process that :func:`probe_peers` starts."""
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=torch.device(kind, 0))
    print(probe_device_copy(source, source.to(torch.device(kind, 1))))


def _neighbour(tensor: torch.Tensor) -> torch.device:
    """Return another device of the same kind as the device of ``tensor``."""
    kind, index = tensor.device.type, tensor.device.index
    return torch.device(kind, (index + 1) % len(present_devices(kind)))


def _import_path() -> str:
    """Return a PYTHONPATH that lets a new process import this package."""
    own = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])


def probe_context(device: torch.device) -> int:
    """Return the bytes of the context on ``device``, with the libraries for matrix products and normalisation."""
    weight = torch.randn(64, 64, device=device, requires_grad=True)
    torch.nn.functional.layer_norm(weight @ weight, (64,)).square().sum().backward()
    torch.accelerator.synchronize(device)
    return accelerator_of(device).unaccounted_bytes(device)


def _probe(directory: Path) -> Probes:
    copy = probe_copy()
    write, read, synced = probe_disk(directory)
    local, latency = probe_local_link()
    host_write, host_read, context = copy, copy, 0
    if (kind := present_kind()) is not None:
        host = torch.zeros(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
        device = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=own_device(kind))
        host_write, host_read = probe_device_copy(device, host), probe_device_copy(host, device)
        if len(present_devices(kind)) > 1:
            local = _peer_rate(device) or local
        context = probe_context(device.device)
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
        context_bytes=context,
    )


def measure_probes(directory: Path, *, fresh: bool = False) -> Probes:
    """Return the bandwidths of this machine, from the cache if they were measured before.

    The disk is measured in ``directory``. The first result is kept per host, CPU, torch version, devices and file
    system, so that plans do not change because the machine was busy for a second. If ``fresh``, everything is measured
    again and replaces the cached result.
    """
    device = existing_parent(directory).stat().st_dev
    known = [
        _EDITION,
        socket.gethostname(),
        cpu_model(),
        torch.__version__,
        str(device),
        str(present_devices()),
    ]
    cache = (
        cache_directory()
        / f"machine-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}.json"
    )
    if not fresh:
        with contextlib.suppress(OSError, ValueError, TypeError, ConfigError):
            return Probes(**read_json(cache, SMALL_BYTES) | {"directory": str(directory)})
    probes = _probe(directory)
    # without a writable cache, each call measures again
    with contextlib.suppress(OSError), replacing(cache) as file:
        file.write(json.dumps(asdict(probes), indent=1).encode())
    return probes


# ---------------------------------------------------------------------------------- computing together


@dataclass(frozen=True, slots=True)
class HostSpeeds:
    """Measured speeds of k processes of one host that compute at once, for k = 1, 2, …; empty if not measured.

    ``speeds`` is the speed of each process relative to one process alone. ``sum_seconds`` is the time of an all-reduce
    of a few numbers after computing, as at the end of a step; most of this time passes while the processes' threads
    wake up. ``reduce_seconds`` is the time per byte of an all-reduce of gradients. ``exchange_seconds`` is the time of
    each all-reduce of a few numbers in a series of them. The processes compute for a millisecond before each. This time
    is longer than ``sum_seconds``, because the processes do not arrive together, and a process that gets one result
    late also starts the next all-reduce late.
    """

    speeds: tuple[float, ...] = ()
    sum_seconds: tuple[float, ...] = ()
    reduce_seconds: tuple[float, ...] = ()
    exchange_seconds: tuple[float, ...] = ()


ALONE = HostSpeeds()


def measure_together(count: int, threads: int, *, fresh: bool = False) -> HostSpeeds:
    """Return the speeds of 1 to ``count`` concurrent processes of ``threads`` threads each.

    At most :data:`TOGETHER` processes are measured, once, in about ten seconds for two of them and twenty for four on
    two cores; later calls for as many or fewer read the result from the cache, unless ``fresh`` is True.
    """
    count = min(count, TOGETHER)
    for measured in () if fresh else range(count, TOGETHER + 1):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            found = read_json(_together_file(measured, threads), SMALL_BYTES)
            return HostSpeeds(**{k: tuple(map(float, each[:count])) for k, each in found.items()})
    seconds, sums, reductions, exchanges = compute_together(count, threads)
    speeds = shared_speeds(seconds, usable_cores() / threads)
    together = HostSpeeds(speeds, tuple(sums), tuple(reductions), tuple(exchanges))
    with contextlib.suppress(OSError), replacing(_together_file(count, threads)) as file:
        file.write(json.dumps(asdict(together)).encode())
    return together


def _together_file(count: int, threads: int) -> Path:
    known = [
        _TOGETHER_EDITION,
        socket.gethostname(),
        cpu_model(),
        torch.__version__,
        usable_cores(),
        count,
        threads,
    ]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
    return cache_directory() / f"together-{digest}.json"


def shared_speeds(seconds: list[float], able: float) -> tuple[float, ...]:
    """Return the speed of each of k concurrent processes, for k = 1, 2, …, relative to one process alone.

    ``seconds`` holds, for each k, the CPU seconds in which each process does the same work. ``able`` is the number of
    processes that can have cores of their own. The speed never increases with k, because a measured increase is noise.
    """
    speeds: list[float] = []
    for together, taken in enumerate(seconds, 1):
        speed = min(1.0, able / together) * min(1.0, seconds[0] / taken)
        speeds.append(min([speed, *speeds[-1:]]))
    return tuple(speeds)


def compute_together(count: int, threads: int) -> tuple[list[float], ...]:
    """Return four lists of measurements. Entry k − 1 of each list is for k processes of ``threads`` threads that
    compute at once, from 1 to ``count`` processes.

    1. CPU seconds of one repetition of :func:`compute_on_request`
    2. seconds of an all-reduce of a few numbers
    3. seconds per byte of an all-reduce of gradients
    4. seconds of each all-reduce of a few numbers in a series of them; the processes compute for a millisecond before
       each

    CPU time does not advance while another program has the core, so other programs hardly affect it. Sharing memory and
    caches with other ranks increases it. Each value is the median of several turns, except the CPU seconds of a single
    process, which are the minimum. An all-reduce begins when the last process arrives, so its time is the shortest that
    any process measured. Only the numbers of :func:`measured_counts` are measured. The entries of all others are
    interpolated.
    """
    counts = measured_counts(count)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parallax-probe-")))
        workers = [
            stack.enter_context(_worker(rank, count, threads, folder / "store"))
            for rank in range(count)
        ]
        for worker in workers:
            _answer(worker)
        turns: list[list[float]] = [[] for _ in counts]
        sums: list[list[float]] = [[] for _ in counts]
        reductions: list[list[float]] = [[] for _ in counts]
        exchanges: list[list[float]] = [[] for _ in counts]
        for _ in range(TURNS):
            for computing, taken, summed, reduced, exchanged in zip(
                counts, turns, sums, reductions, exchanges
            ):
                for worker in workers[:computing]:
                    _request(worker, computing)
                answers = [
                    [float(each) for each in _answer(worker).split()]
                    for worker in workers[:computing]
                ]
                taken.append(statistics.fmean(answer[0] for answer in answers))
                summed.extend(map(min, zip(*(answer[1:-3] for answer in answers))))
                reduced.append(min(answer[-3] for answer in answers) / REDUCED_BYTES)
                waves = max(1.0, computing * threads / usable_cores())
                exchanged.append(
                    statistics.fmean(max(0.0, wall - waves * busy) for *_, wall, busy in answers)
                )
    found = [
        [min(turns[0]), *(statistics.median(taken) for taken in turns[1:])],
        *([statistics.median(each) for each in kind] for kind in (sums, reductions, exchanges)),
    ]
    return tuple(np.interp(range(1, count + 1), counts, kind).tolist() for kind in found)


def measured_counts(count: int) -> list[int]:
    """Return the numbers of concurrent processes that are measured: the powers of two below ``count``, and ``count``,
    since each number takes seconds, and more than the one before it.

    >>> measured_counts(1), measured_counts(6)
    ([1], [1, 2, 4, 6])
    """
    return [*(1 << n for n in range((count - 1).bit_length())), count]


@contextlib.contextmanager
def _worker(rank: int, count: int, threads: int, store: Path) -> Iterator[subprocess.Popen[str]]:
    """A context with a new process that runs :func:`compute_on_request` with these arguments. The process is killed at
    the end of the context."""
    arguments = f"{rank}, {count}, {threads}, {str(store)!r}"
    code = (
        f"from parallax.machine.probes import compute_on_request; compute_on_request({arguments})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": _import_path(),
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
        },
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _request(worker: subprocess.Popen[str], computing: int) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{computing}\n")
    worker.stdin.flush()


def _answer(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise ConfigError(
            f"a process that was to measure the cores ended with {worker.wait()}: "
            "is there memory for as many processes as cluster.devices?"
        )
    return line


def compute_on_request(rank: int, count: int, threads: int, store: str) -> None:
    """Entry point of the ``count`` processes of :func:`compute_together`, which rendezvous at the file ``store``. This
    is the process ``rank``, which computes on ``threads`` threads.

    Each line of standard input is the number of processes that compute now. For each line, the process trains three
    transformer layers for a quarter of a second: repeatedly two micro-batches forward, then backward. Four all-reduces
    of a few numbers are spread over this time, and one all-reduce of gradients ends it. Then the process computes about
    a millisecond between two all-reduces of a few numbers. The process prints the CPU seconds of one repetition, the
    seconds of each all-reduce, and for the last ones the mean seconds of one with its computing, and of the computing.
    """
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    groups = [dist.new_group(list(range(computing))) for computing in range(1, count + 1)]
    layers = [
        torch.nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(3)
    ]
    model, rows = torch.nn.Sequential(*layers), torch.randn(2, 256, 256)
    numbers, gradients = torch.zeros(4, dtype=torch.float64), torch.zeros(REDUCED_BYTES // 4)
    matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE)

    def train_once() -> None:
        sums = [model(rows).sum() for _ in range(2)]
        while sums:
            sums.pop().backward()

    train_once()  # allocates gradients, as in a step
    print("ready", flush=True)
    for line in sys.stdin:
        group, spent, repetitions, summing = groups[int(line) - 1], 0.0, 0, list[float]()
        for _ in range(SUMS):
            until, begun = time.perf_counter() + TURN_SECONDS / SUMS, time.process_time()
            train_once()
            repetitions += 1
            while time.perf_counter() < until:
                train_once()
                repetitions += 1
            spent += time.process_time() - begun
            summing.append(1 / _rate(1, partial(dist.all_reduce, numbers, group=group)))
        summing.append(1 / _rate(1, partial(dist.all_reduce, gradients, group=group)))
        summing.extend(_exchange(group, numbers, matrix))
        print(spent / repetitions, *summing, flush=True)


def _exchange(
    group: dist.ProcessGroup | None, numbers: torch.Tensor, matrix: torch.Tensor
) -> tuple[float, float]:
    """Return the mean seconds of computing and an all-reduce of ``numbers``, and the CPU seconds of the computing."""
    dist.all_reduce(numbers, group=group)  # all begin together
    begun, busy = time.perf_counter(), 0.0
    for _ in range(EXCHANGES):
        computing = time.thread_time()
        torch.mm(matrix, matrix)
        busy += time.thread_time() - computing
        dist.all_reduce(numbers, group=group)
    return (time.perf_counter() - begun) / EXCHANGES, busy / EXCHANGES
