"""The rows of a global batch, fetched only where they are needed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from parallax.errors import DataError


class Rows(Protocol):
    """A global batch of ``len()`` rows. Each rank asks only for the rows that it computes on, so a source can
    make them on demand; rows are the first dimension of what it returns."""

    def __len__(self) -> int: ...

    def inputs(self, start: int, stop: int) -> Tensor | tuple[Tensor, ...]:
        """Model inputs of rows [start, stop); asked by the first stage."""

    def targets(self, start: int, stop: int) -> Tensor:
        """Loss targets of rows [start, stop); asked by the last stage."""


class TensorRows:
    """A global batch that is already in memory: inputs and targets with the rows in dimension 0."""

    def __init__(self, inputs: Tensor | tuple[Tensor, ...], targets: Tensor) -> None:
        self._inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        self._targets = targets
        sizes = [len(tensor) for tensor in (*self._inputs, targets)]
        if len(set(sizes)) != 1 or sizes[0] == 0:
            raise DataError(f"a batch needs the same number of rows, above zero, in inputs and targets; got {sizes}")

    def __len__(self) -> int:
        return len(self._targets)

    def inputs(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Rows [start, stop) of each input."""
        return tuple(tensor[start:stop] for tensor in self._inputs)

    def targets(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the targets."""
        return self._targets[start:stop]
