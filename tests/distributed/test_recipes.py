"""Each recipe of ``configs/experiment`` trains as its plain torch loop under any plan."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from parallax.config import RunConfig, compose
from parallax.model.describe import Chain, parameter_names
from parallax.model.materialise import materialise
from parallax.run.job import build_chain, build_loss, open_source, with_steps
from parallax.runtime.batch import Rows
from parallax.runtime.checkpoint import checkpoint_name
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan
from tests.recipes import MICRO, RECIPES, ROWS
from tests.recipes.loops import STEPS


@dataclass
class Outcome:
    """``averages``: the averaged weights, if the recipe has them."""

    losses: list[float]
    weights: dict[str, Tensor]
    averages: dict[str, Tensor]


@functools.lru_cache(maxsize=1)  # a rank of a pool trains one recipe under several plans
def configured(folder: Path, settings: tuple[str, ...]) -> tuple[RunConfig, list[Rows], Chain]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        config = with_steps(compose(settings))
        source = open_source(config)
        return config, [source.batch(ROWS) for _ in range(STEPS)], build_chain(config)


def plain(name: str, folder: Path, settings: Sequence[str]) -> Outcome:
    """The recipe in one process, from the weights with which the engine begins."""
    config, batches, chain = configured(folder, tuple(settings))
    dtype, recipe = config.precision.parameter_dtype, RECIPES[name]
    model = recipe.model().to(dtype)
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    states = [block.state_dict() for block in blocks]
    names = parameter_names(chain, range(len(blocks)))
    begun = {n: states[i][inner] for n, (i, inner) in names.items() if inner in states[i]}
    model.load_state_dict({n: begun[n] for n in model.state_dict() if n in begun}, strict=False)
    losses, average = [], AveragedModel(model, **(recipe.averages or {}))
    for index, (batch, step) in enumerate(zip(batches, recipe.loop(model), strict=True)):
        total, loss = counted(recipe.loss, as_tensors(batch.targets(0, ROWS))), 0.0
        for first in range(0, ROWS, MICRO):
            inputs, targets = (each(first, first + MICRO) for each in (batch.inputs, batch.targets))
            scores = called(model, as_tensors(inputs, dtype)).flatten(0, -2)
            options = {
                k: scores.new_tensor(v) if isinstance(v, list) else v
                for k, v in recipe.loss.items()
            }
            targets = as_tensors(targets).flatten().long()
            part = F.cross_entropy(scores, targets, **options, reduction="sum") / total
            part.backward()
            loss += part.item()
        step()
        losses.append(loss)
        if index + 1 >= recipe.averages_since:
            average.update_parameters(model)
    found = [
        {name: tensor.detach() for name, tensor in [*m.named_parameters(), *m.named_buffers()]}
        for m in (model, average.module)
    ]
    return Outcome(losses, found[0], {} if recipe.averages is None else found[1])


def counted(loss: Mapping[str, Any], targets: Tensor) -> float:
    """Return the divisor of a mean over ``targets``: their number, or the sum of the weights of their classes."""
    known = targets[targets != -100]
    return float(torch.tensor(loss["weight"])[known].sum()) if "weight" in loss else len(known)


def called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def as_tensors(values: Any, dtype: torch.dtype | None = None) -> Any:
    """``values`` as tensors, of which those of float32 become ``dtype``."""
    if isinstance(values, dict):
        return {name: as_tensors(each, dtype) for name, each in values.items()}
    if isinstance(values, tuple):
        return tuple(as_tensors(each, dtype) for each in values)
    found = torch.as_tensor(values)
    return found.to(dtype) if found.is_floating_point() else found


def trained(
    name: str, folder: Path, settings: Sequence[str], plan: dict[str, Any], first: int, last: int
) -> Outcome:
    """Steps ``first`` to ``last``, from the checkpoint of step ``first``; then saves."""
    config, batches, chain = configured(folder, tuple(settings))
    made = make_plan(chain, **{"global_batch": ROWS, "microbatch": MICRO, **plan})
    engine = Engine.build(
        chain,
        made,
        loss=build_loss(config),
        steps=config.trainer.steps,
        optimizer=config.optimizer,
        schedule=config.schedule,
        precision=config.precision,
        replicas=config.replicas,
        ema=config.ema,
        swap=SwapConfig(minimum_bytes=1),
        scratch=folder / "swap",
    )
    if first:
        engine.load(folder / "saved" / checkpoint_name(first))
    losses = [engine.step(batch).loss for batch in batches[first:last]]
    weights, averages = copies(engine), {}
    if RECIPES[name].averages is not None:
        with engine.averaged():
            averages = copies(engine)
    engine.save(folder / "saved", {})
    engine.close()
    return Outcome(losses, weights, averages)


def copies(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}


def defined(name: str, weight: Tensor) -> Tensor:
    """``weight`` without the keys' biases, whose gradients are rounding errors that Adam scales up."""
    if name.endswith("qkv.bias"):
        query, _, value = weight.chunk(3)
        weight = torch.cat([query, value])
    return weight.double()


def compare(
    found: list[Outcome], expected: Outcome, first: int, losses: float, weights: float
) -> None:
    for outcome in found:
        assert outcome.losses == pytest.approx(expected.losses[first:], rel=losses)
    for key in ("weights", "averages"):
        of_loop, names = getattr(expected, key), set[str]()
        for name, weight in (pair for each in found for pair in getattr(each, key).items()):
            names.add(name)
            one, other = defined(name, weight), defined(name, of_loop[name])
            error = float((one - other).norm() / other.norm().clamp(min=0.1))
            assert error <= weights, f"{key} {name}: {error}"
        assert names == of_loop.keys()


PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    "two stages": {"replicas": (1, 1)},
    "two replicas": {"replicas": (2,)},
    "offloaded": {"replicas": (1, 1), "optimizer_offload": 1.0, "parameter_offload": 1.0},
}


def cases(quick: Collection[Any], others: Iterable[Any]) -> list[Any]:
    """``quick``, and ``others`` as slow ones."""
    slow = [case if isinstance(case, tuple) else (case,) for case in others]
    return [*quick, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]


TRAINED = [("nanogpt", "fp64"), ("speech", "fp32")]


@pytest.mark.parametrize(
    ("name", "precision"),
    cases(TRAINED, sorted({*itertools.product(RECIPES, ["fp64", "fp32"])} - {*TRAINED})),
)
def test_a_recipe_trains_as_its_plain_loop(
    pool: Pool, tmp_path: Path, name: str, precision: str
) -> None:
    losses, weights = (1e-10, 1e-10) if precision == "fp64" else (1e-6, RECIPES[name].fp32)
    settings = RECIPES[name].overrides(tmp_path, precision)
    (expected,) = pool.run(plain, 1, name, tmp_path, settings)
    for plan in PLANS.values():
        world = sum(plan.get("replicas", (1,)))
        found = pool.run(trained, world, name, tmp_path, settings, plan, 0, STEPS)
        compare(found, expected, 0, losses, weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_resumes_under_another_plan(pool: Pool, tmp_path: Path, name: str) -> None:
    settings = RECIPES[name].overrides(tmp_path, "fp64")
    (expected,) = pool.run(plain, 1, name, tmp_path, settings)
    first, second = PLANS["two replicas"], PLANS["offloaded"]
    pool.run(trained, 2, name, tmp_path, settings, first, 0, 3)
    found = pool.run(trained, 2, name, tmp_path, settings, second, 3, STEPS)
    compare(found, expected, 3, 1e-10, 1e-10)
