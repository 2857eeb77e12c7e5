"""What does batching bring to ``parallax serve``, and are its latencies predicted?  ``python -m benchmarks.serve``

An MLP with large weights: a request of one row reads all of them, and a batch of 32 reads them once. This process sends
requests of one row to a server in a process of its own, at times of a Poisson process, whether or not earlier requests
were answered (open loop). The server has one core, and this process another; two stages have both cores, and this
process needs a part of them, which is printed. Latencies are from the time at which a request was due to its answer, so
a queue counts.

``--part loads``: the rates rise; the throughput is the highest rate of answers. ``one at a time`` is
``serve.max_batch_rows=1``, and ``litserve`` the same model behind LitServe in one worker, with the same most rows of a
batch. ``longest wait`` is that of a request in the queue, as the server says in its answers. ``too long`` counts the
requests that waited for longer than ``serve.max_wait`` and the longest batch; each full batch of requests that were
unanswered when they were sent allows a batch more.
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
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
ONE_AT_A_TIME = "one at a time"
WAITS = {
    "max_wait 0 ms": ["serve.max_wait=0"],
    "max_wait 5 ms": ["serve.max_wait=5ms"],
    "max_wait 20 ms": ["serve.max_wait=20ms"],
    "max_wait auto": ["serve.max_wait=auto", f"serve.requests_per_second={AUTO_RATE}"],
}
TWO_STAGES = ["cluster.devices=2", "plan.stages=2"]
SERVERS = {
    ONE_AT_A_TIME: ["serve.max_batch_rows=1"],
    **WAITS,
    **{f"{name}, two stages": [*settings, *TWO_STAGES] for name, settings in WAITS.items()},
}
LITSERVE = {"litserve 0 ms": 0.0, "litserve 5 ms": 0.005}  # batch_timeout
RATES = 100, 200, 400, 800, 1200, 2000  # requests a second
SHARES = 0.3, 0.6, 0.85  # of the throughput
SECONDS, STARTED_SECONDS, ENDED_SECONDS = 2.0, 60.0, 20.0
# Of loads that are compared with predictions; the medians count. Near saturation a second has too few bursts.
TURNS, TURN_SECONDS = 5, 3.0
CONNECTIONS = 256
ROOT = Path(__file__).parents[1]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Answers at one rate. ``refused``: answers other than 200. ``longest_wait_ms``, ``too_long``: of requests in the
    queue; None if the server does not say. ``client_share``: the part of a core that this process needed."""

    server: str
    offered_per_second: float
    answered_per_second: float
    p50_ms: float
    p99_ms: float
    refused: int
    longest_wait_ms: float | None
    too_long: int | None
    client_share: float


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A measured p99, and the predictions of it by the server at its start and by the plan. ``p99s_ms``: of all
    turns."""

    share: float
    load: Load
    p99s_ms: list[float]
    server_p50_ms: float
    server_p99_ms: float
    plan_p99_ms: float


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server that listens at ``port``, and a request for it. ``lines``: printed at its start. ``max_wait``,
    ``batch_rows``: its settings."""

    port: int
    content: bytes
    lines: tuple[str, ...] = ()
    max_wait: float = 0.0
    batch_rows: int = ROWS


