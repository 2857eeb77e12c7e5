"""What does batching bring to ``parallax serve``, and are its latencies predicted?  ``python -m benchmarks.serve``

An MLP with large weights: a request of one row reads all of them, and a batch of 32 reads them once. This process sends
requests of one row to a server in a process of its own, at times of a Poisson process, whether or not earlier requests
were answered (open loop). The server has one core, and this process another. Latencies are from the time at which a
request was due to its answer, so a queue counts.

``--part loads``: the rates rise; the throughput is the highest rate of answers. ``one at a time`` is
``serve.max_batch_rows=1``, and ``litserve`` the same model behind LitServe, with the same most rows of a batch.
``--part predictions``: p99 at 30%, 60% and 85% of the throughput, beside the prediction that the server prints at its
start, and that of ``parallax plan task=inference``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

WIDTH, LAYERS, TOKENS, ROWS = 2048, 4, 32, 32
MODEL = [
    *("model=mlp", f"model.hidden={WIDTH}", f"model.layers={LAYERS}", f"model.sequence={TOKENS}"),
    *("data.max_bytes=64KiB", "cluster.devices=1", "model.verify=false", "name=mlp"),
]
TRAINING = ["trainer.global_batch=32", "trainer.steps=1", "logger=none", "trainer.eval_every=0"]
AUTO_RATE = 600
SERVERS = {
    "one at a time": ["serve.max_batch_rows=1"],
    "max_wait 0 ms": ["serve.max_wait=0"],
    "max_wait 5 ms": ["serve.max_wait=5ms"],
    "max_wait 20 ms": ["serve.max_wait=20ms"],
    "max_wait auto": ["serve.max_wait=auto", f"serve.requests_per_second={AUTO_RATE}"],
}
LITSERVE = {"litserve 0 ms": 0.0, "litserve 5 ms": 0.005}  # batch_timeout
RATES = 100, 200, 400, 800, 1200, 2000  # requests a second
SHARES = 0.3, 0.6, 0.85  # of the throughput
SECONDS, STARTED_SECONDS = 2.0, 60.0
TURNS = 5  # of loads that are compared with predictions; the medians count
CONNECTIONS = 256
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Answers at one rate. ``refused``: answers other than 200."""

    server: str
    offered_per_second: float
    answered_per_second: float
    p50_ms: float
    p99_ms: float
    refused: int


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A measured p99, and the predictions of it by the server at its start and by the plan."""

    share: float
    load: Load
    server_p50_ms: float
    server_p99_ms: float
    plan_p99_ms: float


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server that listens at ``port``, and a request for it. ``lines``: printed at its start."""

    port: int
    content: bytes
    lines: tuple[str, ...] = ()


