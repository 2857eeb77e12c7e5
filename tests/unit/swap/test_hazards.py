"""Every hazard of moving saved tensors that is known, and the tests that it cannot come back past.

The list is of what other offloaders were found to do wrong, and of what a training loop may do at all.
"""

from __future__ import annotations

import ast
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallax.errors import SwapError
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from tests.unit.swap_fakes import MIB, Make, everything, making, save, settle, storing

HAZARDS = {
    "the version check of autograd is off": ["swap/test_hooks::test_a_change_in_place_raises"],
    "a kept tensor changed in place": ["swap/test_hooks::test_a_change_in_place_raises"],
    "a change in place before a second save": [
        "swap/test_hooks::test_a_change_in_place_before_a_second_save_is_a_new_version"
    ],
    "views, transposes, expand, offset": [
        "swap/test_hooks::test_views_come_back_with_their_strides"
    ],
    "a shared storage is copied twice": ["swap/test_hooks::test_a_shared_storage_is_moved_once"],
    "a shared storage whose parts change each for itself": [
        "test_parts_of_one_memory_that_change_apart"
    ],
    "a freed and reused address": ["swap/test_hooks::test_a_reused_address_is_another_storage"],
    "what left is saved again": [
        "swap/test_hooks::test_what_is_saved_again_after_it_left_does_not_stay"
    ],
    "a cycle that no collector sees": ["swap/test_hooks::test_a_kept_output_is_no_cycle"],
    "parameters, buffers and their casts are moved": [
        "swap/test_hooks::test_parameters_buffers_and_their_casts_stay"
    ],
    "the caller's data are moved": ["swap/test_hooks::test_a_slice_of_a_data_set_stays"],
    "an entry ends with its first unpack": ["swap/test_hooks::test_unpack_twice"],
    "double backward": [
        "swap/test_hooks::test_double_backward",
        "test_second_derivatives_of_what_came_back",
    ],
    "checkpoint inside and outside": [
        "swap/test_hooks::test_checkpoint_inside_hooks_and_hooks_inside_checkpoint",
        "test_a_checkpoint_switches_no_offload_off",
    ],
    "several micro-batches in flight": ["swap/test_steps::test_micro_batches_in_flight"],
    "no backward ever comes": ["swap/test_steps::test_a_step_without_backward_leaves_nothing"],
    "an unused branch": ["test_an_unused_branch_is_let_go_of_with_its_graph"],
    "evaluation between steps": ["test_evaluation_between_steps_changes_nothing"],
    "a split backward": ["test_a_split_backward"],
    "a failed transfer keeps its tensor": ["test_a_failed_transfer_keeps_nothing"],
    "copies against the reuse of their memory": [
        "swap/test_verify::test_a_missing_wait_is_found",
        "swap/test_verify::test_a_read_into_a_block_that_was_given_up_is_a_stray",
        "swap/test_manager::test_a_place_is_not_reused_while_its_transfer_runs",
    ],
    "rare races": ["swap/test_verify::test_a_thousand_seeds"],
    "a pinned allocation for each tensor": [
        "machine/test_device::test_no_host_memory_is_allocated_after_the_store_was_made"
    ],
    "pinned memory rounded up": ["machine/test_device::test_an_arena_is_as_large_as_requested"],
}


def test_every_hazard_has_its_tests() -> None:
    for names in HAZARDS.values():
        for name in names:
            module, _, test = name.rpartition("::")
            source = (Path(__file__).parents[1] / f"{module or 'swap/test_hazards'}.py").read_text(
                encoding="utf-8"
            )
            found = {
                node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
            }
            assert test in found, name


@pytest.fixture(params=["disk", "late disk", "late host"])
def make(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Make]:
    with making(request.param, scratch) as build:
        yield build


class Net(nn.Module):
    """Smooth, with every kind of saving: inputs, outputs, a storage twice, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        left, right = hidden.chunk(2, dim=-1)
        return self.second(left * right.sigmoid()).exp().sum(-1)


def run(net: Net, x: Tensor, manager: SwapManager | None) -> Tensor:
    if manager is None:
        return net(x)
    with offloading(manager, everything(*net.parameters()), 0):
        found = net(x)
    settle(manager, 0.01)  # all of it is offloaded, except what another graph has in use
    return found


def test_second_derivatives_of_what_came_back(make: Make) -> None:
    """gradcheck and gradgradcheck, with nothing left on the device when the first backward begins."""
    torch.manual_seed(0)
    manager, net = make(), Net().double()
    x = torch.randn(2, 6, dtype=torch.double, requires_grad=True)

    def swapped(x: Tensor, *_: Tensor) -> Tensor:
        return run(net, x, manager)

    inputs = (x, net.first.weight, net.second.weight)
    assert torch.autograd.gradcheck(swapped, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(swapped, inputs, fast_mode=True)
    assert manager.take_statistics().bytes_in > 0


@pytest.mark.parametrize("limit", [600, MIB])
def test_a_split_backward(make: Make, limit: int) -> None:
    """As zero-bubble schedules run it: first for the inputs, on which another stage waits, then for the weights."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(5, 6, requires_grad=True)
    weights = [*net.parameters()]
    plain = net(x).sum()
    expected = [
        *torch.autograd.grad(plain, x, retain_graph=True),
        *torch.autograd.grad(plain, weights),
    ]
    manager = make(limit)
    for reported in (False, True):
        loss = run(net, x, manager).sum()
        if reported:
            manager.fetch(0)
        found = [*torch.autograd.grad(loss, x, retain_graph=True)]
        other = run(net, x, manager).sum()  # another micro-batch runs forward in between
        found += torch.autograd.grad(loss, weights)
        assert all(torch.equal(a, b) for a, b in zip(expected, found))
        del loss, other
    assert manager.take_statistics().bytes_in > 0


