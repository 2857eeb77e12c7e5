"""Is every request answered once while ranks are killed?  ``python -m benchmarks.serve_kills [--requests N] [--json]``

Clients send requests of one row one after the other to ``parallax serve`` with the settings that are given, by default
two stages on two processes. A rank, at random, is killed every few seconds. Printed are the answers by status, answers
whose numbers differ from the first for the same row, how often the server said that it is not ready and for how long at
most, and the longest time of a request.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

TRAIN = [
    *("experiment=tiny", "data.max_bytes=64KiB", "trainer.steps=2", "logger=none", "name=tiny"),
    "cluster.devices=1",
]
TWO_STAGES = ["cluster.devices=2", "plan.stages=2"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
}
CLIENTS, ROWS = 16, 16
TOLERANCE = 1e-4  # batches of other sizes may add in another order


class Clients:
    """Send ``requests`` requests in all, and count their answers."""

    def __init__(self, address: str, requests: int) -> None:
        self._address, self._left = address, requests
        self._lock = threading.Lock()
        rows = np.random.default_rng(1).integers(0, 256, (ROWS, 64))
        self._bodies = [_body(row) for row in rows]
        self._first: dict[int, Any] = {}
        self.statuses, self.different, self.slowest = Counter[str](), 0, 0.0
        self._threads = [threading.Thread(target=self._work) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    @property
    def at_work(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=120)
        while True:
            with self._lock:
                self._left -= 1
                if self._left < 0:
                    return
                row = self._left % ROWS
            begun = time.monotonic()
            connection.request(
                "POST",
                "/v2/models/tiny/infer",
                self._bodies[row],
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            content = answer.read()
            with self._lock:
                self.statuses[str(answer.status)] += 1
                self.slowest = max(self.slowest, time.monotonic() - begun)
                if answer.status == 200:
                    header = int(answer.getheader("Inference-Header-Content-Length", "0"))
                    found = np.frombuffer(content[header:], np.float32)
                    first = self._first.setdefault(row, found)
                    self.different += bool(np.abs(found - first).max() > TOLERANCE)


def _body(row: Any) -> bytes:
    entry = {"name": "tokens", "shape": [1, len(row)], "datatype": "INT64", "data": row.tolist()}
    binary = {"binary_data_output": True}
    return json.dumps({"inputs": [entry], "parameters": binary}).encode()


def ready(address: str) -> bool:
    """Return whether the server says that it is ready."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    finally:
        connection.close()


def kill_one(server: int) -> bool:
    """Kill a rank of the server's; return whether there was one."""
    ranks = [
        each
        for each in psutil.Process(server).children(recursive=True)
        if "parallax rank " in " ".join(each.cmdline())
    ]
    if ranks:
        random.choice(ranks).kill()
    return bool(ranks)


def watch(
    process: subprocess.Popen[str], address: str, requests: int, every: float
) -> dict[str, Any]:
    """Return the counts for ``requests`` requests, while a rank is killed every ``every`` seconds."""
    clients, kills, unready, longest = Clients(address, requests), 0, 0, 0.0
    since: float | None = None
    last = time.monotonic()
    while clients.at_work:
        time.sleep(0.02)
        now, is_ready = time.monotonic(), ready(address)
        if is_ready and since is not None:
            longest, since = max(longest, now - since), None
        elif not is_ready and since is None:
            since, unready = now, unready + 1
        if now - last >= every:
            with suppress(psutil.Error):
                kills += kill_one(process.pid)
            last = now
    return {
        "requests": requests,
        "answers": dict(clients.statuses),
        "answered": sum(clients.statuses.values()),
        "different": clients.different,
        "kills": kills,
        "not_ready": unready,
        "longest_not_ready_seconds": round(longest, 2),
        "slowest_request_seconds": round(clients.slowest, 2),
    }


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two kills")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("settings", nargs="*", default=TWO_STAGES)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "parallax"]
        subprocess.run(
            [*run, "train", *TRAIN],
            cwd=folder,
            env=ENVIRONMENT,
            check=True,
            capture_output=True,
        )
        command = [*run, "serve", "tiny", "serve.port=0", "serve.queue_rows=4096"]
        output = Path(folder) / "output"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*command, *parsed.settings],
                cwd=folder,
                env=ENVIRONMENT,
                text=True,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            while "http://" not in output.read_text():
                if process.poll() is not None:
                    sys.exit(output.read_text())
                time.sleep(0.1)
            address = output.read_text().split("http://")[1].split("/")[0]
            found = watch(process, address, parsed.requests, parsed.every)
        finally:
            process.terminate()
            process.wait()
    print(json.dumps(found) if parsed.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
