"""Hundreds of steps of ever other shapes leave nothing behind: no memory, file, thread, mapping or tensor."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from parallax.model.describe import describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan

LENGTHS = (4, 10, 16)
MODEL = GPTConfig(layers=2, hidden=16, heads=2, sequence=max(LENGTHS), vocabulary=32)
PLANS: list[dict[str, Any]] = [
    {"schedule": "1f1b", "directive": "offload"},
    {"schedule": "zb-h1", "directive": "keep"},
    {"schedule": "interleaved", "directive": "keep", "interleave": 2},
]
PERIOD = 8 * len(LENGTHS) * len(PLANS)  # after so many steps, every plan has seen every shape
# Tables of many kinds grow for a thousand steps.
MEASURED = 6 * PERIOD, 10 * PERIOD, 14 * PERIOD, 18 * PERIOD
KIB = 1024


def make_batch(step: int) -> TensorRows:
    rows, length = 1 + step % 8, LENGTHS[step // 8 % len(LENGTHS)]
    tokens = torch.randint(0, 32, (rows, length + 1), generator=torch.Generator().manual_seed(step))
    return TensorRows(tokens[:, :-1], tokens[:, 1:])


_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def heap_bytes() -> int:
    """Given out by malloc and not given back; 0 where the C library does not say."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = _Mallinfo
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def census(engines: list[Engine]) -> dict[str, int]:
    """What this process holds between two steps."""
    deadline = time.monotonic() + 20
    for manager in (engine._manager for engine in engines if engine._manager is not None):
        while manager.stored_bytes + manager.resident_bytes and time.monotonic() < deadline:
            time.sleep(0.001)  # a write that had begun is let end
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = gc.get_objects()
    return {
        "resident": psutil.Process().memory_info().rss,
        "heap": heap_bytes(),
        "objects": sys.getallocatedblocks(),
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in found),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rings": Path("/proc/self/maps").read_text().count("parallax-ring"),
    }


def training(measured: tuple[int, ...]) -> list[dict[str, int]]:
    chain = describe(MODEL.build, seed=3)
    with tempfile.TemporaryDirectory() as folder:
        engines = [
            Engine.build(
                chain,
                make_plan(chain, replicas=(1, 1), microbatch=4, **options),
                loss=GPT.loss,
                swap=SwapConfig(minimum_bytes=1024, threads=1),
                scratch=Path(folder) / str(number),
            )
            for number, options in enumerate(PLANS)
        ]
        found = []
        for step in range(measured[-1]):
            engines[step % len(engines)].step(make_batch(step // len(engines)))
            if step + 1 in measured:
                found.append(census(engines))
        for engine in engines:
            engine.close()
    return found


def grown(counted: list[dict[str, int]]) -> dict[str, int]:
    """A leak grows from each census to the next; a table that fills up, or becomes larger at once, does not."""
    return {
        name: min(b[name] - a[name] for a, b in itertools.pairwise(counted)) for name in counted[0]
    }


@pytest.mark.slow
def test_steps_leave_no_file_thread_ring_or_tensor(pool: Pool) -> None:
    """Views of the slots of a ring are made when a slot is first used, which is a matter of time: they fill up."""
    for counted in pool.run(training, 2, tuple(PERIOD * n for n in (1, 2, 3, 4))):
        more = grown(counted[:3])
        assert more["files"] <= 0, counted
        assert more["threads"] <= 0, counted
        assert more["rings"] <= 0, counted
        assert grown(counted)["tensors"] < PERIOD / 2, counted


@pytest.mark.thorough  # what is counted one by one is counted above
def test_steps_leave_nothing_behind(pool: Pool) -> None:
    for counted in pool.run(training, 2, MEASURED):
        first, last, more = counted[0], counted[-1], grown(counted)
        steps = MEASURED[1] - MEASURED[0]
        assert last["files"] <= first["files"], counted
        assert last["threads"] <= first["threads"], counted
        assert more["rings"] <= 0, counted
        assert more["tensors"] < steps / 2, counted
        assert more["objects"] < steps, counted  # not one Python object for each step
        assert more["heap"] < steps * KIB, counted
        assert more["resident"] < steps * KIB, counted
