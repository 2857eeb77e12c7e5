"""Number formats and sharded states in whole training runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallax.model.factory.gpt import GPT
from parallax.model.precision import PrecisionConfig
from parallax.runtime.engine import Engine
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.distributed.test_engine import gpt, make_batch
from tests.plans import described, make_plan

STEPS, HALF = 6, 3
FORMATS = {
    "bf16": PrecisionConfig(parameters="bf16", compute="bf16"),
    "fp16": PrecisionConfig(parameters="fp16", compute="fp16"),
    "bf16 autocast": PrecisionConfig(compute="bf16"),
    "fp16 autocast": PrecisionConfig(compute="fp16"),
    "tf32": PrecisionConfig(compute="tf32"),
    "fp32": PrecisionConfig(),
}
STREAMED = {"optimizer_offload": 1.0, "parameter_offload": 0.6}
PLANS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((1,), {"optimizer_offload": 1.0}),
    ((2,), {"shard": True}),
    ((1, 2), {"shard": True}),
    ((1, 2), {"shard": True, "optimizer_offload": 0.5}),
    ((1, 1), {"schedule": "zb-h1"}),
]


@dataclass
class Outcome:
    losses: list[float]
    weights: dict[str, Tensor]
    factor: float
    skipped: int
    state_bytes: int = field(default=0)


def engine(
    precision: PrecisionConfig, replicas: tuple[int, ...], options: dict[str, Any], folder: Path
) -> Engine:
    chain = described(gpt(), seed=3, dtype=precision.parameter_dtype)
    return Engine.build(
        chain,
        make_plan(chain, replicas=replicas, global_batch=8, microbatch=2, **options),
        loss=GPT.loss,
        steps=20,
        optimizer=AdamWConfig(lr=3e-3, clip_norm=0.5),
        precision=precision,
        swap=SwapConfig(minimum_bytes=1),
        scratch=folder / "swap",
    )


def outcome(built: Engine, losses: list[float]) -> Outcome:
    weights = {name: tensor.detach().clone() for name, tensor in built.parameters.items()}
    states = {t: built._optimizer.states(t) for t in built._stage.parameters()}
    held = sum(value.nbytes for found in states.values() for value in found.values() if value.dim())
    scale = built._scale
    built.close()
    return Outcome(losses, weights, scale.factor, scale.skipped, held)


def train(
    precision: PrecisionConfig,
    replicas: tuple[int, ...],
    options: dict[str, Any],
    folder: Path,
    first: int,
    last: int,
) -> Outcome:
    """Steps ``first`` to ``last``, from the checkpoint before and into one after."""
    built = engine(precision, replicas, options, folder)
    if first:
        built.load(folder / f"step-{first:08d}")
    losses = [built.step(make_batch(8, step)).loss for step in range(first, last)]
    built.save(folder, {})
    return outcome(built, losses)


def same(one: Outcome, other: Outcome) -> None:
    assert (one.factor, one.skipped) == (other.factor, other.skipped)
    assert all(
        torch.equal(one.weights[name], other.weights[name]) for name in one.weights | other.weights
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "fp16",  # with masters and a loss scale; test_engine.py has bf16, with offloaded parameters and autocast
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("fp32", "bf16", "bf16 autocast", "fp16 autocast", "tf32")
        ),
    ],
)
def test_every_plan_trains_alike_and_resumes_exactly(pool: Pool, tmp_path: Path, name: str) -> None:
    precision = FORMATS[name]
    (expected,) = pool.run(train, 1, precision, (1,), {}, tmp_path / "whole", 0, STEPS)
    near = 2e-5 if name in ("fp32", "tf32") else 3e-2
    for index, (replicas, options) in enumerate(PLANS):
        world = sum(replicas)
        found = pool.run(
            train, world, precision, replicas, options, tmp_path / f"{index}", 0, STEPS
        )
        for each in found:
            assert each.losses == pytest.approx(expected.losses, abs=near), options
            assert each.factor == expected.factor
            assert all(
                tensor.dtype is precision.parameter_dtype for tensor in each.weights.values()
            )
        pool.run(train, world, precision, replicas, options, tmp_path / f"{index} in two", 0, HALF)
        resumed = pool.run(
            train, world, precision, replicas, options, tmp_path / f"{index} in two", HALF, STEPS
        )
        for whole, rest in zip(found, resumed):
            assert whole.losses[HALF:] == rest.losses
            same(whole, rest)


def test_replicas_share_their_states(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(train, 2, PrecisionConfig(), (2,), {}, tmp_path / "whole", 0, 2)
    sharded = pool.run(
        train, 2, PrecisionConfig(), (2,), {"shard": True}, tmp_path / "sharded", 0, 2
    )
    assert sum(each.state_bytes for each in sharded) == whole[0].state_bytes
    assert max(each.state_bytes for each in sharded) < 0.7 * whole[0].state_bytes
    for one, other in zip(sharded, whole):
        assert one.losses == other.losses
        same(one, other)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_streamed_parameters_resume_exactly(pool: Pool, tmp_path: Path, name: str) -> None:
    precision = FORMATS[name]
    (whole,) = pool.run(train, 1, precision, (1,), STREAMED, tmp_path / "whole", 0, STEPS)
    pool.run(train, 1, precision, (1,), STREAMED, tmp_path / "in two", 0, HALF)
    (rest,) = pool.run(train, 1, precision, (1,), STREAMED, tmp_path / "in two", HALF, STEPS)
    assert whole.losses[HALF:] == rest.losses
    same(whole, rest)


def overflow(
    precision: PrecisionConfig, replicas: tuple[int, ...], options: dict[str, Any], folder: Path
) -> Outcome:
    """A step, one whose loss is scaled far too much until it is not, and some more."""
    built = engine(precision, replicas, options, folder)
    losses = [built.step(make_batch(8, 0)).loss]
    built._scale.factor = 2.0**60
    for _ in range(60):
        skipped = built._scale.skipped
        before = {name: tensor.detach().clone() for name, tensor in built.parameters.items()}
        result = built.step(make_batch(8, 1))
        if result.skipped_steps == skipped:
            assert not all(
                torch.equal(before[name], tensor) for name, tensor in built.parameters.items()
            )
            break
        assert all(torch.equal(before[name], tensor) for name, tensor in built.parameters.items())
        built._scale.factor /= 2**8
    losses += [result.loss, *(built.step(make_batch(8, step)).loss for step in range(2, 5))]
    return outcome(built, losses)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=[pytest.mark.thorough] if (i + j) % 2 else [])
        for i, name in enumerate(("fp16", "fp16 autocast"))
        for j, plan in enumerate((((1,), {}), PLANS[4], PLANS[3], ((1,), STREAMED)))
    ],
    ids=str,
)
def test_an_overflow_is_skipped_by_all(
    pool: Pool, tmp_path: Path, name: str, plan: tuple[tuple[int, ...], dict[str, Any]]
) -> None:
    replicas, options = plan
    found = pool.run(overflow, sum(replicas), FORMATS[name], replicas, options, tmp_path)
    assert found[0].skipped > 0
    assert len({(each.factor, each.skipped) for each in found}) == 1
    assert len(found[0].losses) == 5
    assert all(torch.isfinite(tensor).all() for each in found for tensor in each.weights.values())
