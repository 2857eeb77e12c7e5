"""Which devices a plan uses: no replica without rows, and no device that does not help."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from parallax.errors import InfeasiblePlan
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Plan
from parallax.plan.profile import Affine
from parallax.plan.rows import micro_batch_rows, replica_rows
from parallax.plan.search.search import search
from parallax.report import plan_table
from tests.unit.plan.searched import SIZES, random_case
from tests.unit.plan_fakes import block, cluster, profile

AMPLE = 10**9


def empty_places(plan: Plan) -> list[tuple[int, int, int]]:
    """(stage, replica, micro-batch) without rows."""
    count = plan.micro_batches(plan.global_batch)
    found = []
    for stage, part in enumerate(plan.stages):
        for micro in range(count):
            first, stop = micro_batch_rows(plan.global_batch, count, micro)
            for replica in range(part.replicas):
                low, high = replica_rows(stop - first, part.replicas, replica)
                found += [(stage, replica, micro)] if low == high else []
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(40))
def test_every_replica_has_rows_in_every_micro_batch(seed: int) -> None:
    """A stage of two replicas had micro-batches of one row, so that one rank of three was idle for the whole run."""
    r = random.Random(seed)
    blocks, devices = r.choice(SIZES[:10])
    model, machines, _ = random_case(r, blocks, devices)
    batch = r.choice([1, 2, 3, 5, 7, 8, 16])
    options: dict[str, Any] = {"microbatch": r.choice(["auto", "auto", min(batch, 2), 1])}
    try:
        plan, _ = search(
            model, machines, PlanConfig(interleave=1), global_batch=batch, spare=True, **options
        )
    except InfeasiblePlan:
        return
    assert empty_places(plan) == []
    assert plan.world_size + plan.spare_devices == devices


def test_few_rows_at_their_measured_cost_are_not_chosen() -> None:
    """One row takes nearly as long as two: micro-batches of one row are the slowest way to train."""
    seconds = Affine.measured([(1, 1.8), (2, 2.0), (4, 4.0)])
    blocks = [replace(block(), forward_seconds=seconds, backward_seconds=seconds)] * 4
    plan, _ = search(profile(blocks), cluster(2, AMPLE), PlanConfig(stages=2), global_batch=16)
    assert plan.microbatch >= 2


@pytest.mark.parametrize(("batch", "used"), [(1, 1), (2, 2), (16, 3)])
def test_devices_that_do_not_shorten_the_step_stay_unused(batch: int, used: int) -> None:
    """One block cannot be partitioned, so that as many devices help as there are rows."""
    plan, _ = search(
        profile([block()]),
        cluster(3, AMPLE, concurrent=3),
        PlanConfig(),
        global_batch=batch,
        spare=True,
    )
    assert (plan.world_size, plan.spare_devices) == (used, 3 - used)
    output = f"{used} of 3 devices are used: with more the step would be no shorter"
    assert (output in str(plan_table(plan).caption)) == (used < 3)
    assert Plan.from_dict(plan.to_dict()) == plan


def test_cores_that_are_shared_by_more_processes_do_not_help() -> None:
    plan, _ = search(
        profile([block()] * 6),
        cluster(3, AMPLE, concurrent=2),
        PlanConfig(),
        global_batch=12,
        spare=True,
    )
    assert plan.world_size == 2


def test_ranks_that_were_started_are_all_used_and_idle_ones_are_named() -> None:
    plan, _ = search(profile([block()]), cluster(3, AMPLE), PlanConfig(), global_batch=2)
    idle = [rank for rank in range(3) if not plan.rows_of(rank)]
    assert (plan.world_size, len(idle)) == (3, 1)
    assert f"rank {idle[0]} of 3 replicas never has a row" in str(plan_table(plan).caption)


def test_requested_replicas_may_be_idle_and_are_named() -> None:
    config = PlanConfig(stages=2, replicas=[1, 2])
    plan, _ = search(
        profile([block()] * 4), cluster(3, AMPLE), config, global_batch=4, microbatch=1, spare=True
    )
    assert [plan.rows_of(rank) for rank in range(3)] == [4, 0, 4]
    assert "rank 1 of 2 replicas never has a row of micro-batches of 1" in str(
        plan_table(plan).caption
    )


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("device_seconds", [1e-9, 1e-3, 1.0])
def test_what_fits_stays_on_the_device(devices: int, device_seconds: float) -> None:
    """Models of few parameters, whose step is all overhead, were streamed from disk with 16 GiB free: what a byte
    takes on the host is known from memory traffic alone, and looked faster."""
    model = profile(
        [block(parameters=100, parameter_bytes=400)] * 3, optimizer_seconds=device_seconds
    )
    machines = cluster(devices, AMPLE, host_update_seconds=1e-9)
    plan, _ = search(model, machines, PlanConfig(), global_batch=8)
    assert not any(
        stage.offloads or stage.optimizer_offload or stage.parameter_offload
        for stage in plan.stages
    )
