"""A step that any rank is asked to end, at any of its actions, is as if it had not begun, under any plan."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import CutShortError
from parallax.runtime.engine import Engine
from parallax.runtime.replicas.config import ReplicasConfig
from tests.distributed.pool import Pool
from tests.distributed.test_engine import (
    Case,
    Weights,
    gpt,
    gpt_with_dropout,
    half_frozen,
    make_batch,
)

LATE = 10_000  # actions: a step has fewer


class Turned(nn.Module):
    """What BatchNorm takes for channels, and back."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, 8),
        Turned(),
        nn.BatchNorm1d(8),
        nn.Dropout(0.1),
        Turned(),
        nn.Linear(8, 16),
        nn.Linear(16, 64),
    )


def asks(engine: Engine, rank: int, action: int) -> Any:
    """What says on ``rank``, from its ``action``-th on, that the step is to end."""
    calls = iter(range(LATE))
    return lambda: engine.mesh.rank == rank and next(calls) >= action


def training(case: Case, cuts: list[tuple[int, int]]) -> tuple[Weights, list[float], list[bool]]:
    """A step for each of ``cuts``, which is taken where it was cut short before; and which of them were."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        losses, gone = [], []
        for step, (rank, action) in enumerate(cuts):
            batch = make_batch((8, 7)[step % 2], step)
            try:
                result = engine.step(batch, asks(engine, rank, action))
            except CutShortError:
                assert engine.completed_steps == step
                result = engine.step(batch)
            else:
                gone.append(False)
            gone += [True] * (len(losses) + 1 - len(gone))
            losses.append(result.loss)
        weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
        weights |= {name: b.clone() for name, b in engine._stage.named_buffers()}
        engine.close()
    return weights, losses, gone


PLANS: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = [
    (gpt_with_dropout, (1,), {"directive": "offload"}),
    (gpt_with_dropout, (1, 1), {"directive": "recompute"}),
    (gpt(tied=True), (1, 1, 1), {"schedule": "gpipe"}),
    (gpt(tied=False), (1, 2), {}),
    (gpt(tied=False), (2, 1), {"optimizer_offload": 1.0, "directive": "offload"}),
    (gpt(tied=False), (1, 1), {"schedule": "zb-h1", "optimizer_offload": 0.5}),
    (gpt(tied=False), (2, 2), {"schedule": "zb-h1"}),
    (gpt(tied=False), (1,), {"parameter_offload": 1.0, "optimizer_offload": 1.0}),
    (gpt(tied=False), (2,), {"parameter_offload": 1.0, "optimizer_offload": 1.0}),
    (gpt(tied=False), (2,), {"shard": True, "directive": "offload"}),
    (gpt(tied=False, layers=4), (1, 1), {"schedule": "interleaved", "interleave": 2}),
    (gpt(tied=False, layers=4), (1, 1), {"schedule": "zb-v", "interleave": 2}),
    (normed, (2, 1), {}),
    (normed, (1, 1), {"directive": "recompute"}),
    (half_frozen, (1, 2), {}),
]


@pytest.mark.parametrize(
    ("factory", "replicas", "options"), PLANS, ids=lambda each: getattr(each, "__name__", str(each))
)
def test_whoever_is_asked_in_whatever_action_nothing_of_the_step_is_left(
    pool: Pool, factory: Any, replicas: tuple[int, ...], options: dict[str, Any]
) -> None:
    case = Case(factory).under(replicas, **options)
    cuts = [(rank, action) for action in (0, 3, 8) for rank in range(case.world)]
    found = pool.run(training, case.world, case, cuts)
    plain = pool.run(training, case.world, case, [(0, LATE)] * len(cuts))
    for (weights, losses, cut), (others, other_losses, none) in zip(found, plain):
        assert losses == other_losses
        assert cut == found[0][2]  # all ranks agree
        assert all(cut[: case.world])  # those of the first action
        assert any(cut[case.world : 2 * case.world])  # and of a later one
        assert not any(none)
        assert weights.keys() == others.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, others[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("number", ["bf16", "fp16"])
def test_short_numbers_too(pool: Pool, number: str) -> None:
    together = ReplicasConfig(compress="bf16")
    case = Case(gpt(tied=False), dtype=torch.float32, compute=number, together=together)
    case = case.under((1, 2), directive="offload")
    cuts = [(rank, action) for action in (0, 3) for rank in range(3)]
    found = pool.run(training, 3, case, cuts)
    plain = pool.run(training, 3, case, [(0, LATE)] * len(cuts))
    for (weights, losses, cut), (others, other_losses, _) in zip(found, plain):
        assert losses == other_losses
        assert all(cut[:3])
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def told_by_gradients(case: Case) -> bool:
    """Whether this rank cut a step short that the last one was asked to end in its first action."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        with pytest.raises(CutShortError):
            engine.step(make_batch(8, 0), asks(engine, case.world - 1, 0))
        cut = engine._executor.cut
        engine.close()
    return cut


def test_whoever_gets_no_gradients_learns_of_it(pool: Pool) -> None:
    """And computes the forwards that are left no more."""
    case = Case(gpt(tied=False)).under((1, 1))
    assert pool.run(told_by_gradients, 2, case) == [True, True]


@pytest.mark.parametrize(
    ("factory", "options", "together"),
    [
        (gpt(), {"gather_loss": True, "schedule": "gpipe"}, ReplicasConfig()),
        (normed, {}, ReplicasConfig(batchnorm="sync")),
        (gpt(tied=False), {}, ReplicasConfig(compress="powersgd")),
    ],
    ids=["the loss of all rows", "statistics of all rows", "what is lost counts in the next step"],
)
def test_a_step_that_replicas_need_whole_is_taken(
    pool: Pool, factory: Any, options: dict[str, Any], together: ReplicasConfig
) -> None:
    case = Case(factory, together=together).under((1, 2), **options)
    for _, losses, cut in pool.run(training, case.world, case, [(0, 0), (1, 2)]):
        assert cut == [False, False]
        assert len(losses) == 2
