"""The queue of requests, and the threads that compute them in batches.

There is one thread for each batch that the model can compute at the same time. When the model can take a batch, a
thread takes the oldest request and, in order, all later requests of equal shapes and types, until the batch is full.
Requests that arrive while the model computes wait in the queue. With ``max_wait`` above 0, a batch that is not full
waits for further requests, at most until its oldest request has been queued for that long::

    arrivals    a b   c d e f          g
    max_wait=0  [a]   [b c d]  [e f]   [g]       each batch has the requests that arrived during the previous one
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallax.serve.config import ServeConfig
from parallax.serve.metrics import ServeMetrics
from parallax.serve.model import BatchOutputs, ModelFailed, ServedModel
from parallax.serve.tensors import RequestError

logger = logging.getLogger("parallax")

_RETRY_SECONDS = 1  # after which a client may try a full queue again
_CLOSE_SECONDS = 5.0  # for the model to end its batches when the server closes


@dataclass(eq=False)
class Queued:
    """A request in the queue.

    ``arrived``: the monotonic time of its arrival in seconds. ``answer``: a future that gets all outputs, or a
    :class:`RequestError`. If it is cancelled before the request's batch starts, the request is not computed. ``kind``:
    the shapes of a row and the dtypes of the tensors. Only requests of equal kind can share a batch.
    """

    tensors: list[Tensor]
    answer: Future[BatchOutputs] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    rows: int = field(init=False)
    kind: tuple[tuple[torch.Size, torch.dtype], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = len(self.tensors[0])
        self.kind = tuple((tensor.shape[1:], tensor.dtype) for tensor in self.tensors)


class Batcher:
    """Queues requests and computes them in batches, between :meth:`start` and :meth:`close`."""

    def __init__(self, model: ServedModel, config: ServeConfig, metrics: ServeMetrics) -> None:
        self._model, self._config, self._metrics = model, config, metrics
        self._queue: deque[Queued] = deque()
        self._rows = 0  # of the queue
        self._changed = threading.Condition()
        self._closing = False
        self._at_work = 0  # batches that the model computes
        self._threads = list[threading.Thread]()

    def start(self) -> None:
        self._model.on_change(self._model_changed)
        self._model_changed()

    def close(self) -> None:
        """Refuse all queued requests and end the threads. Batches in progress get five seconds to finish."""
        with self._changed:
            self._closing = True
            left, self._queue, self._rows = [*self._queue], deque(), 0
            self._changed.notify_all()
        for request in left:
            _refuse(request, RequestError(503, "the server ends"))
        end = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    @property
    def queued_rows(self) -> int:
        return self._rows

    def submit(self, tensors: Sequence[Tensor]) -> Future[BatchOutputs]:
        """Queue a request of at most ``max_batch_rows`` rows, and return the future of its outputs.

        Raises :class:`RequestError` with status 503 if the queue is full or closed.
        """
        request = Queued(list(tensors))
        with self._changed:
            if self._closing or self._rows + request.rows > self._config.queue_rows:
                raise RequestError(
                    503,
                    f"the queue is full: {self._rows} of {self._config.queue_rows} rows wait",
                    _RETRY_SECONDS,
                )
            self._queue.append(request)
            self._rows += request.rows
            # Not at every request, because a thread that waits for a full batch then searches the whole queue.
            if len(self._queue) == 1 or self._rows >= self._config.max_batch_rows:
                self._changed.notify_all()
        request.answer.add_done_callback(lambda answer: self._drop(request, answer))
        return request.answer

    def _drop(self, request: Queued, answer: Future[BatchOutputs]) -> None:
        """Remove ``request`` from the queue if its ``answer`` was cancelled.

        Its rows then no longer count towards the limit ``queue_rows``.
        """
        if answer.cancelled():
            with self._changed:
                if request in self._queue:
                    self._queue.remove(request)
                    self._rows -= request.rows

    # ---- the threads

    def _model_changed(self) -> None:
        with self._changed:
            while len(self._threads) < self._model.capacity and not self._closing:
                self._threads.append(threading.Thread(target=self._work, daemon=True))
                self._threads[-1].start()
            self._changed.notify_all()

    def _work(self) -> None:
        while batch := self._take():
            started = time.monotonic()
            taken = [each for each in batch if each.answer.set_running_or_notify_cancel()]
            for request in taken:
                self._metrics.queue_seconds.observe(started - request.arrived)
            if taken:
                self._compute(taken)
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    def _take(self) -> list[Queued]:
        """Wait until there is a request and the model can compute; then remove the next batch from the queue and return
        it.

        The list is empty when the server closes.
        """
        with self._changed:
            while not self._closing:
                batch, full = self._next()
                if not batch or self._at_work >= self._model.capacity:
                    self._changed.wait()
                    continue
                left = batch[0].arrived + self._config.wait_seconds - time.monotonic()
                if full or left <= 0:
                    gone = set(batch)
                    self._queue = deque(each for each in self._queue if each not in gone)
                    self._rows -= sum(each.rows for each in batch)
                    self._at_work += 1
                    return batch
                self._changed.wait(left)
        return []

    def _next(self) -> tuple[list[Queued], bool]:
        """Return the batch that begins with the oldest request, and whether this batch is full."""
        batch, rows = list[Queued](), 0
        for request in self._queue:
            if batch and request.kind != batch[0].kind:
                continue
            if rows + request.rows > self._config.max_batch_rows:
                return batch, True
            batch.append(request)
            rows += request.rows
        return batch, rows == self._config.max_batch_rows

    def _compute(self, batch: Sequence[Queued]) -> None:
        """Compute a batch and answer its requests.

        If the model raises an error, each request is computed separately, so that one request cannot make the others
        fail.
        """
        started = time.monotonic()
        try:
            outputs = self._run([torch.cat(parts) for parts in zip(*(q.tensors for q in batch))])
        except Exception as error:  # the model may raise anything
            if len(batch) > 1:
                for request in batch:
                    self._compute([request])
                return
            if isinstance(error, RequestError):
                _refuse(batch[0], error)
                return
            failed = error if isinstance(error, ModelFailed) else ModelFailed.of(error)
            reason = f"the model failed: {failed}"
            logger.warning(reason)
            _refuse(batch[0], RequestError(500, reason))
            return
        first, seconds = 0, time.monotonic() - started
        for request in batch:
            last = first + request.rows
            tensors = [output[first:last] for output in outputs.tensors]
            queued = started - request.arrived
            request.answer.set_result(BatchOutputs(tensors, outputs.version, queued, seconds))
            first = last

    def _run(self, tensors: list[Tensor]) -> BatchOutputs:
        rows = len(tensors[0])
        started = time.monotonic()
        if self._config.batch_invariant:
            tensors = padded(tensors, self._config.max_batch_rows)
        found = self._model.run(tensors)
        self._metrics.compute_seconds.observe(time.monotonic() - started)
        self._metrics.batch_rows.observe(rows)
        return BatchOutputs([output[:rows] for output in found.tensors], found.version)


def padded(tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return ``tensors`` extended to ``rows`` rows by copies of their last row."""
    return [
        torch.cat([each, each[-1:].expand(rows - len(each), *each.shape[1:])]) for each in tensors
    ]


def _refuse(request: Queued, error: RequestError) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)
