"""The optimizer below the device against the same optimizer on it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.device import CpuCopies
from parallax.errors import ConfigError, SwapError
from parallax.runtime.optimizer import Lion
from parallax.swap.optimizer import HostOptimizer
from parallax.swap.store import DiskStore, Store

BUCKET = 50_000  # bytes: the widest parameter is in three
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "lion": (Lion, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
}


def make_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(100, 300), nn.GELU(), nn.LayerNorm(300), nn.Linear(300, 77), nn.Linear(77, 10)]
    return nn.Sequential(*layers).to(dtype)


def make_optimizer(name: str, net: nn.Module) -> torch.optim.Optimizer:
    kind, options = CASES[name]
    decaying = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() < 2]
    return kind([{"params": decaying, "weight_decay": 0.1}, {"params": others}], lr=1e-2, **options)


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Store | None]:
    if request.param == "memory":
        yield None
        return
    with contextlib.closing(DiskStore(scratch, 2**24, CpuCopies(), threads=2)) as opened:
        yield opened


def below(optimizer: torch.optim.Optimizer, net: nn.Module, store: Store | None) -> HostOptimizer:
    return HostOptimizer(optimizer, net.parameters(), copies=CpuCopies(), store=store, bucket_bytes=BUCKET)


def backward(net: nn.Module, step: int, count: int = 2) -> None:
    torch.manual_seed(step)
    for _ in range(count):
        net(torch.randn(16, 100, dtype=next(net.parameters()).dtype)).square().sum().backward()


@pytest.mark.parametrize("name", CASES)
def test_thirty_steps_are_bit_identical(name: str, store: Store | None) -> None:
    plain, mine = make_net(), make_net()
    optimizer, template = make_optimizer(name, plain), make_optimizer(name, mine)
    with contextlib.closing(below(template, mine, store)) as host:
        for step in range(30):
            for group in [*optimizer.param_groups, *template.param_groups]:
                group["lr"] = 1e-2 / (1 + step)
            optimizer.zero_grad(set_to_none=False)
            backward(plain, step)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            for layer in mine:
                host.ready(layer.parameters())
            host.zero_grad()
            backward(mine, step)
            assert torch.equal(nn.utils.get_total_norm([p.grad for p in mine.parameters()]), norm)
            host.commit(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
            if step == 11:  # as a checkpoint does
                states = {p: host.states(p) for p in mine.parameters()}
                for parameter, found in states.items():
                    host.restore(parameter, found)
        host.finish()
        for one, other in zip(plain.parameters(), mine.parameters()):
            assert torch.equal(one, other)
            found = host.states(other)
            for key, value in optimizer.state[one].items():
                assert not isinstance(value, Tensor) or torch.equal(found[key], value)
        if store is not None:
            assert store.slots.used_bytes > 0


def test_short_types_have_full_precision_copies(store: Store | None) -> None:
    """Small steps are lost in bfloat16, and add up in the copies."""
    mine, exact = make_net(torch.bfloat16), make_net(torch.bfloat16).float()
    template = torch.optim.AdamW(mine.parameters(), lr=2e-4, fused=True)
    optimizer = torch.optim.AdamW(exact.parameters(), lr=2e-4, fused=True)
    before = [parameter.detach().clone() for parameter in mine.parameters()]
    with contextlib.closing(below(template, mine, store)) as host:
        for step in range(40):
            host.ready(mine.parameters())
            host.zero_grad()
            backward(mine, step, 1)
            for one, other in zip(exact.parameters(), mine.parameters()):
                assert other.grad is not None
                one.grad = other.grad.float()
            for parameter in reversed(list(mine.parameters())):
                host.reduced(parameter)
            host.commit()
            optimizer.step()
        host.finish()
    for one, other, first in zip(exact.parameters(), mine.parameters(), before):
        assert torch.equal(one.bfloat16(), other)
        assert other.grad is not None
        assert not other.grad.any()
        assert not torch.equal(other, first)


def test_parameters_without_gradient_stay_as_they_are(store: Store | None) -> None:
    mine = make_net()
    with contextlib.closing(below(make_optimizer("adamw", mine), mine, store)) as host:
        before = mine[4].weight.detach().clone()
        mine[:4](torch.randn(3, 100)).sum().backward()
        host.commit()
        host.finish()
        assert torch.equal(mine[4].weight, before)
        assert mine[4].weight.grad is None
        assert host.states(mine[4].weight) == {}
        assert host.states(mine[0].weight)


def test_a_full_tier_is_told_where_the_weights_are_needed(scratch: Path) -> None:
    mine = make_net()
    small = DiskStore(scratch, 200_000, CpuCopies(), threads=1)
    with contextlib.closing(small), contextlib.closing(below(make_optimizer("adamw", mine), mine, small)) as host:
        backward(mine, 0)
        host.commit()
        with pytest.raises(SwapError, match="is full"):
            host.ready(mine.parameters())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("parallax-update")]


def test_optimizers_that_look_at_several_parameters_are_refused() -> None:
    mine = make_net()
    with pytest.raises(ConfigError, match="LBFGS looks at all parameters at once"):
        below(torch.optim.LBFGS(mine.parameters()), mine, None)
