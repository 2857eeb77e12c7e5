"""A split backward: the input-gradient pass (B) runs first, and the weight-gradient pass (W) later.

Zero-bubble schedules send a micro-batch's input gradient to the previous stage early, and compute weight gradients in
pipeline bubbles. :mod:`torch.distributed.pipelining` splits autograd's graph for that, which fails if a stage returns a
view, uses a weight twice or contains a custom function.

Here the graph stays whole. While a block runs forward, its products with parameters (linear layers, matrix products,
convolutions) are replaced by autograd functions that compute the same values. The backward of such a function returns
the input gradient, and stores the operands of the weight gradient. All other operators (norms, embeddings, custom
functions) compute the gradients of their parameters in the B pass, as usual.

An offloaded weight is on the device during its block's forward and B pass, but not during the W pass. So the W pass
reads no weight. A copy of an offloaded weight in another dtype is not kept after the forward; the B pass makes a new
one.

Source of the idea: the weight gradient store of Qi et al. 2024, "Zero Bubble Pipeline Parallelism".
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

Ready = Callable[[nn.Parameter], None]


class WeightGradStore:
    """The deferred weight gradients of one micro-batch.

    The forward runs inside :meth:`splitting`. The backward stores the operands of each weight gradient: the input of
    the product and the gradient of its output. :meth:`finish` computes the weight gradients. ``is_offloaded(tensor)``
    returns whether a tensor uses the memory of an offloaded parameter.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        is_offloaded: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        self._is_offloaded = is_offloaded
        # Replaces the parameters as graph inputs: otherwise hooks on the parameters would fire in the B pass.
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._deferred: list[tuple[_Product, Tensor, Tensor]] = []
        self._forward = False

    @contextlib.contextmanager
    def splitting(self) -> Iterator[None]:
        """A context for a forward in which products with parameters are replaced, so that their weight gradients are
        deferred.
        """
        self._forward = True
        try:
            with _Splitting(self):
                yield
        finally:
            self._forward = False

    def apply(self, product: _Product, x: Tensor) -> Tensor:
        """Return the result of ``product`` for the input ``x``. The backward of the result defers the weight
        gradient."""
        result: Tensor = _DeferredProduct.apply(self._anchor, x, product, self)
        return result

    def defer(self, product: _Product, x: Tensor, gradient: Tensor) -> None:
        """Store the operands of a weight gradient: ``x``, the input of ``product``, and ``gradient``, that of its
        output.

        Operands in the memory of an offloaded parameter are copied. No-op while a forward runs: a derivative that a
        forward itself computes is with respect to inputs, not to weights.
        """
        if not self._forward:
            x, gradient = (t.clone() if self._is_offloaded(t) else t for t in (x, gradient))
            self._deferred.append((product, x, gradient))

    def held(self, product: _Product) -> _Product:
        """Return ``product`` in the form that is stored until the weight-gradient pass.

        If the weight is offloaded, this form omits the copy of the weight in the dtype of the computation.
        """
        return replace(product, copy=None) if self._is_offloaded(product.weight) else product

    def separate_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy each ``.grad`` that shares memory with a stored output gradient. Call this after the backward.

        Autograd may use the output gradient of a product as a ``.grad`` without a copy. The next micro-batch would then
        change the stored gradient, because it adds to ``.grad`` in place.
        """
        held = {gradient.untyped_storage().data_ptr() for _, _, gradient in self._deferred}
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() in held:
                parameter.grad = parameter.grad.clone()

    @property
    def deferred_bytes(self) -> int:
        """The bytes of the stored operands. Each storage counts once."""
        storages = [
            tensor.untyped_storage()
            for _, x, gradient in self._deferred
            for tensor in (x, gradient)
        ]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def pending_parameters(self) -> set[nn.Parameter]:
        """Return the parameters with deferred gradients, whose ``.grad`` is still incomplete."""
        return {parameter for product, _, _ in self._deferred for parameter in product.parameters}

    def finish(self, ready: Ready | None = None, *, begin: Ready | None = None) -> None:
        """Compute the deferred weight gradients and add them to ``.grad``, last layer first.

        ``begin`` is called with each parameter before the first addition to its gradient, and ``ready`` after the last.
        """
        left = Counter(
            parameter for product, _, _ in self._deferred for parameter in product.parameters
        )
        begun: set[nn.Parameter] = set()
        self._deferred.reverse()  # in the order of the backward; each entry is freed once it is used
        with torch.no_grad():
            while self._deferred:
                product, x, gradient = self._deferred.pop()
                for parameter in product.parameters:
                    if begin is not None and parameter not in begun:
                        begin(parameter)
                begun.update(product.parameters)
                product.add_gradients(x, gradient)
                for parameter in product.parameters:
                    left[parameter] -= 1
                    if ready is not None and not left[parameter]:
                        ready(parameter)


class _DeferredProduct(torch.autograd.Function):
    """An autograd function for a product.

    Its backward returns only the input gradient, and defers the weight gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, product: _Product, store: WeightGradStore
    ) -> Tensor:
        del anchor
        ctx.product, ctx.store = store.held(product), store
        ctx.save_for_backward(x)
        return product.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.store.defer(ctx.product, x, gradient)
        return (
            None,
            ctx.product.input_gradient(x, gradient) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Product(ABC):
    """A product with a parameter, at one place in a forward.

    ``dtype``: the dtype of the computation. ``copy``: the weight cast to this dtype; None if the weight has this dtype,
    or if a new copy is made when one is needed.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    dtype: torch.dtype
    copy: Tensor | None

    @property
    def used(self) -> Tensor:
        """The weight in the dtype of the computation."""
        return self.weight.detach().to(self.dtype) if self.copy is None else self.copy

    @property
    def used_bias(self) -> Tensor | None:
        """The bias in the dtype of the computation."""
        return None if self.bias is None else self.bias.detach().to(self.dtype)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the product that get a gradient."""
        found = [self.weight] if self.weight.requires_grad else []
        if self.bias is not None and self.bias.requires_grad:
            found.append(self.bias)
        return tuple(found)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of ``x``, the product's input. ``gradient`` is that of the product's output."""

    @abstractmethod
    def add_gradients(self, x: Tensor, gradient: Tensor) -> None:
        """Add the gradients of weight and bias to their ``.grad``.

        ``x`` is the product's input, and ``gradient`` the gradient of its output.
        """


class _Linear(_Product):
    """The product ``x @ weight.T + bias`` of torch.nn.functional.linear."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.used, self.used_bias
        if bias is None or x.dim() == 2:
            return F.linear(x, weight, bias)
        # F.linear returns a view here, and a view that a custom function returns cannot be changed in place.
        result = x.new_empty((*x.shape[:-1], len(weight)))
        torch.addmm(bias, _matrix(x), weight.t(), out=result.view(-1, len(weight)))
        return result

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        del x
        return gradient @ self.used

    def add_gradients(self, x: Tensor, gradient: Tensor) -> None:
        flat = _matrix(gradient)
        if self.weight.requires_grad:
            _add_product(self.weight, flat.t(), _matrix(x))
        _add_bias(self.bias, flat)


class _Matrix(_Product):
    """The product ``x @ weight + bias`` of matrix products and torch.addmm."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.used_bias
        return torch.matmul(x, self.used) if bias is None else torch.addmm(bias, x, self.used)

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        del x
        return gradient @ self.used.t()

    def add_gradients(self, x: Tensor, gradient: Tensor) -> None:
        flat = _matrix(gradient)
        if self.weight.requires_grad:
            _add_product(self.weight, _matrix(x).t(), flat)
        _add_bias(self.bias, flat)


@dataclass(frozen=True, slots=True, eq=False)
class _Convolution(_Product):
    """A convolution over 1 to 3 dimensions. ``options``: the arguments of torch.convolution from ``stride`` on."""

    options: tuple[Any, ...]

    def forward(self, x: Tensor) -> Tensor:
        return torch.convolution(x, self.used, self.used_bias, *self.options)

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        return self._backward(x, gradient, self.used, (True, False, False))[0]

    def add_gradients(self, x: Tensor, gradient: Tensor) -> None:
        wanted = [
            parameter is not None and parameter.requires_grad
            for parameter in (self.weight, self.bias)
        ]
        found = self._backward(x, gradient, self._like_used(), (False, *wanted))[1:]
        for parameter, value in zip((self.weight, self.bias), found):
            if parameter is not None and parameter.requires_grad:
                _add(parameter, value)

    def _like_used(self) -> Tensor:
        """Return a tensor with the shape of the weight and the dtype of the computation. Its values are not used.

        The weight itself may be offloaded, and so have no values on the device.
        """
        if self.copy is None and self.dtype is not self.weight.dtype:
            return torch.empty_like(self.weight, dtype=self.dtype)
        return self.used

    def _backward(
        self, x: Tensor, gradient: Tensor, weight: Tensor, mask: tuple[bool, ...]
    ) -> tuple[Tensor, ...]:
        sizes = None if self.bias is None else [len(self.bias)]
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            gradient, x, weight, sizes, *self.options, mask
        )
        return found


class _Splitting(TorchFunctionMode):
    """Replaces products with parameters by functions that defer the weight gradients."""

    def __init__(self, store: WeightGradStore) -> None:
        super().__init__()
        self._store = store

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _MAKERS and torch.is_grad_enabled():
            found = _make(func, *args, **(kwargs or {}))
            if found is not None:
                return self._store.apply(*found)
        return func(*args, **(kwargs or {}))


def _make(func: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[_Product, Tensor] | None:
    """Return the product that a torch call computes, and the product's input; None if the call is not replaced."""
    try:
        return _MAKERS[func](*args, **kwargs)
    except TypeError:  # arguments that the replacement does not support
        return None


def _linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[_Product, Tensor] | None:
    if not _splits(input, weight, bias) or weight.dim() != 2 or input.dim() < 1:
        return None
    return _Linear(*_as_computed(weight, bias)), _cast(input)


def _matmul(input: Tensor, other: Tensor) -> tuple[_Product, Tensor] | None:
    if not _splits(input, other, None) or other.dim() != 2 or input.dim() < 2:
        return None
    return _Matrix(*_as_computed(other, None)), _cast(input)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor) -> tuple[_Product, Tensor] | None:
    if not _splits(mat1, mat2, input) or input.dim() != 1:
        return None
    return _Matrix(*_as_computed(mat2, input)), _cast(mat1)