class Cores:
    """The core of the servers, and that of this process. Two stages have both."""

    def __init__(self) -> None:
        self.server, *mine = self.all = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, mine or {self.server})

    def start(
        self, command: Sequence[str], folder: Path, *, both: bool = False
    ) -> subprocess.Popen[str]:
        """Start a process in a group of its own."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        cores = ",".join(map(str, self.all)) if both else str(self.server)
        return subprocess.Popen(
            ["taskset", "-c", cores, *command],
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def run(self, command: Sequence[str], folder: Path) -> str:
        process = self.start([sys.executable, "-m", "parallax", *command], folder)
        text, _ = process.communicate()
        assert process.returncode == 0, f"{' '.join(command)}: {text[-500:]}"
        return text


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """A context that ends the process and its children. LitServe's worker does not end with its server."""
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDED_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextmanager
def serving(cores: Cores, folder: Path, settings: Sequence[str]) -> Iterator[Target]:
    """Run ``parallax serve``."""
    command = [sys.executable, "-m", "parallax", "serve", "mlp", "serve.port=0", *settings]
    process = cores.start(command, folder, both=TWO_STAGES[0] in settings)
    lines = list[str]()
    assert process.stdout is not None
    with ending(process):
        for line in process.stdout:
            lines.append(line.strip())
            if "http://" in line:
                break
        port = int(lines[-1].split("http://")[1].split("/")[0].split(":")[1])
        name = next(line.split()[2] for line in lines if line.startswith("mlp takes "))
        yield Target(
            port=port,
            content=protocol_request(name),
            lines=tuple(lines),
            max_wait=wait_of(settings, lines),
            batch_rows=1 if "serve.max_batch_rows=1" in settings else ROWS,
        )


def wait_of(settings: Sequence[str], lines: Sequence[str]) -> float:
    """Return ``serve.max_wait`` in seconds, which auto chooses."""
    text = next((each.partition("=")[2] for each in settings if "max_wait" in each), "0")
    if text == "auto":
        chosen = r"max_wait=auto is ([\d.]+ \S?s)"
        return next(milliseconds(m[1]) for each in lines if (m := re.search(chosen, each))) / 1e3
    return float(text.removesuffix("ms")) / 1e3


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
        while not run_exactly(answers(target)):
            assert time.monotonic() < end, "LitServe did not start"
            time.sleep(0.2)
        yield target


async def answers(target: Target) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
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


