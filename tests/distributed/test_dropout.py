"""Dropout under plans: a row is dropped from alike wherever it is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.pool import Pool
from tests.distributed.test_engine import Case, compare, gpt, gpt_with_dropout, same, training


class Sometimes(nn.Module):
    """Drops without a module that says so, with two functions and several times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.linear(x)), 0.2, self.training)
        heads = x.unflatten(2, (4, -1)).transpose(1, 2).flatten(0, 1)  # a multiple of the rows
        x = F.dropout(heads, 0.2, self.training).unflatten(0, (-1, 4)).transpose(1, 2).flatten(2)
        dropped: Tensor = F.dropout1d(x, 0.2, self.training)
        return dropped


def with_functions() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, 16), Sometimes(16), nn.Dropout(0.1), Sometimes(16), nn.Linear(16, 64)
    )


PLANS: list[dict[str, Any]] = [
    {"replicas": (1, 2), "directive": "recompute", "microbatch": 3},
    {"replicas": (3,), "directive": "offload", "microbatch": 5},
    {"replicas": (2, 1), "directive": "keep", "microbatch": 1, "schedule": "zb-h1"},
]


@pytest.mark.parametrize("factory", [gpt_with_dropout, with_functions])
def test_the_same_for_every_plan(pool: Pool, factory: Any) -> None:
    case = Case(factory, sizes=(8, 5, 2))
    (expected,) = pool.run(training, 1, case.under((1,), microbatch=8))
    for options in PLANS:
        found = pool.run(training, sum(options["replicas"]), case.under(**options))
        compare(found, expected, 1e-9)
    (without,) = pool.run(training, 1, Case(gpt(), sizes=(8, 5, 2)).under((1,)))
    assert expected.losses != without.losses


@pytest.mark.parametrize("replicas", [(1,), (1, 2)], ids=str)
def test_bit_for_bit_whatever_becomes_of_activations(pool: Pool, replicas: tuple[int, ...]) -> None:
    case = Case(with_functions, dtype=torch.float32, sizes=(8, 5)).under(replicas)
    kept = pool.run(training, case.world, case)
    same(pool.run(training, case.world, case.under(replicas, "offload")), kept)
    same(pool.run(training, case.world, case.under(replicas, "recompute")), kept)
