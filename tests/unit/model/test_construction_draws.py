"""Draws into tensors without bytes: what torch refuses is refused there, and values are those that replay draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallax.model.construction.deferred import deferred_init
from parallax.model.describe import describe
from parallax.model.materialise import materialise


class Drawn(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], Any], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        with torch.no_grad():
            assert draw(self.weight) is self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum()


DRAWS: list[Callable[[torch.Tensor], Any]] = [
    lambda t: t.normal_(3.0, 0.1),
    lambda t: t.uniform_(2.0, 3.0),
    lambda t: t.bernoulli_(1.0),
    lambda t: t.exponential_(2.0).add_(1.0),
    lambda t: t.random_(5, 9),
    lambda t: t.geometric_(0.5),
    lambda t: t.log_normal_(1.0, 0.1),
    lambda t: t.normal_(3.0, 0.1, generator=torch.Generator().manual_seed(3)),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_has_its_shape_and_values(draw: Callable[[torch.Tensor], Any]) -> None:
    chain = describe(lambda: nn.Sequential(Drawn(draw, (3, 5)), nn.Linear(5, 2)), seed=1)
    (weight, *_) = materialise(chain, 0, 1, torch.device("cpu"))[0].parameters()
    assert weight.shape == (3, 5)
    assert (weight > 0.5).all()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda t: t.normal_(0.0, -1.0), "normal expects std >= 0.0"),
        (lambda t: t.uniform_(1.0, 0.0), "uniform_ expects to return a"),
        (lambda t: t[:, :1].expand(3, 5).normal_(), "more than one element"),
    ],
)
def test_what_torch_refuses_is_refused(draw: Callable[[torch.Tensor], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        Drawn(draw, (3, 5))
    with pytest.raises(RuntimeError, match=message):
        deferred_init(lambda: Drawn(draw, (3, 5)), 1)
