"""Where nothing fits: what is missing is named, with the smallest change that helps."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from parallax.errors import ConfigError, InfeasiblePlan
from parallax.plan.config import PlanConfig
from parallax.plan.cost.traffic import TIER_FLOOR
from parallax.plan.plan import Plan
from parallax.plan.search.search import search
from tests.unit.plan.searched import check, layers
from tests.unit.plan_fakes import block, cluster, profile


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        ({"stages": 1}, {}),
        ({"stages": 2, "activations": "keep"}, {"microbatch": 4}),
        ({"activations": "recompute", "schedule": "gpipe"}, {"microbatch": 2}),
        ({"activations": "offload"}, {"microbatch": 8}),
        ({"replicas": [1, 2]}, {"swap": False}),
    ],
)
def test_the_fix_for_an_infeasible_plan_is_the_smallest_that_works(
    config: dict[str, Any], options: dict[str, Any]
) -> None:
    model, wanted = layers(5, 3), PlanConfig(**config)

    def attempt(memory: int, config: PlanConfig = wanted, **changes: Any) -> Plan:
        return search(model, cluster(3, memory), config, global_batch=8, **{**options, **changes})[
            0
        ]

    with pytest.raises(InfeasiblePlan) as error:
        attempt(10**6)
    message = str(error.value)
    assert re.search(r"no plan fits 976.6 KiB per device: the best needs [\d.]+ MiB", message), (
        message
    )
    fixed = int(re.search(r"cluster.device_memory=(\d+)MiB", message)[1])  # type: ignore[index]
    attempt(fixed * 2**20)
    with pytest.raises(InfeasiblePlan):
        attempt((fixed - 1) * 2**20)
    needed = (
        math.ceil(int(re.search(r"\(([\d,]+) bytes more\)", message)[1].replace(",", ""))) + 10**6
    )  # type: ignore[index]
    check(attempt(needed), cluster(3, needed))
    with pytest.raises(InfeasiblePlan) as error:
        attempt(needed - 1)
    message = str(error.value)
    smaller = re.search(r"trainer.microbatch=(\d+)", message)
    if smaller:
        attempt(needed - 1, microbatch=int(smaller[1]))
    stages = re.search(r"plan.stages=(\d+)", message)
    if stages:
        attempt(needed - 1, replace(wanted, stages=int(stages[1])))
    if re.search(r"plan\.\w+=auto swap\.tier=auto", message):
        attempt(needed - 1, PlanConfig(), swap=True)
    elif "swap.tier=auto" in message:
        attempt(needed - 1, swap=True)


@pytest.mark.parametrize("memory", [10**15, 10**6], ids=["enough memory", "too little of both"])
def test_a_tier_that_is_too_small_is_named_with_the_smallest_that_suffices(memory: int) -> None:
    config = PlanConfig(activations="offload")

    def attempt(tier: int, memory: int = memory) -> Plan:
        machine = cluster(1, memory, tier=tier)
        return search(layers(3), machine, config, global_batch=4)[0]

    with pytest.raises(InfeasiblePlan) as error:
        attempt(TIER_FLOOR)
    found = re.fullmatch(
        r"1.0 MiB per device in tier disk cannot hold the bytes that must be offloaded; these changes fit: "
        r"cluster.disk=(\d+)MiB"
        r"(?: cluster.device_memory=(\d+)MiB)? \((?:\d+)MiB per device, ([\d,]+) bytes more\)"
        r"(?:, or plan.activations=auto swap.tier=auto)?",
        str(error.value),
    )
    assert found, error.value
    tier, more, beside = int(found[1]) * 2**20, int(found[3].replace(",", "")), found[2]
    assert tier == TIER_FLOOR + more
    assert (beside is None) == (memory == 10**15)
    enough = int(beside) * 2**20 if beside else memory
    check(attempt(tier, enough), cluster(1, enough, tier=tier))
    with pytest.raises(InfeasiblePlan):
        attempt(tier - 2**20, enough)
    if "swap.tier=auto" in str(error.value):
        search(layers(3), cluster(1, memory, tier=TIER_FLOOR), PlanConfig(), global_batch=4)


def test_one_huge_block() -> None:
    blocks = [block(f"b{i}", parameter_bytes=10**9 if i == 2 else 100) for i in range(4)]
    with pytest.raises(
        InfeasiblePlan, match=r"needs 3.7 GiB .*cluster.device_memory=\d+MiB \([\d,]+ bytes more\)"
    ):
        search(profile(blocks), cluster(4, 10**9), PlanConfig(), global_batch=4)
    plan, _ = search(profile(blocks), cluster(4, 4 * 10**9 + 1000), PlanConfig(), global_batch=4)
    check(plan, cluster(4, 4 * 10**9 + 1000))


@pytest.mark.parametrize(
    "config", [{"stages": 5}, {"stages": 3, "replicas": 2}, {"replicas": [1, 1]}]
)
def test_shapes_that_cannot_use_every_device(config: dict[str, Any]) -> None:
    with pytest.raises(InfeasiblePlan, match=r"does not use 4 device\(s\) and 4 block\(s\)"):
        search(layers(4), cluster(4), PlanConfig(**config), global_batch=4)


@pytest.mark.parametrize(
    "options", [{"global_batch": 0}, {"global_batch": 1.5}, {"microbatch": 0}, {"microbatch": "8"}]
)
def test_rows_that_are_no_count_are_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.(global_batch|microbatch)=.*accepted"):
        search(layers(2), cluster(1), PlanConfig(), **{"global_batch": 4, **options})


def test_a_shape_that_cannot_be_is_named() -> None:
    with pytest.raises(InfeasiblePlan, match=r"plan.interleave=3 has no shape for 4 block\(s\)"):
        search(layers(4), cluster(2), PlanConfig(interleave=3), global_batch=8)


def test_the_stages_that_fit_come_with_their_replicas() -> None:
    with pytest.raises(InfeasiblePlan, match=r"plan.stages=\d plan.replicas=auto"):
        search(layers(8), cluster(4, 42 * 10**6), PlanConfig(stages=2, replicas=2), global_batch=8)
