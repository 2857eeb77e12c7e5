"""Measure the bytes that a function call allocates on a device."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from parallax.common.files import temporary_folder


class Allocations(NamedTuple):
    """The bytes that a call has allocated.

    ``most``    the peak during the call, above the bytes allocated before it
    ``left``    bytes that the call has allocated and not freed
    ``blocks``  the bytes of each single allocation on a CPU; empty on other devices
    """

    most: int
    left: int
    blocks: tuple[int, ...] = ()


def measure_allocations(device: torch.device, call: Callable[[], object]) -> Allocations:
    """Run ``call`` and return the bytes that it allocated on ``device``."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        call()
        most = torch.accelerator.max_memory_allocated(device)
        left = int(torch.accelerator.memory_allocated(device)) - before
        return Allocations(int(most) - before, left)
    with (
        _quiet_stderr(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile,
    ):
        call()
    with temporary_folder() as folder:
        path = folder / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    steps = [
        event
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    ]
    level = peak = 0
    blocks = []
    for event in sorted(steps, key=lambda event: float(event["ts"])):
        size = int(event["args"]["Bytes"])
        level += size
        peak = max(peak, level)
        if size > 0:
            blocks.append(size)
    return Allocations(peak, level, tuple(blocks))


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """A context that silences stderr.

    Otherwise torch's profiler writes two lines to it in each run, at any log level.
    """
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
