"""The metrics of a server, in the text format of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from parallax.serve.model import ServedModel

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ROWS = tuple(2**power for power in range(13))


class ServeMetrics:
    """The metrics of one server: counts, times and sizes of requests and batches."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "parallax_requests",
            "Inference requests by the HTTP status of their answer; gone: the client left before",
            ["outcome"],
            registry=self._registry,
        )
        self.queue_seconds = self._histogram(
            "parallax_queue_seconds", "Seconds from the arrival of a request to its batch", _SECONDS
        )
        self.compute_seconds = self._histogram(
            "parallax_compute_seconds", "Seconds that the model took for a batch", _SECONDS
        )
        self.batch_rows = self._histogram(
            "parallax_batch_rows", "Rows of a batch, without padding", _ROWS
        )
        self._queued = Gauge("parallax_queued_rows", "Rows that wait", registry=self._registry)
        self._ready = Gauge(
            "parallax_ready_replicas",
            "Copies of the model that can compute",
            registry=self._registry,
        )
        self._fetched = Gauge(
            "parallax_fetched_bytes",
            "Bytes of offloaded parameters that were fetched from their tier",
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def text(self, queued_rows: int, model: ServedModel) -> bytes:
        """Return all metrics in Prometheus' text format. ``queued_rows`` and ``model``: the present number of rows in
        the queue, and the served model, which some metrics describe."""
        self._queued.set(queued_rows)
        self._ready.set(model.ready)
        self._fetched.set(model.fetched_bytes)
        return generate_latest(self._registry)
