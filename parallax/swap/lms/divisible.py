"""Decide whether an optimizer's step may be taken in pieces, one subset of the parameters at a time.

torch's own optimizers are known. A third-party optimizer may use all parameters in ``step`` (a global norm, a shared
average), count its calls, or keep lists of parameters. Its class name does not tell. So it is tested with copies whose
parameters have only a few elements. One copy is stepped whole, and another one from the same start with one piece per
parameter. The optimizer is divisible if parameters, states, groups and attributes are bit-identical afterwards.
Gradients of several scales trigger clipping by norm, and enough steps are made to include actions of every fifth or
tenth step.

The result is cached by class and by the settings that may change what ``step`` does: whether a number is zero, and each
value that is None, true, false or text.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from parallax.swap.lms.offloaded_states import OffloadedStates
from parallax.swap.lms.wrapped import parts
from parallax.swap.optimizer.chunked_step import (
    Arguments,
    ChunkedStep,
    evaluated,
    inner_optimizers,
    raw_step,
)

STEPS = 12
SCALES = 1e-3, 1.0, 1e3
_LENGTH = 3  # most elements in each dimension of a small tensor
_TRIED = 8  # most parameters tried per group, of those with gradients
_LARGEST = 2**16  # most bytes of a copied tensor beside the states
_FOUND: WeakKeyDictionary[type[Optimizer], dict[object, bool]] = WeakKeyDictionary()
_CONTAINERS = list, tuple, set, frozenset, deque
_VALUES = type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size


class _UntriedError(Exception):
    """Raised if the optimizer has a value that cannot be copied for the test."""


def is_divisible(optimizer: Optimizer, arguments: Arguments) -> bool:
    """Return whether a step taken in pieces has bit-identical results to a whole step.

    ``arguments`` are the positional and keyword arguments of the step. The first one is the optimizer.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):
        return True
    if inner_optimizers(optimizer):
        return False
    known = _FOUND.setdefault(kind, {})
    key = _settings(optimizer), closure_of(arguments) is not None
    if key not in known:
        known[key] = _try(optimizer, arguments)
    return known[key]


def closure_of(arguments: Arguments) -> Callable[[], Any] | None:
    """Return the closure among the arguments of a step, or None."""
    args, kwargs = arguments
    found = args[1] if len(args) > 1 else kwargs.get("closure")
    return found if callable(found) else None


def _settings(optimizer: Optimizer) -> object:
    """Return a cache key of the settings that may change how the optimizer steps.

    Numbers enter the key only as zero or not zero.
    """
    left_out = "params", "state", "param_groups"
    held = [*optimizer.param_groups, vars(optimizer)]
    return frozenset(
        _kind({k: v for k, v in each.items() if k not in left_out and k[:11] != "_optimizer_"})
        for each in held
    )


def _kind(value: Any) -> object:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return type(value), bool(value)
    if isinstance(value, Mapping):
        return frozenset((_kind(key), _kind(each)) for key, each in value.items())
    if isinstance(value, _CONTAINERS):
        return type(value), frozenset(map(_kind, value))
    return type(value)


def _try(optimizer: Optimizer, arguments: Arguments) -> bool:
    try:
        with _no_trace(optimizer):
            whole = _outcome(optimizer, arguments, in_pieces=False)
        with _no_trace(optimizer):
            return _same(whole, _outcome(optimizer, arguments, in_pieces=True))
    except Exception:  # third-party code may raise anything on tensors of another size
        return False


@contextmanager
def _no_trace(optimizer: Optimizer) -> Iterator[None]:
    """A context with seeded random generators that, on exit, restores the states of random generators and the counters
    in the optimizer's classes."""
    counts, state = _counts(type(optimizer)), random.getstate()
    places = {p.device for group in optimizer.param_groups for p in group["params"]}
    kind = next((place.type for place in places if place.type != "cpu"), "cuda")
    indices = sorted(place.index or 0 for place in places if place.type == kind)
    with torch.random.fork_rng(indices, device_type=kind):
        torch.manual_seed(0)
        random.seed(0)
        try:
            yield
        finally:
            random.setstate(state)
            for owner, values in counts.items():
                for name, value in values.items():
                    if vars(owner).get(name) is not value:
                        setattr(owner, name, value)


