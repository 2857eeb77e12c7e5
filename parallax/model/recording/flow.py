"""Track the data flow of a forward while it is recorded: which tensors depend on inputs, and which are written."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from parallax.model.block import leaves, module_repr, tensors_in, transform
from parallax.model.private import OperatorMode

SHAPE_ONLY = (
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
)
"""Operators that use only the shape and dtype of a tensor, not its values."""

CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type, range, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.BuiltinFunctionType, types.FunctionType, types.MethodDescriptorType),
)


class RepeatedModules:
    """Runs only the first of several equal modules, and returns copies of its results for the others.

    This saves time, because equal modules return tensors of equal shapes for equal inputs. If a result shares memory
    with an input, or an input is changed, each of the modules runs.
    """

    def __init__(self, flow: DataFlow) -> None:
        self._flow = flow
        self._given: dict[Any, Any] = {}

    def run(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function to call in place of ``call``, the call of ``module``.

        If an equal module was called with equal arguments before, the function returns copies of the earlier results.
        """

        def once(*args: Any, **kwargs: Any) -> Any:
            key = self._key(module, args, kwargs)
            if key in self._given:
                return transform(self._given[key], self._copied)
            given = [*tensors_of((args, kwargs)), *module.parameters(), *module.buffers()]
            before = [state(tensor) for tensor in given]
            found = call(*args, **kwargs)
            results = [storage_of(tensor) for tensor in tensors_in(found)]
            apart = len({*results, *map(storage_of, given)}) == len(results) + len(
                {*map(storage_of, given)}
            )
            if apart and before == [state(tensor) for tensor in given]:
                self._given[key] = found
            return found

        return once

    def _copied(self, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        made = part.clone()
        if self._flow.is_dependent(storage_of(part)):
            self._flow.mark_dependent(made)
        return made

    def _key(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = [
            (
                str(path),
                (part.dtype, part.shape, part.stride(), self._flow.is_dependent(storage_of(part)))
                if isinstance(part, Tensor)
                else repr(part),
            )
            for path, part in leaves((args, kwargs))
        ]
        structure = module_repr(module) or id(module)
        return type(module), structure, module.training, torch.is_grad_enabled(), str(inputs)


class DataFlow(OperatorMode):
    """Tracks for every storage whether its content depends on the model's inputs.

    ``stale``: tensors that an earlier run left in the model. ``read_stale``: whether one of these was used.
    """

    def __init__(self, stale: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._depends: set[int] = set()
        self._stale = {storage_of(tensor) for tensor in stale}
        self.read_stale = False

    def note_use(self, tensor: Tensor) -> None:
        self.read_stale = self.read_stale or storage_of(tensor) in self._stale

    def mark_dependent(self, tensor: Tensor) -> None:
        self._depends.add(storage_of(tensor))

    def is_dependent(self, storage: int) -> bool:
        """Return whether the content of the storage with id ``storage`` depends on inputs."""
        return storage in self._depends

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and mark its results as dependent on inputs if one of its operands is."""
        del types
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = list(tensors_of((args, kwargs))) if name not in SHAPE_ONLY else []
        read = any(storage_of(tensor) in self._depends for tensor in given)
        for tensor in given:
            self.note_use(tensor)
        value = func(*args, **kwargs)
        schema = func._schema
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        for tensor in tensors_of(value):
            storage = storage_of(tensor)
            if read:
                self._depends.add(storage)
            elif not views and not schema.is_mutable:
                # A new storage, perhaps with the id of a freed one.
                self._depends.discard(storage)
        return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the arguments of a call. Tensors inside ``slice`` objects are not found."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_of(part)
    elif value is not None and not isinstance(value, CONSTANTS):
        yield from tensors_in(value)


def holds_tensors(function: types.FunctionType) -> bool:
    """Return whether the closure of a function holds tensors."""
    held = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    return any(True for _ in tensors_in(held))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def state(tensor: Tensor) -> tuple[int, int]:
    """Return a value that changes when ``tensor`` is written or its storage is replaced."""
    return tensor._version, storage_of(tensor)


def storage_of(tensor: Tensor) -> int:
    """Return the id of a tensor's storage, which is equal for tensors that share memory."""
    if tensor.layout is torch.jagged:
        tensor = tensor._values  # type: ignore[assignment]
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)
