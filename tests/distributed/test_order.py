"""One action list, two interpreters: the order that the executor records is the order that the simulator ran."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from parallax.plan.cluster import Link
from parallax.plan.schedule import ORDERS
from parallax.plan.simulation.simulate import simulate
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.distributed.test_transparency import MODELS, make_batch, make_chain
from tests.plans import make_plan
from tests.unit.plan_fakes import block, cluster, profile

ROWS = 7


def job(options: dict[str, Any]) -> list[tuple[str, int, int]]:
    chain = make_chain("gpt", torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.build(
            chain,
            make_plan(chain, global_batch=ROWS, microbatch=2, **options),
            loss=MODELS["gpt"][1],
            swap=SwapConfig(minimum_bytes=1),
            scratch=Path(folder) / "swap",
        )
        spans = engine.step(make_batch(ROWS)).spans
        engine.close()
    return [(span.kind, span.stage, span.micro) for span in spans]


@pytest.mark.parametrize("directive", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("replicas", [(1,), (2, 1), (1, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("schedule", ORDERS)
def test_recorded_order_is_simulated_order(
    pool: Pool, schedule: str, replicas: tuple[int, ...], directive: str
) -> None:
    interleave = 2 if schedule == "interleaved" and len(replicas) == 2 else 1
    options = {
        "schedule": schedule,
        "replicas": replicas,
        "directive": directive,
        "interleave": interleave,
    }
    as_simulated(pool.run(job, sum(replicas), options), options)


def as_simulated(recorded: list[list[tuple[str, int, int]]], options: dict[str, Any]) -> None:
    """Every rank's actions are those of the simulator under the same plan."""
    plan = make_plan(make_chain("gpt", torch.float32), global_batch=ROWS, microbatch=2, **options)
    simulation = simulate(
        profile([block(moved=10, input=4, output=4) for _ in range(plan.blocks)]),
        cluster(plan.world_size, write=Link(bytes_per_second=1e3)),
        plan.stages,
        schedule=plan.schedule,
        rows=ROWS,
        micro_batches=plan.micro_batches(ROWS),
        interleave=plan.interleave,
    )
    for rank, found in enumerate(recorded):
        assert found == [(s.kind, s.stage, s.micro) for s in simulation.spans if s.rank == rank]