def _counts(kind: type[Optimizer]) -> dict[type, dict[str, Any]]:
    """Return the numeric attributes, such as counters, of ``kind`` and its base classes up to torch's ``Optimizer``."""
    return {
        owner: {k: v for k, v in vars(owner).items() if isinstance(v, int | float)}
        for owner in kind.__mro__[: kind.__mro__.index(Optimizer)]
    }


def _outcome(optimizer: Optimizer, arguments: Arguments, *, in_pieces: bool) -> Any:
    """Step a small copy of the optimizer several times and return all values that the steps may have changed.

    ``arguments`` are those of a step. With ``in_pieces``, each step is taken one parameter at a time, otherwise whole.
    """
    twin, parameters, trained = _small_copy(optimizer)
    args, kwargs = arguments
    for number in range(STEPS):
        scale = SCALES[number % len(SCALES)]
        given = (twin, *args[1:]), dict(kwargs)
        _set_gradients(trained, number, scale)
        if closure_of(arguments) is not None:
            given = _with_closure(given, lambda: _set_gradients(trained, -number, scale))  # noqa: B023
        if in_pieces:
            _step_in_pieces(twin, trained, given)
        else:
            raw_step(twin)(*given[0], **given[1])
    states = [twin.state.get(p) for p in parameters]
    others = {key: value for key, value in twin.state.items() if not isinstance(key, Tensor)}
    held = {k: v for k, v in vars(twin).items() if k not in ("state", "param_groups")}
    counts = [*_counts(type(optimizer)).values()]
    return parameters, states, others, twin.param_groups, held, counts


