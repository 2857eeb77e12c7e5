"""Tensors that change after they were saved: the gradients of plain torch, or its refusal, and nothing else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import parallax
from parallax.errors import ConfigError
from tests.alone import alone

Case = Callable[[], list[Tensor]]
SIDE = 100  # rows and columns: 40,000 bytes


def weight(*shape: int) -> Tensor:
    return torch.randn(*(shape or (SIDE, SIDE)), requires_grad=True)


def gradients(result: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(result.sum(), inputs)]


def further(x: Tensor) -> Tensor:
    """So that what was saved before has to leave."""
    return x.tanh().tanh().tanh().tanh()


# ---- changes that torch permits


def relu_after_convolution() -> list[Tensor]:
    w, v = weight(8, 3, 3, 3), weight(8, 8, 3, 3)
    x = F.conv2d(torch.randn(2, 3, 16, 16), w).relu_()
    x = F.conv2d(x, v, stride=2).relu_()
    return gradients(x * 2, w, v)


def relu_after_norm_and_residual() -> list[Tensor]:
    w = weight(3, 3, 3, 3)
    x = torch.randn(2, 3, 16, 16)
    y = F.batch_norm(F.conv2d(x, w, padding=1), None, None, training=True)
    y += x
    return gradients(F.max_pool2d(F.relu_(y), 2).tanh(), w)


def in_place_on_views() -> list[Tensor]:
    w = weight()
    y = torch.randn(16, SIDE) @ w
    y[:8].relu_()
    y.view(4, 4, SIDE).sigmoid_()
    return gradients((y @ w).relu_(), w)


def saved_twice_around_a_change() -> list[Tensor]:
    w, x = weight(), torch.randn(SIDE, SIDE)
    first = w * x
    x.mul_(2)
    second = (w * x).tanh()
    found = gradients(second, w)
    assert first.requires_grad
    return found


def parts_that_change_apart() -> list[Tensor]:
    w = weight()
    left, right = torch.unsafe_chunk(w @ w, 2)
    return gradients(left.sigmoid_() * right.tanh_(), w)


# ---- operators that write into what they saved


def noise_of_rrelu() -> list[Tensor]:
    w = weight()
    return gradients(further(F.rrelu(w * 1, training=True)), w)


def noise_of_rrelu_in_place() -> list[Tensor]:
    w = weight()
    return gradients(further(F.rrelu(w * 1, training=True, inplace=True)), w)


def statistics_of_a_norm() -> list[Tensor]:
    w = weight(10, SIDE, 10)
    averages = torch.zeros(SIDE), torch.ones(SIDE)
    outputs = torch.ops.aten._native_batch_norm_legit(
        w * 2, torch.ones(SIDE), torch.zeros(SIDE), *averages, True, 0.1, 0
    )
    return gradients(further(outputs[0]), w)


def statistics_of_a_norm_with_update() -> list[Tensor]:
    w = weight(10, SIDE, 10)
    averages = torch.zeros(SIDE), torch.ones(SIDE)
    outputs = torch.ops.aten._batch_norm_with_update(
        w * 2, torch.ones(SIDE), torch.zeros(SIDE), *averages, 0.1, 1e-5
    )
    return gradients(further(outputs[0]), w)


# ---- changes that torch does not see


def data_between_two_saves() -> list[Tensor]:
    w, x = weight(), torch.randn(SIDE, SIDE)
    first = w * x
    x.data.mul_(2)
    return gradients(further(first + w * x), w)


def data_of_an_activation() -> list[Tensor]:
    w = weight()
    x = w.exp()
    x.data.mul_(2)
    y = further(x.sigmoid())
    del x
    return gradients(y, w)


def data_of_an_activation_that_left() -> list[Tensor]:
    w = weight()
    x = w.exp()
    y = further(x.sigmoid())
    x.data.mul_(2)
    return gradients(y, w)


def other_data() -> list[Tensor]:
    w, x = weight(), torch.randn(SIDE, SIDE)
    y = further(w * x)
    x.data = x * 3
    return gradients(y, w)


def numpy_buffer() -> list[Tensor]:
    w, x = weight(), torch.randn(SIDE, SIDE)
    y = further(w * x)
    x.numpy()[:] = 3
    return gradients(y, w)


def storage_emptied_and_filled_again() -> list[Tensor]:
    w, x = weight(), torch.randn(SIDE, SIDE)
    y = further(w * x)
    storage = x.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    x.data.fill_(3)
    return gradients(y, w)


# ---- changes that torch refuses


def output_changed() -> list[Tensor]:
    w = weight()
    x = w.exp()
    y = further(x)
    x.add_(1)
    return gradients(y, w)


def changed_by_one_who_remains() -> list[Tensor]:
    w = weight()
    x = w.exp()
    view = x.view(-1).detach()
    y = further(x * 2)
    del x
    view.add_(1)
    return gradients(y, w)


def mask_changed() -> list[Tensor]:
    w, mask = weight(), torch.rand(SIDE, SIDE) > 0.5
    y = further((w * 1).masked_fill_(mask, 0))
    mask.logical_not_()
    return gradients(y, w)


def other_storage() -> list[Tensor]:
    w, x = weight(), torch.randn(SIDE, SIDE)
    y = further(w * x)
    x.set_(torch.ones(SIDE, SIDE))
    return gradients(y, w)


def resized() -> list[Tensor]:
    w, x = weight(), torch.randn(SIDE, SIDE)
    y = further(w * x)
    x.resize_(50, 50)
    return gradients(y, w)


def small_one_changed() -> list[Tensor]:
    w = weight(3)
    x = w.exp()
    y = x * x
    x.zero_()
    return gradients(y, w)


class Rewriting(torch.autograd.Function):
    """A product by what was saved, whose backward uses that memory for its own result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (factor,) = ctx.saved_tensors
        return factor.mul_(grad).unsqueeze_(0).squeeze_(0), None


