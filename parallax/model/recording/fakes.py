"""Run a model on fake tensors, which temporarily replace its tensors on the meta device.

A fake tensor has shape, dtype and device but no values. torch computes shape, dtype and device of every result. Small
constants keep their values. Attributes and function caches that a forward changes are restored.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from parallax.model.block import in_dtype, tensors_in, transform

ASKED_FOR_VALUES = DataDependentOutputException, DynamicOutputShapeException
"""The errors that torch raises if Python, or the shape of a result, needs a fake tensor's value."""

without_modes = _disable_current_modes
"""A context without dispatch modes, in which new tensors are real."""

_TORCHS_OWN = {"_parameters", "_buffers", "_modules", "training"}
_CONTAINERS = list, dict, set, deque
_PLAIN = bool, int, float, complex, str, bytes, type(None)


@dataclass
class FakeModel:
    """``model`` with fake tensors in place of its own tensors. ``mode`` creates the fake tensors.

    ``names`` maps the id of a fake tensor to its name in the model. ``shared`` are ids of fake tensors that have
    several names. ``bare`` maps the id of a fake tensor to the meta tensor that it replaces. ``value_of(tensor)``
    returns the value that the model's constructor gives to a meta tensor of the model.
    """

    model: nn.Module
    mode: FakeTensorMode
    value_of: Callable[[Tensor], Tensor]
    names: dict[int, str] = field(default_factory=dict)
    bare: dict[int, Tensor] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)

    def value(self, tensor: Tensor) -> Tensor:
        """Return the value that the model's constructor gives to the buffer or attribute that the fake ``tensor``
        replaces.
        """
        return self.value_of(self.bare[id(tensor)]).to(tensor.dtype)

    def fake(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new fake tensor of this shape and dtype on the CPU."""
        with self.mode:
            return torch.empty(shape, dtype=dtype, device="cpu")


@contextlib.contextmanager
def with_fake_tensors(
    model: nn.Module, dtype: torch.dtype, value_of: Callable[[Tensor], Tensor]
) -> Iterator[FakeModel]:
    """A context in which fake tensors replace the tensors of ``model``, which are on the meta device.

    Floating-point parameters and buffers have ``dtype``. ``value_of(tensor)`` returns the value that the model's
    constructor gives to a tensor of the model.
    """
    # Only the sizes of nested tensors are symbols.
    sizes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes)
    fakes = FakeModel(model, mode, value_of)
    memo: dict[int, Tensor] = {}

    def fake(tensor: Tensor, name: str) -> Tensor:
        if id(tensor) not in memo:
            kind = in_dtype(tensor.dtype, dtype) if name in own else tensor.dtype
            with fakes.mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = made
            fakes.names[id(made)], fakes.bare[id(made)] = name, tensor
        elif fakes.names[id(memo[id(tensor)])] != name:
            fakes.shared.add(id(memo[id(tensor)]))
        return memo[id(tensor)]

    own = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            for holder in (module._parameters, module._buffers, vars(module)):
                for name, tensor in list(holder.items()):
                    if isinstance(tensor, Tensor):
                        full = f"{path}.{name}" if path else name
                        stack.callback(holder.__setitem__, name, tensor)
                        holder[name] = fake(tensor, full)
        yield fakes


def is_fake(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has no values."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def is_transforming() -> bool:
    """Return whether a torch.func transform (such as vmap or grad) is active. Tensors inside it cannot be traced."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_attention_of_nested(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the call is attention on nested tensors. Such a call reads the row lengths of the tensors."""
    attends = getattr(function, "__name__", "") == F.scaled_dot_product_attention.__name__
    return attends and any(tensor.is_nested for tensor in tensors_in((args, kwargs)))


def fake_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Return a fake result of attention on nested tensors, with the shape of ``value`` if ``value`` has the row lengths
    of ``query``, otherwise with the shape of ``query``."""
    del key, rest, named
    found = value if bool(value.shape[-2] == query.shape[-2]) else query
    return found.clone()


def run_on_real_values(
    fakes: FakeModel,
    module: nn.Module,
    args: Any,
    kwargs: Any,
    value_of: Callable[[Tensor], Tensor | None],
) -> Any:
    """Run a ``module`` that needs values on real tensors, and return its results as fake tensors.

    ``value_of(tensor)`` returns the value of a fake tensor, or None if it is unknown. Unknown floating-point tensors
    are filled with small random numbers, and unknown integers with zeros. Buffers have their initial values.
    """
    memo: dict[int, Any] = {}
    real = _with_values(fakes, value_of, memo)

    with without_modes(), torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            made = real(tensor)
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad)
        copied = copy.deepcopy(module, memo)
        before = AttributeChange(copied)
        with torch.random.fork_rng(devices=[]):
            found = copied(*transform(args, real), **transform(kwargs, real))
        kept = [name for name, value in before.changed().items() if list(tensors_in(value[0]))]
        if kept and not _is_repeatable(
            copied, transform(args, real), transform(kwargs, real), found
        ):
            raise KeepsState(*kept[0])
    known = {id(value): key for key, value in memo.items()}
    given = {id(part): part for part in tensors_in((args, kwargs))}
    nested: list[Any] = [part for part in given.values() if part.is_nested]
    given |= {id(part._offsets): part._offsets for part in nested}

    def fake(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        back = given.get(known.get(id(part), 0))
        if back is None and part.is_nested:
            inner: Any = part
            return renested(part, fake(inner._values), fake(inner._offsets))
        return back if back is not None else fakes.fake(tuple(part.shape), part.dtype)

    return transform(found, fake)


def _with_values(
    fakes: FakeModel, value_of: Callable[[Tensor], Tensor | None], memo: dict[int, Any]
) -> Callable[[Any], Any]:
    """Return a function that maps a fake tensor to a real one.

    For one fake tensor it always returns the same real tensor, which is stored in ``memo``.
    """

    def real(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        if id(part) not in memo:
            inner: Any = part
            value = None if part.is_nested else value_of(part)
            if value is not None:
                made = value
            elif part.is_nested:
                made = renested(part, real(inner._values), real(inner._offsets))
            elif id(part) in fakes.bare and not isinstance(part, nn.Parameter):
                made = fakes.value(part)
            elif part.is_floating_point() or part.is_complex():
                made = 0.02 * torch.randn(part.shape, dtype=part.dtype)
            else:
                made = torch.zeros(part.shape, dtype=part.dtype)
            memo[id(part)] = made
        return memo[id(part)]

    return real


def renested(like: Any, values: Tensor, offsets: Tensor) -> Tensor:
    """Return a jagged nested tensor of ``values`` with the row boundaries ``offsets``.

    Its ragged dimension, and the least and greatest row lengths that torch caches, are those of ``like``.
    """
    found: Tensor = torch.nested.nested_tensor_from_jagged(
        values,
        offsets,
        jagged_dim=like._ragged_idx,
        min_seqlen=like._maybe_min_seqlen,
        max_seqlen=like._maybe_max_seqlen,
    )
    return found


class KeepsState(Exception):
    """Raised if a module reads a tensor from an earlier forward: the attribute ``name`` of the submodule ``path``."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(f"{path}{'.' if path else ''}{name}")


def _is_repeatable(module: nn.Module, args: Any, kwargs: Any, first: Any) -> bool:
    """Return whether a second forward of ``module`` gives the results ``first`` again."""
    with torch.random.fork_rng(devices=[]):
        second = module(*args, **kwargs)
    pairs = zip(tensors_in(first), tensors_in(second), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class AttributeChange:
    """Records the attributes of all modules at its creation, to find and undo the changes that a forward then makes."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {
            path: (module, _attributes(module), module.training)
            for path, module in model.named_modules()
        }
        self._buffers = {path: dict(module._buffers) for path, module in model.named_modules()}

    def changed(self) -> dict[tuple[str, str], Any]:
        """Return the attributes that have changed since this object was made.

        The result is {(module path, attribute name): (present value, copy)}. ``copy`` is a shallow copy of the value if
        it is a container, otherwise None.
        """
        return {
            (path, name): value
            for path, (module, before, _) in self._before.items()
            for name, value in _attributes(module).items()
            if name not in before or not _same(before[name], value)
        }

    def replaced(self) -> dict[str, str]:
        """Return {module path: buffer name} for modules in which a buffer was replaced.

        If several buffers of a module were replaced, one of them is named.
        """
        return {
            path: name
            for path, (module, _, _) in self._before.items()
            for name, tensor in module._buffers.items()
            if self._buffers[path].get(name) is not tensor
        }

    def undo(self) -> None:
        """Restore the recorded attributes, buffers and modes of all modules."""
        for module, before, training in self._before.values():
            for name in [name for name in _attributes(module) if name not in before]:
                del vars(module)[name]
            for name, (value, content) in before.items():
                vars(module)[name] = value
                _refill(value, content)
            module.training = training
        for path, buffers in self._buffers.items():
            self._before[path][0]._buffers.update(buffers)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes of a module, without those of torch itself, as {name: (value, copy)}. ``copy`` is a shallow
    copy of the value if it is a container, otherwise None."""
    return {
        name: (value, copy.copy(value) if isinstance(value, _CONTAINERS) else None)
        for name, value in vars(module).items()
        if name not in _TORCHS_OWN
    }


def _same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    if isinstance(before[0], _CONTAINERS) and isinstance(now[0], _CONTAINERS):
        return _content(before[1]) == _content(now[1])
    if isinstance(before[0], _PLAIN) and isinstance(now[0], _PLAIN):
        return type(before[0]) is type(now[0]) and bool(before[0] == now[0])
    return before[0] is now[0]


def _content(container: Any) -> Any:
    """Return a container's content in a form for comparison: plain values as they are, and other objects by id."""

    def key(value: Any) -> Any:
        return value if isinstance(value, _PLAIN) else id(value)

    if isinstance(container, dict):
        return {name: key(value) for name, value in container.items()}
    return (
        sorted(map(str, map(key, container)))
        if isinstance(container, set)
        else [*map(key, container)]
    )


def _refill(container: Any, content: Any) -> None:
    if not isinstance(container, _CONTAINERS):
        return
    container.clear()
    if isinstance(container, dict | set):
        container.update(content)
    else:
        container.extend(content)


def is_plain_state(value: Any) -> bool:
    """Return whether an attribute holds plain values and no tensors.

    Such an attribute is a counter rather than a cache of tensors.
    """
    found: list[Any] = []
    transform(value, lambda part: found.append(part))
    return bool(found) and all(isinstance(part, _PLAIN) for part in found)


@contextlib.contextmanager
def restored_process_state() -> Iterator[None]:
    """A context that on exit restores random states, and clears function caches to which entries were added inside.

    Such entries may hold fake tensors.
    """
    caches = [(cache, cache.cache_info().misses) for cache in _function_caches()]
    known = {id(cache) for cache, _ in caches}
    state = random.getstate()
    noise = logging.getLogger("torch._subclasses.fake_tensor")  # it logs each failed attempt
    level = noise.level
    noise.setLevel(logging.CRITICAL)
    fused = torch.backends.mha.get_fastpath_enabled()  # for evaluation only, and it reads values
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        noise.setLevel(level)
        random.setstate(state)
        for cache, misses in [*caches, *((c, 0) for c in _function_caches() if id(c) not in known)]:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _function_caches() -> list[Any]:
    return [
        found
        for found in gc.get_objects()
        if type(found) is functools._lru_cache_wrapper
        and not str(getattr(found, "__module__", "")).startswith(
            ("torch.", "typing", "sympy", "re")
        )
    ]
