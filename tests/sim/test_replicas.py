"""Replicas on simulated devices: what depends on the links between them."""

from __future__ import annotations

from functools import partial

from tests.distributed.pool import Pool


def all_reduces(*, direct: bool) -> int:
    """Of a step of a model with 14 MiB of gradients."""
    import torch
    from torch import Tensor, nn

    from parallax.machine.accelerators import register_accelerator
    from parallax.model.describe import describe
    from parallax.runtime.batch import TensorRows
    from parallax.runtime.engine import Engine
    from tests.plans import make_plan
    from tests.sim import group
    from tests.sim.device import SIM
    from tests.sim.engines import Apart, Shared

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    register_accelerator(Apart() if direct else Shared("sim", "", group.NAME))
    chain = describe(lambda: nn.Sequential(*[nn.Linear(600, 600) for _ in range(10)]))
    plan = make_plan(chain, replicas=(2,), tier_bytes=2**20)
    engine = Engine.build(chain, plan, loss=loss, device=SIM)
    rows = torch.zeros(8, 600)
    engine.step(TensorRows(rows, rows))
    found = engine.all_reduces
    engine.close()
    return found


def test_links_between_devices_carry_larger_buckets(sim_pool: Pool) -> None:
    """Over them an all-reduce of 4 MiB takes as long as its launch."""
    for direct, expected in ((False, 4), (True, 1)):
        assert sim_pool.run(partial(all_reduces, direct=direct), 2) == [expected] * 2
