"""Embeddings that ask for sparse gradients train as those that do not, under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.runtime.optim.schedules.constant import ConstantSchedule
from tests.distributed.pool import Pool
from tests.distributed.test_engine import Case, Outcome, compare, plain_blocks, plain_loss, training

WIDTH = 16
RATE = 0.1
SGD = SGDConfig(
    lr=RATE,
    momentum=0.0,
    weight_decay=0.0,
    clip_norm=0.0,
)


class Looks(nn.Module):
    """Three sources of a sparse gradient; one table is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(64, WIDTH, mode="sum", sparse=True)
        self.table = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        bag = self.bags(tokens)[:, None]
        return self.words(tokens) + bag + F.embedding(tokens, self.table, sparse=True)


class Head(nn.Module):
    """Logits; its weight may be somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def looked_up() -> nn.Module:
    return nn.Sequential(Looks(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Head())


def looked_up_and_tied() -> nn.Module:
    model = looked_up()
    model[0].table = model[3].weight
    return model


def plain_sgd(case: Case) -> Outcome:
    """torch.optim.SGD, on sparse gradients as they are."""
    blocks, tensors = plain_blocks(case)
    optimizer = torch.optim.SGD([t for t in tensors.values() if t.requires_grad], lr=RATE)
    outcome = Outcome([], [], tensors)
    for batch in case.batches():
        optimizer.zero_grad()
        loss = plain_loss(case, blocks, batch)
        loss.backward()
        assert any(t.grad is not None and t.grad.is_sparse for t in tensors.values())
        optimizer.step()
        outcome.losses.append(loss.item())
    return outcome


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        ((1,), {}),
        ((2,), {}),
        ((1, 1), {"schedule": "zb-h1"}),
        ((2, 1), {"schedule": "zb-h1"}),
        ((1, 1), {"schedule": "zb-v", "interleave": 2}),
        ((1, 1), {"directive": "offload"}),
        ((1, 2), {"directive": "recompute"}),
        ((1, 1), {"optimizer_offload": 1.0}),
        ((2,), {"parameter_offload": 1.0, "optimizer_offload": 1.0}),
        ((2,), {"shard": True}),
    ],
    ids=str,
)
def test_sparse_gradients_train_as_in_plain_torch(
    pool: Pool, replicas: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Their norm cannot be taken, they have no storage, and they do not fit buckets."""
    case = Case(looked_up, optimizer=SGD, schedule=ConstantSchedule()).under(replicas, **options)
    expected = plain_sgd(case)
    found = pool.run(training, case.world, case)
    for outcome in found:
        outcome.norms.clear()
    compare(found, expected, 1e-9)


def test_a_tied_table_of_sparse_gradients(pool: Pool) -> None:
    """Of the same parameter one stage has a sparse gradient and another a dense one."""
    case = Case(looked_up_and_tied, optimizer=SGD, schedule=ConstantSchedule()).under((2, 1))
    blocks, tensors = plain_blocks(case)
    optimizer = torch.optim.SGD(tensors.values(), lr=RATE)
    losses = []
    for batch in case.batches():
        optimizer.zero_grad()
        loss = plain_loss(case, blocks, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = pool.run(training, case.world, case)
    for outcome in found:
        outcome.norms.clear()
    compare(found, Outcome(losses, [], tensors), 1e-9)