@pytest.mark.parametrize("how", ["no_grad", "inference", "with a graph"])
def test_evaluation_between_steps_changes_nothing(make: Make, how: str) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(50, 6)
    modes: dict[str, Callable[[], object]] = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "with a graph": torch.enable_grad,
    }

    def train(manager: SwapManager | None) -> list[Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(3):
            waiting = run(net, x, manager).mean()
            with modes[how]():  # type: ignore[attr-defined]
                run(net, x * 2, manager).mean()
            optimizer.zero_grad()
            waiting.backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in net.parameters()]

    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    expected = train(None)
    net.load_state_dict(start)
    assert all(torch.equal(a, b) for a, b in zip(expected, train(make(limit=6000))))


def test_an_unused_branch_is_let_go_of_with_its_graph(make: Make) -> None:
    manager = make()
    x = torch.randn(100, requires_grad=True)
    with offloading(manager, everything(), 0):
        shared = (x * 2).sigmoid()
        used, unused = shared.tanh().sum(), shared.exp().sum()
    settle(manager)
    used.backward()
    del used
    assert manager.stored_bytes + manager.resident_bytes > 0
    del unused, shared
    settle(manager)
    assert (manager.resident_bytes, manager.stored_bytes) == (0, 0)


@pytest.mark.parametrize("outer", ["hooks", "checkpoint"])
def test_a_checkpoint_switches_no_offload_off(make: Make, outer: str) -> None:
    """Only the innermost hooks see a tensor: what they leave to others must still reach the store."""
    manager = make()
    x, w = torch.randn(50, 40, requires_grad=True), torch.randn(40, 60, requires_grad=True)

    def hooked(x: Tensor, w: Tensor) -> Tensor:
        with offloading(manager, everything(w), 0):
            return torch.tanh(x @ w).square().exp()

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w).square().exp()

    if outer == "hooks":
        with offloading(manager, everything(w), 0):
            out = checkpoint(plain, x * 1, w, use_reentrant=False)
        settle(manager)
        assert manager.take_statistics().bytes_out == x.nbytes, (
            "the checkpoint's input is an activation"
        )
    else:
        out = checkpoint(hooked, x * 1, w, use_reentrant=False)
    out.sum().backward()
    found = manager.take_statistics()
    if outer == "checkpoint":
        assert found.bytes_out + found.bytes_cancelled > 0
    else:
        assert found.bytes_in == x.nbytes


@pytest.mark.parametrize("kind", ["disk", "late disk"])
def test_a_failed_transfer_keeps_nothing(
    kind: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error once held the frames that held the tensor that held the transfer, until a collection of garbage."""

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with storing(kind, scratch) as (store, _):
        manager = SwapManager(store, limit_bytes=MIB)
        gc.collect()
        gc.disable()
        try:
            with monkeypatch.context() as patch:
                patch.setattr("os.pwrite", fail)
                tensor = torch.ones(10_000)
                watch = weakref.ref(tensor.untyped_storage())
                root = save(manager, tensor)
                del tensor
                while not manager._evictor.writing[0].transfer._future.done():
                    time.sleep(0.001)
                with pytest.raises(SwapError, match="No space left"):
                    manager.save(torch.ones(10), 1)[0]
            del root
            settle(manager)
            assert watch() is None
        finally:
            gc.enable()
        assert (manager.resident_bytes, manager.stored_bytes) == (0, 0)
        manager.close()


def test_parts_of_one_memory_that_change_apart(make: Make) -> None:
    """torch.unsafe_chunk gives each part a version of its own; an LSTM changes its gates so, one after the other, while
    a copy of the first, and of all their memory, would be under way."""
    torch.manual_seed(0)
    net, manager = nn.LSTM(6, 8).double(), make()
    x = torch.randn(5, 3, 6, dtype=torch.double)
    for _ in range(3):
        expected = torch.autograd.grad(net(x)[0].square().sum(), list(net.parameters()))
        with offloading(manager, everything(*net.parameters()), 0):
            loss = net(x)[0].square().sum()
        found = torch.autograd.grad(loss, list(net.parameters()))
        assert all(torch.equal(*pair) for pair in zip(found, expected))
    y = torch.randn(4, 12, dtype=torch.double, requires_grad=True)
    with offloading(manager, everything(), 0):
        one, two, three = (y * 2).unsafe_chunk(3, 1)
        first, second, third = one.sigmoid_(), two.sigmoid_(), three.tanh_()
        settle(manager, 0.01)
        (first * second + third).sum().backward()
    found_y, y.grad = y.grad, None
    one, two, three = (y * 2).chunk(3, 1)
    (one.sigmoid() * two.sigmoid() + three.tanh()).sum().backward()
    torch.testing.assert_close(found_y, y.grad)
