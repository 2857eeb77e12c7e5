"""Take one optimizer step in pieces, each of which updates a subset of the parameters.

Each piece is stepped by a stand-in: a clone of the optimizer that has only this subset of the parameters. At the end,
the changes that the stand-ins made to groups and attributes are copied into the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallax.errors import ConfigError, SwapError

# These update all parameters together: always, or with one of the settings in _OF_ALL. They clip or divide by the norm
# of all gradients inside ``step``; in a step by pieces that norm would be silently wrong.
_WHOLE = (
    "LBFGS",
    "ZeroRedundancyOptimizer",
    "DAdaptAdam",
    "DAdaptSGD",
    "Prodigy",
    "NVLAMB",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "DistributedFusedLAMB",
)
_OF_ALL = ("max_grad_norm", "pre_norm")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Piece = list[tuple[int, Tensor]]  # (index of the parameter group, parameter)


class ChunkedStep:
    """One optimizer step that is taken in pieces.

    Every piece begins with the parameter groups and attributes that the optimizer had before the step. So all pieces
    must make equal changes to parameter groups and to the optimizer's own attributes, such as counters.
    """

    def __init__(self, optimizer: Optimizer, pieces: list[Piece]) -> None:
        self._optimizer = optimizer
        self._attributes = dict(vars(optimizer))
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._stand_ins: list[tuple[Optimizer, list[_Group]]] = []
        self._pieces = pieces

    def stand_in(self, piece: Piece) -> Optimizer:
        """Return a clone of the optimizer, with the same settings and states, that has only the parameters of
        ``piece``."""
        parameters: dict[int, list[Tensor]] = {}
        for index, parameter in piece:
            parameters.setdefault(index, []).append(parameter)
        groups = [
            _Group(index, {**self._groups[index], "params": found})
            for index, found in parameters.items()
        ]
        narrow = [group.narrow for group in groups]
        other = shallow_clone(self._optimizer, self._attributes, narrow)
        self._stand_ins.append((other, groups))
        return other

    def finish(self) -> None:
        """Copy the changes of groups and attributes from the stand-ins (clones that stepped the pieces) to the
        optimizer.

        Raises :class:`SwapError` if two stand-ins have changed a group's value differently.
        """
        for other, groups in self._stand_ins:
            for key, value in vars(other).items():
                if key not in ("param_groups", "state") and value is not self._attributes.get(key):
                    setattr(self._optimizer, key, value)
            for index, narrow in groups:
                self._merge_group(self._optimizer.param_groups[index], self._groups[index], narrow)

    def _merge_group(
        self, group: dict[str, Any], before: dict[str, Any], narrow: dict[str, Any]
    ) -> None:
        for key, value in narrow.items():
            if key == "params" or value is before.get(key):
                continue
            if group.get(key) is not before.get(key) and group[key] != value:
                raise SwapError(
                    f"{type(self._optimizer).__name__} updates parameters together, not each by itself (group value "
                    f"{key!r} is {group[key]} after one piece and {value} after another): leave optimizer= out"
                )
            group[key] = value


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that hold states: ``optimizer``, and the optimizers whose ``step`` it calls.

    A framework's wrapper is omitted, because its states are those of the wrapped optimizer.
    """
    inner = inner_optimizers(optimizer)
    several = [each for one in inner for each in with_inner(one)]
    own = "_optimizer_step_pre_hooks" in vars(optimizer) and "state" in vars(optimizer)
    shared = any(vars(each).get("state") is vars(optimizer).get("state") for each in inner)
    mine = [optimizer] if not inner or (own and not shared) else []
    return list({id(each): each for each in (*mine, *several)}.values())


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in the attributes of ``optimizer``, directly or in a list or dictionary."""
    found: list[Optimizer] = []
    for value in vars(optimizer).values():
        several: Any = value.values() if isinstance(value, dict) else value
        held = several if isinstance(value, dict | list | tuple) else [value]
        found += [each for each in held if isinstance(each, Optimizer) and each is not optimizer]
    return list({id(each): each for each in found}.values())


def check_per_parameter(optimizer: Optimizer) -> None:
    """Raise :class:`ConfigError` for an optimizer that cannot be stepped in pieces."""
    names = {name.casefold() for name in _WHOLE}
    whole = next(
        (kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__.casefold() in names),
        None,
    )
    if whole is not None:
        raise ConfigError(
            f"optimizer={type(optimizer).__name__}: {whole} updates all parameters together, so its states cannot "
            "visit the device in pieces: leave optimizer= out, or use another such as AdamW"
        )
    for settings in (optimizer.defaults, vars(optimizer), *optimizer.param_groups):
        for name in _OF_ALL:
            if settings.get(name):
                raise ConfigError(
                    f"optimizer={type(optimizer).__name__}: {name}={settings[name]} takes the norm of all gradients "
                    f"inside step, so its states cannot visit the device in pieces: set {name} to 0 and call "
                    "torch.nn.utils.clip_grad_norm_ before the step, or leave optimizer= out"
                )


def raw_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the ``step`` function of the optimizer's class, without hooks."""
    step = type(optimizer).step
    raw: Callable[..., Any] = (
        getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    )
    return raw


def evaluated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Run the closure of a step, and return the step's arguments with a closure that returns the computed loss.

    So all pieces of the step share one evaluation. Without a closure the arguments are returned unchanged.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    if len(args) > 1:
        return (args[0], lambda: loss, *args[2:]), kwargs
    return args, {**kwargs, "closure": lambda: loss}


def shallow_clone(
    optimizer: Optimizer, attributes: Mapping[str, Any], groups: list[dict[str, Any]]
) -> Optimizer:
    """Return an optimizer of the same class with other parameter ``groups``, which shares ``attributes`` with the
    original.

    The attributes include states and hooks. ``__init__`` is not called, because a third-party class may require any
    arguments.
    """
    clone: Optimizer = object.__new__(type(optimizer))
    vars(clone).update(attributes, param_groups=groups)
    return clone


def independent_clone(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class and settings with other parameter ``groups``, without states or hooks."""
    clone = shallow_clone(optimizer, vars(optimizer), [])
    Optimizer.__init__(clone, groups, dict(optimizer.defaults))
    return clone


class _Group(NamedTuple):
    number: int
    narrow: dict[str, Any]
