"""A split backward gives the gradients of a whole one."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallax.model.split_backward import WeightGradStore


class Doubled(torch.autograd.Function):
    """Counts how often its backward runs."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        Doubled.backwards += 1
        return 2 * gradient


class OfAllKinds(nn.Module):
    """Products in every spelling, weights used twice, a custom function, and a view at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.twice = (
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 8, bias=False),
        )
        self.across = nn.Conv1d(3, 3, 3, padding=1)
        self.matrix, self.shift = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.across(self.norm(self.first(x)).relu())
        x = self.twice(torch.tanh(self.twice(x))) @ self.matrix
        x = torch.addmm(self.shift, x.flatten(0, 1), self.matrix).view_as(x)
        x = Doubled.apply(torch.matmul(x, self.matrix) + self.shift)
        return x.transpose(1, 2)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)
        self.bare = nn.Conv2d(6, 4, 1, bias=False)
        self.same = nn.Conv2d(4, 4, 3, padding="same")
        self.up = nn.ConvTranspose2d(4, 4, 2)
        self.volume = nn.Conv3d(1, 2, (1, 3, 3), dilation=(1, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.same(self.bare(self.conv(x).relu())))
        return self.volume(x.unsqueeze(1))


class Tied(nn.Module):
    """An embedding and a head of one weight: one of them splits, the other does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x.argmax(-1)) + x.mean(-1, keepdim=True))


