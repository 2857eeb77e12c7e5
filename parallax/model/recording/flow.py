"""What operators do to tensors while a forward is recorded: whose values they read, and which they write."""

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
"""Operators that take shape and type of a tensor, and not its values."""

CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type, range, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.BuiltinFunctionType, types.FunctionType, types.MethodDescriptorType),
)


class RepeatedModules:
    """Repeated layers give tensors of the same shapes for the same inputs: one of them is run, and the others give
    copies of what it gave. Not where a result is an input, or a view of something."""

    def __init__(self, flow: DataFlow) -> None:
        self._flow = flow
        self._given: dict[Any, Any] = {}

    def run(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` of ``module``, run if no module like it was called with such arguments."""

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
        looks = [
            (
                str(path),
                (part.dtype, part.shape, part.stride(), self._flow.is_dependent(storage_of(part)))
                if isinstance(part, Tensor)
                else repr(part),
            )
            for path, part in leaves((args, kwargs))
        ]
        words = module_repr(module) or id(module)
        return type(module), words, module.training, torch.is_grad_enabled(), str(looks)


class DataFlow(OperatorMode):
    """Knows of every storage whether what lies in it depends on the values of inputs. ``stale`` are tensors that an
    earlier run left behind, and ``read_stale`` whether one of them was used."""

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
        """Whether what lies in ``storage`` depends on inputs."""
        return storage in self._depends

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """An operator: what it gives depends on what it was given."""
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
                # A new one, perhaps in the place of an old one.
                self._depends.discard(storage)
        return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments, but for those in slices, which have none that matter."""
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
    """Whether there are tensors in what a function closes over."""
    held = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    return any(True for _ in tensors_in(held))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def state(tensor: Tensor) -> tuple[int, int]:
    """Changes when values of ``tensor`` are written, or others take their place."""
    return tensor._version, storage_of(tensor)


def storage_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    if tensor.layout is torch.jagged:
        tensor = tensor._values  # type: ignore[assignment]
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)
