"""Servers as processes of their own."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import ROOT
from tests.leaks import lasting

DONE_SECONDS = 60
TINY = ["experiment=tiny", "data.max_bytes=64KiB", "trainer.checkpoint_every=2", "logger=none"]


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DONE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json["error"])


@dataclass
class Server:
    """A server's process. ``folder``: its working directory."""

    process: subprocess.Popen[str]
    address: str
    folder: Path
    model: str
    lines: list[str] = field(default_factory=list)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, timeout=DONE_SECONDS)

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        connection = self.connection()
        try:
            connection.request(method, path, body, headers or {})
            found = connection.getresponse()
            return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.call("GET", path)

    def infer(self, body: Any, **headers: str) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.call(
            "POST",
            f"/v2/models/{self.model}/infer",
            content,
            {k.replace("_", "-"): v for k, v in headers.items()},
        )

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def end(self) -> int:
        """Ask the server to end; return its exit code."""
        self.process.terminate()
        self.process.communicate(timeout=DONE_SECONDS)
        return self.process.returncode


def start(command: list[str], folder: Path, model: str) -> Server:
    """Start a server and wait until it prints its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if "http://" in line:
            address = line.split("http://")[1].split("/")[0].split()[0].strip()
            return Server(process, address, folder, model, lines)
    raise AssertionError("\n".join(lines))


def close(server: Server) -> None:
    server.process.kill()
    server.process.communicate()


@pytest.fixture(scope="session")
def client_loop() -> None:
    """The event loop of the protocol's client, which it makes once in a thread and never closes."""
    with lasting():
        pytest.importorskip("gevent").get_hub()


@pytest.fixture
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start a server of :mod:`tests.serving.models`; it ends with the test."""
    started: list[Server] = []

    def begin(kind: str, *settings: str) -> Server:
        folder = tmp_path_factory.mktemp(kind)
        started.append(start(["tests.serving.models", kind, *settings], folder, kind))
        return started[-1]

    yield begin
    for server in started:
        close(server)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of :class:`~tests.serving.models.Echo` for all tests of a module."""
    command = ["tests.serving.models", "echo", "max_batch_rows=8", "max_body_bytes=100000"]
    server = start(command, tmp_path_factory.mktemp("echo"), "echo")
    yield server
    close(server)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run of four steps, and a checkpoint after the second."""
    found = tmp_path_factory.mktemp("run")
    train = [sys.executable, "-m", "parallax", "train", *TINY, "name=tiny", "cluster.devices=1"]
    subprocess.run(train, cwd=found, check=True, capture_output=True)
    return found


@pytest.fixture
def serving_run(folder: Path) -> Iterator[Callable[..., Server]]:
    """Start servers of the run in ``folder``; they end with the test."""
    started: list[Server] = []

    def begin(*words: str, within: Path = folder) -> Server:
        command = ["parallax", "serve", "tiny", "serve.port=0", *words]
        started.append(start(command, within, "tiny"))
        return started[-1]

    yield begin
    for server in started:
        close(server)
