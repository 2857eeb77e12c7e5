"""The master property: a result never depends on the plan."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from parallax.model.describe import Chain, parameter_names
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.factory.mlp import MLP, MLPConfig
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import described, make_plan

ROWS = 7
MODELS: dict[str, Any] = {
    "gpt": (GPTConfig(layers=2, hidden=32, heads=2, sequence=16, vocabulary=64), GPT.loss),
    "deep": (GPTConfig(layers=4, hidden=32, heads=2, sequence=16, vocabulary=64), GPT.loss),
    "mlp": (MLPConfig(layers=3, hidden=48, embedding=8, sequence=16, vocabulary=64), MLP.loss),
}


def make_chain(model: str, dtype: torch.dtype) -> Chain:
    return described(MODELS[model][0].build, seed=3, dtype=dtype)


def make_batch(rows: int = ROWS) -> TensorRows:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 64, (rows, 17), generator=generator)
    return TensorRows(tokens[:, :-1], tokens[:, 1:])


def reference(
    model: str, dtype: torch.dtype, rows: int = ROWS
) -> tuple[float, dict[str, torch.Tensor]]:
    """One process, one batch, plain torch."""
    chain, batch = make_chain(model, dtype), make_batch(rows)
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    (x,) = batch.inputs(0, rows)
    for block in blocks:
        x = block(x)
    loss = MODELS[model][1](x, batch.targets(0, rows))
    loss.backward()
    names = parameter_names(chain, range(len(blocks))).items()
    return loss.item(), {
        name: blocks[index].get_parameter(inner).grad for name, (index, inner) in names
    }


def job(
    model: str, dtype: torch.dtype, plan_options: dict[str, Any], rows: int
) -> tuple[float, dict[str, Any], int, int]:
    chain = make_chain(model, dtype)
    precision = (
        PrecisionConfig(parameters="fp64", compute="fp64")
        if dtype is torch.float64
        else PrecisionConfig()
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.build(
            chain,
            make_plan(chain, global_batch=rows, microbatch=2, **plan_options),
            loss=MODELS[model][1],
            precision=precision,
            swap=SwapConfig(minimum_bytes=1),
            scratch=Path(folder) / "swap",
        )
        # A first round, so that the one compared runs on re-used state.
        engine.gradients(make_batch(rows))
        before = engine.all_reduces
        loss = engine.gradients(make_batch(rows))
        reduced = engine.all_reduces - before
        moved = engine._manager.take_statistics().bytes_out if engine._manager else 0
        gradients = {n: t.grad.clone() for n, t in engine.parameters.items()}
        engine.close()
    return loss, gradients, reduced, moved


def jobs(model: str, options: dict[str, Any], variants: list[tuple[str, torch.dtype]]) -> list[Any]:
    """One for each directive and type, in one world: making one takes as long as a step."""
    return [
        job(model, dtype, {**options, "directive": directive}, ROWS)
        for directive, dtype in variants
    ]


def compare(
    results: Sequence[Any], model: str, dtype: torch.dtype, rows: int, tolerance: float
) -> None:
    loss, gradients = reference(model, dtype, rows)
    seen: set[str] = set()
    for found, partial, _, _ in results:
        assert abs(found - loss) <= tolerance * abs(loss)
        for name, gradient in partial.items():
            seen.add(name)
            error = (gradient - gradients[name]).norm() / gradients[name].norm()
            assert error <= tolerance, f"{name}: {error}"
    assert seen == set(gradients)


ON_ONE_RANK = [((1, 1), "keep"), ((2, 2), "offload"), ((1, 1, 1), "recompute")]
REPLICAS = [(1,), (2,), (1, 1), (2, 2), (1, 2), (2, 1), (1, 1, 1), (1, 2, 1), (2, 1, 1)]


def sampled(cases: Iterable[tuple[Any, ...]], sample: Callable[..., bool]) -> list[Any]:
    """The cases, of which those that are not in the sample are for the thorough tests."""
    return [
        case if sample(*case) else pytest.param(*case, marks=pytest.mark.thorough) for case in cases
    ]


TELLING = {
    ("1f1b", "gpt"): [(1, 2), (2, 1), (2, 2)],
    ("gpipe", "mlp"): [(1, 1), (1, 2, 1)],
}
"""Replicas before, after and on both sides of a boundary, and no replicas. test_engine.py trains one stage, alone and
with replicas; below are three stages."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("replicas", "schedule", "model"),
    sampled(
        itertools.product(REPLICAS, ["1f1b", "gpipe"], ["gpt", "mlp"]),
        lambda replicas, schedule, model: replicas in TELLING.get((schedule, model), ()),
    ),
    ids=str,
)
def test_gradients_equal_plain_training(
    pool: Pool, model: str, schedule: str, replicas: tuple[int, ...]
) -> None:
    variants = list(
        itertools.product(["keep", "offload", "recompute"], [torch.float32, torch.float64])
    )
    options = {"replicas": replicas, "schedule": schedule, "swap_limit": 60000}
    by_directive = dict(
        zip(variants, zip(*pool.run(jobs, sum(replicas), model, options, variants)))
    )
    for (directive, dtype), results in by_directive.items():
        compare(results, model, dtype, ROWS, 1e-6 if dtype is torch.float32 else 1e-12)
        moved = [r[3] for r in results]
        assert all(moved) if directive == "offload" else not any(moved)
    for dtype in (torch.float32, torch.float64):
        kept, offloaded = by_directive["keep", dtype], by_directive["offload", dtype]
        for (loss_a, a, count_a, _), (loss_b, b, count_b, _) in zip(kept, offloaded):
            assert loss_a == loss_b
            assert all(torch.equal(a[name], b[name]) for name in a)
            assert count_a == count_b
    position = 0
    # One all-reduce per bucket and step in a replicated stage, none elsewhere.
    for count in replicas:
        reduced = {
            results[rank][2]
            for results in by_directive.values()
            for rank in range(position, position + count)
        }
        assert reduced == ({1} if count > 1 else {0})
        position += count


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("replicas", "directive"),
    sampled(
        itertools.product([(1, 1), (2, 2), (1, 2), (1, 1, 1)], ["keep", "offload", "recompute"]),
        lambda replicas, directive: replicas == (1, 2) or (replicas, directive) in ON_ONE_RANK,
    ),
    ids=str,
)
def test_stages_that_hand_over_on_one_rank(
    pool: Pool, replicas: tuple[int, ...], directive: str
) -> None:
    """At the turn of a V two stages in a row are on one pipeline rank: nothing is sent between them, and the result is
    the plain one. The first and the last block, which share a parameter, are on one pipeline rank, too."""
    options = {"replicas": replicas, "schedule": "zb-v", "directive": directive, "interleave": 2}
    model = "deep" if len(replicas) > 2 else "gpt"
    results = pool.run(job, sum(replicas), model, torch.float64, options, ROWS)
    compare(results, model, torch.float64, ROWS, 1e-12)
    single = pool.run(job, sum(replicas), model, torch.float32, options, ROWS)
    compare(single, model, torch.float32, ROWS, 1e-6)


LAYOUTS = [(1, 2), (2, 1), (1, 1, 1)]
PLACEMENTS = [(2, 0, 1), (1, 2, 0), (2, 1, 0)]


@pytest.mark.parametrize(
    ("replicas", "placement"),
    sampled(itertools.product(LAYOUTS, PLACEMENTS), lambda *case: case in zip(LAYOUTS, PLACEMENTS)),
    ids=str,
)
def test_ranks_may_stand_in_any_order(
    pool: Pool, replicas: tuple[int, ...], placement: tuple[int, ...]
) -> None:
    """Once a message from a later rank to an earlier one was taken for a gradient."""
    results = pool.run(
        job, 3, "gpt", torch.float32, {"replicas": replicas, "placement": placement}, ROWS
    )
    compare(results, "gpt", torch.float32, ROWS, 1e-6)