def gradients(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Of the inputs, after as many backwards that add up in the parameters."""
    found = []
    for x in inputs:
        x = x.clone().requires_grad_()
        model(x).square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    return found


def in_split_passes(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """The same, with all input-gradient passes before the first weight-gradient pass."""
    found, deferred = [], []
    for x in inputs:
        x, weight_grads = x.clone().requires_grad_(), WeightGradStore()
        with weight_grads.splitting():
            outputs = model(x)
        outputs.square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
        deferred.append(weight_grads)
    for weight_grads in deferred:
        weight_grads.finish()
        assert not weight_grads.pending_parameters()
    return found


def same(found: Tensor | None, expected: Tensor | None, tolerance: float = 1e-5) -> None:
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )


@pytest.mark.parametrize(
    ("factory", "shape"),
    [
        (OfAllKinds, (2, 3, 8)),
        (Images, (2, 4, 9, 9)),
        (Tied, (2, 5, 16)),
        (lambda: nn.LSTM(8, 8), (3, 2, 8)),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_split_backward_equals_plain_backward(
    factory: Any, shape: tuple[int, ...], frozen: bool
) -> None:
    torch.manual_seed(1)
    model = factory()
    if isinstance(model, nn.LSTM):
        model = nn.Sequential(nn.Linear(8, 8), First(model))
    if frozen:
        next(model.parameters()).requires_grad_(False)
    twin, inputs = copy.deepcopy(model), [torch.randn(shape) for _ in range(2)]
    for found, expected in zip(in_split_passes(twin, inputs), gradients(model, inputs)):
        same(found, expected)
    for (name, found), expected in zip(twin.named_parameters(), model.parameters()):
        if expected.requires_grad:
            same(found.grad, expected.grad)
        else:
            assert found.grad is None, name


class First(nn.Module):
    """The first of what a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.inner(x)[0]
        return first


def test_a_custom_function_goes_backward_once() -> None:
    Doubled.backwards = 0
    in_split_passes(OfAllKinds(), [torch.randn(2, 3, 8)])
    assert Doubled.backwards == 1


def test_autocast() -> None:
    torch.manual_seed(1)
    model = OfAllKinds()
    twin, x = copy.deepcopy(model), [torch.randn(2, 3, 8)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = gradients(model, x), in_split_passes(twin, x)
    same(found[0], expected[0])
    for one, other in zip(twin.parameters(), model.parameters()):
        assert one.grad is not None
        assert one.grad.dtype is torch.float32
        same(one.grad, other.grad, 2e-2)


@pytest.mark.parametrize("offloaded", [False, True])
def test_no_copy_of_an_offloaded_weight_is_kept(offloaded: bool) -> None:
    """A copy of a resident weight in the type of autocast is kept, for the input gradient."""
    model, weight_grads = nn.Linear(7, 5), WeightGradStore(None, lambda _: offloaded)
    with torch.autocast("cpu", dtype=torch.bfloat16), weight_grads.splitting():
        outputs = model(torch.randn(3, 7, requires_grad=True))

    def copies() -> int:
        tensors = (found for found in gc.get_objects() if type(found) is Tensor)
        return sum(t.dtype is torch.bfloat16 and t.shape == (5, 7) for t in tensors)

    assert copies() == (not offloaded)
    outputs.float().sum().backward()
    assert copies() == (not offloaded)
    weight_grads.finish()


def test_recomputed_blocks_split_as_well() -> None:
    torch.manual_seed(1)
    model = OfAllKinds()
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 8, requires_grad=True)
    weight_grads = WeightGradStore()

    def run(y: Tensor) -> Tensor:
        with weight_grads.splitting():
            outputs: Tensor = twin(y)
            return outputs

    checkpoint(run, x, use_reentrant=False).square().sum().backward()
    assert twin.first.weight.grad is None
    weight_grads.finish()
    gradients(model, [x.detach()])
    for one, other in zip(twin.parameters(), model.parameters()):
        same(one.grad, other.grad)


def test_ready_is_called_when_a_gradient_is_complete() -> None:
    torch.manual_seed(1)
    model, weight_grads, reported = OfAllKinds(), WeightGradStore(), []
    with weight_grads.splitting():
        outputs = model(torch.randn(2, 3, 8))
    outputs.sum().backward()
    deferred, names = (
        weight_grads.pending_parameters(),
        {parameter: name for name, parameter in model.named_parameters()},
    )
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {name for name, gradient in before.items() if gradient is not None} == {
        "norm.weight",
        "norm.bias",
        "shift",
    }
    weight_grads.finish(lambda parameter: reported.append(names[parameter]))
    assert sorted(reported) == sorted(names[parameter] for parameter in deferred)
    assert len(reported) == len(set(reported))
    assert reported[0] == "matrix" or reported.index("matrix") < reported.index("first.weight")


def test_each_gradient_is_begun_once_before_it_is_ready() -> None:
    torch.manual_seed(1)
    model, weight_grads, calls = OfAllKinds(), WeightGradStore(), []
    with weight_grads.splitting():
        outputs = model(torch.randn(2, 3, 8))
    outputs.sum().backward()
    deferred = weight_grads.pending_parameters()
    weight_grads.finish(
        lambda parameter: calls.append((parameter, "ready")),
        begin=lambda parameter: calls.append((parameter, "begin")),
    )
    for parameter in deferred:
        assert [call for found, call in calls if found is parameter] == ["begin", "ready"]


def test_nothing_is_held_after_the_weight_gradient_pass() -> None:
    model, weight_grads = OfAllKinds(), WeightGradStore()
    with weight_grads.splitting():
        outputs = model(torch.randn(2, 3, 8))
    assert weight_grads.deferred_bytes == 0
    outputs.sum().backward()
    assert weight_grads.deferred_bytes > 0
    weight_grads.finish()
    assert weight_grads.deferred_bytes == 0


def test_without_gradients_nothing_changes() -> None:
    model, weight_grads = nn.Linear(4, 4), WeightGradStore()
    with weight_grads.splitting(), torch.no_grad():
        assert not model(torch.ones(2, 4)).requires_grad
    x = torch.ones(2, 4)
    with weight_grads.splitting():
        assert torch.equal(F.linear(x, torch.ones(3, 4)), x @ torch.ones(4, 3))
        assert model(x).requires_grad  # also where its input does not
    assert not weight_grads.pending_parameters()


class Positions(nn.Module):
    """The gradient of its table is, for one row, the gradient that the layer's weight waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table.unsqueeze(0)


def test_stored_gradients_do_not_change_in_the_next_micro_batch() -> None:
    torch.manual_seed(1)
    model, rows = Positions(), [torch.randn(1, 3, 4) for _ in range(3)]
    twin, deferred = copy.deepcopy(model), []
    for x in rows:
        weight_grads = WeightGradStore()
        with weight_grads.splitting():
            outputs = twin(x)
        outputs.backward(torch.ones_like(outputs) * (1 + len(deferred)))
        weight_grads.separate_gradients(list(twin.parameters()))
        deferred.append(weight_grads)
        output = model(x)
        output.backward(torch.ones_like(output) * len(deferred))
    for weight_grads in deferred:
        weight_grads.finish()
    for one, other in zip(twin.parameters(), model.parameters()):
        same(one.grad, other.grad)


def test_a_derivative_taken_in_a_forward_owes_nothing() -> None:
    layer, weight_grads = nn.Linear(4, 1), WeightGradStore()
    x = torch.randn(3, 4, requires_grad=True)
    with weight_grads.splitting():
        (slope,) = torch.autograd.grad(layer(x).sum(), x)
        outputs = layer(x * slope)
    outputs.sum().backward()
    weight_grads.finish()
    plain = copy.deepcopy(layer)
    plain.zero_grad()
    plain(x * slope).sum().backward()
    same(layer.weight.grad, plain.weight.grad)
