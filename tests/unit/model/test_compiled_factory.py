"""A factory that calls torch.compile: blocks, names and weights are those of the model that was compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from parallax.model.construction.deferred import uncompiled
from parallax.model.describe import describe, parameter_names


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        for layer in self.layers:
            rows = torch.relu(layer(rows))
        return rows


def parts() -> nn.Module:
    model = Net()
    model.first = torch.compile(model.first)
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer)
    return model


def whole() -> nn.Module:
    return torch.compile(Net())


def both() -> nn.Module:
    return torch.compile(parts())


def in_place() -> nn.Module:
    model = Net()
    model.layers[0].compile()
    model.compile()
    return model


@pytest.mark.sampled
@pytest.mark.parametrize("factory", [parts, whole, both, in_place])
def test_a_compiled_model_is_partitioned_like_the_wrapped_one(
    factory: Callable[[], nn.Module],
) -> None:
    plain, compiled = (
        describe(each, sample=lambda rows: torch.ones(rows, 4)) for each in (Net, factory)
    )
    names = [parameter_names(each, range(len(each.blocks))) for each in (plain, compiled)]
    assert list(names[1]) == list(Net().state_dict())
    assert names[0] == names[1]
    assert len(compiled.blocks) == len(plain.blocks)
    assert compiled.fingerprint() == plain.fingerprint()


def test_a_model_that_is_not_compiled_stays_itself() -> None:
    model = Net()
    before = list(model.modules())
    assert uncompiled(model) is model
    assert all(a is b for a, b in zip(before, model.modules(), strict=True))
