"""The rows of a global batch, read only on the ranks that need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallax.errors import DataError, EmptyBatchError
from parallax.model.block import (
    check_padded,
    is_nest,
    leaves,
    padding_help,
    parts_of,
    transform,
)

Values = Tensor | NDArray[Any] | Sequence[Any] | Mapping[str, Any]
"""A tensor or nested tensors. NumPy arrays and lists of numbers become tensors when they are read."""

_CLASSES = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32))


class Rows(Protocol):
    """A global batch of ``len()`` rows. Each rank requests only the rows that it computes on, so a source can make rows
    on demand. Inputs and targets are tensors, sequences of tensors, or mappings, with the rows in the first
    dimension."""

    def __len__(self) -> int: ...

    def inputs(self, start: int, stop: int) -> Any:
        """Return the model inputs of rows [start, stop); called on the first stage."""

    def targets(self, start: int, stop: int) -> Any:
        """Return the loss targets of rows [start, stop); called on the last stage."""


class RowsOf:
    """Base class of batches that wrap another batch, ``batch``. Subclasses define ``inputs`` and ``targets``; all other
    attributes are those of ``batch``."""

    def __init__(self, batch: Rows) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped batch, such as ``memory_bytes``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batch, name)


def row_count(batch: Rows, step: int) -> int:
    """Return the number of rows in ``batch``. If it is zero, raise :class:`~parallax.errors.DataError`, which names
    ``step``."""
    rows = len(batch)
    if rows < 1:
        raise DataError(
            f"the batch of step {step} has {rows} rows, and a step needs at least one: at the end of the data, start "
            "again, raise StopIteration, or end the run earlier (trainer.steps)"
        )
    return rows


class FirstRows(RowsOf):
    """The first ``rows`` rows of ``batch``."""

    def __init__(self, batch: Rows, rows: int) -> None:
        super().__init__(batch)
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def inputs(self, start: int, stop: int) -> Any:
        return self._batch.inputs(start, stop)

    def targets(self, start: int, stop: int) -> Any:
        return self._batch.targets(start, stop)


class TensorRows:
    """A global batch in memory. The first dimension of inputs and targets is the rows."""

    def __init__(self, inputs: Values, targets: Values) -> None:
        check_padded("inputs", inputs)
        check_padded("targets", targets)
        known = {shape[:1] for shape in _shapes((inputs, targets))} - {()}
        rows = next(iter(known))[0] if len(known) == 1 else None
        inputs, targets = as_arrays(inputs, rows), as_arrays(targets, rows)
        alone = isinstance(inputs, Tensor | np.ndarray)
        self._inputs: Any = (inputs,) if alone else inputs
        self._targets = targets
        shapes = _shapes((self._inputs, targets))
        sizes = {shape[:1] for shape in shapes}
        if not shapes:
            raise DataError(
                "a batch needs the same number of rows, above zero, in inputs and targets, and "
                f"{type(inputs).__name__} and {type(targets).__name__} hold no rows; accepted are tensors, "
                "NumPy arrays and lists of numbers, in tuples, lists and dictionaries"
            )
        if len(sizes) != 1 or sizes <= {(), (0,)}:
            raise (EmptyBatchError if sizes == {(0,)} else DataError)(
                "a batch needs the same number of rows, above zero, in inputs and targets; got tensors of shapes "
                f"{shapes}; for a tensor without rows, write a class with inputs(start, stop), targets(start, stop) "
                "and __len__ that returns it whole"
            )
        self._rows = shapes[0][0]

    def __len__(self) -> int:
        return self._rows

    @cached_property
    def memory_bytes(self) -> int:
        """Bytes of all inputs and targets."""
        parts = (part for _, part in leaves((self._inputs, self._targets)))
        return sum(part.nbytes for part in parts if isinstance(part, Tensor | np.ndarray))

    def inputs(self, start: int, stop: int) -> Any:
        """Return rows [start, stop) of each input; a single tensor is returned as a tuple of one."""
        return _rows_of(self._inputs, start, stop)

    def targets(self, start: int, stop: int) -> Any:
        """Return rows [start, stop) of the targets."""
        return _rows_of(self._targets, start, stop)


def _rows_of(values: Any, start: int, stop: int) -> Any:
    """Return rows [start, stop) of each tensor and array in nested ``values``."""
    return transform(
        values, lambda part: part[start:stop] if isinstance(part, Tensor | np.ndarray) else part
    )


def _shapes(values: Any) -> list[tuple[Any, ...]]:
    """Return the shape of each tensor and array in nested ``values``."""
    return [
        tuple(part.shape) for _, part in leaves(values) if isinstance(part, Tensor | np.ndarray)
    ]


def as_tensors(what: str, values: Any, rows: int, dtype: torch.dtype) -> Any:
    """Return ``values``, the inputs or the targets of ``rows`` rows, with tensors in place of NumPy arrays and lists of
    numbers. ``what`` is "inputs" or "targets".

    Only lists with one entry per row are converted. Element types become those of the model: float64 arrays, NumPy's
    default, are converted to ``dtype``, the model's type. If the model is in float64, float32 inputs become float64.
    Class indices among the targets become int64, the only integer type that torch's losses accept. Raises
    :class:`DataError` for an array whose type torch lacks.
    """

    def change(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            part = _from_array(what, part, dtype)
        if what == "targets" and isinstance(part, Tensor) and part.dtype in _CLASSES:
            return part.to(torch.int64)
        if what == "inputs" and dtype == torch.float64 and isinstance(part, Tensor):
            return part.double() if part.dtype == torch.float32 else part
        return part

    check_padded(what, values)
    return transform(as_arrays(values, rows), change)


def as_arrays(values: Any, rows: int | None = None) -> Any:
    """Return nested ``values`` with NumPy arrays in place of lists of numbers. If ``rows`` is given, only lists of this
    length are replaced."""
    if not isinstance(values, Tensor) and _has_list(values):
        return transform(values, lambda part: _from_list(part, rows), (Tensor, list))
    return values


def _has_list(values: Any) -> bool:
    if is_nest(values):
        return isinstance(values, list) or any(_has_list(part) for _, part in parts_of(values))
    return False


def _from_list(part: Any, rows: int | None) -> Any:
    if not isinstance(part, list):
        return part
    if not part or rows not in (None, len(part)) or not _is_of_numbers(part):
        return [as_arrays(each, rows) for each in part]
    try:
        return np.asarray(part)
    except ValueError:
        raise DataError(
            f"a list of {len(part)} rows holds rows of several lengths: {padding_help()}"
        ) from None


def _is_of_numbers(part: Any) -> bool:
    if isinstance(part, list):
        return all(map(_is_of_numbers, part))
    return isinstance(part, int | float | np.number | np.bool_)


def _from_array(what: str, array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    if array.dtype in (np.uint16, np.uint32):
        array = array.astype(np.int64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    try:
        # Torch accepts neither read-only arrays nor negative strides.
        found = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    except TypeError:
        raise DataError(
            f"{what} are a NumPy array of type {array.dtype}, for which torch has no type: give numbers, for example "
            "array.astype('float32') or 'int64'"
        ) from None
    return found.to(dtype) if found.dtype is torch.float64 else found
