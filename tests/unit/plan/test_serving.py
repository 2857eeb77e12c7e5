"""The simulated queue of a server, against what is known of queues."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parallax.plan.serving import (
    BatchTimes,
    Server,
    _SharedCoreRun,
    best_wait,
    copies_needed,
    simulate,
)

ROW = 0.004  # seconds of a batch of one row
HTTP = 0.001


def times(*stages: tuple[float, float], rows: int = 32) -> BatchTimes:
    """Batches whose seconds in a stage grow from the first number, for one row, to the second."""
    ends = [1, rows]
    latency = [sum(stage[end] for stage in stages) for end in (0, 1)]
    return BatchTimes.between(ends, latency, stages)


def alone(seconds: float = ROW) -> Server:
    """A server of one request at a time."""
    return Server(times=BatchTimes(latency=(seconds,), stages=((seconds,),)))


BATCHES = Server(times=times((ROW, 4 * ROW)))


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_one_request_at_a_time_waits_as_in_a_queue_of_poisson_arrivals(load: float) -> None:
    """M/D/1: the mean wait is ρ·D / (2·(1 − ρ))."""
    found = simulate(alone(), load / ROW, 0.0, requests=60_000)
    assert found.mean - ROW == pytest.approx(load * ROW / (2 * (1 - load)), rel=0.05)
    assert found.batch_rows == 1


def test_an_http_thread_of_its_own_is_a_queue_before_and_after() -> None:
    """Its work is 2·HTTP/2 for each request; at a low rate nothing waits."""
    server = replace(alone(), request_seconds=HTTP)
    found = simulate(server, 1.0, 0.0)
    assert found.p50 == pytest.approx(ROW + HTTP)
    assert server.most_per_second == pytest.approx(1 / ROW)
    assert replace(server, shares_core=True).most_per_second == pytest.approx(1 / (ROW + HTTP))


def test_a_shared_core_saturates_where_all_work_together_does() -> None:
    server = replace(alone(), request_seconds=HTTP, batch_seconds=HTTP, shares_core=True)
    assert server.most_per_second == pytest.approx(1 / (ROW + 2 * HTTP))
    assert simulate(server, 1.0, 0.0).p50 == pytest.approx(ROW + 2 * HTTP)
    rate = 0.98 * server.most_per_second
    found = simulate(server, rate, 0.0)
    assert found.mean > 10 * ROW
    assert simulate(replace(server, shares_core=False), rate, 0.0).mean < 2 * ROW + 3 * HTTP


def test_the_model_and_the_http_thread_each_get_half_of_a_shared_core() -> None:
    """In milliseconds: the first request is read until 1, and computed until 6. The second one arrives at 2, is read
    until 4, and computed from 6 to 11. The first answer is written until 8, the second until 12."""
    server = replace(alone(), request_seconds=2 * HTTP, shares_core=True)
    found = _SharedCoreRun(server, 0.0, [0.0, 2 * HTTP])
    found.run()
    assert found.answered == pytest.approx([8 * HTTP, 12 * HTTP])


@pytest.mark.parametrize("wait", [0.0, 0.01])
@pytest.mark.parametrize("shares_core", [False, True])
def test_no_request_waits_longer_than_max_wait_and_a_batch(wait: float, shares_core: bool) -> None:
    """At a low rate a batch is computing at most once before a request's own."""
    found = simulate(replace(BATCHES, shares_core=shares_core), 5.0, wait, requests=5000)
    assert found.p99 <= wait + 2 * BATCHES.times.latency[3]
    assert found.p50 == pytest.approx(wait + ROW, rel=0.05)


@pytest.mark.parametrize("server", [BATCHES, replace(BATCHES, request_seconds=HTTP / 4, copies=3)])
@pytest.mark.parametrize("wait", [0.0, 0.005])
def test_the_p99_grows_with_the_rate(server: Server, wait: float) -> None:
    shares = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
    found = [simulate(server, share * server.most_per_second, wait) for share in shares]
    latencies = [load.p99 for load in found]
    rows = [load.batch_rows for load in found]
    if not wait:
        assert latencies == sorted(latencies)
    assert rows == sorted(rows)
    assert latencies[-1] > latencies[1]