class Cores:
    """The core of the servers, and that of this process."""

    def __init__(self) -> None:
        self.server, *mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, mine or {self.server})

    def start(self, command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["taskset", "-c", str(self.server), *command],
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def run(self, command: Sequence[str], folder: Path) -> str:
        process = self.start([sys.executable, "-m", "parallax", *command], folder)
        text, _ = process.communicate()
        assert process.returncode == 0, f"{' '.join(command)}: {text[-500:]}"
        return text


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def serving(cores: Cores, folder: Path, settings: Sequence[str]) -> Iterator[Target]:
    """Run ``parallax serve``."""
    command = [sys.executable, "-m", "parallax", "serve", "mlp", "serve.port=0", *settings]
    process, lines = cores.start(command, folder), list[str]()
    assert process.stdout is not None
    with ending(process):
        for line in process.stdout:
            lines.append(line.strip())
            if "http://" in line:
                break
        port = int(lines[-1].split("http://")[1].split("/")[0].split(":")[1])
        name = next(line.split()[2] for line in lines if line.startswith("mlp takes "))
        yield Target(port=port, content=protocol_request(name), lines=tuple(lines))


@contextmanager
def serving_lit(cores: Cores, folder: Path, python: str, wait: float) -> Iterator[Target]:
    """Run LitServe."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [python, "-m", "benchmarks.litserve_mlp", str(port), str(wait)]
    body = json.dumps({"tokens": row().tolist()}).encode()
    target = Target(port=port, content=post("/predict", body, "Content-Type: application/json\r\n"))
    with ending(cores.start(command, folder)):
        end = time.monotonic() + STARTED_SECONDS
        while not asyncio.run(answers(target)):
            assert time.monotonic() < end, "LitServe did not start"
            time.sleep(0.2)
        yield target


async def answers(target: Target) -> bool:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        return (await asyncio.wait_for(load(target, 1.0, "", 1), 5)).refused == 0
    return False


def row() -> Any:
    return np.random.default_rng(1).integers(0, 256, TOKENS).astype(np.int64)


def post(path: str, body: bytes, headers: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body


def protocol_request(name: str) -> bytes:
    """Return a request of one row, with binary data."""
    data = row().tobytes()
    entry = {
        "name": name,
        "shape": [1, TOKENS],
        "datatype": "INT64",
        "parameters": {"binary_data_size": len(data)},
    }
    header = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    length = f"Inference-Header-Content-Length: {len(header)}\r\n"
    return post("/v2/models/mlp/infer", header + data, length)


async def load(target: Target, rate: float, server: str, count: int, seed: int = 0) -> Load:
    """Send ``count`` requests at ``rate``, and wait for all answers. ``seed``: of the times."""
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    limit, seconds, last, refused = asyncio.Semaphore(CONNECTIONS), list[float](), 0.0, 0

    async def send(due: float) -> None:
        nonlocal refused, last
        async with limit:
            reader, writer = (
                idle.pop() if idle else await asyncio.open_connection("127.0.0.1", target.port)
            )
            writer.write(target.content)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"\r\ncontent-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            idle.append((reader, writer))
        last = time.monotonic()
        seconds.append(last - due)
        refused += not head.startswith(b"HTTP/1.1 200")

    gaps = np.random.default_rng([2, seed]).exponential(1 / rate, count)
    begin = time.monotonic()
    sent = []
    for due in begin + np.cumsum(gaps):
        while (left := due - time.monotonic()) > 0:
            await asyncio.sleep(
                left - 2e-3 if left > 3e-3 else 0
            )  # timers are late by a millisecond
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


def median_of(turns: Sequence[Load]) -> Load:
    """Return the medians of equal loads: other work on the machine delays one of them."""
    return replace(
        turns[0],
        answered_per_second=float(np.median([turn.answered_per_second for turn in turns])),
        p50_ms=float(np.median([turn.p50_ms for turn in turns])),
        p99_ms=float(np.median([turn.p99_ms for turn in turns])),
        refused=sum(turn.refused for turn in turns),
    )


def rising(target: Target, server: str) -> Iterator[Load]:
    """Load a server at rising rates until it is saturated."""
    asyncio.run(load(target, 100, server, 50))  # the first requests open connections
    for rate in RATES:
        found = asyncio.run(load(target, rate, server, int(rate * SECONDS)))
        yield found
        if found.answered_per_second < 0.7 * rate:
            return


def loads(cores: Cores, folder: Path, litserve: str, only: Sequence[str] | None) -> Iterator[Load]:
    for server, settings in SERVERS.items():
        if only and server not in only:
            continue
        with serving(cores, folder, settings) as target:
            yield from rising(target, server)
    for server, wait in LITSERVE.items() if litserve else ():
        if only and server not in only:
            continue
        with serving_lit(cores, folder, litserve, wait) as target:
            yield from rising(target, server)


def predictions(cores: Cores, folder: Path) -> Iterator[Predicted]:
    """Find the throughput, and compare predictions at some shares of it."""
    with serving(cores, folder, []) as target:
        most = max(found.answered_per_second for found in rising(target, ""))
    for share in SHARES:
        stated = [f"serve.requests_per_second={share * most:.0f}"]
        planned = json.loads(
            cores.run(["plan", "task=inference", *MODEL, *stated, "--json"], folder)
        )["serving"]
        with serving(cores, folder, stated) as target:
            asyncio.run(load(target, 100, "", 50))
            rate = round(share * most)
            found = median_of(
                [
                    asyncio.run(load(target, rate, "", int(rate * SECONDS), turn))
                    for turn in range(TURNS)
                ]
            )
        text = next(line for line in target.lines if "predicted latency" in line)
        p50, p99 = map(milliseconds, re.findall(r"p(?:50|99) ([\d.]+ \S?s)", text))
        yield Predicted(
            share=share,
            load=found,
            server_p50_ms=p50,
            server_p99_ms=p99,
            plan_p99_ms=1e3 * (planned["p99"] or float("inf")),
        )


def milliseconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1e3, "ms": 1.0, "µs": 1e-3}[unit]


def litserve_python(named: str) -> str:
    """Return the Python with LitServe; empty if there is none."""
    python = named or sys.executable
    found = subprocess.run([python, "-c", "import litserve"], capture_output=True, check=False)
    assert found.returncode == 0 or not named, f"{named} has no litserve"
    return python if found.returncode == 0 else ""


def collected(measured: Iterator[Any], as_json: bool) -> list[Any]:
    """Return all measurements. With ``as_json``, print each one as a line of JSON when it arrives."""
    found = []
    for each in measured:
        found.append(each)
        if as_json:
            print(json.dumps(asdict(each)), flush=True)
    return found


def table_of(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "server" else "right")
    return table


def show_loads(found: Sequence[Load], console: Console) -> None:
    table = table_of("server", "offered/s", "answered/s", "p50 ms", "p99 ms", "refused")
    best: dict[str, float] = {}
    for each in found:
        best[each.server] = max(best.get(each.server, 0.0), each.answered_per_second)
        numbers = each.offered_per_second, each.answered_per_second, each.p50_ms, each.p99_ms
        table.add_row(each.server, *(f"{number:.0f}" for number in numbers), str(each.refused))
    console.print(table)
    for server, throughput in best.items():
        times = throughput / best.get("one at a time", float("nan"))
        console.print(f"{server}: {throughput:.0f} answers/s, {times:.1f} times one at a time")


def show_predictions(found: Sequence[Predicted], console: Console) -> None:
    table = table_of(
        "load", "requests/s", "p50 ms", "predicted", "p99 ms", "predicted", "error", "by the plan"
    )
    for each in found:
        measured = each.load
        error = f"{each.server_p99_ms / measured.p99_ms - 1:+.0%}"
        numbers = measured.p50_ms, each.server_p50_ms, measured.p99_ms, each.server_p99_ms
        table.add_row(
            f"{each.share:.0%}",
            f"{measured.offered_per_second:.0f}",
            *(f"{number:.1f}" for number in numbers),
            error,
            f"{each.plan_p99_ms:.1f}",
        )
    console.print(table)


def main() -> int:
    """Print tables, or a line of JSON for each load and prediction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", choices=("loads", "predictions"))
    parser.add_argument("--server", action="append", metavar="NAME", help="some servers alone")
    parser.add_argument("--litserve-python", default="", metavar="PATH")
    parsed = parser.parse_args()
    cores, console = Cores(), Console(width=100, quiet=parsed.json)
    litserve = litserve_python(parsed.litserve_python)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cores.run(["train", *MODEL, *TRAINING], folder)
        if parsed.part != "predictions":
            show_loads(
                collected(loads(cores, folder, litserve, parsed.server), parsed.json), console
            )
        if parsed.part != "loads":
            show_predictions(collected(predictions(cores, folder), parsed.json), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
