"""Whole steps through the swap: several micro-batches, none that ends well, and whole models."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import BudgetExceeded
from parallax.model.factory.gpt import GPTConfig
from parallax.model.saved import Selector
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from tests.unit.swap_fakes import Make, everything, making, save, settle, unpacked


@pytest.fixture(params=["disk", "late host"])
def make(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Make]:
    with making(request.param, scratch) as build:
        yield build


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]])
@pytest.mark.parametrize("prefetch", [False, True])
def test_micro_batches_in_flight(make: Make, order: list[int], prefetch: bool) -> None:
    manager = make(limit=9000)
    roots, expected = {}, {}
    for micro in range(4):
        tensors = [torch.randn(250, 1 + i).flatten() for i in range(3)]
        expected[micro] = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            roots.setdefault(micro, []).append(save(manager, tensor, micro=micro))
    for micro, following in zip(order, [*order[1:], None]):
        if prefetch:
            manager.fetch(micro)
        for root, tensor in reversed(list(zip(roots.pop(micro), expected[micro]))):
            assert torch.equal(unpacked(root)[0], tensor)
        if prefetch and following is not None:
            manager.fetch(following)
    assert manager.take_statistics().high_water <= 9000


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


def objects_when_settled(manager: SwapManager, seconds: float = 10.0) -> Counter[str]:
    """Kinds of objects when everything has left the device, and threads have seen what was cancelled in their queues,
    which on a busy machine they come to later."""
    settle(manager)
    deadline = time.monotonic() + seconds
    while True:
        gc.collect()
        kinds = Counter(type(each).__name__ for each in gc.get_objects())
        if not kinds["_WorkItem"] or time.monotonic() > deadline:
            return kinds
        time.sleep(0.01)


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["evaluation", "dropped", "forward", "backward", "fetched"])
def test_a_step_without_backward_leaves_nothing(make: Make, how: str) -> None:
    manager = make(limit=40_000)

    def step() -> None:
        x = torch.randn(20, 100, requires_grad=True)
        with offloading(manager, everything(), 0), torch.set_grad_enabled(how != "evaluation"):
            hidden = (
                torch.sigmoid(Broken.apply(torch.sigmoid(x * 2)) if how == "backward" else x * 2)
                * 3
            )
            if how == "forward":
                raise ArithmeticError("in forward")
            out = (hidden * hidden).sum()
        if how == "fetched":
            manager.fetch(0)
        if how == "backward":
            out.backward()

    def aborted(times: int) -> None:
        for _ in range(times):
            try:
                step()
            except ArithmeticError:
                continue

    aborted(10)
    files, kinds = open_files(), [objects_when_settled(manager)]
    # Other libraries in the process make objects now and then; a leak makes them each time.
    for _ in range(3):
        aborted(100)
        kinds.append(objects_when_settled(manager))
    assert (manager.resident_bytes, manager.stored_bytes) == (0, 0)
    before, after = min(
        itertools.pairwise(kinds), key=lambda pair: pair[1].total() - pair[0].total()
    )
    assert after.total() - before.total() < 50, after - before
    assert open_files() == files
    assert sum("parallax-swap" in thread.name for thread in threading.enumerate()) <= 4


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for a, b in [(3, 8), (8, 16), (16, 16)]:
            layers += [
                nn.Conv2d(a, b, 3, padding=1),
                nn.BatchNorm2d(b),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ]
        super().__init__(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 10))


def gpt() -> tuple[nn.Module, Tensor]:
    model = GPTConfig(layers=2, hidden=64, heads=4, sequence=32, vocabulary=96, dropout=0.1).build()
    return model, torch.randint(0, 96, (4, 32))


NETS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "gpt": gpt,
    "convolutions": lambda: (ConvNet(), torch.randn(6, 3, 16, 16)),
}


def losses_and_gradients(net: str, manager: SwapManager | None) -> list[Tensor]:
    """Two steps of three micro-batches each, run forward together and backward in turn."""
    torch.manual_seed(1)
    model, inputs = NETS[net]()
    selector = Selector([*model.parameters(), *model.buffers()], minimum_bytes=64)
    results: list[Tensor] = []
    for _ in range(2):
        roots = []
        for micro in range(3):
            if manager is None:
                roots.append(model(inputs).square().mean())
                continue
            with offloading(manager, selector, micro):
                roots.append(model(inputs).square().mean())
        for micro in (0, 2, 1):
            if manager is not None:
                manager.fetch(micro)
            roots[micro].backward()
        results += [root.detach() for root in roots]
    return results + [p.grad for p in model.parameters()] + list(model.buffers())


@pytest.mark.sampled
@pytest.mark.parametrize("net", NETS)
def test_gradients_are_bit_identical_at_every_limit(make: Make, net: str) -> None:
    plain = losses_and_gradients(net, None)
    refused, limit, most = 0, 2**12, 0
    while most < limit / 2:  # from too little for one operator to more than the step ever needs
        limit *= 2
        manager = make(limit)
        try:
            offloaded = losses_and_gradients(net, manager)
        except BudgetExceeded:
            refused += 1
            assert most == 0, f"a limit of {limit} was refused after a smaller one was enough"
            continue
        most = manager.take_statistics().high_water
        assert most <= limit
        assert all(torch.equal(a, b) for a, b in zip(plain, offloaded))
    assert refused
