"""Measure a server's costs when it starts: the seconds of batches, and the HTTP thread's seconds for a request.

:class:`TimedModel` times batches of several sizes. :func:`http_seconds` sends requests over loopback to a server of the
model. It reads the processor time of the server's threads outside the model, so the time of the client and of other
processes does not count.

The requests arrive one by one at the configured rate, while the model computes. This matters: requests that arrive
together cost half as much, because then the HTTP thread need not be woken for each one, and the model's weights have
not evicted its data from the caches in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import selectors
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
from parallax.serve.invariance import sample_rows
from parallax.serve.metrics import ServeMetrics
from parallax.serve.model import NAMES, BatchOutputs, ServedModel, TensorSpec
from parallax.serve.server import http_settings

_SIZE_TURNS, _SIZE_SECONDS = 5, 0.1  # batches of each size, at most
_CONNECTIONS = 64  # fewer if a row takes long, so that few rows are left at the end of a turn
_ROW_SECONDS = 0.05
_SHARES = 0.5, 1.0  # of the stated rate
_TURNS, _SECONDS = 3, 0.4  # for each; the median counts
_LEAST_RATE = 50.0
_MOST_READ = 2**28  # bytes: more than caches hold
_FREE_SIZE = 8  # of a dimension that requests choose


class TimedModel(ServedModel):
    """A wrapper of ``model`` that measures the seconds of each batch."""

    def __init__(self, model: ServedModel) -> None:
        self.name, self.version = model.name, model.version
        self.inputs, self.outputs = model.inputs, model.outputs
        self._model = model
        self._measured: dict[int, list[float]] = {}

    def run(self, tensors: Sequence[Tensor]) -> BatchOutputs:
        started = time.perf_counter()
        outputs = self._model.run(tensors)
        seconds = time.perf_counter() - started
        self._measured.setdefault(len(tensors[0]), []).append(seconds)
        return outputs

    def repeat(self, config: ServeConfig) -> None:
        """Compute batches of several sizes, up to five times each.

        Several sizes are measured because the time of a batch jumps at sizes where the library selects another kernel.
        If ``config.batch_invariant`` is set, all batches are padded to one size, so only this size is measured.
        """
        most = config.max_batch_rows
        inputs = sample_rows(self.inputs, most)
        powers = {2**power for power in range(most.bit_length())}
        for rows in sorted({most} if config.batch_invariant else {most, *powers}):
            end = time.monotonic() + _SIZE_SECONDS
            for _ in range(_SIZE_TURNS):
                self.run([each[:rows] for each in inputs])
                if time.monotonic() > end:
                    break

    @property
    def seconds(self) -> dict[int, float]:
        """{number of rows: median seconds of the batches of this size}."""
        return {rows: statistics.median(self._measured[rows]) for rows in sorted(self._measured)}


class _Metered(ServedModel):
    """A wrapper of ``model`` that measures the time of the thread which calls it.

    ``outside``: that thread's processor seconds between the end of one batch and the start of the next. ``batches``:
    the number of batches.
    """

    name, version = "cost", "1"

    def __init__(self, model: ServedModel) -> None:
        self.inputs, self.outputs = model.inputs, model.outputs
        self._model = model
        self._ended: float | None = None
        self.outside, self.batches = 0.0, 0

    def run(self, tensors: Sequence[Tensor]) -> BatchOutputs:
        if self._ended is not None:
            self.outside += time.thread_time() - self._ended
        outputs = self._model.run(tensors)
        self._ended = time.thread_time()
        self.batches += 1
        return outputs


class Prepared(ServedModel):
    """A stand-in for a model whose weights are not loaded, to measure the HTTP thread's costs.

    For each batch, the stand-in reads ``weight_bytes`` bytes of memory, but at most 256 MiB. A row has ``input_bytes``
    of inputs and ``output_bytes`` of outputs. A batch has at most ``rows`` rows.
    """

    name, version = "prepared", "1"

    def __init__(self, rows: int, input_bytes: int, output_bytes: int, weight_bytes: int) -> None:
        given = TensorSpec("input", torch.uint8, (-1, input_bytes))
        self.inputs: tuple[TensorSpec, ...] = (given,)
        self.outputs: tuple[TensorSpec, ...] = (
            TensorSpec("output", torch.uint8, (-1, output_bytes)),
        )
        self._output = torch.zeros(rows, output_bytes, dtype=torch.uint8)
        self._weights = torch.ones(min(weight_bytes, _MOST_READ) // 4)

    def run(self, tensors: Sequence[Tensor]) -> BatchOutputs:
        self._weights.sum()
        return BatchOutputs([self._output[: len(tensors[0])].clone()], self.version)


class _LoopbackServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals keep their handlers


class HttpSeconds(NamedTuple):
    """The processor seconds of a server outside the model: for each request, and for each batch."""

    request: float
    batch: float


def http_seconds(model: ServedModel, config: ServeConfig) -> HttpSeconds:
    """Return the processor seconds that a server of ``model`` spends outside the model: for each request, and for each
    batch.

    The measurement sends requests of one row and binary data, at two rates: the configured rate, but at least 50
    requests per second, and half of it.
    """
    metered, metrics = _Metered(model), ServeMetrics()
    plain = ServeConfig(max_batch_rows=config.max_batch_rows, max_body_bytes="1TiB")
    rate = max(_LEAST_RATE, config.requests_per_second)
    batcher = Batcher(metered, plain, metrics)
    app = ServeApp(metered, plain, batcher, metrics, b"", "")
    batcher.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            counts, seconds = asyncio.run(_measured(app, plain, metered, listening, rate))
    finally:
        batcher.close()
    (request, batch), *_ = np.linalg.lstsq(counts, seconds)
    if request > 0 and batch > 0:
        return HttpSeconds(float(request), float(batch))
    return HttpSeconds(sum(seconds) / sum(count for count, _ in counts), 0.0)


async def _measured(
    app: ServeApp, config: ServeConfig, model: _Metered, listening: socket.socket, rate: float
) -> tuple[list[tuple[int, int]], list[float]]:
    """Send requests at half of ``rate``, then at ``rate``.

    Return two lists with one entry for each of these two rates: (number of requests, number of batches), and the
    processor seconds of the server outside the model. ``listening``: the socket on which the server listens.
    """
    server = _LoopbackServer(http_settings(app, config))
    running = asyncio.ensure_future(server.serve(sockets=[listening]))
    address, content = listening.getsockname(), _request(model)
    counts, found = list[tuple[int, int]](), list[float]()
    with contextlib.ExitStack() as stack:

        def connections(count: int) -> list[socket.socket]:
            return [stack.enter_context(socket.create_connection(address)) for _ in range(count)]

        first = connections(1)
        await asyncio.to_thread(_exchange, first, content, [0.0] * 2)
        started = time.monotonic()
        await asyncio.to_thread(_exchange, first, content, [0.0])
        row = time.monotonic() - started
        some = connections(max(1, min(_CONNECTIONS, int(_CONNECTIONS * _ROW_SECONDS / row))))
        for share in _SHARES:
            turns = []
            for turn in range(_TURNS):
                pace = share * rate
                gaps = np.random.default_rng(turn).exponential(1 / pace, math.ceil(pace * _SECONDS))
                before, batches = time.thread_time() + model.outside, model.batches
                count = await asyncio.to_thread(_exchange, some, content, gaps.tolist())
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


def _exchange(connections: Sequence[socket.socket], content: bytes, gaps: Sequence[float]) -> int:
    """Send requests, read all answers, and return the number of requests.

    ``content``: the bytes of each request. ``gaps``: the seconds before each request. A request is sent later if all
    connections wait for an answer. No further request is sent after 0.8 s.
    """
    idle, count, due = [*connections], 0, time.monotonic()
    end = due + 2 * _SECONDS
    with selectors.DefaultSelector() as waiting:
        for gap in gaps:
            due += gap
            time.sleep(max(0.0, due - time.monotonic()))
            _collect(waiting, idle, 0.0)
            while not idle:
                _collect(waiting, idle, None)
            if count and time.monotonic() > end:
                break
            connection = idle.pop()
            connection.sendall(content)
            waiting.register(connection, selectors.EVENT_READ)
            count += 1
        while waiting.get_map():
            _collect(waiting, idle, None)
    return count


def _collect(
    waiting: selectors.BaseSelector, idle: list[socket.socket], timeout: float | None
) -> None:
    """Read every answer that has begun to arrive, and move its connection from ``waiting`` to ``idle``.

    If none has, wait for one, but at most ``timeout`` seconds; None: without a limit.
    """
    for key, _ in waiting.select(timeout):
        connection = key.fileobj
        assert isinstance(connection, socket.socket)
        _read_answer(connection)
        waiting.unregister(connection)
        idle.append(connection)


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
