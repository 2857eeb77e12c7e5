"""Rows as people bring them: nests, what has no rows, what is no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import DataError, DescribeError, NonFiniteError
from parallax.model.describe import describe
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from tests.plans import make_plan

ROWS, WIDTH = 8, 4


@dataclass
class Aims:
    values: Tensor
    unit: str = "m"


class Graphs:
    """Pairs of features, and edges that are those of all rows."""

    def __init__(self, weight: float = 1.0) -> None:
        self._x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        self._edges, self._weight = torch.tensor([[0, 1], [1, 2]]), torch.tensor(weight)

    def __len__(self) -> int:
        return ROWS

    def inputs(self, start: int, stop: int) -> Any:
        x = self._x[start:stop]
        return {
            "graph": {
                "pair": (x, 2 * x),
                "edges": self._edges,
                "weight": self._weight,
                "name": "ring",
            }
        }

    def targets(self, start: int, stop: int) -> Any:
        return {"aims": Aims(self._x[start:stop]), "note": None}


class Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, graph: Any) -> Any:
        first, second = graph["pair"]
        ones = torch.ones(graph["edges"].shape[1])
        joined = torch.zeros(WIDTH, WIDTH).index_put(tuple(graph["edges"]), ones, accumulate=True)
        hidden = self.middle(self.enter(first).relu() + second) @ joined * graph["weight"]
        return {"out": (self.leave(hidden),)}


def loss(outputs: Any, targets: Any) -> Tensor:
    found: Tensor = (outputs["out"][0] - targets["aims"].values).square().mean()
    return found


def engine() -> Engine:
    chain = describe(Convolves, sample=lambda rows: Graphs().inputs(0, rows))
    return Engine.build(chain, make_plan(chain), loss=loss)


def test_nests_with_what_has_no_rows() -> None:
    torch.manual_seed(0)
    trained, batch = engine(), Graphs()
    before = trained.evaluate(batch)
    assert trained.step(batch).loss == pytest.approx(before, rel=1e-5)
    parts = trained.predict(batch)
    assert [first for first, _ in parts] == [0, 2, 4, 6]
    trained.close()


def test_what_is_not_finite_and_has_no_rows() -> None:
    """The search for its row took the number itself for rows."""
    trained = engine()
    with pytest.raises(NonFiniteError, match="inputs hold nan, in a tensor without rows"):
        trained.step(Graphs(weight=float("nan")))
    trained.close()


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        ({"x": torch.ones(4, 2), "scale": torch.tensor(1.0)}, torch.ones(4)),
        ({"x": torch.ones(4, 2), "edges": torch.ones(2, 9)}, torch.ones(4)),
        (torch.tensor(1.0), torch.tensor(1.0)),
        (torch.ones(0, 2), torch.ones(0)),
        ("texts", None),
    ],
    ids=["number", "edges", "numbers", "none", "texts"],
)
def test_rows_that_are_not_as_many(inputs: Any, targets: Any) -> None:
    with pytest.raises(DataError, match="the same number of rows") as error:
        TensorRows(inputs, targets)
    assert "\n" not in str(error.value)


def test_what_modules_in_a_row_cannot_take() -> None:
    chain = describe(lambda: nn.Sequential(nn.Linear(2, 2)))
    for value in (None, ["a", torch.ones(2)], {"input": {"x": torch.ones(2)}}):
        with pytest.raises(DescribeError, match=r"^inputs are "):
            chain.arguments(value)
