"""Offloaded weights and gradients: tensors that are fetched to the device when they are passed to a torch function.

Nearly every torch function calls ``__torch_function__``. There, the owner of the tensors first fetches their values.
Only ``torch.tensor``, ``torch.asarray``, ``new_tensor`` and C++ code receive the tensors without a fetch. They read NaN
from a placeholder.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from parallax.errors import ConfigError
from parallax.model.private import METADATA, as_class, as_plain_tensors, count_as_plain

# Functions of lists that treat each tensor by itself.
_PER_TENSOR = "_foreach_", "_fused_", "_amp_foreach_"
_ZERO = "zero_", "_foreach_zero_"
_REPLACE = "resize_", "share_memory_", "apply_", "map_"
_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data
# An alias that these return has a version counter of its own, or none.
_ALIASES: frozenset[Any] = frozenset(
    [
        _DATA.__get__,
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.untyped_storage,
        Tensor.storage,
        Tensor.__array__,
        Tensor.__dlpack__,
    ]
)


class TensorOwner(Protocol):
    """The interface of the object that holds offloaded tensors and fetches them."""

    def enter(self, parameters: Iterable[nn.Parameter], *, backward: bool = False) -> None:
        """Put all ``parameters`` on the device.

        With ``backward``, they stay there until the running autograd node ends.
        """

    def check_unshared(self, parameter: nn.Parameter) -> None:
        """Raise :class:`ConfigError` if views of the weight exist on the device: the weight is about to get a new
        value, which the views would not have."""

    def note_change(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that weights on the device may have changed although their version counters have not."""

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the value of ``parameter.grad``."""

    def set_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Set ``parameter.grad`` to ``gradient``."""

    def zero_gradient(self, gradient: OffloadedGradient) -> bool:
        """Set an offloaded gradient to zero; return False, without an effect, if it is on the device."""

    def fetch(self, gradient: OffloadedGradient) -> Tensor:
        """Return the values of a gradient on the device, where they stay until :meth:`put_back`."""

    def note_changed_gradient(self, parameter: nn.Parameter) -> None:
        """Note that a fetched gradient may have changed although its version counter has not."""

    def put_back(self, parameter: nn.Parameter) -> None:
        """Write a fetched gradient to the store if it was changed, and free it on the device."""


def _refuse_new_memory(name: str) -> NoReturn:
    raise ConfigError(
        f"{name} replaces the memory of an offloaded parameter or gradient: call it outside of parallax.swap, or "
        "use copy_"
    )


class OffloadedWeight(nn.Parameter):
    """The class that a parameter has while a :class:`TensorOwner` offloads it. A copy is an ordinary parameter."""

    _offloaded_by: TensorOwner

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error, because ``set_`` bypasses ``__torch_function__``."""
        _refuse_new_memory("set_")

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(_plain_copy(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        found: nn.Parameter = memo.setdefault(id(self), _plain_copy(self))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain_copy(self).__reduce_ex__(protocol)


class OffloadedGradient(Tensor):
    """The gradient of an offloaded parameter. The memory of this tensor is a placeholder.

    ``value`` is None as long as this object is the parameter's gradient and is offloaded. When the parameter gets
    another gradient or none, or the offload ends, ``value`` becomes a tensor on the device with the values of this
    gradient.
    """

    parameter: nn.Parameter
    value: Tensor | None
    _offloaded_by: TensorOwner

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error, because ``set_`` bypasses ``__torch_function__``."""
        _refuse_new_memory("set_")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        found: Tensor = memo.setdefault(id(self), self.clone())
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


count_as_plain(OffloadedGradient)


def unfetched_gradient(parameter: nn.Parameter, owner: TensorOwner) -> OffloadedGradient:
    """Return the gradient of ``parameter`` as a placeholder. ``owner`` fetches the values when they are used."""
    with as_plain_tensors():
        fill = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        found: OffloadedGradient = as_class(OffloadedGradient, fill.expand(parameter.shape))
    found.parameter, found.value, found._offloaded_by = parameter, None, owner
    return found


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function whose arguments contain offloaded weights or gradients, and return its result.

    The values of these weights and gradients are fetched to the device first, unless the function needs no values, such
    as a query of the shape.
    """
    if func in METADATA:
        with as_plain_tensors():
            return func(*args, **kwargs)
    if torch.compiler.is_compiling():
        raise ConfigError(
            "torch.compile traces a function that uses offloaded parameters: compile the modules that hold them "
            "instead, before parallax.swap"
        )
    if type(args[0] if args else None) is OffloadedWeight:
        owner, first = args[0]._offloaded_by, args[0]
        if func == _GRAD.__get__:
            return owner.gradient(first)
        if func in (_GRAD.__set__, _GRAD.__delete__):
            return owner.set_gradient(first, *args[1:] or (None,))
    if func is torch.autograd.grad:
        return func(*_with_edges(args), **_with_edges(kwargs))
    name: str = getattr(func, "__name__", "")
    if name.startswith(_PER_TENSOR):
        return _call_each(func, args, kwargs)
    return _call_fetched(func, name, args, kwargs)


def _call_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function of lists of tensors separately for each list element, so that one tensor at a time is
    fetched."""
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
    count = len(lists[0])

    def only(value: Any, index: int) -> Any:
        sliced = isinstance(value, list | tuple) and len(value) == count
        return value[index : index + 1] if sliced else value

    found: list[Any] = []
    for index in range(count):
        some = tuple(only(each, index) for each in args)
        named = {key: only(each, index) for key, each in kwargs.items()}
        offloaded = any(True for _ in _offloaded_in((*some, *named.values())))
        call = (
            _call_fetched(func, func.__name__, some, named) if offloaded else func(*some, **named)
        )
        found += call if isinstance(call, list | tuple) else []
    return found or None


