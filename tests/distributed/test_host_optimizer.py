"""Offloaded optimizer states: steps on the host during the next forward change only where the bytes are."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallax.errors import NonFiniteError
from parallax.runtime.optim.config import OptimizerConfig
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.custom import CustomOptimizerConfig
from parallax.runtime.optim.kinds.lion import LionConfig
from parallax.runtime.optim.kinds.muon import MuonConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from tests.distributed.pool import Pool
from tests.distributed.test_checkpoint import CASE, training
from tests.distributed.test_engine import (
    POISON,
    Case,
    gpt,
    half_frozen,
    make_batch,
    of_many_buckets,
    poisoned,
    same,
)

STEPS = 4
LOW = 1e-3  # a clip norm that every gradient is above


def many_steps(
    case: Case, folder: Path, steps: int, clip: float
) -> tuple[list[float], dict[str, Any], int]:
    """Losses, weights, and the bytes of optimizer states that the tier holds at the end."""
    optimizer = AdamWConfig(lr=3e-3, clip_norm=clip)
    engine = replace(case, optimizer=optimizer).engine(folder)
    losses = [engine.step(make_batch(8, step)).loss for step in range(steps)]
    weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    stored = sum(store.slots.used_bytes for store in engine._tiers._opened)
    engine.close()
    return losses, weights, stored


FACTORIES = {"gpt": gpt(), "of_many_buckets": of_many_buckets, "half_frozen": half_frozen}
TELLING = [("gpt", (2,)), ("of_many_buckets", (1, 2))]  # one rank takes a hundred offloaded steps
OTHERS = [
    pair for pair in itertools.product(FACTORIES, [(1,), (2,), (1, 2), (3,)]) if pair not in TELLING
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "replicas"),
    [*TELLING, *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in OTHERS)],
    ids=str,
)
def test_offloaded_steps_equal_steps_on_the_device(
    pool: Pool, tmp_path: Path, model: str, replicas: tuple[int, ...]
) -> None:
    case, world = Case(FACTORIES[model], dtype=torch.float32), sum(replicas)
    for clip in (0.0, LOW):
        expected = pool.run(many_steps, world, case.under(replicas), tmp_path, STEPS, clip)
        for share in (0.5, 1.0):
            offloaded = case.under(replicas, optimizer_offload=share)
            found = pool.run(many_steps, world, offloaded, tmp_path, STEPS, clip)
            for (losses, weights, none), (losses_offloaded, weights_offloaded, _) in zip(
                expected, found
            ):
                assert losses_offloaded == losses
                assert all(torch.equal(weights_offloaded[name], weights[name]) for name in weights)
                assert none == 0
            assert sum(stored for _, _, stored in found) > 0
        if len(replicas) == 1:  # shared, not copied: together they hold what one would
            total = sum(2 * w.nbytes for w in expected[0][1].values())
            assert sum(stored for _, _, stored in found) <= total * 1.1 + 64 * 4096


@pytest.mark.slow
def test_a_hundred_steps_with_clipping_and_accumulation_are_bit_identical(
    pool: Pool, tmp_path: Path
) -> None:
    case = Case(gpt(), dtype=torch.float32)
    (plain,) = pool.run(many_steps, 1, case.under((1,)), tmp_path, 100, 0.5)
    (offloaded,) = pool.run(
        many_steps, 1, case.under((1,), optimizer_offload=1.0), tmp_path, 100, 0.5
    )
    assert plain[0] == offloaded[0]
    assert all(torch.equal(offloaded[1][name], weight) for name, weight in plain[1].items())


@pytest.mark.parametrize(
    "config",
    [
        SGDConfig(lr=1e-2, clip_norm=1.0),
        LionConfig(lr=1e-2, clip_norm=1.0),
        MuonConfig(lr=1e-2),
        CustomOptimizerConfig(target="torch.optim:Adafactor", lr=1e-2),
        CustomOptimizerConfig(target="torch.optim:NAdam", lr=1e-2, groups=[{"dims": 1, "lr": 0.1}]),
    ],
    ids=lambda config: config.label,
)
def test_other_optimizers(pool: Pool, tmp_path: Path, config: OptimizerConfig) -> None:
    case = replace(
        Case(gpt(), dtype=torch.float32),
        optimizer=config,
    )
    plain = pool.run(training, 1, case.under((1,)), tmp_path / "plain", 0, 3, None)
    offloaded = pool.run(
        training, 1, case.under((1,), optimizer_offload=1.0), tmp_path / "offloaded", 0, 3, None
    )
    same(offloaded, plain)
    assert plain[0].losses[-1] != plain[0].losses[0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("before", "after", "replicas"),
    [
        *((0.0, 1.0, (1, 2)), (1.0, 0.0, (1, 2)), (0.5, 1.0, (1,))),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in ((0.0, 1.0, (1,)), (1.0, 0.0, (1,)), (0.5, 1.0, (1, 2)))
        ),
    ],
    ids=str,
)
def test_a_checkpoint_does_not_know_where_states_were(
    pool: Pool, tmp_path: Path, before: float, after: float, replicas: tuple[int, ...]
) -> None:
    world = sum(replicas)
    whole = pool.run(training, world, CASE.under(replicas), tmp_path / "whole", 0, 4, None)
    pool.run(training, world, CASE.under(replicas, optimizer_offload=before), tmp_path, 0, 2, None)
    rest = pool.run(
        training, world, CASE.under(replicas, optimizer_offload=after), tmp_path, 2, 4, 2
    )
    for one, other in zip(whole, rest):
        assert other.losses == one.losses[2:]
        assert all(torch.equal(other.weights[name], weight) for name, weight in one.weights.items())


def poisoned_on_the_host(case: Case, folder: Path) -> tuple[bool, float, float, list[str]]:
    """Whether a step on NaN changed anything; evaluation while a step is under way and after it; threads left."""
    engine = case.engine(folder)
    engine.step(make_batch(8, 0))
    before = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    bad = make_batch(8, 1)
    bad.targets(0, 8)[5, 3] = POISON
    with pytest.raises(NonFiniteError, match="nothing was updated"):
        engine.step(bad)
    changed = any(
        not torch.equal(tensor, before[name]) for name, tensor in engine.parameters.items()
    )
    engine.step(make_batch(8, 2))
    at_once = engine.evaluate(make_batch(8, 3))
    after = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    later = engine.evaluate(make_batch(8, 3))
    engine.close()
    return (
        changed,
        at_once,
        later,
        [t.name for t in threading.enumerate() if t.name.startswith("parallax")],
    )


def test_nan_updates_nothing_and_evaluation_sees_the_new_weights(
    pool: Pool, tmp_path: Path
) -> None:
    case = Case(gpt(), loss=poisoned).under((1,), optimizer_offload=1.0)
    ((changed, at_once, later, threads),) = pool.run(poisoned_on_the_host, 1, case, tmp_path)
    assert not changed
    assert at_once == later
    assert not threads
