"""The forward half of an engine: its outputs are the model's own, and it holds nothing that only training needs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import ParallaxError
from parallax.model.describe import describe
from parallax.plan.plan import Plan
from parallax.runtime.batch import TensorRows
from parallax.runtime.forward import ForwardEngine
from parallax.swap.config import SwapConfig
from parallax.swap.parameters.offloaded import ResidentParameters
from tests.distributed.pool import Pool
from tests.distributed.test_engine import (
    Case,
    Weights,
    gpt,
    gpt_with_dropout,
    make_batch,
    plain_blocks,
    with_buffers,
)
from tests.distributed.test_engine_evaluation import numbers_held
from tests.plans import make_plan

SIZES = 8, 3, 1  # whole, uneven, fewer than replicas
PADDING = 2**10  # bytes
SMALL = 4096  # numbers of seeds and libraries; the smallest stage has seven times as many
Parts = list[list[tuple[int, Tensor]]]  # by batch


def plan_of(case: Case) -> Plan:
    return make_plan(case.chain(), **{"global_batch": 8, "microbatch": 4, **case.options})


def built(case: Case, folder: Path) -> ForwardEngine:
    return ForwardEngine.build(
        case.chain(),
        plan_of(case),
        precision=case.precision(),
        swap=SwapConfig(minimum_bytes=1),
        scratch=folder / "swap",
    )


def batches() -> list[TensorRows]:
    return [make_batch(rows, step) for step, rows in enumerate(SIZES)]


def predictions(case: Case, folder: Path, checkpoint: Path | None = None) -> tuple[Parts, Weights]:
    engine = built(case, folder)
    if checkpoint is not None:
        engine.load(checkpoint)
    parts = [engine.predict(batch) for batch in batches()]
    weights = {name: value.detach().clone() for name, value in engine.parameters.items()}
    engine.close()
    return parts, weights


def check(case: Case, found: list[tuple[Parts, Weights]], weights: Weights) -> None:
    """Compare the outputs of all ranks with those of the model's own forward on the same rows."""
    model = case.factory().to(case.dtype)
    model.load_state_dict(weights, strict=False)
    model.eval()
    plan = plan_of(case)
    last = plan.ranks(len(plan.stages) - 1)
    for number, batch in enumerate(batches()):
        rows = 0
        for rank, (parts, _) in enumerate(found):
            assert rank in last or not parts[number]
            for first, outputs in parts[number]:
                with torch.no_grad():
                    expected = model(*batch.inputs(first, first + len(outputs)))
                assert torch.equal(outputs, expected)
                assert not outputs.requires_grad
                rows += len(outputs)
        assert rows == len(batch)


def named(value: Any) -> str:
    """The name of a factory, the same in all processes; other values as text."""
    return getattr(value, "__name__", str(value))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (gpt(), {"replicas": (1,)}),
        (gpt(), {"replicas": (1, 2)}),
        (gpt(), {"replicas": (2, 1), "schedule": "gpipe"}),
        (gpt_with_dropout, {"replicas": (1, 2, 1)}),
        (gpt(), {"replicas": (1, 1), "schedule": "zb-v", "interleave": 2}),
        (with_buffers, {"replicas": (3,)}),
        (gpt(), {"replicas": (1,), "parameter_offload": 1.0}),
        (gpt(), {"replicas": (1, 1, 1), "parameter_offload": 0.5, "tier": "host"}),
        (gpt(), {"replicas": (1, 2), "parameter_offload": 1.0}),
    ],
    ids=named,
)
def test_outputs_are_those_of_the_models_own_forward(
    pool: Pool,
    tmp_path: Path,
    factory: Callable[[], nn.Module],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    case = Case(factory, options=options, dtype=dtype)
    found = pool.run(predictions, case.world, case, tmp_path)
    _, weights = plain_blocks(case)
    for _, held in found:
        assert all(torch.equal(value, weights[name]) for name, value in held.items())
    check(case, found, weights)


# ---- weights of a run


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 64))


