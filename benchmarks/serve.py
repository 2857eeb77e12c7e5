"""How much does batching raise the throughput of ``parallax serve``?  ``python -m benchmarks.serve [--json]``

An MLP with large weights: a request of one row reads all of them, and a batch of 32 reads them once. This process sends
requests of one row to a server in a process of its own, at times of a Poisson process, whether or not earlier requests
were answered (open loop). The rates rise; the throughput is the highest rate of answers. Latencies are from the time at
which a request was due to its answer, so a queue counts. ``one at a time`` is ``serve.max_batch_rows=1``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

WIDTH, LAYERS, TOKENS = 2048, 4, 32
RUN = [
    *("model=mlp", f"model.hidden={WIDTH}", f"model.layers={LAYERS}", f"model.sequence={TOKENS}"),
    *("data.max_bytes=64KiB", "trainer.global_batch=32", "trainer.steps=1", "logger=none"),
    *("trainer.eval_every=0", "cluster.devices=1", "model.verify=false", "name=mlp"),
]
SERVERS = {
    "one at a time": ["serve.max_batch_rows=1"],
    "max_wait 0 ms": ["serve.max_wait=0"],
    "max_wait 5 ms": ["serve.max_wait=0.005"],
    "max_wait 20 ms": ["serve.max_wait=0.02"],
}
RATES = 50, 200, 600, 1200  # requests a second
SECONDS = 2.5
CONNECTIONS = 256


@dataclass(frozen=True, kw_only=True)
class Load:
    """Answers at one rate. ``refused``: answers other than 200."""

    server: str
    offered_per_second: float
    answered_per_second: float
    p50_ms: float
    p99_ms: float
    refused: int


@contextmanager
def serving(folder: Path, settings: list[str]) -> Iterator[tuple[str, int, str]]:
    """Run a server; yield its host, its port and the name of the model's input."""
    command = [sys.executable, "-m", "parallax", "serve", "mlp", "serve.port=0", *settings]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    name = ""
    try:
        for line in process.stdout:
            if line.startswith("mlp takes "):
                name = line.split()[2]
            if "http://" in line:
                host, _, port = line.split("http://")[1].split("/")[0].partition(":")
                yield host, int(port), name
                break
    finally:
        process.terminate()
        process.communicate()


def request(host: str, name: str) -> bytes:
    """Return a request of one row, with binary data."""
    row = np.random.default_rng(1).integers(0, 256, (1, TOKENS)).astype(np.int64).tobytes()
    entry = {
        "name": name,
        "shape": [1, TOKENS],
        "datatype": "INT64",
        "parameters": {"binary_data_size": len(row)},
    }
    header = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(header) + len(row)}\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\n\r\n"
    )
    return head.encode() + header + row


async def load(host: str, port: int, content: bytes, rate: float, server: str) -> Load:
    """Send requests at ``rate`` for some seconds, and wait for all answers."""
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    limit = asyncio.Semaphore(CONNECTIONS)
    seconds, refused, last = list[float](), 0, time.monotonic()

    async def send(due: float) -> None:
        nonlocal refused, last
        async with limit:
            reader, writer = idle.pop() if idle else await asyncio.open_connection(host, port)
            writer.write(content)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"\r\ncontent-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            idle.append((reader, writer))
        last = time.monotonic()
        seconds.append(last - due)
        refused += not head.startswith(b"HTTP/1.1 200")

    gaps = np.random.default_rng(2).exponential(1 / rate, int(rate * SECONDS))
    begin = time.monotonic()
    sent = []
    for due in begin + np.cumsum(gaps):
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        sent.append(asyncio.ensure_future(send(float(due))))
    await asyncio.gather(*sent)
    for _, writer in idle:
        writer.close()
    return Load(
        server=server,
        offered_per_second=rate,
        answered_per_second=(len(seconds) - refused) / (last - begin),
        p50_ms=1e3 * float(np.percentile(seconds, 50)),
        p99_ms=1e3 * float(np.percentile(seconds, 99)),
        refused=refused,
    )


def measure(folder: Path) -> Iterator[Load]:
    """Train the model for a step, and load each server at each rate until it is saturated."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    train = [sys.executable, "-m", "parallax", "train", *RUN]
    subprocess.run(train, cwd=folder, env=environment, check=True, capture_output=True)
    for server, settings in SERVERS.items():
        with serving(folder, settings) as (host, port, name):
            content = request(host, name)
            for rate in RATES:
                found = asyncio.run(load(host, port, content, rate, server))
                yield found
                if found.answered_per_second < 0.7 * rate:
                    break


def main() -> int:
    """Print a table, or a line of JSON for each load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parsed = parser.parse_args()
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("server", "offered/s", "answered/s", "p50 ms", "p99 ms", "refused"):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for found in measure(Path(folder)):
            if parsed.json:
                print(json.dumps(asdict(found)), flush=True)
            best[found.server] = max(best.get(found.server, 0.0), found.answered_per_second)
            numbers = (
                found.offered_per_second,
                found.answered_per_second,
                found.p50_ms,
                found.p99_ms,
            )
            table.add_row(
                found.server, *(f"{number:.0f}" for number in numbers), str(found.refused)
            )
    if not parsed.json:
        console = Console(width=100)
        console.print(table)
        alone = best["one at a time"]
        for server, throughput in best.items():
            console.print(
                f"{server}: {throughput:.0f} answers/s, {throughput / alone:.1f} times one at a time"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
