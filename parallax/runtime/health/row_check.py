"""Checks that a batch returns one input and one target for each requested row.

Only the first stage reads inputs and only the last reads targets, and a loss may accept any number of inputs or
targets. So each returned value is checked. A tensor of the wrong length may also be one without rows, such as a table,
which is returned whole for any request. To distinguish these cases, the rows are read one by one. This happens once,
and only if a length is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallax.errors import DataError, HangError, printable
from parallax.model.block import Field, leaves, parts_of
from parallax.runtime.batch import Rows, RowsOf, as_tensors

_TYPES = re.compile("dtype|scalar type|data type")

Place = tuple[Any, ...]
"""The path to a part of nested values; the first key is ``inputs`` or ``targets``."""


class RowCheck:
    """Checks the batches of one data source, for a model of type ``dtype``. It remembers which tensors have no rows,
    and the type that each floating-point tensor had when it was last read."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._known = _Known(dtype)

    def of(self, batch: Rows, name: str) -> CheckedRows:
        """Return the rows of ``batch`` as tensors, which are checked when they are read. Errors call the batch
        ``name``."""
        return CheckedRows(batch, name, self._known)

    def explained(self, error: Exception) -> Exception:
        """Return the error to raise in place of ``error``.

        If torch reports a type mismatch, and the rows have another type than the model, the result is a
        :class:`DataError` that says so. Otherwise the result is ``error`` itself.
        """
        others = {
            _place_name(place): kind
            for place, kind in self._known.floats.items()
            if kind is not self._known.dtype
        }
        if not others or not isinstance(error, RuntimeError) or not _TYPES.search(str(error)):
            return error
        name, kind = next(iter(others.items()))
        first = (str(error).splitlines() or [""])[0]
        return DataError(
            f"{name} are {kind} and the model is {self._known.dtype} ({first}): give rows of the model's type, for "
            f"example with .to({self._known.dtype})"
        )


@dataclass(frozen=True)
class _Known:
    dtype: torch.dtype
    rowless: set[Place] = field(default_factory=set)
    floats: dict[Place, torch.dtype] = field(default_factory=dict)


class CheckedRows(RowsOf):
    """A batch that raises :class:`DataError` if it returns a wrong number of inputs or targets."""

    def __init__(self, batch: Rows, name: str, known: _Known) -> None:
        super().__init__(batch)
        self._name, self._all, self._rowless = name, known, known.rowless

    def inputs(self, start: int, stop: int) -> Any:
        return self._checked("inputs", start, stop)

    def targets(self, start: int, stop: int) -> Any:
        return self._checked("targets", start, stop)

    def check_last(self) -> None:
        """Raise :class:`DataError` if the last row has no inputs or no targets."""
        for ask in (self.inputs, self.targets):
            ask(len(self) - 1, len(self))

    def _checked(self, what: str, start: int, stop: int) -> Any:
        values = self._read(what, start, stop)
        for place, count in _counts(values, (what,)):
            if count == stop - start or place in self._rowless:
                continue
            found = self._rows_at(place)
            if not found:
                self._rowless.add(place)
                continue
            few = found < len(self)
            held = f"have {found}" if few else f"are {count} for {stop - start} row(s)"
            raise DataError(
                f"{self._name} has {len(self)} row(s), and its {_place_name(place)} {held}: return inputs and "
                "targets for each row; a tensor without rows must be returned whole for any rows"
            )
        self._note_types(what, values)
        return values

    def _read(self, what: str, start: int, stop: int) -> Any:
        found = getattr(self._batch, what)(start, stop)
        return as_tensors(what, found, stop - start, self._all.dtype)

    def _note_types(self, what: str, values: Any) -> None:
        for path, part in leaves(values):
            if isinstance(part, Tensor) and part.is_floating_point():
                self._all.floats[what, *path] = part.dtype

    def _rows_at(self, place: Place) -> int:
        """Return how many rows the batch has in the tensor or list at ``place``: "inputs" or "targets", followed by the
        keys within the value that is read.

        The rows are read one by one. A read of an existing row must return one row, and a read past the end must return
        none. Return 0 if the tensor or list has no rows, or if their number cannot be found.
        """
        what = place[0]
        try:
            one, two = (self._counts_of(what, 0, min(n, len(self))) for n in (1, 2))
            # In a list of tensors each tensor is one row.
            if one.keys() != two.keys() and place[-1] is not list:
                return 0
            found = one.get(place, 0)
            if found != 1 or two.get(place) not in (1, 2):
                return 0
            for row in range(1, len(self)):
                count = self._counts_of(what, row, row + 1).get(place, 0)
                if count not in ((0, 1) if found == row else (0,)):
                    return 0
                if row == 1 and count != two[place] - 1:
                    return 0
                found += count
        except HangError:
            raise
        except Exception:  # a user's source may not support single rows
            return 0
        return found

    def _counts_of(self, what: str, start: int, stop: int) -> dict[Place, int]:
        return dict(_counts(self._read(what, start, stop), (what,)))


def _counts(value: Any, place: Place) -> Iterator[tuple[Place, int]]:
    """Yield (place, length) of each part of the nested ``value`` that may have rows: tensors of at least one dimension,
    and lists. ``place`` is the place of ``value`` itself, which the yielded places continue with the keys inside."""
    if isinstance(value, list):
        yield (*place, list), len(value)
    if isinstance(value, Tensor):
        if value.dim():
            yield place, len(value)
    else:
        for key, part in parts_of(value):
            yield from _counts(part, (*place, key))


def _place_name(place: Place) -> str:
    """Return the text for error messages that names the part of the inputs or targets at ``place``.

    >>> _place_name(("inputs", "mask", 0))
    "inputs['mask'][0]"
    """
    what, *keys = place
    suffixes = [
        f".{key}" if isinstance(key, Field) else f"[{key!r}]" for key in keys if key is not list
    ]
    return printable("".join([what, *suffixes]))