def trained(case: Case, folder: Path) -> tuple[Path, Weights]:
    engine = case.engine(folder)
    engine.step(make_batch(8, 5))
    saved = engine.save(folder / "checkpoints", {})
    weights = {name: value.detach().clone() for name, value in engine.parameters.items()}
    engine.close()
    return saved, weights


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (gpt(), {"replicas": (1, 1)}),
        (gpt(), {"replicas": (2, 1), "parameter_offload": 1.0}),
        (with_statistics, {"replicas": (1, 1, 1)}),
    ],
    ids=named,
)
def test_weights_of_a_checkpoint_of_another_plan(
    pool: Pool, tmp_path: Path, factory: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    case = Case(factory).under((1, 2))
    ranks = pool.run(trained, case.world, case, tmp_path)
    weights = {name: value for _, held in ranks for name, value in held.items()}
    other = replace(case, options=options)
    check(other, pool.run(predictions, other.world, other, tmp_path, ranks[0][0]), weights)


LAYERS = ("layers.0", "layers.1.up", "head.norm")


def features(case: Case, layer: str, folder: Path, checkpoint: Path) -> Parts:
    """The parts of a layer's output; the engine has no later block."""
    chain = describe(case.factory, seed=3, dtype=case.dtype, layer=layer)
    plan = make_plan(chain, **{"global_batch": 8, "microbatch": 4, **case.options})
    engine = ForwardEngine.build(
        chain, plan, precision=case.precision(), swap=SwapConfig(minimum_bytes=1), scratch=folder
    )
    engine.load(checkpoint)
    parts = [engine.predict(batch) for batch in batches()]
    engine.close()
    return parts


@pytest.mark.sampled
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "options",
    [
        {"replicas": (1, 1)},
        {"replicas": (1, 2)},
        {"replicas": (1,), "parameter_offload": 1.0},
        {"replicas": (1, 1), "parameter_offload": 1.0, "tier": "host"},
    ],
    ids=str,
)
def test_a_layers_outputs_are_those_of_a_hook(
    pool: Pool, tmp_path: Path, options: dict[str, Any], layer: str
) -> None:
    case = Case(gpt(), dtype=torch.float32).under((1, 2))
    ranks = pool.run(trained, case.world, case, tmp_path)
    model = case.factory()
    model.load_state_dict({k: v for _, held in ranks for k, v in held.items()}, strict=False)
    model.eval()
    hooked: list[Tensor] = []
    model.get_submodule(layer).register_forward_hook(lambda _, __, output: hooked.append(output))
    other = replace(case, options=options)
    found = pool.run(features, other.world, other, layer, tmp_path, ranks[0][0])
    for number, batch in enumerate(batches()):
        parts = [part for of_rank in found for part in of_rank[number]]
        assert sum(len(output) for _, output in parts) == len(batch)
        for first, output in parts:
            with torch.no_grad():
                model(*batch.inputs(first, first + len(output)))
            assert torch.equal(output, hooked.pop())


def refused(case: Case, folder: Path) -> tuple[str, bool]:
    """The message for a checkpoint that is not there, and whether the weights stay as they were."""
    engine = built(case, folder)
    before = {name: value.detach().clone() for name, value in engine.parameters.items()}
    try:
        engine.load(folder / "step-000001")
    except ParallaxError as error:
        same = all(torch.equal(value, before[n]) for n, value in engine.parameters.items())
        return str(error), same
    finally:
        engine.close()
    raise AssertionError("a checkpoint that is not there was loaded")


def test_a_missing_checkpoint_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    case = Case(gpt()).under((1, 1))
    for message, same in pool.run(refused, case.world, case, tmp_path):
        assert "step-000001" in message
        assert "\n" not in message
        assert same


# ---- memory


