"""Parameters divided into runs, and optimizers cloned to step them, shared by all callers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.swap.optimizer.chunked_step import independent_clone, shallow_clone
from parallax.swap.weights import ParameterSegment, aligned_runs, bytes_of

LANES = 64


def padded(segment: ParameterSegment) -> int:
    return -(-bytes_of(segment) // 64) * 64


def parameters(draw: random.Random) -> list[nn.Parameter]:
    found = []
    for _ in range(draw.randint(1, 12)):
        shape = draw.choice([(1,), (7,), (64,), (33, 5), (128, 40), (500,), ()])
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64])
        data = torch.zeros(shape, dtype=dtype)
        strided = draw.random() < 0.2 and len(shape) == 2
        found.append(nn.Parameter(data.t().contiguous().t() if strided else data))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("size", [bytes_of, padded])
@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_runs_cover_all_in_order_and_split_no_vector(seed: int, divides: bool, size: Any) -> None:
    draw = random.Random(seed)
    given, most = parameters(draw), draw.choice([1, 256, 1000, 4096, 10**6])
    runs = list(aligned_runs(given, most, lambda p: p.dtype, split=divides, size=size))
    flat = [segment for run in runs for segment in run]
    for parameter in given:
        mine = [s for s in flat if s.parameter is parameter]
        assert [s.start for s in mine] == [0, *(s.stop for s in mine[:-1])]
        assert mine[-1].stop == parameter.numel()
        assert all(s.stop % LANES == 0 for s in mine[:-1])
        assert len(mine) == 1 or (divides and parameter.is_contiguous())
    assert [*dict.fromkeys(id(s.parameter) for s in flat)] == [id(p) for p in given]
    for run in runs:
        assert len({segment.parameter.dtype for segment in run}) == 1
        least = LANES * run[0].parameter.element_size()
        assert len(run) == 1 or sum(map(size, run)) <= max(most, least) + 64 * len(run)


class Demanding(torch.optim.SGD):
    """An optimizer with an unusual ``__init__`` and state of its own."""

    def __init__(self, parameters: Any, *, secret: object, lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.secret = secret

    def step(self, closure: Any = None) -> Any:
        assert self.secret is not None
        return super().step(closure)


def stepped(parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameter.detach().clone()


def test_clones_step_as_the_original() -> None:
    first, second, third = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    secret, hooked = object(), []
    original = Demanding([first], secret=secret, lr=0.5)
    original.register_step_pre_hook(lambda *_: hooked.append(1))
    group = {k: v for k, v in original.param_groups[0].items() if k != "params"}
    own = independent_clone(original, [{**group, "params": [second]}])
    shared = shallow_clone(original, vars(original), [{**group, "params": [third]}])
    assert type(own) is type(shared) is Demanding
    assert own.secret is shared.secret is secret  # type: ignore[attr-defined]
    expected = stepped(first, original)
    each = len(hooked)  # 2 where a plain SGD was made before: torch then calls hooks for both steps
    assert each
    assert torch.equal(stepped(second, own), expected)
    assert len(hooked) == each
    assert torch.equal(stepped(third, shared), expected)
    assert len(hooked) == 2 * each
    assert (second in own.state, second in original.state) == (True, False)
    assert shared.state is original.state
    assert third in original.state
    assert original.param_groups[0]["params"] == [first]
