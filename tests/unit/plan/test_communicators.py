"""What a device holds beside torch's allocator: a term of each rank's proof, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallax.errors import InfeasiblePlan
from parallax.plan.analytic.hardware import collective_bytes, edge_bytes, usual_context
from parallax.plan.cluster import Cluster, with_buckets
from parallax.plan.config import PlanConfig
from parallax.plan.search.search import search
from parallax.plan.simulation.predict import Forecast, predict
from parallax.report import memory_table
from tests.unit.plan_fakes import FREE, block, cluster, plan, profile, stages
from tests.unit.test_report import text

GROUP, EDGE, CONTEXT = 1000, 10, 77
MODEL = profile([block(str(index), parameter_bytes=8, output=1) for index in range(3)])


def machines(devices: int, **fields: int) -> Cluster:
    beside = {"context_bytes": CONTEXT, "collective_bytes": GROUP, "edge_bytes": EDGE}
    return cluster(devices, **{**beside, **fields})


def forecast(replicas: list[int], machines: Cluster, **changes: object) -> Forecast:
    bounds = [0, 2, 3] if len(replicas) == 2 else [0, 1, 2, 3]
    parts = [replace(stage, **changes) for stage in stages(bounds, replicas)]  # type: ignore[arg-type]
    prediction = replace(plan().prediction, ranks=plan().prediction.ranks[:1] * sum(replicas))
    return predict(MODEL, machines, plan(stages=tuple(parts), prediction=prediction))


def test_a_rank_has_its_own_groups() -> None:
    """One group of its replicas, another for offloaded parameters; and two connections to every rank of its neighbour
    stages."""
    first, middle, last = forecast([1, 2, 3], machines(6)).stages
    assert [stage.memory["context"] for stage in (first, middle, last)] == [CONTEXT] * 3
    assert [stage.memory["communicators"] for stage in (first, middle, last)] == [0, GROUP, GROUP]
    assert [stage.memory["connections"] for stage in (first, middle, last)] == [
        2 * 2 * EDGE,
        2 * (1 + 3) * EDGE,
        2 * 2 * EDGE,
    ]
    offloaded = forecast([1, 2, 3], machines(6), parameter_offload=1.0).stages
    assert [stage.memory["communicators"] for stage in offloaded] == [0, 2 * GROUP, 2 * GROUP]


def test_replicas_that_gather_their_outputs_have_a_group_for_it() -> None:
    gathering = replace(MODEL, gathered_rows=4)
    for replicas, more in (([1, 2], [0, GROUP]), ([2, 1], [0, 0])):
        parts = tuple(stages([0, 2, 3], replicas))
        prediction = replace(plan().prediction, ranks=plan().prediction.ranks[:1] * 3)
        requested = plan(stages=parts, prediction=prediction)
        found, usual = (
            predict(model, machines(3), requested).stages for model in (gathering, MODEL)
        )
        connections = [[stage.memory["connections"] for stage in each] for each in (found, usual)]
        assert [a - b for a, b in zip(*connections)] == more


def test_they_are_in_the_proof() -> None:
    """A device of one byte less is too small."""
    found = forecast([1, 2], machines(3))
    peak = max(rank.peak_bytes for rank in found.ranks)
    assert forecast([1, 2], machines(3, memory=peak)).ranks[2].peak_bytes == peak
    with pytest.raises(InfeasiblePlan):
        forecast([1, 2], machines(3, memory=peak - 1))
    without = forecast([1, 2], cluster(3))
    more = found.ranks[2].peak_bytes - without.ranks[2].peak_bytes
    assert more == CONTEXT + GROUP + 2 * EDGE


def test_hosts_that_carry_tensors_take_none() -> None:
    memory = forecast([1, 2], cluster(3)).stages[1].memory
    assert (memory["context"], memory["communicators"], memory["connections"]) == (0, 0, 0)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_search_leaves_memory_for_them(devices: int) -> None:
    least = 2 * GROUP + CONTEXT + 8 * devices * EDGE
    for spare in (200, 400, 2000):
        found, _ = search(
            MODEL, machines(devices, memory=least + spare), PlanConfig(), global_batch=8
        )
        for rank in range(devices):
            planned = found.prediction.ranks[rank]
            assert planned.peak_bytes <= planned.budget_bytes


def test_the_allocator_gets_what_is_left() -> None:
    found = forecast([1, 2], machines(3, memory=10**4))
    planned = plan(prediction=replace(plan().prediction, ranks=found.ranks, stages=found.stages))
    assert planned.allocator_bytes(0) == 10**4 - CONTEXT - 2 * 2 * EDGE
    assert planned.allocator_bytes(1) == 10**4 - CONTEXT - GROUP - 2 * EDGE


def test_what_the_allocator_will_hold_is_what_a_device_without_them_would() -> None:
    found, without = forecast([1, 2], machines(3)), forecast([1, 2], cluster(3))
    planned = plan(prediction=replace(plan().prediction, ranks=found.ranks, stages=found.stages))
    for rank, plain in enumerate(without.ranks):
        assert planned.allocator_peak_bytes(rank) == plain.peak_bytes < found.ranks[rank].peak_bytes


def test_they_are_printed() -> None:
    found = forecast([1, 2], machines(3))
    planned = plan(prediction=replace(plan().prediction, ranks=found.ranks, stages=found.stages))
    shown = text(memory_table(planned))
    assert all(name in shown for name in ("context", "communicators", "connections"))


def test_what_nccl_takes() -> None:
    """A communicator for an all-reduce was seen to take 1.6 GB with 24 channels and more."""
    assert 0.5e9 < collective_bytes() < collective_bytes(24) < 1.6e9
    assert edge_bytes() == 4 * (4 * 2**20 + 2**19)


def test_a_context_is_known_by_the_name_of_its_device() -> None:
    assert usual_context("NVIDIA H100 80GB HBM3") == 600 * 2**20
    assert usual_context("NVIDIA GeForce RTX 4090") == 400 * 2**20
    assert usual_context("something new") == 800 * 2**20


def test_buckets_follow_the_link() -> None:
    """Small ones where it carries little in its latency, large ones where that is much."""
    sizes = []
    for rate, latency in ((3e9, 0.0), (3e9, 1e-4), (360e9, 1e-5), (1e12, 1e-4)):
        link = replace(FREE, bytes_per_second=rate, latency_seconds=latency)
        (device,) = set(with_buckets(cluster(2, link=link)).devices)
        sizes.append(device.bucket_bytes >> 20)
    assert sizes == [4, 4, 54, 64]