def test_batches_multiply_the_throughput() -> None:
    assert BATCHES.most_per_second == pytest.approx(32 / (4 * ROW))
    rate = 2 / ROW
    assert simulate(alone(), rate, 0.0).saturated
    assert simulate(BATCHES, rate, 0.0).p99 < 4 * ROW


def test_stages_work_at_the_same_time() -> None:
    one, two = Server(times=times((ROW, ROW))), Server(times=times((ROW / 2,) * 2, (ROW / 2,) * 2))
    assert two.times.latency == one.times.latency
    assert two.most_per_second == pytest.approx(2 * one.most_per_second)
    assert simulate(two, 1.0, 0.0).p50 == pytest.approx(ROW)
    assert simulate(two, 300.0, 0.0).p99 < simulate(one, 300.0, 0.0).p99


def test_uneven_stages_are_as_fast_as_the_slowest() -> None:
    server = Server(times=times((ROW, ROW), (3 * ROW, 3 * ROW), rows=1))
    assert server.times.starts(1) == pytest.approx([0, ROW])
    assert server.most_per_second == pytest.approx(1 / (3 * ROW))
    found = simulate(server, 0.9 / (3 * ROW), 0.0, requests=60_000)
    assert found.mean - 4 * ROW == pytest.approx(0.9 * 3 * ROW / (2 * 0.1), rel=0.1)  # M/D/1


def test_copies_answer_more_requests() -> None:
    rate = 3.5 * BATCHES.most_per_second
    assert copies_needed(BATCHES, rate, 0.0, lambda server: 0.0) == 4
    # The p99 takes more than the throughput, and no copies help if a row alone takes too long.
    limit = 1.5 * BATCHES.times.latency[-1]
    needed = copies_needed(BATCHES, rate, limit, lambda server: 0.0)
    assert needed is not None
    assert needed >= 4
    assert simulate(replace(BATCHES, copies=needed), rate, 0.0).p99 <= limit
    assert simulate(replace(BATCHES, copies=needed - 1), rate, 0.0).p99 > limit
    assert copies_needed(BATCHES, rate, 0.9 * ROW, lambda server: 0.0) is None
    http = replace(BATCHES, request_seconds=HTTP)
    assert copies_needed(http, 1.1 / HTTP, 0.0, lambda server: 0.0) is None


def test_the_best_wait_is_none_if_batches_cost_as_much_as_their_rows() -> None:
    assert best_wait(Server(times=times((ROW, 32 * ROW))), 100.0) == 0
    assert best_wait(BATCHES, 2 * BATCHES.most_per_second) == 0  # saturated


def test_the_best_wait_beats_none_where_small_batches_fill_a_pipeline() -> None:
    """Four stages take four batches at once, so nothing collects, and batches of one row take all of their time."""
    server = Server(times=times(*[(ROW, ROW)] * 4))
    rate = 1.2 / ROW
    wait = best_wait(server, rate)
    assert wait > 0
    assert simulate(server, rate, wait).p99 < 0.9 * simulate(server, rate, 0.0).p99


def test_measured_seconds_are_interpolated() -> None:
    found = BatchTimes.measured({4: 4.0, 1: 1.0, 2: 3.0}, 6, (0.5, 0.25))
    assert found.latency == (1.0, 3.0, 3.5, 4.0, 4.0, 4.0)
    assert found.stages == (
        tuple(x / 2 for x in found.latency),
        tuple(x / 4 for x in found.latency),
    )
    assert found.padded().latency == (4.0,) * 6


def test_a_saturated_server_has_no_latencies() -> None:
    found = simulate(BATCHES, 1.01 * BATCHES.most_per_second, 0.0)
    assert found.saturated
    assert math.isinf(found.p50)
