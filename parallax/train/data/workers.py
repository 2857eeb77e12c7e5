"""Worker processes that read rows while the rank trains.

A worker is forked before the model is built, so it shares the tables but none of the model's memory. A worker returns
results in anonymous shared memory, which counts neither against the rank's memory budget nor against the size of
``/dev/shm``. A worker ends when its rank ends, even if the rank is killed. A result depends only on the request, so a
new worker can take over the requests of a worker that died. Rank and worker exchange pickled objects, but only with
each other.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallax.common.processes import die_with
from parallax.errors import DataError
from parallax.model.block import transform
from parallax.train.data.order import Taken
from parallax.train.data.table import Table, Values, read_only_process, taken_seconds

logger = logging.getLogger("parallax")

_ALIGNMENT = 64
_SENT_BYTES = (
    2**16
)  # of waiting requests per worker: less than a socket holds, so that sending never blocks
_SIZE = struct.Struct("<q")  # the size that precedes a request
_RESULT = struct.Struct("<qqq")  # number, bytes of the structure, bytes of tensors and arrays
_MOST_DEATHS = 2  # workers that one request may end


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A request to read rows of the table with a given name."""

    table: str
    taken: Taken
    parts: frozenset[str]
    seed: int


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A placeholder for a tensor or array in the shared memory of a result. ``start``: the byte at which its values
    start."""

    start: int
    shape: tuple[int, ...]
    dtype: Any  # torch's or numpy's


def read(tables: Mapping[str, Table], request: RowRequest) -> Values:
    """Return the rows that ``request`` asks for, from one of ``tables``. Each row has its own random numbers."""
    table, taken = tables[request.table], request.taken
    if (set_epochs := getattr(table, "set_epochs", None)) is not None:
        set_epochs(taken.epochs)
    try:
        return table.read(taken.rows, taken.seeds(request.seed), request.parts)
    except MemoryError as error:
        raise DataError(
            f"{len(taken)} row(s) do not fit in memory ({error}): make rows smaller, or trainer.microbatch"
        ) from error


class Workers:
    """``count`` worker processes that read rows of ``tables``."""

    def __init__(self, tables: Mapping[str, Table], count: int) -> None:
        self._tables = tables
        self._context = multiprocessing.get_context("fork")
        self._requests: dict[int, RowRequest] = {}
        self._unsent: deque[int] = deque()
        self._results: dict[int, tuple[Values, dict[str, float]] | Exception] = {}
        self._deaths: dict[int, int] = {}
        self._next = 0
        self._workers: list[_Worker] = []
        for index in range(count):
            self._workers.append(self._start(index))

    def __len__(self) -> int:
        return len(self._workers)

    def submit(self, request: RowRequest) -> int:
        """Queue ``request``, which is sent to the least busy worker as soon as a worker can take it. Return the number
        of the request, for :meth:`result`."""
        number, self._next = self._next, self._next + 1
        self._requests[number] = request
        self._unsent.append(number)
        self._receive(0)
        return number

    def result(self, number: int) -> tuple[Values, dict[str, float]]:
        """Wait for the result of request ``number``. Return its rows, and a mapping from each part of reading, such as
        ``decode``, to the seconds that it took in the worker. Raises the error that reading these rows raised."""
        while number not in self._results:
            self._receive(None)
        del self._requests[number]
        found = self._results.pop(number)
        if isinstance(found, Exception):
            raise found
        return found

    def forget(self, number: int) -> None:
        """Discard a request. A worker may still read it if it has begun."""
        self._requests.pop(number, None)
        self._results.pop(number, None)
        self._receive(0)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.socket.close()
        for worker in self._workers:
            worker.process.join(1)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers = []

    def _start(self, index: int) -> _Worker:
        mine, theirs = socket.socketpair()
        others = [worker.socket for worker in self._workers if worker.index != index]
        process = self._context.Process(
            target=_serve,
            args=(os.getpid(), self._tables, theirs, [*others, mine]),
            name=f"data worker {index}",
            daemon=True,
        )
        process.start()
        theirs.close()
        return _Worker(index, process, mine)

    def _send(self) -> None:
        """Send waiting requests to the least busy workers, up to a limit for each."""
        while self._unsent:
            worker = min(self._workers, key=lambda each: (each.bytes, len(each.sizes)))
            if worker.bytes > _SENT_BYTES:
                return
            number = self._unsent.popleft()
            if number not in self._requests:
                continue
            message = pickle.dumps((number, self._requests[number]))
            worker.sizes[number] = len(message)
            try:
                worker.socket.sendall(_SIZE.pack(len(message)) + message)
            except OSError:  # the worker has died, which the next wait finds
                return

    def _receive(self, timeout: float | None) -> None:
        """Send waiting requests, receive the results that have arrived, and replace workers that have ended. If there
        is no result yet, wait for one, but at most ``timeout`` seconds (None: no limit)."""
        self._send()
        ends: dict[Any, _Worker] = {}
        for worker in self._workers:
            ends[worker.socket] = ends[worker.process.sentinel] = worker
        for worker in {
            worker.index: worker for worker in map(ends.get, wait(list(ends), timeout)) if worker
        }.values():
            if not self._take(worker):
                self._replace(worker)
        self._send()

    def _take(self, worker: _Worker) -> bool:
        """Receive one result of ``worker``; return False if the worker has ended without another result."""
        try:
            header, descriptors, _, _ = socket.recv_fds(
                worker.socket, _RESULT.size, 1, socket.MSG_DONTWAIT
            )
        except OSError:  # nothing has arrived, so the process has ended
            return False
        if len(header) < _RESULT.size or not descriptors:
            return False
        number, structure, size = _RESULT.unpack(header)
        try:
            memory = mmap.mmap(descriptors[0], structure + size)
        finally:
            os.close(descriptors[0])
        del worker.sizes[number]
        if number in self._requests:
            found = pickle.loads(memory[:structure])  # of our own worker
            if isinstance(found, tuple):
                values, seconds = found
                found = _unpacked(values, memory, structure), seconds
            self._results[number] = found
        return True

    def _replace(self, worker: _Worker) -> None:
        """Start a new worker for one that has died, and resend its requests."""
        worker.process.join()
        code, pid = worker.process.exitcode or 0, worker.process.pid
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        worker.socket.close()
        numbers = [number for number in worker.sizes if number in self._requests]
        self._workers[worker.index] = self._start(worker.index)
        if numbers:
            first = numbers[0]
            self._deaths[first] = self._deaths.get(first, 0) + 1
            if self._deaths[first] >= _MOST_DEATHS:
                rows = self._requests[first].taken.rows
                raise DataError(
                    f"data worker {worker.index} (process {pid}) {how} while it read row {rows.min()} or later, "
                    "as did the one before it: read in the rank to see more (data.workers=0)"
                )
        logger.warning("data worker %d (process %s) %s: replaced", worker.index, pid, how)
        self._unsent.extendleft(reversed(numbers))


@dataclass(slots=True)
class _Worker:
    index: int
    process: Any
    socket: socket.socket
    sizes: dict[int, int] = field(
        default_factory=dict
    )  # bytes of each request that it has not answered, by number

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


def _serve(
    parent: int,
    tables: Mapping[str, Table],
    end: socket.socket,
    others: Sequence[socket.socket],
) -> None:
    """Run a worker: read the rows that the rank requests through the socket ``end``, until the rank ends or closes the
    socket. ``parent``: the process id of the rank. ``others``: the rank's sockets of other workers, which this process
    closes."""
    die_with(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the whole group; the rank ends its workers
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for other in others:
        other.close()
    torch.set_num_threads(1)
    read_only_process()
    with end:
        while (message := _received(end)) is not None:
            number, request = pickle.loads(message)  # of our own rank
            buffers: list[tuple[int, Any]] = []
            size = 0
            try:
                values, buffers, size = _packed(read(tables, request))
                structure = pickle.dumps((values, taken_seconds()))
            except Exception as error:
                structure, size = _pickled(error), 0
            try:
                _answer(end, number, structure, buffers if size else [], size)
            except OSError:
                return


def _received(end: socket.socket) -> bytes | None:
    """Return the next request; None after the last one."""

    def exactly(size: int) -> bytes:
        found = b""
        while len(found) < size and (part := end.recv(size - len(found))):
            found += part
        return found

    try:
        header = exactly(_SIZE.size)
        return exactly(_SIZE.unpack(header)[0]) if len(header) == _SIZE.size else None
    except OSError:
        return None


def _pickled(error: Exception) -> bytes:
    try:
        found = pickle.dumps(error)
        pickle.loads(found)  # some exceptions fail only here
    except Exception:
        return pickle.dumps(DataError(f"{type(error).__name__}: {error}"))
    return found


def _packed(values: Values) -> tuple[Any, list[tuple[int, Any]], int]:
    """Return ``values`` with a placeholder for each tensor and array, a list of their offsets and bytes, and the total
    bytes."""
    buffers: list[tuple[int, Any]] = []
    size = 0

    def place(part: Any) -> Any:
        nonlocal size
        if isinstance(part, Tensor) and part.layout is torch.strided and not part.is_nested:
            plain = part.detach().contiguous()
            kind: Any = part.dtype
            data = (
                plain.reshape(-1).view(torch.uint8).numpy()
                if plain.numel()
                else np.empty(0, np.uint8)
            )
        elif isinstance(part, np.ndarray) and not part.dtype.hasobject:
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            kind = part.dtype
        else:
            return part
        leaf = _Leaf(size, tuple(part.shape), kind)
        buffers.append((size, data))
        size += -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
        return leaf

    return transform(values, place, (Tensor, np.ndarray)), buffers, size


def _answer(
    end: socket.socket, number: int, structure: bytes, buffers: list[tuple[int, Any]], size: int
) -> None:
    """Send a result in shared memory: the pickled structure, then the tensors and arrays."""
    structure += b" " * (-len(structure) % _ALIGNMENT)
    if sys.platform == "linux":
        descriptor = os.memfd_create("parallax-rows")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, len(structure) + size)
        with open(descriptor, "wb", closefd=False) as file:  # half the cost of writing to a mapping
            file.write(structure)
            for start, data in buffers:
                file.seek(len(structure) + start)
                file.write(data.data)
        socket.send_fds(end, [_RESULT.pack(number, len(structure), size)], [descriptor])
    finally:
        os.close(descriptor)


def _unpacked(values: Any, memory: mmap.mmap, first: int) -> Values:
    """Return ``values`` with the placeholders replaced by tensors and arrays in ``memory``, which is freed when the
    last of them is freed."""

    def restore(part: Any) -> Any:
        if not isinstance(part, _Leaf):
            return part
        count, start = int(np.prod(part.shape, dtype=np.int64)), first + part.start
        if not isinstance(part.dtype, torch.dtype):
            return np.frombuffer(memory, part.dtype, count, start).reshape(part.shape)
        if not count:
            return torch.empty(part.shape, dtype=part.dtype)
        return torch.frombuffer(memory, dtype=part.dtype, count=count, offset=start).reshape(
            part.shape
        )

    found: Values = transform(values, restore, (_Leaf,))
    return found