def _step_in_pieces(twin: Optimizer, trained: list[Tensor], given: Arguments) -> None:
    (_, *args), kwargs = evaluated(*given)
    pieces = [
        [(index, parameter)]
        for index, group in enumerate(twin.param_groups)
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    step = ChunkedStep(twin, pieces)
    for piece in pieces:
        raw_step(twin)(step.stand_in(piece), *args, **kwargs)
    step.finish()
    assert len(pieces) == len(trained)


def _with_closure(given: Arguments, set_gradients: Callable[[], None]) -> Arguments:
    """Return the step arguments ``given`` with another closure in place of the training loop's.

    This closure calls ``set_gradients`` and returns a constant as the loss.
    """

    def closure() -> float:
        set_gradients()
        return 1.0

    args, kwargs = given
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def _set_gradients(parameters: list[Tensor], number: int, scale: float) -> None:
    """Set gradients that depend on the parameters' values, so that the result depends on when the closure was called.

    Each gradient is half of the parameter plus numbers of the size of ``scale``, which depend on ``number``.
    """
    for index, parameter in enumerate(parameters):
        values = torch.arange(1, parameter.numel() + 1, device=parameter.device) * (index + number)
        noise = torch.sin(values.double()).reshape(parameter.shape) * scale * (index + 1)
        parameter.grad = parameter.detach() / 2 + noise.to(parameter.dtype)


def _small_copy(optimizer: Optimizer) -> tuple[Optimizer, list[Tensor], list[Tensor]]:
    """Return a copy of the optimizer with small parameters.

    The second result has the small parameter of each original parameter. The third has the small parameters that the
    copy steps.
    """
    small: dict[int, Tensor] = {}
    trained: list[Tensor] = []
    originals = [p for group in optimizer.param_groups for p in group["params"]]
    for original in originals:
        small[id(original)] = _small_parameter(original)
    memo: dict[int, Any] = dict(small)
    twin: Optimizer = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key.startswith("_optimizer_"):
            vars(twin)[key] = OrderedDict()  # hooks
        elif key not in ("state", "param_groups", "step", "register_step_pre_hook"):
            vars(twin)[key] = _copied(value, memo)
    twin.param_groups = []
    for group in optimizer.param_groups:
        with_gradient = [p for p in group["params"] if p.grad is not None] or group["params"]
        tried = [small[id(p)] for p in with_gradient[:_TRIED]]
        others = _copied({k: v for k, v in group.items() if k != "params"}, memo)
        twin.param_groups.append({**others, "params": tried})
        trained += tried
    twin.state = defaultdict(dict)
    for owner, state in optimizer.state.items():
        if not isinstance(owner, Tensor):
            twin.state[_copied(owner, memo)] = _copied(state, memo)
        elif any(small.get(id(owner)) is p for p in trained):
            twin.state[small[id(owner)]] = _small_state(owner, state, memo)
    return twin, [*small.values()], trained


def _small_parameter(original: Tensor) -> Tensor:
    shape = _small_shape(original)
    values = torch.linspace(-1, 1, max(1, shape.numel()), device=original.device)
    found = values[: shape.numel()].reshape(shape).to(original.dtype)
    if type(original) is not Tensor:
        found = Parameter(found, requires_grad=original.requires_grad)
    vars(found).update(vars(original))  # attributes that the optimizer may read
    return found


def _small_shape(tensor: Tensor) -> torch.Size:
    return torch.Size(min(size, _LENGTH) for size in tensor.shape)


def _small_state(parameter: Tensor, state: Any, memo: dict[int, Any]) -> Any:
    """Return the optimizer state of a parameter, cropped to the size of the parameter's small copy.

    ``memo`` maps the id of each original object to its copy, as in ``copy.deepcopy``.
    """
    if isinstance(state, OffloadedStates):
        state = state.host_copy()
    if not isinstance(state, dict):
        return _copied(state, memo)
    found = {}
    for key, value in state.items():
        if isinstance(value, Tensor):  # of the parameter's shape, or of its rows or columns
            corner = value.detach()[tuple(slice(n) for n in _small_shape(value))]
            found[key] = corner.to(parameter.device, copy=True)
        else:
            found[key] = _copied(value, memo)
    return found


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of ``value`` in which the original parameters are replaced by the small ones.

    ``memo`` maps the id of each original object to its copy, as in ``copy.deepcopy``.
    """
    _check_copied(value, memo)
    return copy.deepcopy(value, memo)


def _check_copied(value: Any, memo: dict[int, Any]) -> None:
    """Raise an error unless ``value`` consists of small values that no code except the optimizer references.

    Tensors of any size are accepted if their id is in ``memo``, because small copies of them exist.
    """
    if isinstance(value, Mapping):
        for each in (*value.keys(), *value.values()):
            _check_copied(each, memo)
    elif isinstance(value, _CONTAINERS):
        for each in value:
            _check_copied(each, memo)
    elif isinstance(value, Tensor):
        if id(value) not in memo and value.nbytes > _LARGEST:
            raise _UntriedError
    elif not isinstance(value, (*_VALUES, type)) and not _is_plain_function(value):
        raise _UntriedError


def _is_plain_function(value: Any) -> bool:
    """Whether the function has no state that could change."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    return isinstance(value, BuiltinFunctionType)


def _same(one: Any, other: Any) -> bool:
    """Whether two outcomes are bit-identical."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and _bits(one) == _bits(other)
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and len(one) == len(other)
            and all(key in other and _same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and (repr(one) == repr(other) or bool(one == other))


def _bits(tensor: Tensor) -> object:
    flat = [part.detach().cpu().contiguous().reshape(-1) for part in parts(tensor)]
    values = [part.view(torch.uint8).tolist() for part in flat]
    return type(tensor), tensor.dtype, tensor.shape, values