def _call_fetched(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fetch the offloaded tensors among the arguments, call ``func``, put the gradients back, and return the result of
    ``func``.

    ``name`` is the name of ``func``.
    """
    weights: dict[TensorOwner, list[nn.Parameter]] = {}
    gradients: list[OffloadedGradient] = []
    for each in _offloaded_in((*args, *kwargs.values())):
        if isinstance(each, OffloadedGradient):
            gradients.append(each)
        else:
            weights.setdefault(each._offloaded_by, []).append(each)
    if name in _REPLACE:
        _refuse_new_memory(name)
    if (
        name in _ZERO
        and len(gradients) == 1
        and gradients[0]._offloaded_by.zero_gradient(gradients[0])
    ):
        return gradients[0] if name == "zero_" else None
    for owner, parameters in weights.items():
        owner.enter(parameters)
    if func == _DATA.__set__ and type(args[0]) is OffloadedWeight:
        args[0]._offloaded_by.check_unshared(args[0])
    try:
        values = {id(g): g._offloaded_by.fetch(g) for g in gradients}
        back = {id(value): g for g, value in zip(gradients, values.values())}
        if gradients:
            args, kwargs = _replaced(args, values), _replaced(kwargs, values)
        with as_plain_tensors():
            result = (_assign_data if func == _DATA.__set__ else func)(*args, **kwargs)
        result = _replaced(result, back) if gradients else result
        if func in _ALIASES or func == _DATA.__set__ or name.startswith(_PER_TENSOR):
            # changes without a new version
            for owner, parameters in weights.items():
                owner.note_change(parameters)
            for gradient in gradients:
                gradient._offloaded_by.note_changed_gradient(gradient.parameter)
        return result
    finally:
        args = kwargs = values = back = None  # type: ignore[assignment]
        for gradient in gradients:
            gradient._offloaded_by.put_back(gradient.parameter)


def _assign_data(target: Tensor, value: Tensor) -> None:
    """Copy ``value`` into the memory of ``target``. This replaces an assignment to ``target.data``."""
    if (value.shape, value.dtype, value.device) != (target.shape, target.dtype, target.device):
        raise ConfigError(
            f"an assignment to .data of an offloaded parameter changes {target.dtype} {list(target.shape)} on "
            f"{target.device} to {value.dtype} {list(value.shape)} on {value.device}: do it outside of parallax.swap"
        )
    target.data.copy_(value)


def _offloaded_in(values: Iterable[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, OffloadedWeight | OffloadedGradient):
            yield each
        elif isinstance(each, list | tuple):
            yield from _offloaded_in(each)
        elif isinstance(each, dict):
            yield from _offloaded_in(each.values())


def _replaced(value: Any, others: dict[int, Any]) -> Any:
    """Return ``value`` with objects in nested containers replaced.

    ``others`` maps the id of an object to its replacement.
    """
    if id(value) in others:
        return others[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, others) for each in value)
    if type(value) is dict:
        return {key: _replaced(each, others) for key, each in value.items()}
    return value


def _with_edges(value: Any) -> Any:
    """Return arguments of ``torch.autograd.grad`` in which gradient edges replace the offloaded weights.

    With gradient edges, no weight is fetched.
    """
    if isinstance(value, OffloadedWeight):
        with as_plain_tensors():
            return get_gradient_edge(value)
    if isinstance(value, OffloadedGradient):
        return value.clone()
    if isinstance(value, dict):
        return {key: _with_edges(each) for key, each in value.items()}
    return tuple(map(_with_edges, value)) if isinstance(value, list | tuple) else value


def _plain_copy(parameter: OffloadedWeight) -> nn.Parameter:
    found = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    others = {k: v for k, v in vars(parameter).items() if k != "_offloaded_by"}
    vars(found).update(copy.copy(others))
    return found
