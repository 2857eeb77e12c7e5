"""What a user brings of a model: a factory, batches of rows and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Any, Any]
"""Inputs and targets: tensors with rows in dimension 0, alone, in tuples or in dicts; :class:`Whole` ones have none."""


@dataclass(frozen=True)
class Whole:
    """A tensor that every micro-batch is given whole, such as the edges of a graph that all rows share."""

    tensor: Tensor


@dataclass(frozen=True)
class Entry:
    """``build()`` makes the model, ``batch(rows, random)`` inputs and targets, ``loss(outputs, targets)`` is the mean
    over rows. ``path`` says what the model is, for tables. ``coupled``: rows of a micro-batch meet in the model or the
    loss (batch statistics, negatives), so that replicas compute something else than one process. ``gathered``: they
    meet in the loss alone, which is computed once, of all rows. ``optimizers``: those that torch has for its gradients.
    ``imports``: large modules that it needs, imported once for all."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss: Callable[[Any, Any], Tensor]
    path: str = ""
    coupled: bool = False
    gathered: bool = False
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    imports: tuple[str, ...] = ()


class EntryRows:
    """One global batch of an entry, in the number format of its parameters."""

    def __init__(self, entry: Entry, rows: int, step: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(100 + step)
        self._rows = rows
        self._inputs, self._targets = (cast(part, dtype) for part in entry.batch(rows, random))

    def __len__(self) -> int:
        return self._rows

    def inputs(self, start: int, stop: int) -> Any:
        """Rows [start, stop) of the inputs; one given alone is a tuple of one."""
        found = change(self._inputs, lambda value: _slice(value, start, stop))
        return found if isinstance(found, tuple | dict) else (found,)

    def targets(self, start: int, stop: int) -> Any:
        """Rows [start, stop) of the targets."""
        return change(self._targets, lambda value: _slice(value, start, stop))


def cast(values: Any, dtype: torch.dtype) -> Any:
    """``values`` with what floats in ``dtype``, and complex numbers of that precision."""

    def one(value: Any) -> Any:
        if isinstance(value, Whole):
            return Whole(one(value.tensor))
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    return change(values, one)


def change(values: Any, one: Callable[[Any], Any]) -> Any:
    """The same nest of tuples, lists and dicts with ``one`` applied to every other part."""
    if isinstance(values, dict):
        return {name: change(value, one) for name, value in values.items()}
    if isinstance(values, tuple | list):
        return type(values)([change(value, one) for value in values])
    return one(values)


def _slice(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, Whole):
        return value.tensor
    return value[start:stop] if isinstance(value, Tensor) else value


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's outputs: a dict gives arguments by name, a tuple in order."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)
