"""Part ``device``: what the device and its link can do at best, beside which all else is read.

A way that moves B bytes cannot take less than B over the link's speed, whatever runs beside the copies.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.meters import CountedMeter, CudaMeter, Meter
from benchmarks.gpu.parts.part import Findings, Found, Given
from benchmarks.gpu.setup import start_of
from benchmarks.workers import Worker
from parallax.common.units import format_bytes
from parallax.machine.host import available_memory, cpu_model

REPEATS = 7
QUERY = "name,driver_version,clocks.sm,clocks.max.sm,power.limit,pcie.link.gen.current,pcie.link.width.current"


def device(given: Given) -> Findings:
    """Name, bytes and speeds; a process of its own, so that nothing of it stays on the device."""
    cuda = given.kind == "cuda"
    worker = Worker("device", _measured, given.kind, start=start_of(given.kind))
    try:
        found: Found = worker.ready(given.deadline.left())
    finally:
        worker.close(patience=5.0)
    given.say(f"{found['name']}, {format_bytes(found['free_bytes'])} free")
    yield found | {"driver": _driver_output() if cuda else ""}


def _driver_output() -> str:
    """What nvidia-smi says in a line; nothing where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return (done.stdout.strip().splitlines() or [""])[0]


@contextlib.contextmanager
def _measured(kind: str) -> Iterator[tuple[dict[str, Any], Callable[[Any], Any]]]:
    cuda = kind == "cuda"
    meter: Meter = CudaMeter(None) if cuda else CountedMeter(None)
    there = torch.device("cuda", 0) if cuda else torch.device("cpu")
    facts = {
        "name": cpu_model(),
        "free_bytes": available_memory(),
        "host_bytes": available_memory(),
    }
    if cuda:
        facts |= {
            "name": torch.cuda.get_device_name(0),
            "free_bytes": torch.cuda.mem_get_info(0)[0],
        }
    width, count = (8192, 2**28) if cuda else (128, 2**20)
    yield facts | {"threads": torch.get_num_threads(), **_speeds(there, meter, width, count)}, str


def _speeds(there: torch.device, meter: Meter, width: int, count: int) -> dict[str, Any]:
    """Rates of some repetitions: bytes down and up, alone and at once; a matrix product of random numbers."""
    pinned = there.type == "cuda"
    device, other = (torch.empty(count, dtype=torch.uint8, device=there) for _ in range(2))
    host, back = (torch.empty(count, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    left, right = (torch.randn(width, width, device=there, dtype=torch.bfloat16) for _ in range(2))
    side = torch.cuda.Stream() if pinned else None

    def both() -> None:
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # None is no stream
            other.copy_(back, non_blocking=True)
        host.copy_(device, non_blocking=True)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)

    passes: dict[str, tuple[float, Callable[[], Any]]] = {
        "down_bytes_per_second": (count, lambda: host.copy_(device, non_blocking=True)),
        "up_bytes_per_second": (count, lambda: device.copy_(host, non_blocking=True)),
        "both_bytes_per_second": (2 * count, both),
        "device_copy_bytes_per_second": (2 * count, lambda: other.copy_(device)),
        "bf16_flops": (2.0 * width**3, lambda: left @ right),
    }
    found = {}
    for name, (amount, call) in passes.items():
        rates = [amount / seconds for seconds in _times(call, meter)]
        low, median, high = statistics.quantiles(rates, n=4, method="inclusive")
        found[name] = {"median": median, "low": low, "high": high}
    return found


def _times(call: Callable[[], Any], meter: Meter) -> list[float]:
    """The first calls warm up."""
    for _ in range(3):
        call()
    marks: list[Any] = [meter.mark()]
    for _ in range(REPEATS):
        call()
        marks.append(meter.mark())
    return meter.seconds(marks)
