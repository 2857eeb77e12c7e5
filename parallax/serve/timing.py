"""Measure a server at its start: the seconds of batches, and the seconds of the HTTP thread for a request.

``TimedModel`` times the batches that :mod:`.invariance` computes anyway. ``http_seconds`` sends requests to a server
of the model over loopback, and reads the processor time of the server's threads besides the model: the client's time
does not count, nor that of other processes. The model computes meanwhile, because reading a request takes twice as long
where its weights have filled the caches; for the same reason a batch costs something besides its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import uvicorn
from torch import Tensor

from parallax.serve.app import HEADER_LENGTH, ServeApp
from parallax.serve.batching import Batcher
from parallax.serve.config import ServeConfig
from parallax.serve.metrics import ServeMetrics
from parallax.serve.model import NAMES, BatchOutputs, ServedModel, TensorSpec
from parallax.serve.server import http_settings

_CONNECTIONS = 8
_TURNS = 5  # of which the median counts
_ROUNDS = 12  # requests on each connection in a turn, at most
_SECONDS = 0.25  # of a turn, at most
_MOST_READ = 2**28  # bytes: more than caches hold
_FREE_SIZE = 8  # of a dimension that requests choose


class TimedModel(ServedModel):
    """``model``, and the seconds of each batch that it computed, by its rows."""

    def __init__(self, model: ServedModel) -> None:
        self.name, self.version = model.name, model.version
        self.inputs, self.outputs = model.inputs, model.outputs
        self._model = model
        self._measured: dict[int, list[float]] = {}

    def run(self, tensors: Sequence[Tensor]) -> BatchOutputs:
        """See :class:`~parallax.serve.model.ServedModel`."""
        started = time.perf_counter()
        outputs = self._model.run(tensors)
        seconds = time.perf_counter() - started
        self._measured.setdefault(len(tensors[0]), []).append(seconds)
        return outputs

    @property
    def seconds(self) -> dict[int, float]:
        """The seconds by rows. Each number of rows was computed a few times only, so its time is the median of those of
        similar numbers."""
        every = sorted(self._measured)
        found = {}
        for rows in every:
            near = [n for n in every if 0.8 * rows <= n <= 1.25 * rows]
            per_row = [each * rows / n for n in near for each in self._measured[n]]
            found[rows] = statistics.median(per_row if rows > len(near) else self._measured[rows])
        return found


class _Metered(ServedModel):
    """``model`` under another address. ``outside``: the processor seconds of its thread between its ``batches``."""

    name, version = "cost", "1"

    def __init__(self, model: ServedModel) -> None:
        self.inputs, self.outputs = model.inputs, model.outputs
        self._model = model
        self._ended: float | None = None
        self.outside, self.batches = 0.0, 0

    def run(self, tensors: Sequence[Tensor]) -> BatchOutputs:
        """See :class:`~parallax.serve.model.ServedModel`."""
        if self._ended is not None:
            self.outside += time.thread_time() - self._ended
        outputs = self._model.run(tensors)
        self._ended = time.thread_time()
        self.batches += 1
        return outputs


class Prepared(ServedModel):
    """A model that reads as many bytes as ``weight_bytes``, and has inputs and outputs of some bytes a row."""

    name, version = "prepared", "1"

    def __init__(self, input_bytes: int, output_bytes: int, weight_bytes: int) -> None:
        given = TensorSpec("input", torch.uint8, (-1, input_bytes))
        self.inputs: tuple[TensorSpec, ...] = (given,)
        self.outputs: tuple[TensorSpec, ...] = (
            TensorSpec("output", torch.uint8, (-1, output_bytes)),
        )
        self._output = torch.zeros(_CONNECTIONS, output_bytes, dtype=torch.uint8)
        self._weights = torch.ones(min(weight_bytes, _MOST_READ) // 4)

    def run(self, tensors: Sequence[Tensor]) -> BatchOutputs:
        """See :class:`~parallax.serve.model.ServedModel`."""
        self._weights.sum()
        return BatchOutputs([self._output[: len(tensors[0])].clone()], self.version)


class _LoopbackServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals keep their handlers


class HttpSeconds(NamedTuple):
    """The processor seconds of a server besides the model's: for each request, and for each batch."""

    request: float
    batch: float


