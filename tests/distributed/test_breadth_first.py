"""Breadth-first: each block computes a group of micro-batches, so that its offloaded weights are read once for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallax.runtime.optim.kinds.adamw import AdamWConfig
from tests.distributed.pool import Pool
from tests.distributed.test_checkpoint import training
from tests.distributed.test_engine import Case, gpt, half_frozen, make_batch, with_buffers
from tests.distributed.test_streaming import OFFLOADED, gradients_of
from tests.plans import described

CASES = [
    # Replicas by pipeline rank, micro-batches in a group (0: all), directive, rows to a micro-batch.
    ((1,), 0, "keep", 2),
    ((1,), 2, "recompute", 1),
    ((1,), 3, "keep", 1),
    ((1,), 0, "offload", 1),
    ((1, 1), 3, "offload", 2),
    ((2,), 0, "keep", 2),
    ((1, 1), 0, "recompute", 1),
    ((1, 1), 2, "keep", 1),
    ((2, 1), 0, "keep", 2),
]


def shape_of(case: Case, replicas: tuple[int, ...]) -> dict[str, Any]:
    """A virtual stage for each block, as far as pipeline ranks can share them equally."""
    blocks = len(described(case.factory).blocks)
    return {"schedule": "breadth-first", "interleave": blocks // len(replicas)}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("replicas", "group", "directive", "rows"), CASES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_1f1b(
    pool: Pool,
    tmp_path: Path,
    replicas: tuple[int, ...],
    group: int,
    directive: str,
    rows: int,
    tied: bool,
) -> None:
    case, world = Case(gpt(tied=tied), dtype=torch.float32), sum(replicas)
    plain = case.under(replicas, directive, microbatch=rows)
    shape = shape_of(case, replicas)
    expected = pool.run(gradients_of, world, plain, tmp_path, 8)
    resident = case.under(replicas, directive, microbatch=rows, group=group, **shape)
    offloaded = case.under(replicas, directive, microbatch=rows, group=group, **shape, **OFFLOADED)
    for other in (resident, offloaded):
        found = pool.run(gradients_of, world, other, tmp_path, 8)
        assert {loss for loss, *_ in found} == {loss for loss, *_ in expected}
        wanted: dict[str, Tensor] = {}
        for _, gradients, _, _ in expected:
            wanted |= gradients
        for _, gradients, held, limit in found:
            assert held <= limit
            for name, gradient in gradients.items():
                # The gradients of a shared parameter are added in the order of the backwards.
                if name in described(case.factory).ties or max(replicas) > 1:
                    torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7)
                else:
                    assert torch.equal(gradient, wanted[name]), name


@pytest.mark.sampled(8)
@pytest.mark.parametrize("factory", [gpt(), gpt(tied=False), half_frozen, with_buffers])
@pytest.mark.parametrize(("replicas", "group"), [((1,), 0), ((1,), 2), ((1, 1), 0), ((2,), 0)])
def test_training_is_bit_identical(
    pool: Pool, tmp_path: Path, factory: Any, replicas: tuple[int, ...], group: int
) -> None:
    case = replace(
        Case(factory, dtype=torch.float32), optimizer=AdamWConfig(lr=3e-3, clip_norm=0.1)
    )
    world, shape = sum(replicas), {**shape_of(case, replicas), "group": group}
    others = [case.under(replicas, **shape)]
    if world == 1 and not described(factory).ties:  # else norms are added in another order
        others.append(case.under(replicas))
    found = pool.run(
        training, world, case.under(replicas, **shape, **OFFLOADED), tmp_path, 0, 4, None
    )
    for number, other in enumerate(others):
        expected = pool.run(training, world, other, tmp_path / str(number), 0, 4, None)
        for one, wanted in zip(found, expected):
            assert (one.losses, one.norms) == (wanted.losses, wanted.norms)
            assert all(
                torch.equal(each, wanted.weights[name]) for name, each in one.weights.items()
            )


def bytes_of_a_step(case: Case, folder: Path, rows: int) -> tuple[int, int]:
    """Bytes of parameters and gradients that a second step reads from the tier, and that it writes."""
    engine = case.engine(folder)
    engine.gradients(make_batch(rows, 0))
    engine._stage.offloaded.take_statistics()
    engine.gradients(make_batch(rows, 0))
    moved = engine._stage.offloaded.take_statistics()
    engine.close()
    return moved.bytes_in, moved.bytes_out


def test_bytes_do_not_depend_on_the_number_of_micro_batches(pool: Pool, tmp_path: Path) -> None:
    case = Case(gpt(tied=False), dtype=torch.float32)
    shape = {**shape_of(case, (1,)), **OFFLOADED, "microbatch": 1}

    def moved(rows: int, group: int) -> tuple[int, int]:
        found = case.under((1,), group=group, global_batch=rows, **shape)
        ((read, written),) = pool.run(bytes_of_a_step, 1, found, tmp_path, rows)
        return read, written

    once = moved(2, 0)
    assert once == moved(4, 0) == moved(8, 0)
    # A second group reads the weights again, and the gradients of the first to add to them.
    weights, gradients = once[0], once[1]
    again = moved(8, 4)
    assert 2 * weights <= again[0] <= 2 * weights + gradients + weights // 2
    assert again[1] == 2 * gradients
