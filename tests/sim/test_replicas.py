"""Replicas on simulated devices: what depends on the links between them, and gradients that are being offloaded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.sim import jobs


def all_reduces(bucket_mebibytes: int) -> int:
    """Of a step of a model with 14 MiB of gradients."""
    import torch
    from torch import Tensor, nn

    from parallax.machine.accelerators import register_accelerator
    from parallax.model.describe import describe
    from parallax.runtime.batch import TensorRows
    from parallax.runtime.engine import Engine
    from tests.plans import make_plan
    from tests.sim.device import SIM
    from tests.sim.engines import Apart

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    register_accelerator(Apart())
    chain = describe(lambda: nn.Sequential(*[nn.Linear(600, 600) for _ in range(10)]))
    plan = make_plan(chain, replicas=(2,), tier_bytes=2**20, bucket_bytes=bucket_mebibytes * 2**20)
    engine = Engine.build(chain, plan, loss=loss, device=SIM)
    rows = torch.zeros(8, 600)
    engine.step(TensorRows(rows, rows))
    found = engine.all_reduces
    engine.close()
    return found


def streaming(direct: bool, microbatch: int) -> tuple[Any, list[float], int, int]:
    """Some steps of a model of several buckets with offloaded parameters, on a device of the planned bytes: what was
    noticed, the losses, and the peak, predicted and measured."""
    import tempfile
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from parallax.machine.accelerators import limit_device_memory, register_accelerator
    from parallax.model.describe import describe
    from parallax.plan.simulation.predict import predict
    from parallax.runtime.batch import TensorRows
    from parallax.runtime.engine import Engine
    from tests.plans import make_plan
    from tests.sim import group
    from tests.sim.device import SIM, TOTAL_BYTES
    from tests.sim.engines import Apart, Shared
    from tests.sim.races import judge
    from tests.sim.timed import cache_in, cluster_of, measured_quickly

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    register_accelerator(Apart() if direct else Shared("sim", "", group.NAME))
    chain = describe(lambda: nn.Sequential(*[nn.Linear(1100, 1100) for _ in range(5)]))
    rows = torch.randn(8, 1100, generator=torch.Generator().manual_seed(0))
    offloaded = {"parameter_offload": 1.0, "optimizer_offload": 1.0, "tier_bytes": 2**20}
    plan = make_plan(chain, replicas=(2,), tier="host", microbatch=microbatch, **offloaded)
    losses, peaks = list[float](), [0, 0]

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder, cache_in(folder):
            profile = measured_quickly(chain, loss, lambda n: ((rows[:n],), rows[:n]))
            peaks[0] = predict(profile, cluster_of(2), plan).ranks[0].peak_bytes
            limit_device_memory(SIM, peaks[0])
            engine = Engine.build(chain, plan, loss=loss, device=SIM, scratch=Path(folder))
            for _ in range(4):
                result = engine.step(TensorRows(rows, rows))
                losses.append(result.loss)
            peaks[1] = result.peak_bytes
            engine.close()

    try:
        verdict = judge(run, lateness=9)
    finally:
        limit_device_memory(SIM, TOTAL_BYTES)
    return tuple(verdict), losses, *peaks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatch", "direct"),
    [
        *((4, True), (8, False)),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((4, False), (8, True))),
    ],
)
def test_streamed_gradients_fit_what_was_planned(
    sim_pool: Pool, microbatch: int, direct: bool
) -> None:
    """In buckets, through memory that the plan counts, with several on their way at one time."""
    for (error, races, _), losses, predicted, measured in sim_pool.run(
        partial(streaming, direct, microbatch), 2
    ):
        assert not error
        assert not races, races[0]
        assert losses[-1] < losses[0]
        assert 0.5 * predicted < measured <= predicted


def test_buckets_are_as_large_as_the_plan_says(sim_pool: Pool) -> None:
    """They were of 4 MiB whatever the link, for which that is a moment."""
    for mebibytes, expected in ((4, 4), (32, 1)):
        assert sim_pool.run(partial(all_reduces, mebibytes), 2) == [expected] * 2


OFFLOADED = {"optimizer_offload": 1.0, "parameter_offload": 1.0}


@pytest.mark.parametrize(
    "direct", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["direct", "staged"]
)
def test_a_step_fails_in_its_last_backward(sim_pool: Pool, direct: bool) -> None:
    """While buckets of gradients are read, summed and written: the next step is as if that had not been, and keeps its
    places offloaded."""
    (expected,) = sim_pool.run(jobs.never_stumbles, 1)
    job = partial(jobs.stumbles, expected, (2,), OFFLOADED, direct=direct)
    for (error, races, _), states in sim_pool.run(job, 2):
        assert not error
        assert not races, races[0]
        assert states == {"FILLING", "READING", "REDUCING", "WRITING"}
