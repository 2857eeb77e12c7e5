"""Predict the latencies of a server by simulating its queue.

::

    requests ─ HTTP thread ─ queue ─ batch of up to n rows ─┬─ copy 0: stage 0 ─ stage 1 ─┬─ HTTP thread ─ answers
                                                            └─ copy 1: stage 0 ─ stage 1 ─┘

Requests of one row arrive as a Poisson process. Batches form by the rules of :mod:`parallax.serve.batching`, while
fewer than stages × copies batches are in flight. A stage computes one batch at a time. The HTTP thread reads or answers
one request at a time. If the HTTP thread shares a core with the model, each of the two gets half of the core while both
have work. All simulations use the same random arrivals, scaled to the rate of requests, so that predictions for
different settings can be compared.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

REQUESTS = 20_000  # of a simulation
_SEED = 1
_WARM_UP = 0.1  # of the requests, left out of the figures
_WAITS = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the seconds of a row in the slowest stage
_EQUAL = 0.02  # differences of two p99 below this fraction are noise of the simulation
MOST_COPIES = 256


@dataclass(frozen=True, kw_only=True)
class BatchTimes:
    """The seconds of a batch, by its number of rows. Entry ``n - 1`` of each tuple is for n rows.

    ``latency`` is the time of a batch through an idle pipeline. ``stages`` has, for each stage, the seconds for which a
    batch occupies the stage.
    """

    latency: tuple[float, ...]
    stages: tuple[tuple[float, ...], ...]

    @classmethod
    def between(
        cls, rows: Sequence[int], latency: Sequence[float], stages: Sequence[Sequence[float]]
    ) -> BatchTimes:
        """Return the times for 1 to ``rows[-1]`` rows, interpolated from times that are known for some numbers of rows.

        ``latency`` and each entry of ``stages`` have one time for each number in ``rows``.
        """
        every = np.arange(1, rows[-1] + 1)

        def interpolated(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(np.interp(every, rows, values).tolist())

        return cls(latency=interpolated(latency), stages=tuple(map(interpolated, stages)))

    @classmethod
    def measured(
        cls, seconds: Mapping[int, float], most: int, shares: Sequence[float] = (1.0,)
    ) -> BatchTimes:
        """Return the times for 1 to ``most`` rows, interpolated from latencies that were measured for some numbers of
        rows.

        ``seconds`` maps a number of rows to the measured latency. A batch of ``most`` rows is assumed to take as long
        as the largest measured batch. ``shares`` has, for each stage, the fraction of the latency for which the stage
        computes.
        """
        found = {**dict(sorted(seconds.items())), most: seconds[max(seconds)]}
        latency = list(found.values())
        return cls.between(list(found), latency, [[s * each for each in latency] for s in shares])

    def padded(self) -> BatchTimes:
        """Return the times if each batch is padded to the largest number of rows."""
        count = self.most_rows
        return BatchTimes(
            latency=self.latency[-1:] * count,
            stages=tuple(stage[-1:] * count for stage in self.stages),
        )

    @property
    def most_rows(self) -> int:
        return len(self.latency)

    def starts(self, rows: int) -> list[float]:
        """Return, for each stage, the seconds from the start of a batch of ``rows`` rows until this stage begins to
        compute it.

        All stages are assumed to be idle when the batch starts.
        """
        *before, last = [stage[rows - 1] for stage in self.stages]
        spread = (self.latency[rows - 1] - last) / (sum(before) or 1.0)
        return np.cumsum([0.0, *(spread * each for each in before)]).tolist()


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that runs ``copies`` copies of a pipeline.

    ``request_seconds``  seconds that the HTTP thread needs for a request; half of them pass before the request is
                         queued
    ``batch_seconds``    seconds that the HTTP thread needs for a batch before it writes the batch's answers
    ``shares_core``      the HTTP thread and the model share a core; used only with one stage and one copy
    """

    times: BatchTimes
    copies: int = 1
    request_seconds: float = 0.0
    batch_seconds: float = 0.0
    shares_core: bool = False

    @property
    def interrupted(self) -> bool:
        """Whether the model and the HTTP thread slow each other down because they share a core."""
        return self.shares_core and self.copies == len(self.times.stages) == 1

    @property
    def most_per_second(self) -> float:
        """The number of requests per second at which the server is saturated."""
        rows = np.arange(1, self.times.most_rows + 1)
        slowest = np.max(self.times.stages, axis=0)
        http = self.request_seconds + self.batch_seconds / self.times.most_rows
        if self.interrupted:
            row = float(((slowest + self.batch_seconds) / rows).min()) + self.request_seconds
        else:
            row = float((slowest / rows).min()) / self.copies
        return 1 / max(row, http, 1e-12)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The predicted latencies, in seconds, at a ``rate`` of requests per second.

    Latencies are infinite if the server is saturated. ``batch_rows`` is the mean number of rows of a batch.
    """

    rate: float
    max_wait: float
    p50: float
    p99: float
    mean: float
    batch_rows: float

    @property
    def saturated(self) -> bool:
        return math.isinf(self.p99)


def simulate(server: Server, rate: float, max_wait: float, requests: int = REQUESTS) -> Load:
    """Return the predicted latencies of a server at ``rate`` requests of one row per second.

    ``max_wait`` is the longest time in seconds that a request waits for its batch to fill. ``requests`` is the number
    of requests to simulate.
    """
    if rate >= server.most_per_second:
        most = float(server.times.most_rows)
        return Load(
            rate=rate, max_wait=max_wait, p50=math.inf, p99=math.inf, mean=math.inf, batch_rows=most
        )
    gaps = np.random.default_rng(_SEED).exponential(1.0, requests)
    run = _SharedCoreRun if server.interrupted else _QueueRun
    queue = run(server, max_wait, (np.cumsum(gaps) / rate).tolist())
    queue.run()
    seconds = np.subtract(queue.answered, queue.arrivals)[int(_WARM_UP * requests) :]
    p50, p99 = np.percentile(seconds, (50, 99)).tolist()
    return Load(
        rate=rate,
        max_wait=max_wait,
        p50=p50,
        p99=p99,
        mean=float(seconds.mean()),
        batch_rows=requests / queue.batches,
    )


def best_wait(server: Server, rate: float) -> float:
    """Return the ``max_wait``, in seconds, with which ``server`` has the smallest p99 latency at ``rate`` requests per
    second.

    Several values are simulated. Of those whose p99 is nearly the smallest, the shortest one is returned.
    """
    row = max(stage[0] for stage in server.times.stages)
    loads = [simulate(server, rate, factor * row) for factor in (0.0, *_WAITS)]
    least = min(load.p99 for load in loads)
    if math.isinf(least):
        return 0.0
    return next(load.max_wait for load in loads if load.p99 <= (1 + _EQUAL) * least)


def copies_needed(
    server: Server, rate: float, p99: float, wait: Callable[[Server], float]
) -> int | None:
    """Return the least number of copies of the pipeline that answer ``rate`` requests per second; None if no number
    does.

    With a ``p99`` above zero, 99% of the requests must be answered within ``p99`` seconds. ``wait`` is called with a
    server and returns its ``max_wait`` in seconds.
    """

    def fits(copies: int) -> bool:
        found = replace(server, copies=copies)
        load = simulate(found, rate, wait(found))
        return not load.saturated and (not p99 or load.p99 <= p99)

    # With four times the copies that compute on average, no request waits for one.
    ample = 4 * rate * server.times.latency[-1] / len(server.times.stages)
    most = min(MOST_COPIES, 1 + math.ceil(ample))
    copies = 1 + bisect_left(range(1, most + 1), True, key=fits)
    return copies if copies <= most else None


_READ, _WRITE, _WRITE_FIRST = 0, 1, 2  # work of the HTTP thread
_HTTP, _DONE, _TIMER = 0, 1, 2  # events


class _QueueRun:
    """Simulates a server event by event, in the order of time.

    After :meth:`run`, ``answered`` has the time of each request's answer, in seconds from the start of the simulation.
    """

    def __init__(self, server: Server, max_wait: float, arrivals: list[float]) -> None:
        self.arrivals, self.answered, self.batches = arrivals, [0.0] * len(arrivals), 0
        self._server, self._times, self._max_wait = server, server.times, max_wait
        half = server.request_seconds / 2
        self._work_seconds = half, half, half + server.batch_seconds
        self._events: list[tuple[float, int, int]] = []
        self._work: deque[tuple[int, int]] = deque()  # of the HTTP thread
        self._waiting: deque[int] = deque()
        self._queued = [0.0] * len(arrivals)  # seconds by request
        self._timer = -1  # the oldest request, when the timer was set
        count = len(server.times.stages)
        self._starts = [server.times.starts(n) for n in range(1, server.times.most_rows + 1)]
        self._free_at = [[0.0] * count for _ in range(server.copies)]
        self._in_flight = [0] * server.copies
        self._running: dict[int, tuple[int, list[int]]] = {}  # batch: its copy and requests

    def run(self) -> None:
        coming = iter(enumerate(self.arrivals))
        upcoming = next(coming, None)
        while upcoming is not None or self._events:
            if upcoming is not None and (not self._events or upcoming[1] <= self._events[0][0]):
                self._http(upcoming[1], _READ, upcoming[0])
                upcoming = next(coming, None)
                continue
            now, kind, number = heappop(self._events)
            if kind == _HTTP:
                self._handled(now)
            elif kind == _DONE:
                self._done(now, number)
            else:
                self._take(now)

    # ---- the HTTP thread

    def _http(self, now: float, what: int, request: int) -> None:
        """Queue work for the HTTP thread at the time ``now``: to read the request number ``request``, or to write its
        answer.

        ``what`` is the kind of work: ``_READ``, ``_WRITE_FIRST`` for the first answer of a batch, or ``_WRITE`` for a
        further one.
        """
        self._work.append((what, request))
        if len(self._work) == 1:
            self._begin(now)

    def _begin(self, now: float) -> None:
        seconds = self._work_seconds[self._work[0][0]]
        heappush(self._events, (now + seconds, _HTTP, 0))

    def _handled(self, now: float) -> None:
        what, request = self._work.popleft()
        if self._work:
            self._begin(now)
        if what != _READ:
            self.answered[request] = now
            return
        self._queued[request] = now
        self._waiting.append(request)
        self._take(now)

    # ---- batches

    def _take(self, now: float) -> None:
        """Start batches as long as a copy has a free place and the queue has a full batch or its oldest request has
        waited for the longest allowed time."""
        stages, most = len(self._times.stages), self._times.most_rows
        while self._waiting:
            copy = min(range(len(self._in_flight)), key=self._in_flight.__getitem__)
            if self._in_flight[copy] == stages:
                return
            oldest = self._waiting[0]
            due = self._queued[oldest] + self._max_wait
            if len(self._waiting) < most and due > now:
                if self._timer != oldest:
                    self._timer = oldest
                    heappush(self._events, (due, _TIMER, 0))
                return
            rows = min(most, len(self._waiting))
            self._start(now, copy, [self._waiting.popleft() for _ in range(rows)])

    def _start(self, now: float, copy: int, requests: list[int]) -> None:
        rows, free_at = len(requests), self._free_at[copy]
        late = 0.0
        for stage, start in enumerate(self._starts[rows - 1]):
            late = max(late, free_at[stage] - now - start)
            free_at[stage] = now + start + late + self._times.stages[stage][rows - 1]
        end = now + late + self._times.latency[rows - 1]
        self._in_flight[copy] += 1
        self._running[self.batches] = copy, requests
        heappush(self._events, (end, _DONE, self.batches))
        self.batches += 1

    def _done(self, now: float, batch: int) -> None:
        copy, requests = self._running.pop(batch)
        self._in_flight[copy] -= 1
        for index, request in enumerate(requests):
            self._http(now, _WRITE if index else _WRITE_FIRST, request)
        self._take(now)


class _SharedCoreRun:
    """Simulates a server whose model and HTTP thread run on one core.

    While both have work, each gets half of the core. The operating system divides a core in this way between two
    threads of equal priority. The attributes are those of :class:`_QueueRun`.
    """

    def __init__(self, server: Server, max_wait: float, arrivals: list[float]) -> None:
        self.arrivals, self.answered, self.batches = arrivals, [0.0] * len(arrivals), 0
        self._seconds, self._max_wait = server.times.latency, max_wait
        self._half, self._batch_seconds = server.request_seconds / 2, server.batch_seconds
        self._now = 0.0
        self._work: deque[tuple[int, int]] = deque()  # of the HTTP thread
        self._http_left = math.inf  # seconds of a core; infinite without work
        self._model_left = math.inf
        self._batch: list[int] = []  # requests that the model computes
        self._waiting: deque[tuple[int, float]] = deque()  # requests, and when they were read

    def run(self) -> None:
        for request, arrival in enumerate(self.arrivals):
            self._run_until(arrival)
            self._http(_READ, request)
        self._run_until(math.inf)

    def _run_until(self, end: float) -> None:
        """Let the model and the HTTP thread work until the time ``end``, or until all requests are answered."""
        while True:
            slower = 2 if self._work and self._batch else 1
            http, model = slower * self._http_left, slower * self._model_left
            seconds = min(http, model, self._timer() - self._now)
            if not seconds < end - self._now:
                break
            self._pass(seconds, slower)
            if seconds == http:
                self._handled()
            elif seconds == model:
                self._done()
            self._take()
        if end < math.inf:
            self._pass(end - self._now, slower)
            self._now = end

    def _pass(self, seconds: float, slower: int) -> None:
        self._now += seconds
        self._http_left -= seconds / slower
        self._model_left -= seconds / slower

    def _timer(self) -> float:
        """Return the time at which the oldest request has waited so long that its batch starts without being full."""
        return (
            self._waiting[0][1] + self._max_wait if self._waiting and not self._batch else math.inf
        )

    def _http(self, what: int, request: int) -> None:
        self._work.append((what, request))
        if len(self._work) == 1:
            self._begin()

    def _begin(self) -> None:
        first = self._batch_seconds if self._work[0][0] == _WRITE_FIRST else 0.0
        self._http_left = self._half + first

    def _handled(self) -> None:
        what, request = self._work.popleft()
        self._http_left = math.inf
        if self._work:
            self._begin()
        if what == _READ:
            self._waiting.append((request, self._now))
        else:
            self.answered[request] = self._now

    def _take(self) -> None:
        """Start a batch if the model is idle, and the queue has a full batch or its oldest request has waited for the
        longest allowed time."""
        most = len(self._seconds)
        if self._batch or not self._waiting:
            return
        if len(self._waiting) >= most or self._timer() <= self._now:
            count = min(most, len(self._waiting))
            self._batch = [self._waiting.popleft()[0] for _ in range(count)]
            self._model_left = self._seconds[count - 1]
            self.batches += 1

    def _done(self) -> None:
        for index, request in enumerate(self._batch):
            self._http(_WRITE if index else _WRITE_FIRST, request)
        self._batch, self._model_left = [], math.inf
