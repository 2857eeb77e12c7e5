"""Replicas on simulated devices: what depends on the links between them, and gradients on their way below."""

from __future__ import annotations

from functools import partial

from tests.distributed.pool import Pool


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


def test_buckets_are_as_large_as_the_plan_says(sim_pool: Pool) -> None:
    """They were of 4 MiB whatever the link, for which that is a moment."""
    for mebibytes, expected in ((4, 4), (32, 1)):
        assert sim_pool.run(partial(all_reduces, mebibytes), 2) == [expected] * 2
