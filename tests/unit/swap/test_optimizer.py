"""The host optimizer against the same optimizer on the device."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import SwapError
from parallax.machine.device import CpuCopies
from parallax.runtime.optim.algorithms import Lion
from parallax.swap.optimizer.buckets import Correction
from parallax.swap.optimizer.host import HostOptimizer
from parallax.swap.stores.store import DiskStore, Store

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
    layers = [
        nn.Linear(100, 300),
        nn.GELU(),
        nn.LayerNorm(300),
        nn.Linear(300, 77),
        nn.Linear(77, 10),
    ]
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


def on_host(optimizer: torch.optim.Optimizer, net: nn.Module, store: Store | None) -> HostOptimizer:
    return HostOptimizer(
        optimizer,
        net.parameters(),
        copies=CpuCopies(),
        store=store,
        bucket_bytes=BUCKET,
        divides=not isinstance(optimizer, torch.optim.Adafactor),
    )


def backward(net: nn.Module, step: int, count: int = 2) -> None:
    torch.manual_seed(step)
    for _ in range(count):
        net(torch.randn(16, 100, dtype=next(net.parameters()).dtype)).square().sum().backward()


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_thirty_steps_are_bit_identical(name: str, store: Store | None) -> None:
    plain, mine = make_net(), make_net()
    optimizer, template = make_optimizer(name, plain), make_optimizer(name, mine)
    with contextlib.closing(on_host(template, mine, store)) as host:
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
            host.commit([Correction(torch.clamp(1.0 / (norm + 1e-6), max=1.0))])
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
    with contextlib.closing(on_host(template, mine, store)) as host:
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
    with contextlib.closing(on_host(make_optimizer("adamw", mine), mine, store)) as host:
        before = mine[4].weight.detach().clone()
        mine[:4](torch.randn(3, 100)).sum().backward()
        host.commit()
        host.finish()
        assert torch.equal(mine[4].weight, before)
        assert mine[4].weight.grad is None
        assert host.states(mine[4].weight) == {}
        assert host.states(mine[0].weight)


def test_a_full_tier_raises_where_the_weights_are_needed(scratch: Path) -> None:
    mine = make_net()
    small = DiskStore(scratch, 200_000, CpuCopies(), threads=1)
    with (
        contextlib.closing(small),
        contextlib.closing(on_host(make_optimizer("adamw", mine), mine, small)) as host,
    ):
        backward(mine, 0)
        host.commit()
        with pytest.raises(SwapError, match="is full"):
            host.ready(mine.parameters())
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("parallax-update")
    ]


class Permuted(nn.Module):
    """Parameters that fill their memory in another order than contiguous ones."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(40, 30).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).square().sum() + (self.transposed * x.sum()).tanh().sum()


def test_moments_lie_as_their_weights_do(store: Store | None) -> None:
    torch.manual_seed(0)
    plain = Permuted()
    mine = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    with contextlib.closing(
        on_host(torch.optim.AdamW(mine.parameters(), lr=1e-2, fused=True), mine, store)
    ) as host:
        for step in range(8):
            x = torch.randn(2, 3, 9, 9)
            host.ready(mine.parameters())
            host.zero_grad()
            optimizer.zero_grad()
            plain(x).backward()
            mine(x).backward()
            optimizer.step()
            host.commit()
            if step == 3:
                host.finish()
                host.reset()
                for one, other in zip(plain.parameters(), mine.parameters()):
                    host.restore(
                        other,
                        {key: value.contiguous() for key, value in optimizer.state[one].items()},
                    )
        host.finish()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), mine.parameters()))


def test_a_gradient_that_grew_after_it_was_called_final_comes_down_again(
    store: Store | None,
) -> None:
    """A backward that had been called the last raised; the next step's were more."""
    mine = make_net(torch.bfloat16)
    twin = copy.deepcopy(mine)
    with contextlib.closing(on_host(make_optimizer("adamw", mine), mine, store)) as host:
        for step in range(2):
            backward(mine, step, 1)
            for parameter in mine.parameters():
                host.reduced(parameter)
        host.commit()
        host.finish()
    with contextlib.closing(on_host(make_optimizer("adamw", twin), twin, None)) as host:
        for step in range(2):
            backward(twin, step, 1)
        host.commit()
        host.finish()
    assert all(torch.equal(one, other) for one, other in zip(mine.parameters(), twin.parameters()))


def test_after_a_failure_no_parameter_is_half_updated(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, plain = make_net(), make_net()
    optimizer = make_optimizer("adamw", plain)
    disk = DiskStore(scratch, 2**24, CpuCopies(), threads=1)
    with (
        contextlib.closing(disk),
        contextlib.closing(on_host(make_optimizer("adamw", mine), mine, disk)) as host,
    ):

        def step(number: int) -> None:
            host.zero_grad()
            backward(mine, number)
            host.commit()
            host.finish()

        step(0)
        with monkeypatch.context() as broken:
            broken.setattr(os, "preadv", _full)
            with pytest.raises(SwapError, match="cannot read"):
                step(1)
        for again in (
            host.finish,
            lambda: host.ready(mine.parameters()),
            lambda: host.states(mine[0].weight),
        ):
            with pytest.raises(
                SwapError, match=r"only some weights are updated: load the last checkpoint"
            ):
                again()
        backward(plain, 0)
        optimizer.step()
        host.reset()
        for one, other in zip(plain.parameters(), mine.parameters()):
            other.detach().copy_(one)
            host.restore(
                other, {k: v for k, v in optimizer.state[one].items() if isinstance(v, Tensor)}
            )
        optimizer.zero_grad()
        backward(plain, 2)
        optimizer.step()
        step(2)
        assert all(
            torch.equal(one, other) for one, other in zip(plain.parameters(), mine.parameters())
        )


def _full(*_: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


class Peer:
    """Replicas of which the other never answers."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def owner(self, parameter: Tensor) -> int:
        return int(parameter.dim() == 1)

    def owns(self, parameter: Tensor) -> bool:
        return parameter.dim() > 1

    def broadcast(self, parameter: Tensor, tensors: list[Tensor]) -> None:
        if not self.owns(parameter):
            self.answer.wait(20)


def test_a_failed_replica_does_not_wait_for_others(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, peer = make_net(), Peer()
    disk = DiskStore(scratch, 2**24, CpuCopies(), threads=1)
    template = make_optimizer("adamw", mine)
    host = HostOptimizer(
        template,
        mine.parameters(),
        copies=CpuCopies(),
        store=disk,
        exchange=peer,
        bucket_bytes=BUCKET,
    )
    monkeypatch.setattr(os, "pwrite", _full)
    backward(mine, 0)
    start = time.monotonic()
    host.commit()
    with pytest.raises(SwapError, match="cannot write"):
        host.ready([mine[3].weight])
    host.close()
    assert time.monotonic() - start < 10
    peer.answer.set()
    disk.close()
    for thread in threading.enumerate():
        if thread.name.startswith("parallax-spread"):
            thread.join(10)
