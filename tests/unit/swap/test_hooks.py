"""The hazards of saved-tensor hooks: autograd gets back exactly what it saved, and nothing is confused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallax.machine.device import CpuCopies
from parallax.model.saved import Selector
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.stores.store import HostStore
from tests.unit.swap_fakes import MIB, Make, everything, making, save, settle, unpacked


@pytest.fixture(params=["disk", "late host"])
def make(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Make]:
    with making(request.param, scratch) as build:
        yield build


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "square transpose": lambda x: x.t(),
    "lone view": lambda x: x[8:40],
    "offset and step": lambda x: x[1::3, 5:60:2],
    "column": lambda x: x[:, 7],
    "expand": lambda x: x[0].expand(9, 64),
    "flipped axes": lambda x: x.view(4, 16, 64).permute(2, 0, 1),
    "window": lambda x: x.flatten().unfold(0, 16, 4),
    "bytes": lambda x: x.view(torch.uint8),
    "complex": lambda x: torch.view_as_complex(x.view(64, 32, 2)),
    "conjugate": lambda x: torch.view_as_complex(x.view(64, 32, 2)).conj(),
    "half": lambda x: x.half(),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[3, 4],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_come_back_with_their_strides(make: Make, name: str) -> None:
    manager = make()
    saved = VIEWS[name](torch.randn(64, 64).requires_grad_().clone())
    expected, strides, offset = saved.detach().clone(), saved.stride(), saved.storage_offset()
    root = save(manager, saved)
    settle(manager)
    del saved
    (back,) = unpacked(root)
    assert (back.stride(), back.storage_offset()) == (strides, offset)
    assert torch.equal(back, expected)


def test_a_shared_storage_is_moved_once(make: Make) -> None:
    manager = make()
    parts = torch.randn(3, 1024).requires_grad_().clone()
    root = save(manager, *parts.unbind(0), parts.t(), parts)
    settle(manager)
    back = unpacked(root)
    assert len({tensor.untyped_storage().data_ptr() for tensor in back}) == 1
    statistics = manager.take_statistics()
    assert (statistics.bytes_out, statistics.bytes_in) == (parts.nbytes, parts.nbytes)


def test_a_reused_address_is_another_storage(make: Make) -> None:
    manager = make()
    roots, expected, addresses = [], [], []
    for value in range(20):
        # Glibc re-uses a block only for less.
        tensor = torch.full((50_000 - 100 * value,), float(value))
        addresses.append(tensor.data_ptr())
        expected.append(float(value))
        roots.append(save(manager, tensor))
        del tensor
        settle(manager)
    assert len(set(addresses)) < len(addresses), (
        "the allocator reused nothing: the test says nothing"
    )
    for root, value in zip(roots, expected):
        assert unpacked(root)[0].eq(value).all()


def test_what_is_saved_again_after_it_left_does_not_stay(make: Make) -> None:
    """The alias that watches the version once kept the storage of a tensor that had already left."""
    manager = make()
    tensor = torch.randn(1000)
    first = save(manager, tensor)
    settle(manager)
    second = save(manager, tensor)
    gone = weakref.ref(tensor.untyped_storage())
    expected = tensor.clone()
    del tensor
    assert gone() is None
    assert torch.equal(unpacked(first)[0], expected)
    assert torch.equal(unpacked(second)[0], expected)
    assert manager.take_statistics().bytes_out == expected.nbytes


def test_a_kept_output_is_no_cycle() -> None:
    """tanh saves its own output, whose history is the node that holds what was packed."""
    manager = SwapManager(HostStore(MIB, CpuCopies()), limit_bytes=MIB)
    with offloading(manager, Selector([], minimum_bytes=2**40), 0):
        output = torch.tanh(torch.ones(1000, requires_grad=True) * 2)
    gone = weakref.ref(output.untyped_storage())
    del output
    assert gone() is None
    manager.close()


class Tied(nn.Module):
    """A layer, a norm with buffers, an embedding, and the embedding's weight again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.layer, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.register_buffer("scale", torch.rand(64) + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.layer(self.embedding(tokens)) * self.scale)
        return F.linear(x, self.embedding.weight).square().mean()