def rewritten_by_its_backward() -> list[Tensor]:
    w, x = weight(), torch.randn(SIDE, SIDE) * 2
    return gradients(further(Rewriting.apply(w * 1, x)), w)


def rewritten_before_another_needs_it() -> list[Tensor]:
    w, x = weight(), torch.randn(SIDE, SIDE) * 2
    return gradients(further(Rewriting.apply(w * x, x)), w)


def rewritten_through_a_view() -> list[Tensor]:
    w, x = weight(), torch.randn(SIDE, SIDE) * 2
    return gradients(further(Rewriting.apply(w * x, x.t())), w)


def rewritten_before_a_second_backward() -> list[Tensor]:
    w, x = weight(), torch.randn(SIDE, SIDE) * 2
    y = further(Rewriting.apply(w * 1, x)).sum()
    y.backward(retain_graph=True)
    return gradients(y, w)


# ---- tensors without plain memory


def dual_numbers() -> list[Tensor]:
    w = weight()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w, torch.ones_like(w))
        tangent = forward_ad.unpack_dual(further(dual.exp() * dual)).tangent
        assert tangent is not None
        return [tangent, *gradients(tangent, w)]


def jvp_over_a_graph() -> list[Tensor]:
    w = weight()
    _, tangent = torch.func.jvp(lambda x: further(x.exp() * x), (w,), (torch.ones_like(w),))
    return [tangent, *gradients(tangent, w)]


def tangent_of_zeros() -> list[Tensor]:
    w = weight()
    return gradients(w.exp() * torch._efficientzerotensor((SIDE, SIDE)), w)


def jacobian() -> list[Tensor]:
    w = weight(10)
    return gradients(torch.func.jacfwd(lambda x: further(x.exp()))(w), w)


def mapped() -> list[Tensor]:
    w = weight()
    return gradients(torch.func.vmap(lambda row: further(row.exp() * row))(w), w)


def nested() -> list[Tensor]:
    parts = [weight(3, 5), weight(4, 5)]
    rows = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return gradients(((rows * 2).sin() * rows).values(), *parts)


def sparse() -> list[Tensor]:
    w = weight(20, 20)
    return gradients(torch.sparse.mm(torch.eye(20).to_sparse().requires_grad_(), w.exp()).tanh(), w)


