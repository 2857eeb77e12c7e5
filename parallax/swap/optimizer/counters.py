"""Save the Python numbers that an optimizer counts, such as its steps, as tensors in a checkpoint.

Some optimizers keep such a number in the state of each parameter, others in the parameter group. Each number is saved
as a tensor whose name ends with the number's Python type. A number of a group is saved with each parameter of the
group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallax.swap.optimizer.averaging import SHARE

_OF_GROUP = "group."
_TYPES: dict[str, tuple[type, torch.dtype]] = {
    ".bool": (bool, torch.bool),
    ".int": (int, torch.int64),
    ".float": (float, torch.float64),
}


class GroupCounters:
    """The numbers in the parameter groups of ``optimizer`` that its own steps change.

    The settings that are set before each step are excluded: the learning rate and the share of averaged weights.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._built = [_numbers(group) for group in optimizer.param_groups]
        self._groups = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}

    def of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the numbers in the group of ``parameter`` that the optimizer's steps have changed.

        The result is empty if no group has the parameter.
        """
        index = self._groups.get(parameter)
        if index is None:
            return {}
        found, built = _numbers(self._optimizer.param_groups[index]), self._built[index]
        return {_OF_GROUP + k: v for k, v in found.items() if v != built.get(k)}

    def restored(self, parameter: Tensor, states: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the saved ``states`` of a parameter, with tensors that encode Python numbers converted back to
        numbers.

        Numbers that belong to the parameter's group are set in the group and are not in the result.
        """
        found = {}
        for key, value in states.items():
            name, suffix = _parts(key)
            number = value if suffix is None else _TYPES[suffix][0](value.item())
            if name.startswith(_OF_GROUP):
                group = self._optimizer.param_groups[self._groups[parameter]]
                group[name.removeprefix(_OF_GROUP)] = number
            else:
                found[name] = number
        return found

    def reset(self) -> None:
        """Reset the numbers in the groups to their initial values."""
        for group, built in zip(self._optimizer.param_groups, self._built):
            group.update(built)


def as_tensors(states: Mapping[str, Any], counters: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state of a parameter and the counters of its group in one dictionary, with all numbers as tensors."""
    found = {}
    for key, value in {**states, **counters}.items():
        if isinstance(value, Tensor):
            found[key] = value
        else:
            for suffix, (kind, dtype) in _TYPES.items():
                if type(value) is kind:
                    found[key + suffix] = torch.tensor(value, dtype=dtype)
    return found


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    kinds = tuple(kind for kind, _ in _TYPES.values())
    return {k: v for k, v in group.items() if k not in ("lr", SHARE) and type(v) in kinds}


def _parts(key: str) -> tuple[str, str | None]:
    """Return the name of the saved state ``key`` without its type suffix, and the suffix.

    If the key has no type suffix, the second result is None.
    """
    suffix = next((each for each in _TYPES if key.endswith(each)), None)
    return (key if suffix is None else key.removesuffix(suffix)), suffix
