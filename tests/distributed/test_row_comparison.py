"""Ranks whose data sources give different rows are named before the first update with them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.errors import DataError
from parallax.model.describe import describe
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from tests.distributed.pool import Pool
from tests.plans import make_plan

ROWS = 8
COUNT = 64  # rows of the data set: the same on all ranks, in another order


class OnDemand:
    """Rows of ``order``, made on request."""

    def __init__(self, order: list[int], noise: bool = False) -> None:
        self._order, self._noise = order, noise

    def __len__(self) -> int:
        return len(self._order)

    def inputs(self, start: int, stop: int) -> Tensor:
        rows = torch.tensor(self._order[start:stop]).float()[:, None].expand(-1, 4)
        return rows + torch.rand(len(rows), 4) if self._noise else rows

    def targets(self, start: int, stop: int) -> Tensor:
        return torch.tensor(self._order[start:stop])


def batches(kind: str, rank: int) -> Any:
    """Three batches of a source that is at fault on some ranks, as ``kind`` says."""
    python, numpy = random.Random(rank), np.random.default_rng(rank)
    order = list(range(COUNT))
    if kind == "shuffle":
        python.shuffle(order)
    elif kind == "permutation":
        order = numpy.permutation(COUNT).tolist()
    elif kind == "set":
        order = sorted(order, key=lambda row: hash((row, rank)))
    elif kind == "one of three" and rank == 1:
        order = order[::-1]
    for step in range(3):
        mine = order[step * ROWS : (step + 1) * ROWS]
        if kind in ("on demand", "random rows"):
            if kind == "random rows":
                torch.seed()
            elif rank == 2:
                mine = [(row + 1) % COUNT for row in mine]
            yield OnDemand(mine, noise=kind == "random rows")
            continue
        inputs, targets = OnDemand(mine).inputs(0, ROWS), OnDemand(mine).targets(0, ROWS)
        if kind == "targets" and rank == 2:
            targets = targets.flip(0)
        if kind == "third step" and rank == 0 and step == 2:
            inputs = inputs + 1
        yield TensorRows(inputs, targets)


def trained(kind: str, replicas: tuple[int, ...]) -> tuple[str, int, list[float]]:
    """What is raised, after how many steps, and how far the weights have moved in the last one."""
    chain = describe(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, COUNT)))
    plan = make_plan(chain, replicas=replicas, global_batch=ROWS)
    engine = Engine.build(chain, plan, loss=nn.functional.cross_entropy)
    output, before = "", []
    try:
        for batch in batches(kind, dist.get_rank()):
            before = [each.detach().clone() for each in engine.parameters.values()]
            engine.step(batch)
    except DataError as error:
        output = str(error)
    moved = [float((new - old).abs().max()) for new, old in zip(engine.parameters.values(), before)]
    done = engine.completed_steps
    engine.close()
    return output, done, moved


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "ranks", "parts", "done"),
    [
        ("shuffle", "ranks 1, 2 have", "inputs and targets", 0),
        ("permutation", "ranks 1, 2 have", "inputs and targets", 0),
        ("set", "ranks 1, 2 have", "inputs and targets", 0),
        ("one of three", "rank 1 has", "inputs and targets", 0),
        ("targets", "rank 2 has", "targets", 0),
        ("on demand", "rank 2 has", "inputs and targets", 0),
        ("third step", "rank 0 has", "inputs", 2),
    ],
)
@pytest.mark.parametrize("replicas", [(1, 2), (2, 1)], ids=str)
def test_ranks_with_other_rows_are_named_before_an_update(
    pool: Pool, replicas: tuple[int, ...], kind: str, ranks: str, parts: str, done: int
) -> None:
    for output, steps, moved in pool.run(trained, 3, kind, replicas):
        assert output.startswith(
            f"{ranks} other {parts} than the other ranks in the batch of step {done}: "
        )
        assert "random.Random(0)" in output
        assert steps == done
        assert max(moved) == 0


@pytest.mark.parametrize("kind", ["equal", "random rows"])
def test_equal_rows_and_rows_that_are_random_each_time_train(pool: Pool, kind: str) -> None:
    for output, steps, _ in pool.run(trained, 3, kind, (1, 2)):
        assert (output, steps) == ("", 3)