def run_exactly(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on an event loop whose timers are not late by a millisecond, as those of the usual one are."""
    with asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
    ) as runner:
        return runner.run(work)


class Connection(asyncio.Protocol):
    """A connection for one request at a time."""

    _answered: asyncio.Future[tuple[bytes, float]] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    async def answer(self, content: bytes) -> tuple[bytes, float]:
        """Send a request; return the head of the answer, and the time at which it was complete."""
        self._received = bytearray()
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(content)
        return await self._answered

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if length and len(body) >= int(length[1]) and self._answered is not None:
            self._answered.set_result((bytes(head), time.monotonic()))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc or ConnectionError("the server closed it"))

    def close(self) -> None:
        self._transport.close()


class Answer(NamedTuple):
    """The answer to a request. ``seconds``: since it was due. ``before``: requests without an answer when it was sent.
    ``queue``, ``compute``: seconds in the queue and of the batch, if the server says."""

    end: float
    seconds: float
    head: bytes
    before: int

    @property
    def queue(self) -> float | None:
        return self._stated(rb"queue")

    @property
    def compute(self) -> float | None:
        return self._stated(rb"compute")

    def _stated(self, name: bytes) -> float | None:
        found = re.search(name + rb";dur=([\d.]+)", self.head)
        return float(found[1]) / 1e3 if found else None


async def load(target: Target, rate: float, server: str, count: int, seed: int = 0) -> Load:
    """Send ``count`` requests at ``rate``, and wait for all answers. ``seed``: of the times."""
    loop, idle, answered = asyncio.get_running_loop(), list[Connection](), list[Answer]()
    limit, before = asyncio.Semaphore(CONNECTIONS), 0

    async def send(due: float) -> None:
        nonlocal before
        async with limit:
            if not idle:
                address = "127.0.0.1", target.port
                idle.append((await loop.create_connection(Connection, *address))[1])
            connection, earlier = idle.pop(), before
            before += 1
            head, end = await connection.answer(target.content)
            before -= 1
            idle.append(connection)
        answered.append(Answer(end, end - due, head, earlier))

    gaps = np.random.default_rng([2, seed]).exponential(1 / rate, count)
    begin, processor = time.monotonic(), time.process_time()
    sent = []
    for due in (begin + np.cumsum(gaps)).tolist():
        if (left := due - time.monotonic()) > 0:
            await asyncio.sleep(left)
        sent.append(asyncio.ensure_future(send(due)))
    await asyncio.gather(*sent)
    share = (time.process_time() - processor) / (time.monotonic() - begin)
    for connection in idle:
        connection.close()
    return found_in(answered, target, server, rate, begin, share)


def found_in(
    answered: Sequence[Answer],
    target: Target,
    server: str,
    rate: float,
    begin: float,
    client_share: float,
) -> Load:
    """Return the figures of a load."""
    p50, p99 = np.percentile([each.seconds for each in answered], (50, 99)).tolist()
    good = [each for each in answered if each.head.startswith(b"HTTP/1.1 200")]
    stated = [
        (each, queue, batch)
        for each in good
        if (queue := each.queue) is not None and (batch := each.compute) is not None
    ]
    batch = max((seconds for _, _, seconds in stated), default=0.0)
    late = [
        queue > target.max_wait + batch * (1 + each.before // target.batch_rows)
        for each, queue, _ in stated
    ]
    return Load(
        server=server,
        offered_per_second=rate,
        answered_per_second=len(good) / (max(each.end for each in answered) - begin),
        p50_ms=1e3 * p50,
        p99_ms=1e3 * p99,
        refused=len(answered) - len(good),
        longest_wait_ms=1e3 * max(queue for _, queue, _ in stated) if stated else None,
        too_long=sum(late) if stated else None,
        client_share=client_share,
    )


def median_of(turns: Sequence[Load]) -> Load:
    """Return the medians of equal loads: other work on the machine delays one of them."""
    return replace(
        turns[0],
        answered_per_second=float(np.median([turn.answered_per_second for turn in turns])),
        p50_ms=float(np.median([turn.p50_ms for turn in turns])),
        p99_ms=float(np.median([turn.p99_ms for turn in turns])),
        client_share=float(np.median([turn.client_share for turn in turns])),
        refused=sum(turn.refused for turn in turns),
    )


def rising(target: Target, server: str) -> Iterator[Load]:
    """Load a server at rising rates until it is saturated."""
    run_exactly(load(target, 100, server, 50))  # the first requests open connections
    for rate in RATES:
        found = run_exactly(load(target, rate, server, int(rate * SECONDS)))
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
            run_exactly(load(target, 100, "", 50))
            rate = round(share * most)
            turns = [
                run_exactly(load(target, rate, "", int(rate * TURN_SECONDS), turn))
                for turn in range(TURNS)
            ]
        text = next((line for line in target.lines if "predicted latency" in line), "")
        found = re.findall(r"p(?:50|99) ([\d.]+ \S?s)", text)
        p50, p99 = map(milliseconds, found or ["inf s"] * 2)
        yield Predicted(
            share=share,
            load=median_of(turns),
            p99s_ms=[turn.p99_ms for turn in turns],
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
    headings = "offered/s", "answered/s", "p50 ms", "p99 ms", "longest wait", "too long", "client"
    table = table_of("server", *headings)
    best: dict[str, float] = {}
    for each in found:
        best[each.server] = max(best.get(each.server, 0.0), each.answered_per_second)
        numbers = each.offered_per_second, each.answered_per_second, each.p50_ms, each.p99_ms
        wait = "" if each.longest_wait_ms is None else f"{each.longest_wait_ms:.0f}"
        late = "" if each.too_long is None else str(each.too_long)
        share = f"{each.client_share:.0%}"
        table.add_row(each.server, *(f"{number:.0f}" for number in numbers), wait, late, share)
    console.print(table)
    console.print(f"answers other than 200: {sum(each.refused for each in found)}")
    for server, throughput in best.items():
        times = throughput / best.get(ONE_AT_A_TIME, float("nan"))
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