def memory(case: Case, folder: Path) -> tuple[int, int, int]:
    """Numbers in tensors that a new engine holds beyond its parameters and buffers, bytes of offloaded parameters that
    were on the device at one time, and their limit."""
    case.chain()
    gc.collect()
    before = numbers_held()
    engine = built(case, folder)
    gc.collect()
    stage = engine._built.stage
    more = numbers_held() - before - sum(t.numel() for t in stage.held())
    for batch in batches():
        engine.predict(batch)
    assert all(t.grad is None for t in stage.parameters())
    offloaded = stage.offloaded
    if isinstance(offloaded, ResidentParameters):
        high = limit = 0
    else:
        high, limit = offloaded.take_statistics().high_water, offloaded.limit_bytes
        largest = max(sum(p.nbytes for p in block.parameters()) for block in stage.blocks)
        assert limit <= 2 * largest + PADDING  # of two blocks, and no gradient
    engine.close()
    return more, high, limit


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": (2,), "shard": True},
        {"replicas": (1, 2), "directive": "offload", "optimizer_offload": 1.0},
        {"replicas": (2, 1), "parameter_offload": 1.0, "optimizer_offload": 1.0},
    ],
    ids=str,
)
def test_there_is_no_memory_for_gradients_and_optimizers(
    pool: Pool, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Whatever the plan offloads, saves or shards in training."""
    case = Case(gpt(), options=options)
    offloads = "parameter_offload" in options
    for more, high, limit in pool.run(memory, case.world, case, tmp_path):
        assert offloads or more < SMALL
        assert high <= limit
        assert (high > 0) is offloads


# ---- exceptions of the model


class Fuse(nn.Module):
    blown = False

    def forward(self, x: Tensor) -> Tensor:
        if self.blown:
            raise ValueError("blown")
        return x


def with_fuse() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 16), Fuse(), nn.Linear(16, 64)
    )


def with_failures(case: Case, folder: Path) -> tuple[Parts, list[list[str]]]:
    """Four batches: sound, one whose first row is no token, one in which the block before the last fails, sound."""
    wrong = TensorRows(make_batch(8, 1).inputs(0, 8)[0].clone(), make_batch(8, 1).targets(0, 8))
    wrong.inputs(0, 8)[0][0, 0] = 64
    engine = built(case, folder)
    found: Parts = []
    errors: list[list[str]] = []
    for step, batch in enumerate((make_batch(8, 0), wrong, make_batch(8, 2), make_batch(8, 3))):
        failures: list[Exception] = []
        Fuse.blown = step == 2
        found.append(engine.predict(batch, failed=failures.append))
        errors.append([type(each).__name__ for each in failures])
    Fuse.blown = False
    engine.close()
    return found, errors


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": (1,)},
        {"replicas": (1, 1)},
        {"replicas": (1, 2)},
        {"replicas": (2, 1)},
        {"replicas": (1, 1), "schedule": "zb-v", "interleave": 2},
        {"replicas": (1, 1), "parameter_offload": 1.0},
    ],
    ids=named,
)
def test_all_ranks_go_on_after_an_exception_of_the_model(
    pool: Pool, tmp_path: Path, options: dict[str, Any]
) -> None:
    case = Case(with_fuse, options=options)
    found = pool.run(with_failures, case.world, case, tmp_path)
    plan, model = plan_of(case), with_fuse().to(case.dtype)
    model.load_state_dict(plain_blocks(case)[1])
    whole = {(step, row) for step in (0, 3) for row in range(8)}
    rows = set()
    for parts, _ in found:
        for step, several in enumerate(parts):
            for first, outputs in several:
                expected = model(*make_batch(8, step).inputs(first, first + len(outputs)))
                assert torch.equal(outputs, expected)
                rows |= {(step, first + n) for n in range(len(outputs))}
    assert rows == whole | {(1, row) for row in range(4, 8)}
    for rank, (_, errors) in enumerate(found):
        assert not errors[0]
        assert not errors[3]
        assert set(errors[1]) <= ({"IndexError"} if rank in plan.ranks(0) else set())
        assert set(errors[2]) <= {"ValueError"}
    assert all(any(errors[step] for _, errors in found) for step in (1, 2))
