"""Tensors of a subclass that wraps others: taken apart, put together, and moved as optimizer states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import parallax
from parallax.swap.lms.wrapped import local_bytes, parts, take_apart


def test_a_plain_tensor_is_its_own_part() -> None:
    tensor = torch.ones(3)
    assert parts(tensor) == [tensor]
    assert local_bytes(nn.Parameter(tensor)) == 12
    _, rebuild = take_apart(tensor)
    other = torch.zeros(3)
    assert rebuild(iter([other])) is other


def test_a_wrapper_of_wrappers() -> None:
    tensors = [torch.full((2, 3), float(n)) for n in range(3)]
    whole = TwoTensor(TwoTensor(tensors[0], tensors[1]), TwoTensor(tensors[2], tensors[0]))
    found, rebuild = take_apart(whole)
    assert [id(t) for t in found] == [id(tensors[n]) for n in (0, 1, 2, 0)]
    assert local_bytes(whole) == 4 * 24
    other = rebuild(iter([t + 1 for t in found]))
    assert type(other) is TwoTensor
    assert torch.equal(other.a.b, tensors[1] + 1)
    assert torch.equal(other.b.a, tensors[2] + 1)


class Pairs(torch.optim.Optimizer):
    """Its state is a pair of tensors in one, the second of which may be small."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["pair"] = TwoTensor(torch.zeros_like(p), torch.zeros_like(p))
                pair = self.state[p]["pair"]
                pair.a.lerp_(p.grad, 0.1)
                pair.b.add_(pair.a.abs())
                p.addcdiv_(pair.a, pair.b + 1e-3, value=-group["lr"])


def test_states_that_wrap_others_move(scratch: Path) -> None:
    results: list[list[Tensor]] = []
    for limited in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
        optimizer = Pairs(model.parameters())
        limit = 2 * sum(p.nbytes for p in model.parameters()) + 2**17 if limited else 2**30
        with parallax.swap(
            model, limit, optimizer=optimizer, directory=scratch, minimum_bytes=1024
        ) as swapping:
            for _ in range(4):
                model(torch.ones(32, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert bool(swapping.states[0].bytes_in) == limited
        pairs = [optimizer.state[p]["pair"] for p in model.parameters()]
        assert all(type(pair) is TwoTensor for pair in pairs)
        results.append([*model.parameters(), *[t for pair in pairs for t in (pair.a, pair.b)]])
    assert all(torch.equal(a, b) for a, b in zip(*results))