def conjugate_and_negative() -> list[Tensor]:
    w = torch.randn(SIDE, SIDE, dtype=torch.complex64, requires_grad=True)
    z = w.exp()
    imaginary = z.conj().imag
    return gradients((imaginary * imaginary).tanh() + torch.view_as_real(z).sin().sum(-1), w)


class Named(Tensor):
    pass


def subclass() -> list[Tensor]:
    w = weight()
    named = w.exp().as_subclass(Named)  # type: ignore[arg-type]
    return [gradient.as_subclass(Tensor) for gradient in gradients(named.tanh() * named, w)]


def backward_under_inference() -> list[Tensor]:
    w = weight()
    result = further(torch.randn(SIDE, SIDE) @ w * w).sum()
    with torch.inference_mode():
        result.backward()
    assert w.grad is not None
    return [w.grad.clone()]


def turned_leaf() -> list[Tensor]:
    x, w = torch.randn(SIDE, SIDE), weight()
    result = further(x @ w)
    x.data = x.data.t()
    return gradients(result, w)


CASES = [
    backward_under_inference,
    turned_leaf,
    relu_after_convolution,
    relu_after_norm_and_residual,
    in_place_on_views,
    saved_twice_around_a_change,
    parts_that_change_apart,
    noise_of_rrelu,
    noise_of_rrelu_in_place,
    statistics_of_a_norm,
    statistics_of_a_norm_with_update,
    data_between_two_saves,
    data_of_an_activation,
    data_of_an_activation_that_left,
    other_data,
    numpy_buffer,
    storage_emptied_and_filled_again,
    output_changed,
    changed_by_one_who_remains,
    mask_changed,
    other_storage,
    resized,
    small_one_changed,
    rewritten_by_its_backward,
    rewritten_before_another_needs_it,
    rewritten_through_a_view,
    rewritten_before_a_second_backward,
    dual_numbers,
    jvp_over_a_graph,
    tangent_of_zeros,
    jacobian,
    mapped,
    nested,
    sparse,
    conjugate_and_negative,
    subclass,
]


def outcome(case: Case, context: contextlib.AbstractContextManager[Any]) -> list[Tensor] | str:
    """Gradients, or what is essential in torch's refusal."""
    torch.manual_seed(1)
    try:
        with context:
            return [tensor.detach() for tensor in case()]
    except RuntimeError as error:
        message = str(error)
        return f"{type(error)}{message.split(':')[0]} {message[message.find('is at version') :].split(' Hint')[0]}"


@pytest.mark.sampled
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("limit", [90_000, 400_000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_without_swap(case: Case, limit: int, eager: bool, scratch: Path) -> None:
    expected = outcome(case, contextlib.nullcontext())
    swap = parallax.swap(
        nn.Linear(2, 2), limit=limit, minimum_bytes=0, eager=eager, directory=scratch
    )
    found = outcome(case, swap)
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
    else:
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian])
def test_transforms_that_refuse_hooks_say_what_to_do(transform: Any, scratch: Path) -> None:
    swap = parallax.swap(nn.Linear(2, 2), limit=90_000, directory=scratch)
    with pytest.raises(ConfigError, match=r"torch\.autograd\.grad"), swap:
        transform(lambda x: x.exp().sum())(torch.ones(3))
    torch.func.grad(lambda x: x.exp().sum())(torch.ones(3))


def long_chain(scratch: Path) -> bool:
    """In a process of its own, on a thread with a small stack."""
    x = torch.zeros(4, requires_grad=True)

    def chain() -> None:
        with parallax.swap(nn.Linear(2, 2), limit="1MiB", minimum_bytes=0, directory=scratch):
            for backward in (False, True):
                y = x
                for _ in range(6_000):
                    y = torch.tanh(y)
                if backward:
                    y.sum().backward()
                del y

    threading.stack_size(3 * 2**18)
    thread = threading.Thread(target=chain)
    thread.start()
    thread.join()
    return x.grad is not None


def test_a_long_chain_of_small_tensors_overflows_no_stack(scratch: Path) -> None:
    """A node that Python has seen is freed inside the call that freed the one before."""
    assert alone(long_chain, scratch)
