"""Bandwidths, measured, not looked up, in the way that the swap will use them: through the page cache, in pieces."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from parallax.errors import ConfigError, check_positive
from parallax.files import cache_directory, existing_parent, replacing
from parallax.host import cpu_model, cuda_devices

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
