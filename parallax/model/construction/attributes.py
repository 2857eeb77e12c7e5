"""Find the tensors of a module that are neither parameters nor buffers: in attributes, lists, dicts and objects."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from parallax.model.construction.log import OperationLog, Unrecordable

_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)
_REGISTERED = ("_parameters", "_buffers", "_modules")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return {path: tensor} for the tensors of ``model`` that are neither parameters nor buffers.

    Modules that are not registered as submodules are not searched.
    """
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _REGISTERED:
                path = f"{name}.{key}" if name else key
                found.update(_inside(value, path, seen))
    return found


def check_functions(model: nn.Module, log: OperationLog) -> None:
    """Raise :class:`Unrecordable` if an attribute is a function whose closure holds a tensor or a module of ``model``.

    A deep copy of ``model`` would share the function, which would still refer to the original tensor or module.
    """
    inside = {id(module) for module in model.modules()}
    seen: set[int] = set()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _REGISTERED:
                for function in _functions(value, seen):
                    if any(_holds(cell, inside, log) for cell in _captured(function)):
                        raise Unrecordable(
                            f"{name or type(module).__name__}.{key} holds a function that holds a tensor or a module"
                        )


def _inside(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, part in _parts(value, seen):
        yield from _inside(part, f"{path}.{key}", seen)


def _functions(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield ``value`` if it is a function, or the functions inside a container. Other objects are not searched.

    ``seen``: ids of the containers that were searched before; they are not searched again.
    """
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, Mapping | list | tuple | set | functools.partial):
        for _, part in _parts(value, seen):
            yield from _functions(part, seen)


def _parts(value: Any, seen: set[int]) -> list[tuple[Any, Any]]:
    """Return the (key, value) pairs of a container or an object.

    The list is empty for tensors, modules and plain values, and for objects whose ids are in ``seen``. The id of any
    other ``value`` is added to ``seen``.
    """
    if isinstance(value, (*_ATOMS, *_FUNCTIONS, nn.Module, Tensor)) or id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return list(enumerate(value))
    if isinstance(value, functools.partial):
        return [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__)]
    slots = [s for kind in type(value).__mro__ for s in getattr(kind, "__slots__", ())]
    held = [(slot, getattr(value, slot)) for slot in slots if hasattr(value, slot)]
    return [*held, *getattr(value, "__dict__", {}).items()]


def _captured(function: types.FunctionType) -> list[Any]:
    cells = function.__closure__ or ()
    return [cell.cell_contents for cell in cells if _is_filled(cell)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _holds(value: Any, inside: set[int], log: OperationLog) -> bool:
    if isinstance(value, types.MethodType):
        return id(value.__self__) in inside
    if isinstance(value, list | tuple):
        return any(_holds(part, inside, log) for part in value)
    if isinstance(value, dict):
        return any(_holds(part, inside, log) for part in value.values())
    if isinstance(value, Tensor):
        return log.cell_of(value) is not None
    return isinstance(value, nn.Module) and id(value) in inside
