"""Groups that are clipped by norms of their own: under every plan as in a loop of plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import ConfigError
from parallax.runtime.optim.groups import ParameterGroups
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from tests.distributed.pool import Pool
from tests.distributed.test_engine import (
    SCHEDULE,
    STEPS,
    Case,
    Outcome,
    compare,
    gpt,
    plain_blocks,
    plain_loss,
    same,
    training,
)

CONFIG = SGDConfig(
    lr=0.3,
    clip_norm=0.02,
    clip_value=2e-3,
    groups=[
        {"match": "embedding*", "clip_norm": 0.01, "clip_value": 0},
        {"match": "layers.0.*", "clip_norm": 0.05},
        {"match": "layers.1.up*", "clip_value": 1e-4},
    ],
)
CASE = Case(gpt(tied=False), optimizer=CONFIG)
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"replicas": (1,)},
    "stages": {"replicas": (1, 1)},
    "replicas": {"replicas": (2,)},
    "sharded": {"replicas": (2,), "shard": True},
    "states on disk": {"replicas": (1, 1), "optimizer_offload": 1.0, "tier": "disk"},
    "streamed": {
        "replicas": (1,),
        "optimizer_offload": 1.0,
        "parameter_offload": 1.0,
        "tier": "disk",
    },
}


def clip(named: Mapping[str, nn.Parameter]) -> float:
    """Clip as the configuration says; return the norm of all gradients before it."""
    parts: dict[str, list[nn.Parameter]] = {"embedding": [], "layers.0.": [], "": []}
    for name, parameter in named.items():
        parts[next(each for each in parts if name.startswith(each))].append(parameter)
    norms = [
        nn.utils.clip_grad_norm_(parameters, most)
        for parameters, most in zip(parts.values(), (0.01, 0.05, CONFIG.clip_norm))
    ]
    up = [parameter for name, parameter in named.items() if name.startswith("layers.1.up")]
    others = [p for p in (*parts["layers.0."], *parts[""]) if not any(p is each for each in up)]
    nn.utils.clip_grad_value_(others, CONFIG.clip_value)
    nn.utils.clip_grad_value_(up, 1e-4)
    return float(torch.stack(norms).norm())


def plain_training(case: Case) -> Outcome:
    blocks, tensors = plain_blocks(case)
    named = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter)}
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": CONFIG.weight_decay},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, momentum=CONFIG.momentum)
    outcome = Outcome([], [], tensors)
    for step, batch in enumerate(case.batches()):
        optimizer.zero_grad()
        loss = plain_loss(case, blocks, batch)
        loss.backward()
        outcome.norms.append(clip(named))
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.lr * SCHEDULE.factor(step, STEPS)
        optimizer.step()
        outcome.losses.append(loss.item())
    return outcome


@pytest.mark.parametrize("plan", PLANS)
def test_groups_with_their_own_norms_equal_plain_torch(pool: Pool, plan: str) -> None:
    case = CASE.under(**PLANS[plan])
    compare(pool.run(training, case.world, case), plain_training(case), 1e-11)


def test_one_micro_batch_in_single_precision_is_bit_identical(pool: Pool) -> None:
    case = replace(CASE, dtype=torch.float32, sizes=(8,) * STEPS)
    expected = plain_training(case)
    for options in ({}, {"optimizer_offload": 1.0}):
        (found,) = pool.run(training, 1, case.under((1,), microbatch=8, **options))
        assert found.losses == expected.losses
        assert all(torch.equal(w, expected.weights[name]) for name, w in found.weights.items())


@pytest.mark.parametrize("plan", ["stages", "sharded", "streamed"])
def test_scaled_losses_are_clipped_alike(pool: Pool, plan: str) -> None:
    """A factor that is a power of two changes no bit, so the plan without offload is the measure."""
    case = replace(CASE, dtype=torch.float32, compute="fp16")
    options = PLANS[plan]
    found = pool.run(training, sum(options["replicas"]), case.under(**options))
    plain = pool.run(training, sum(options["replicas"]), case.under(options["replicas"]))
    same(found, plain)


def places(names: Iterable[str]) -> ParameterGroups:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    return ParameterGroups.of(replace(AdamWConfig(), groups=CONFIG.groups[:0]), model)


def test_without_groups_there_is_one_norm() -> None:
    groups = places(["a", "b"])
    tensors: dict[str, Tensor] = {name: torch.zeros(1) for name in ("a.weight", "b.weight")}
    assert [each.norm for each in groups.clips] == [0]
    assert list(itertools.chain(*groups.by_norm(tensors))) == list(tensors.values())


@pytest.mark.parametrize("value", [-1, "no", True])
def test_a_wrong_norm_of_a_group_is_refused(value: object) -> None:
    config = AdamWConfig(groups=[{"match": "*", "clip_norm": value}])
    with pytest.raises(ConfigError, match=r"optimizer\.groups\[0\]\.clip_norm=.*accepted"):
        ParameterGroups.of(config, nn.Linear(2, 2))
