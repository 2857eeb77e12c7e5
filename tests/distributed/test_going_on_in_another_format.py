"""A run resumes in any number format with the same master weights: equal masters and states, weights rounded from
them."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from parallax.errors import CheckpointError
from parallax.model.precision import PrecisionConfig
from parallax.runtime.checkpoint import checkpoint_name
from parallax.runtime.optim.scaling import FIRST_FACTOR
from tests.distributed.pool import Pool
from tests.distributed.test_engine import make_batch
from tests.distributed.test_precision import FORMATS, STREAMED, engine
from tests.held import held

PLANS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one rank": ((1,), {}),
    "sharded": ((1, 2), {"shard": True}),
    "states offloaded": ((1, 1), {"optimizer_offload": 1.0, "tier": "disk"}),
    "streamed": ((1,), STREAMED),
}
PAIRS = list(itertools.permutations(FORMATS, 2))
HALF, WHOLE = 2, 4


def taking_over(
    precision: PrecisionConfig,
    plan: str,
    folder: Path,
    loaded: Path | None,
    steps: int,
) -> tuple[bytes, bytes, list[float], float]:
    """What is held after loading and after ``steps`` more, their losses, the loss scale. Saved in ``folder``."""
    built = engine(precision, *PLANS[plan], folder)
    if loaded is not None:
        built.load(loaded)
    before, done = held(built), built.completed_steps
    losses = [built.step(make_batch(8, step)).loss for step in range(done, done + steps)]
    after, factor = held(built), built._scale.factor
    built.save(folder, {})
    built.close()
    return save(before), save(after), losses, factor


def masters(parts: list[Any], place: int) -> dict[str, Tensor]:
    """What all ranks together step, from which their weights are rounded, and what is known of it."""
    found = {name: value for part in parts for name, value in load(part[place]).items()}
    for name in [name for name in found if name.startswith("master ")]:
        master, weight = found.pop(name), name.replace("master ", "weight ", 1)
        assert torch.equal(master.to(found[weight].dtype), found[weight]), name
        found[weight] = master
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype is other[name].dtype, name
        assert torch.equal(value, other[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "plans"),
    [
        pytest.param(
            *pair, plans, marks=[pytest.mark.thorough] if (index + 5 * number) % 19 else []
        )
        for index, pair in enumerate(PAIRS)
        for number, plans in enumerate(itertools.product(PLANS, PLANS))
        if len({"streamed" in plan for plan in plans}) == 1  # with a tied weight, or without
    ],
    ids=str,
)
def test_masters_are_kept(
    pool: Pool, tmp_path: Path, before: str, after: str, plans: tuple[str, str]
) -> None:
    worlds = [sum(PLANS[plan][0]) for plan in plans]
    run = partial(pool.run, taking_over)
    first = run(worlds[0], FORMATS[before], plans[0], tmp_path / "first", None, HALF)
    saved = tmp_path / "first" / checkpoint_name(HALF)
    there = run(worlds[1], FORMATS[after], plans[1], tmp_path / "there", saved, 0)
    same(masters(there, 0), masters(first, 1))
    scaled = "fp16" in after, "fp16" in before
    assert there[0][3] == (first[0][3] if all(scaled) else FIRST_FACTOR if scaled[0] else 1.0)
    # And back again, as if it had never been away.
    passed = tmp_path / "there" / checkpoint_name(HALF)
    back = run(worlds[0], FORMATS[before], plans[0], tmp_path / "back", passed, WHOLE - HALF)
    straight = run(worlds[0], FORMATS[before], plans[0], tmp_path / "on", saved, WHOLE - HALF)
    same(masters(back, 1), masters(straight, 1))
    assert [part[2] for part in back] == [part[2] for part in straight]


def refused(precision: PrecisionConfig, folder: Path, loaded: Path) -> str:
    built = engine(precision, (1,), {}, folder)
    before = held(built)
    try:
        built.load(loaded)
    except CheckpointError as error:
        same(held(built), before)
        return str(error)
    finally:
        built.close()
    return ""


@pytest.mark.parametrize(
    ("before", "after"), [("fp64", "fp32"), ("fp32", "fp64"), ("fp64", "bf16")]
)
def test_other_masters_are_refused(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    formats = [PrecisionConfig(parameters=name, compute=name) for name in (before, after)]
    pool.run(taking_over, 1, formats[0], "one rank", tmp_path, None, 1)
    (output,) = pool.run(refused, 1, formats[1], tmp_path, tmp_path / checkpoint_name(1))
    assert f"is {before}, and no master of {after}: resume with" in output
    assert f"precision.parameters={before}" in output


def of_large_weights(folder: Path) -> None:
    built = engine(PrecisionConfig(), (1,), {}, folder)
    with torch.no_grad():
        built.parameters["head.norm.weight"][3] = 1e5
    built.save(folder, {})
    built.close()


def test_values_that_a_format_cannot_represent_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(of_large_weights, 1, tmp_path)
    (output,) = pool.run(refused, 1, FORMATS["fp16"], tmp_path, tmp_path / checkpoint_name(0))
    assert "head.norm.weight holds 100000, which is too large for fp16" in output