@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_buffers_and_their_casts_stay(make: Make, autocast: bool) -> None:
    manager, model = make(), Tied()
    tokens = torch.randint(0, 64, (256,))
    held = [*model.parameters(), *model.buffers()]
    moved: list[Tensor] = []

    class Spy(Selector):
        def why_kept(self, tensor: Tensor) -> str | None:
            reason = super().why_kept(tensor)
            moved.extend([tensor] if reason is None else [])
            return reason

    def run(**swap: Any) -> list[Tensor]:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(tokens)
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = run()
    with offloading(manager, Spy(held, minimum_bytes=1), 0):
        offloaded = run()
    gradients = [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded))
    storages = {t.untyped_storage().data_ptr() for t in held}
    assert moved
    assert not storages & {t.untyped_storage().data_ptr() for t in moved}
    shapes = [tuple(t.shape) for t in moved]
    assert (64, 64) not in shapes, "a cast of a weight left"
    assert (256, 64) in shapes, "the embedding's output is an activation"
    with offloading(manager, Spy(held, minimum_bytes=1), 1):
        model(tokens).backward()
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients))


def test_a_slice_of_a_data_set_stays(make: Make) -> None:
    manager, layer = make(limit=1024), nn.Linear(16, 1)
    data = torch.randn(1000, 16)
    with offloading(manager, everything(*layer.parameters()), 0):
        loss = layer(data[:8]).sum()
    loss.backward()
    assert manager.take_statistics().high_water < 1024


@pytest.mark.parametrize("when", ["kept", "queued", "stored", "loaded"])
def test_a_change_in_place_raises(make: Make, when: str) -> None:
    manager = make()
    selector = Selector([], minimum_bytes=2**40) if when == "kept" else everything()
    x = torch.ones(1000, requires_grad=True).clone()
    with offloading(manager, selector, 0):
        y = x.sigmoid() if when == "queued" else x * x
    changed = y if when == "queued" else x
    if when in ("stored", "loaded"):
        settle(manager)
    if when == "loaded":
        manager.fetch(0)
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"
    ):
        y.sum().backward()


def test_a_change_in_place_before_a_second_save_is_a_new_version(make: Make) -> None:
    manager = make()
    x = torch.ones(1000)
    save(manager, x)  # dropped at once, so nothing needs the first version
    x.mul_(3)
    second = save(manager, x)
    assert unpacked(second)[0].eq(3).all()


def function(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).pow(2).sum(1).exp()


@pytest.mark.parametrize("limit", [600, MIB])
def test_unpack_twice(make: Make, limit: int) -> None:
    manager = make(limit)
    x, w = (
        torch.randn(5, 4, dtype=torch.double, requires_grad=True),
        torch.randn(4, 6, dtype=torch.double, requires_grad=True),
    )
    expected = torch.autograd.grad(function(x, w).sum(), (x, w))
    with offloading(manager, everything(w), 0):
        out = function(x, w).sum()
    settle(manager)
    for _ in range(3):
        found = torch.autograd.grad(out, (x, w), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_double_backward(make: Make) -> None:
    manager = make()
    x, w = (
        torch.randn(3, 4, dtype=torch.double, requires_grad=True),
        torch.randn(4, 2, dtype=torch.double, requires_grad=True),
    )

    def offloaded(x: Tensor, w: Tensor) -> Tensor:
        with offloading(manager, everything(), 0):
            return function(x, w)

    assert torch.autograd.gradcheck(offloaded, (x, w))
    assert torch.autograd.gradgradcheck(offloaded, (x, w))


@pytest.mark.parametrize("outer", ["hooks", "checkpoint"])
def test_checkpoint_inside_hooks_and_hooks_inside_checkpoint(make: Make, outer: str) -> None:
    manager = make()
    x, w = torch.randn(50, 40, requires_grad=True), torch.randn(40, 60, requires_grad=True)
    expected = torch.autograd.grad(function(x, w).sum(), (x, w))

    def hooked(x: Tensor, w: Tensor) -> Tensor:
        with offloading(manager, everything(), 0):
            return function(x, w)

    if outer == "hooks":
        with offloading(manager, everything(), 0):
            out = checkpoint(function, x * 1, w, use_reentrant=False).sum()
    else:
        out = checkpoint(hooked, x * 1, w, use_reentrant=False).sum()
    settle(manager)
    found = torch.autograd.grad(out, (x, w))
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
