"""The rows of a global batch, fetched only where they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from parallax.errors import DataError
from parallax.model.block import RAGGED_HELP, tensors_in, transform

Values = Tensor | Sequence[Any] | Mapping[str, Any]
"""A tensor, or a nest of tensors."""


class Rows(Protocol):
    """A global batch of ``len()`` rows. Each rank asks only for the rows that it computes on, so a source can
    make them on demand; rows are the first dimension of what it returns: a tensor, several in order, or by name."""

    def __len__(self) -> int: ...

    def inputs(self, start: int, stop: int) -> Any:
        """Model inputs of rows [start, stop); asked by the first stage."""

    def targets(self, start: int, stop: int) -> Any:
        """Loss targets of rows [start, stop); asked by the last stage."""


class TensorRows:
    """A global batch that is already in memory: inputs and targets with the rows in dimension 0."""

    def __init__(self, inputs: Values, targets: Values) -> None:
        self._inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
        self._targets = targets
        transform((self._inputs, targets), _check_rows)
        shapes = [tuple(tensor.shape) for tensor in tensors_in((self._inputs, targets))]
        sizes = {shape[:1] for shape in shapes}
        if len(sizes) != 1 or sizes <= {(), (0,)}:
            raise DataError(
                "a batch needs the same number of rows, above zero, in inputs and targets; got tensors of shapes "
                f"{shapes}; where one has no rows, return it whole from inputs(start, stop) of a class of your own "
                "that also has targets(start, stop) and __len__"
            )
        self._rows = shapes[0][0]

    def __len__(self) -> int:
        return self._rows

    def inputs(self, start: int, stop: int) -> Any:
        """Rows [start, stop) of each input; one given alone is a tuple of one."""
        return _slice(self._inputs, start, stop)

    def targets(self, start: int, stop: int) -> Any:
        """Rows [start, stop) of the targets."""
        return _slice(self._targets, start, stop)


def _check_rows(part: Any) -> None:
    if isinstance(part, Tensor) and part.is_nested:
        raise DataError(f"rows of a nested tensor cannot be sliced: {RAGGED_HELP}")


def _slice(values: Any, start: int, stop: int) -> Any:
    """Rows [start, stop) of every tensor in a nest; what is no tensor stays as it is."""
    return transform(values, lambda part: part[start:stop] if isinstance(part, Tensor) else part)
