"""Evaluations between steps, and how often gradients are reduced."""

from __future__ import annotations

import gc
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.pool import Pool
from tests.distributed.test_engine import (
    SIZES,
    Case,
    close,
    compare,
    gpt_with_dropout,
    of_many_buckets,
    plain_blocks,
    plain_loss,
    plain_training,
    training,
    with_unused,
)
from tests.distributed.test_varying import in_turn

# ---- evaluation


def numbers_held() -> int:
    """In all tensors of this process but those that a compiler has left, whose sizes are symbols."""
    plain = (t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter))
    return sum(t.numel() for t in plain)


def evaluation(case: Case) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        batches = case.batches()
        engine.step(batches[0])
        tensors = engine.parameters
        before = {
            n: (t.detach().clone(), None if t.grad is None else t.grad.clone())
            for n, t in tensors.items()
        }
        places = {
            n: (t.data_ptr(), None if t.grad is None else t.grad.data_ptr())
            for n, t in tensors.items()
        }
        engine.evaluate(batches[1])
        gc.collect()
        held = numbers_held()
        losses = [engine.evaluate(batch) for batch in batches]
        gc.collect()
        more = numbers_held() - held
        for name, tensor in engine.parameters.items():
            weight, gradient = before[name]
            assert torch.equal(tensor, weight)
            assert gradient is None or torch.equal(tensor.grad, gradient)
            assert places[name] == (
                tensor.data_ptr(),
                None if tensor.grad is None else tensor.grad.data_ptr(),
            )
        stored = (
            (engine._manager.stored_bytes, engine._manager.resident_bytes)
            if engine._manager
            else (0, 0)
        )
        swapped = engine._manager.take_statistics().bytes_out if engine._manager else 0
        assert engine.completed_steps == 1
        engine.close()
        weights = {n: w for n, (w, _) in before.items()}
    return [losses, weights, more, stored, swapped]


@pytest.mark.parametrize(
    ("replicas", "directive"), [((1,), "offload"), ((1, 2), "offload"), ((2, 1), "recompute")]
)
def test_evaluation(pool: Pool, replicas: tuple[int, ...], directive: str) -> None:
    case = Case(gpt_with_dropout, sizes=SIZES).under(replicas, directive)
    results = pool.run(evaluation, case.world, case)
    blocks, tensors = plain_blocks(case)
    with torch.no_grad():
        for _, weights, *_ in results:
            for name, weight in weights.items():
                tensors[name].copy_(weight)
        expected = [
            plain_loss(case, [b.eval() for b in blocks], batch).item() for batch in case.batches()
        ]
    for losses, _, more, stored, swapped in results:
        assert all(close(*pair, 1e-12) for pair in zip(losses, expected))
        assert more <= 64
        assert stored == (0, 0)
        assert swapped == 0


# ---- synchronisation


def reductions(case: Case) -> tuple[list[int], list[int], int]:
    """Per step: all-reduces that the engine counts, numbers that they carried; and how many are trained."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        numbers: list[int] = []
        plain = dist.all_reduce

        def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            gradients = tensor.is_floating_point()  # beside them the first step asks who was used
            if (
                gradients
                and kwargs.get("group") is engine.mesh.replicas
                and engine.mesh.replicas is not None
            ):
                numbers.append(tensor.numel())
            return plain(tensor, *args, **kwargs)

        calls, carried = [], []
        with mock.patch.object(dist, "all_reduce", counting):
            for batch in case.batches():
                before = engine.all_reduces
                numbers.clear()
                engine.step(batch)
                calls.append(engine.all_reduces - before)
                carried.append(sum(numbers))
        trained = sum(t.numel() for t in engine.parameters.values() if t.requires_grad)
        engine.close()
    return calls, carried, trained


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("schedule", "replicas"), in_turn(["gpipe", "1f1b"], [(2,), (1, 2), (2, 2)]), ids=str
)
def test_each_gradient_is_reduced_once_per_step(
    pool: Pool, replicas: tuple[int, ...], schedule: str
) -> None:
    case = Case(of_many_buckets, dtype=torch.float32, sizes=(8, 1, 6, 8)).under(
        replicas, schedule=schedule
    )
    results = pool.run(reductions, case.world, case)
    for rank, (calls, carried, trained) in enumerate(results):
        replicated = rank >= case.world - replicas[-1] or replicas[0] > 1
        assert carried == [trained if replicated else 0] * 4
        assert all(count > 1 for count in calls) if replicated else not any(calls)
        assert calls[0] == calls[2] == calls[3]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("schedule", "replicas"), in_turn(["zb-h1", "1f1b"], [(1,), (2,), (2, 1)]), ids=str
)
def test_parameters_that_are_never_used(
    pool: Pool, replicas: tuple[int, ...], schedule: str
) -> None:
    """They have no gradient, under replicas too, and so no weight decay. Once DDP reduced the buckets that were
    complete, and the step went on with the rest unreduced; then this was refused."""
    case = Case(with_unused).under(replicas, schedule=schedule)
    compare(pool.run(training, case.world, case), plain_training(case), 1e-9)