def _convolution(
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[_Product, Tensor] | None:
    if (
        not _splits(input, weight, bias)
        or isinstance(padding, str)
        or input.dim() != dimensions + 2
    ):
        return None

    def each(value: Any) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * dimensions if len(values) == 1 else values

    options = (each(stride), each(padding), each(dilation), False, [0] * dimensions, groups)
    return _Convolution(*_as_computed(weight, bias), options), _cast(input)


_MAKERS: dict[Callable[..., Any], Callable[..., tuple[_Product, Tensor] | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    torch.conv1d: partial(_convolution, 1),
    torch.conv2d: partial(_convolution, 2),
    torch.conv3d: partial(_convolution, 3),
}


def _splits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the weight gradient of a product can be deferred.

    Weight and bias must be plain parameters, and at least one must need a gradient. ``x`` must not be a view of a
    parameter, which may be offloaded before the weight-gradient pass.
    """
    parameters = [weight] if bias is None else [weight, bias]
    plain = (
        all(isinstance(p, nn.Parameter) and type(p.data) is Tensor for p in parameters)
        and type(x) is Tensor
        and not isinstance(x._base, nn.Parameter)
    )
    return plain and any(p.requires_grad for p in parameters)


def _as_computed(
    weight: Any, bias: Any
) -> tuple[nn.Parameter, nn.Parameter | None, torch.dtype, Tensor | None]:
    """Return a product's weight and bias, the dtype of the computation, and the weight cast to this dtype.

    The last is None if the weight already has this dtype.
    """
    used = _cast(weight.detach())
    return weight, bias, used.dtype, None if used.dtype is weight.dtype else used


def _cast(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype to which autocast would cast it."""
    kind = tensor.device.type
    if (
        not torch.is_autocast_enabled(kind)
        or tensor.dtype is torch.float64
        or not tensor.is_floating_point()
    ):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _matrix(tensor: Tensor) -> Tensor:
    """Return the tensor as a matrix: all dimensions except the last are flattened into one."""
    return tensor.reshape(-1, tensor.shape[-1])


def _add_bias(bias: nn.Parameter | None, gradient: Tensor) -> None:
    if bias is not None and bias.requires_grad:
        _add(bias, gradient.sum(0))


def _add_product(parameter: nn.Parameter, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to the gradient of ``parameter``, without a temporary if the dtypes are equal."""
    if parameter.grad is not None and parameter.grad.dtype is a.dtype:
        parameter.grad.addmm_(a, b)
    else:
        _add(parameter, a @ b)


def _add(parameter: nn.Parameter, value: Tensor) -> None:
    if parameter.grad is None:
        # with the strides of the parameter
        parameter.grad = torch.empty_like(parameter).copy_(value.view_as(parameter))
    else:
        parameter.grad.add_(value.view_as(parameter))