def http_seconds(model: ServedModel, config: ServeConfig) -> HttpSeconds:
    """Return the seconds in which a server of ``model`` reads and answers requests of one row with binary data."""
    metered, metrics = _Metered(model), ServeMetrics()
    rows = min(_CONNECTIONS, config.max_batch_rows)
    plain = ServeConfig(max_batch_rows=rows, max_body_bytes="1TiB")
    batcher = Batcher(metered, plain, metrics)
    app = ServeApp(metered, plain, batcher, metrics, b"", "")
    batcher.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            counts, seconds = asyncio.run(_measured(app, plain, metered, listening))
    finally:
        batcher.close()
    (request, batch), *_ = np.linalg.lstsq(counts, seconds)
    if request > 0 and batch > 0:
        return HttpSeconds(float(request), float(batch))
    return HttpSeconds(sum(seconds) / sum(count for count, _ in counts), 0.0)


async def _measured(
    app: ServeApp, config: ServeConfig, model: _Metered, listening: socket.socket
) -> tuple[list[tuple[int, int]], list[float]]:
    """Return requests and batches, and the seconds for them, of a client that sends one request at a time, and of one
    that sends several."""
    server = _LoopbackServer(http_settings(app, config))
    running = asyncio.ensure_future(server.serve(sockets=[listening]))
    address, content = listening.getsockname(), _request(model)
    counts, found = list[tuple[int, int]](), list[float]()
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(address)) for _ in range(_CONNECTIONS)
        ]
        await asyncio.to_thread(_exchange, connections, content, 1)  # others than the first count
        for used in (connections[:1], connections):
            turns = []
            for _ in range(_TURNS):
                before, batches = time.thread_time() + model.outside, model.batches
                count = await asyncio.to_thread(_exchange, used, content, _ROUNDS)
                seconds = time.thread_time() + model.outside - before
                turns.append((seconds / count, count, model.batches - batches))
            each, count, batches = sorted(turns)[_TURNS // 2]
            counts.append((count, batches))
            found.append(each * count)
    server.should_exit = True
    await running
    return counts, found


def _request(model: ServedModel) -> bytes:
    entries, data = [], list[bytes]()
    for spec in model.inputs:
        shape = [1, *(_FREE_SIZE if size < 0 else size for size in spec.shape[1:])]
        row = torch.zeros(shape, dtype=spec.dtype).reshape(-1).view(torch.uint8)
        data.append(row.numpy().tobytes())
        binary = {"binary_data_size": len(data[-1])}
        entries.append(
            {"name": spec.name, "shape": shape, "datatype": NAMES[spec.dtype], "parameters": binary}
        )
    tree = {"inputs": entries, "parameters": {"binary_data_output": True}}
    header = json.dumps(tree).encode()
    body = b"".join([header, *data])
    head = (
        f"POST /v2/models/{model.name}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"{HEADER_LENGTH}: {len(header)}\r\n\r\n"
    )
    return head.encode() + body


def _exchange(connections: Sequence[socket.socket], content: bytes, rounds: int) -> int:
    """Send requests on all connections and read the answers, for some rounds or some time; return how many."""
    end, count = time.monotonic() + _SECONDS, 0
    while count < rounds * len(connections) and (not count or time.monotonic() < end):
        for connection in connections:
            connection.sendall(content)
        for connection in connections:
            _read_answer(connection)
        count += len(connections)
    return count


def _read_answer(connection: socket.socket) -> None:
    found = b""
    while b"\r\n\r\n" not in found:
        found += _received(connection)
    head, _, body = found.partition(b"\r\n\r\n")
    left = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]) - len(body)
    while left > 0:
        left -= len(_received(connection))


def _received(connection: socket.socket) -> bytes:
    if not (part := connection.recv(1 << 16)):
        raise ConnectionError("the server closed a connection while its cost was measured")
    return part
