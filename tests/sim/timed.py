"""Steps in the virtual time of the simulated accelerator, beside what the planner predicts for them.

Speeds are those of an H100 and its PCIe link, a thousand times as slow, so that what the host takes for a launch
matters as little as it does beside large kernels; and matrices are multiplied as much more slowly again as those of
this small model are smaller than a large model's: seconds of computing for each byte that is saved are then alike.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from parallax.machine.accelerators import accelerator_of, limit_device_memory
from parallax.model.describe import Chain, describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling.measure import measure
from parallax.plan.cluster import Cluster, Device, Link, Node
from parallax.plan.profile import ModelProfile
from parallax.plan.simulation.predict import predict
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from parallax.swap.offload_benchmark import OffloadBenchmarks
from tests.plans import make_plan
from tests.sim.device import SIM, TOTAL_BYTES, C

SLOWER, SMALLER = 1000, 200
LINK = 55e9 / SLOWER
SPEEDS = {
    "flops": 400e12 / SLOWER / SMALLER,
    "memory": 3.35e12 / SLOWER,
    "up": LINK,
    "down": LINK,
    "launch": 2e-6,
    "least": 2e-6,
}
SEQUENCE, ROWS = 64, 16

Sample = Callable[[int], tuple[Any, Any]]  # of rows: their inputs and targets


class Timed(NamedTuple):
    """``predicted`` and virtual seconds of a step, those of its actions by kind, and of them spent waiting; the most
    bytes on the device that were planned and were there, and of activations."""

    predicted: float
    seconds: float
    by_kind: dict[str, float]
    waited: dict[str, float]
    high_water: int
    planned_bytes: int
    peak_bytes: int


def batch() -> TensorRows:
    tokens = torch.randint(0, 256, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    return TensorRows(tokens[:, :-1], tokens[:, 1:])


@cache
def measured(layers: int) -> tuple[Chain, ModelProfile]:
    """A decoder, and its profile in virtual time."""
    config = GPTConfig(layers=layers, hidden=256, heads=4, sequence=SEQUENCE, tied=False)
    chain = describe(config.build)
    with tempfile.TemporaryDirectory() as folder, cache_in(folder):
        C.speeds(**SPEEDS)
        return chain, measured_quickly(chain, GPT.loss, sample_of(batch()))


def profile_of(chain: Chain, loss: Any, sample: Sample, **more: Any) -> ModelProfile:
    """What is measured at the speeds that are set."""
    more |= {"device": SIM, "precision": PrecisionConfig(), "minimum_bytes": 1024}
    return measure(chain, loss, sample, (2, 4), **more)


def measured_quickly(chain: Chain, loss: Any, sample: Sample) -> ModelProfile:
    """The same: passes take the same virtual time in each repetition, so the fewest are enough."""
    with patch("parallax.model.profiling.measure.SECONDS_PER_BLOCK", 0.0):
        return profile_of(chain, loss, sample)


def sample_of(rows: TensorRows) -> Sample:
    return lambda count: (rows.inputs(0, count), rows.targets(0, count))


@contextmanager
def cache_in(folder: str) -> Iterator[None]:
    """Profiles are kept in ``folder``."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


def cluster_of(devices: int, memory_bytes: int = 2**32, bytes_per_second: float = LINK) -> Cluster:
    """So many of them on one host."""
    link, quick = Link(bytes_per_second=bytes_per_second), Link(bytes_per_second=1e12)
    device = Device(
        kind="sim",
        memory_bytes=memory_bytes,
        tier="host",
        tier_bytes=2**32,
        write=link,
        read=link,
        reserve_bytes=accelerator_of(SIM).reserve_bytes,
    )
    node = Node(name="simulated", devices=(device,) * devices, concurrent=devices)
    return Cluster(nodes=(node,), local=quick, remote=quick)


def train(
    layers: int, directive: str, share: float = 1.0, *, fraction: float = 1.0, slower: float = 1.0
) -> Timed:
    """The second step of one rank under one directive. Offloaded activations may keep a ``share`` of their bytes on the
    device, which holds ``fraction`` of the planned bytes, and a link that is ``slower`` so many times."""
    chain, profile = measured(layers)
    link = LINK / slower
    moved = sum(block.moved.at(4) for block in profile.blocks)
    plan = make_plan(
        chain,
        directive=directive,
        tier="host",
        tier_bytes=64 * 2**20,
        swap_limit=int(share * moved),
        global_batch=ROWS,
        microbatch=4,
    )
    forecast = predict(profile, cluster_of(1, bytes_per_second=link), plan)
    planned = forecast.ranks[0].peak_bytes
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        held.callback(limit_device_memory, SIM, TOTAL_BYTES)
        limit_device_memory(SIM, int(fraction * planned))
        C.speeds(**SPEEDS | {"up": link, "down": link})
        engine = Engine.build(
            chain,
            plan,
            loss=GPT.loss,
            device=SIM,
            swap=SwapConfig(minimum_bytes=1024),
            scratch=Path(folder),
        )
        held.callback(engine.close)
        for _ in range(2):
            torch.accelerator.synchronize()
            begun = C.host_seconds()
            result = engine.step(batch())
        torch.accelerator.synchronize()
        seconds = C.host_seconds() - begun
    C.speeds()
    by_kind: dict[str, float] = defaultdict(float)
    waited: dict[str, float] = defaultdict(float)
    for span in result.spans:
        by_kind[str(span.kind)] += span.end - span.start
        waited[str(span.kind)] += span.wait
    return Timed(
        forecast.step_seconds,
        seconds,
        dict(by_kind),
        dict(waited),
        result.swap.high_water,
        planned,
        result.peak_bytes,
    )


def offloading() -> tuple[float, float]:
    """Seconds that a block takes longer where what it saves leaves and comes back, without those in which it waits, as
    they are measured, and those that the link takes one way."""
    config = GPTConfig(layers=2, hidden=256, heads=4, sequence=SEQUENCE, tied=False)
    chain, swap = describe(config.build), SwapConfig(minimum_bytes=1024)
    # Virtual time stands still while the host sleeps.
    awake = patch(
        "parallax.swap.offload_benchmark.time.sleep", lambda _: torch.accelerator.synchronize()
    )
    with tempfile.TemporaryDirectory() as folder, cache_in(folder), awake:
        C.speeds(**SPEEDS | {"up": LINK / 64, "down": LINK / 64})
        profile = profile_of(
            chain,
            GPT.loss,
            sample_of(batch()),
            offloader=OffloadBenchmarks("host", swap, Path(folder)),
        )
        C.speeds()
    block = profile.blocks[1]
    return block.offload_seconds.at(4), 64 * block.moved.at(4) / LINK


def figures(layers: int) -> dict[str, Any]:
    """Those of the tests, with three layers, and of the documentation, with six."""
    return {
        "keep": train(layers, "keep")._asdict(),
        "recompute": train(layers, "recompute")._asdict(),
        "offload": train(layers, "offload", 0.5)._asdict(),
        "late": train(layers, "offload", 0.5, slower=4)._asdict(),
        "too small": _refused(layers),
    }


def _refused(layers: int) -> str:
    """Return the error on a device that is smaller than the plan."""
    try:
        train(layers, "keep", fraction=0.6)
    except torch.OutOfMemoryError as error:
        return str(error).splitlines()[0]
    return ""


if __name__ == "__main__":
    for name, found in figures(layers=6).items():
        print(name, found)
