"""Batches, limits and the end of a server, each with a process of its own. The model waits for a file, so that no test
depends on time."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import Answer, Server, wait_for
from tests.serving.models import FAILS, WAITS

pytestmark = pytest.mark.slow  # each starts a process that imports torch
Serving = Callable[..., Server]


def request(*values: float, width: int = 1) -> dict[str, Any]:
    """A request with a row for each value."""
    data = [[value] * width for value in values]
    entry = {"name": "x", "shape": [len(values), width], "datatype": "FP32", "data": data}
    return {"inputs": [entry]}


class Busy:
    """A server whose model waits for the file ``go``, and the requests that wait behind."""

    def __init__(self, server: Server) -> None:
        self.server, self._pool = server, ThreadPoolExecutor(20)
        self.first = self.send(WAITS)
        wait_for(lambda: self.computed)

    @property
    def computed(self) -> list[str]:
        path = self.server.folder / "computed"
        return path.read_text().splitlines() if path.exists() else []

    def send(self, *values: float, width: int = 1) -> Future[Answer]:
        """Send a request, and wait until it is queued."""
        before = self._queued() if hasattr(self, "first") else -1
        found = self._pool.submit(self.server.infer, request(*values, width=width))
        if before >= 0:
            wait_for(lambda: found.done() or self._queued() > before)
        return found

    def _queued(self) -> float:
        return self.server.metric("parallax_queued_rows")

    def go(self) -> None:
        (self.server.folder / "go").touch()
        assert self.first.result().status == 200

    def close(self) -> None:
        self._pool.shutdown()


def outputs(answer: Answer) -> dict[str, list[float]]:
    assert answer.status == 200, answer.body
    return {output["name"]: output["data"] for output in answer.json["outputs"]}


def test_requests_of_equal_shape_share_batches_oldest_first(serving: Serving) -> None:
    busy = Busy(serving("steered", "max_batch_rows=4"))
    sent = [busy.send(1), busy.send(2, 3), busy.send(4, width=2), busy.send(5), busy.send(6)]
    busy.go()
    found = [outputs(each.result()) for each in sent]
    assert [each["y"] for each in found] == [[2], [4, 6], [8, 8], [10], [12]]
    assert busy.computed == ["99", "1 2 3 5", "4", "6"]
    assert [each["rows"][0] for each in found] == [4, 4, 1, 4, 1]
    assert busy.server.metric("parallax_batch_rows_sum") == 7
    assert busy.server.metric("parallax_batch_rows_count") == 4
    busy.close()


def test_an_answer_of_many_numbers_is_whole(serving: Serving) -> None:
    server, width = serving("steered"), 20_000
    answers = [server.infer(request(value, width=width)) for value in (1, 2)]
    assert [outputs(each)["y"] for each in answers] == [[2] * width, [4] * width]
    assert [outputs(each)["rows"] for each in answers] == [[1], [1]]


def test_only_the_culprit_fails(serving: Serving) -> None:
    busy = Busy(serving("steered", "max_batch_rows=4"))
    sent = [busy.send(1), busy.send(FAILS), busy.send(2)]
    busy.go()
    one, culprit, two = [each.result() for each in sent]
    assert outputs(one)["y"] == [2]
    assert outputs(two)["y"] == [4]
    assert culprit.status == 500
    assert culprit.error == "the model failed: ValueError: thirteen"
    assert busy.computed[1:] == ["1 13 2", "1", "13", "2"]
    assert outputs(busy.server.infer(request(3)))["y"] == [6]
    busy.close()


def test_a_full_queue_refuses_more(serving: Serving) -> None:
    busy = Busy(serving("steered", "max_batch_rows=2", "queue_rows=3"))
    sent = [busy.send(1, 1), busy.send(2)]
    refused = busy.server.infer(request(3))
    assert refused.status == 503
    assert int(refused.headers["retry-after"]) > 0
    assert "3 of 3 rows wait" in refused.error
    busy.go()
    assert [each.result().status for each in sent] == [200, 200]
    busy.close()


def test_a_late_request_is_not_computed(serving: Serving) -> None:
    busy = Busy(serving("steered", "timeout=1.0"))
    late = busy.send(1).result()
    assert late.status == 504
    assert "serve.timeout" in late.error
    assert busy.first.result().status == 504  # although the model has begun
    (busy.server.folder / "go").touch()
    assert outputs(busy.server.infer(request(2)))["y"] == [4]
    assert busy.computed == ["99", "2"]
    busy.close()


def test_a_client_that_leaves_is_dropped(serving: Serving) -> None:
    busy = Busy(serving("steered"))
    connection = busy.server.connection()
    connection.request("POST", "/v2/models/steered/infer", json.dumps(request(1)))
    wait_for(lambda: busy._queued() == 1)
    connection.close()
    wait_for(lambda: busy._queued() == 0)
    busy.go()
    assert outputs(busy.server.infer(request(2)))["y"] == [4]
    assert busy.computed == ["99", "2"]
    assert busy.server.metric('parallax_requests_total{outcome="gone"}') == 1
    busy.close()


def test_a_batch_waits_for_others(serving: Serving) -> None:
    server = serving("steered", "max_batch_rows=3", "max_wait=50")
    busy = ThreadPoolExecutor(3)
    sent = [busy.submit(server.infer, request(value)) for value in (1, 2, 3)]
    assert [outputs(each.result())["rows"] for each in sent] == [[3], [3], [3]]
    busy.shutdown()


def test_padding_gives_every_batch_the_same_size(serving: Serving) -> None:
    server = serving("steered", "max_batch_rows=4", "batch_invariant=true")
    found = outputs(server.infer(request(1, 2)))
    assert found == {"y": [2, 4], "rows": [4, 4]}
    assert (server.folder / "computed").read_text() == "1 2 2 2\n"


def test_sigterm_answers_what_waits(serving: Serving) -> None:
    busy = Busy(serving("steered"))
    sent = busy.send(1)
    busy.server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: busy.server.get("/v2/health/ready").status == 503)
    assert busy.server.get("/v2/health/live").status == 200
    assert busy.server.get("/v2/models/steered/ready").status == 503
    refused = busy.server.infer(request(2))
    assert refused.status == 503
    assert "retry-after" in refused.headers
    busy.go()
    assert outputs(sent.result())["y"] == [2]
    assert busy.server.process.wait(60) == 0
    assert busy.computed == ["99", "1"]
    busy.close()


def test_sigint_ends_an_idle_server(serving: Serving) -> None:
    server = serving("steered")
    assert server.get("/v2").status == 200
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    assert server.process.stdout is not None
    assert server.process.stdout.read() == ""


def test_slow_senders_are_cut_off(serving: Serving) -> None:
    server = serving("steered", "timeout=0.5")
    host, _, port = server.address.partition(":")
    head = b"POST /v2/models/steered/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    for content, answer in ((head, b"HTTP/1.1 408"), (b"GET /v2 HTTP/1.1\r\nHo", b""), (b"", b"")):
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(content)
            found = b""
            while part := raw.recv(1000):
                found += part
            assert found.startswith(answer)
            assert bool(found) == bool(answer)


def test_a_connection_carries_several_requests(serving: Serving) -> None:
    server = serving("steered", "timeout=0.5")
    connection = server.connection()
    sockets = set()
    for value in (1, 2, 3):
        connection.request("POST", "/v2/models/steered/infer", json.dumps(request(value)))
        sockets.add(connection.sock)
        assert json.loads(connection.getresponse().read())["outputs"][0]["data"] == [2 * value]
        time.sleep(0.3)  # longer than the timeout together
    assert len(sockets) == 1
    connection.close()


def test_a_token_is_needed(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    server = serving("steered", f"token_file={file}")
    for header in ({}, {"Authorization": "Bearer 0123456789abcdeF"}, {"Authorization": "Bearer "}):
        for method, path in (
            ("GET", "/v2"),
            ("GET", "/metrics"),
            ("POST", "/v2/models/steered/infer"),
        ):
            found = server.call(method, path, b"{}", header)
            assert found.status == 401
            assert found.headers["www-authenticate"] == "Bearer"
    assert server.get("/v2/health/ready").status == 200
    assert outputs(server.infer(request(1), Authorization="Bearer 0123456789abcdef"))["y"] == [2]


def test_it_listens_on_this_machine_alone(serving: Serving) -> None:
    server = serving("steered")
    host, _, port = server.address.partition(":")
    assert host == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        http.client.HTTPConnection("127.0.0.2", int(port), timeout=60).request("GET", "/v2")
