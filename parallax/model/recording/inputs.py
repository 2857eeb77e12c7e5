"""Describe a model's inputs by shapes and dtypes.

From this description, inputs can be made with any number of rows, and with other sizes, such as a shorter sequence.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from parallax.errors import DescribeError
from parallax.model.block import check_padded, in_dtype, leaves, padding_help, transform

Sample = Callable[[int], Any]
"""A function that returns inputs of the given number of rows: a tensor, a tuple of tensors or nests, or {name: tensor
or nest}.
"""

SizeChange = Mapping[int | tuple[int, int], int]
"""A size of the sample → the size to use in its place. For one tensor only, the key is (index of the tensor, size)."""


@dataclass(frozen=True)
class SampleShapes:
    """The shapes of a model's inputs.

    ``nest``: inputs of two rows, for their structure. ``shapes``: (dtype, shape, row dimension) of each tensor in
    ``nest``. The row dimension is None for a tensor without rows.
    """

    nest: Any
    shapes: tuple[tuple[torch.dtype, tuple[int, ...], int | None], ...]

    def cast(self, dtype: torch.dtype) -> SampleShapes:
        """Return the same shapes, with ``dtype`` for floating-point tensors."""
        return SampleShapes(
            self.nest,
            tuple((in_dtype(kind, dtype), shape, d) for kind, shape, d in self.shapes),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that may differ in other inputs, largest first: all sizes of the tensors' dimensions that are at
        least 4, except the number of rows."""
        found = {
            size
            for _, shape, rows in self.shapes
            for d, size in enumerate(shape)
            if d != rows and size >= 4
        }
        return tuple(sorted(found, reverse=True))

    @property
    def shared_sizes(self) -> tuple[tuple[int, int], ...]:
        """Pairs (index of a tensor in :attr:`shapes`, size) for the sizes that several tensors have.

        Such tensors may have the same size by coincidence. Only the sizes in :attr:`sizes`, and only tensors with rows,
        are considered.
        """
        found = [
            (index, size)
            for index, (_, shape, rows) in enumerate(self.shapes)
            for size in {size for d, size in enumerate(shape) if d != rows and size >= 4}
            if rows is not None
        ]
        counts = Counter(size for _, size in found)
        return tuple(each for each in found if counts[each[1]] > 1)

    def limits(self, fixed: Collection[int]) -> tuple[tuple[int | None, ...], ...]:
        """Return, for each tensor, the required size of each dimension, or None if the dimension may have any size.

        A dimension may have any size if it is the row dimension, or if its size in the sample is at least 4 and not in
        ``fixed``.
        """
        return tuple(
            tuple(
                size if d != rows and (size < 4 or size in fixed) else None
                for d, size in enumerate(shape)
            )
            for _, shape, rows in self.shapes
        )

    def make(self, fake: Any, rows: int, change: SizeChange | None = None) -> Any:
        """Return inputs of ``rows`` rows in the sample's structure. ``fake(shape, dtype)`` creates their tensors.

        ``change`` maps sizes of the sample to the sizes to use in their place.
        """
        change = change or {}
        order = enumerate(self.shapes)

        def new(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return part
            index, (dtype, shape, dimension) = next(order)
            sizes = [
                rows
                if d == dimension
                else change.get((index, size), change.get(size, size))
                if dimension is not None
                else size
                for d, size in enumerate(shape)
            ]
            return fake(tuple(sizes), dtype)

        return transform(self.nest, new)


class SampleValues:
    """The values of a sample's tensors for any number of rows.

    ``rows``: the number of rows that are taken from ``sample``. They are repeated if more are requested. ``shapes``:
    the shapes of the sample.
    """

    def __init__(self, sample: Sample, shapes: SampleShapes, rows: int) -> None:
        self._sample, self._shapes, self._rows = sample, shapes, rows

    def named(self, rows: int, change: SizeChange | None = None) -> Mapping[str, Tensor]:
        """Return {name: tensor} for inputs of ``rows`` rows.

        ``change`` maps sizes of the sample to the smaller sizes to use in their place. The index of the first row
        depends on ``rows``, so that calls with different ``rows`` use different rows of the sample. Otherwise a
        coincidence in some rows could be mistaken for a property of all.
        """
        order = iter(self._given)

        def slice_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            tensor, dimension = next(order)
            if dimension is not None:
                places = (torch.arange(rows) + rows) % tensor.shape[dimension]
                tensor = tensor.index_select(dimension, places)
            for d, size in enumerate(shape):
                tensor = tensor.narrow(d, 0, min(size, tensor.shape[d]))
            return tensor.to(dtype)

        args, kwargs = call_arguments(self._shapes.make(slice_of, rows, change))
        return {
            input_name(path): part
            for path, part in leaves((args, kwargs))
            if isinstance(part, Tensor) and not part.is_meta
        }

    @cached_property
    def _given(self) -> list[tuple[Tensor, int | None]]:
        dimensions = [rows for _, _, rows in self._shapes.shapes]
        return list(zip(_tensors(self._sample(self._rows)), dimensions, strict=True))


def input_name(path: tuple[Any, ...]) -> str:
    """Return the name of an input: the keys of its path without the first, joined by dots, such as ``0`` or ``labels``.

    ``path``: where the input is in the pair (positional arguments, named arguments) of the forward.
    """
    return ".".join(map(str, path[1:]))


def sample_shapes(sample: Sample) -> SampleShapes:
    """Return the shapes of ``sample``.

    The row dimension of each tensor is found by comparing a sample of one row with one of two. If both have equal
    shapes, it is dimension 0.
    """
    few, many = sample(1), sample(2)
    check_padded("a sample's inputs", many)
    one, two = _tensors(few), _tensors(many)
    if len(one) != len(two):
        raise DescribeError(
            f"a sample of one row has {len(one)} tensor(s) and of two rows {len(two)}; each must have the rows in its "
            f"first dimension: {padding_help()}"
        )
    pairs = list(zip(one, two))
    same = all(a.shape == b.shape for a, b in pairs)
    shapes = []
    for a, b in pairs:
        moving = [d for d in range(b.ndim) if d < a.ndim and a.shape[d] != b.shape[d]]
        if same:
            moving = [0] if a.ndim and a.shape[0] == pairs[0][0].shape[0] else []
        if len(moving) > 1 or a.ndim != b.ndim:
            raise DescribeError(
                f"a sample's tensor has shape {tuple(a.shape)} for one row and {tuple(b.shape)} for two: only one "
                "dimension may change with the number of rows"
            )
        shapes.append((b.dtype, tuple(b.shape), moving[0] if moving else None))
    return SampleShapes(many, tuple(shapes))


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    transform(value, lambda part: found.append(part) if isinstance(part, Tensor) else None)
    return found


def call_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and named arguments with which the model is called for ``value``, inputs returned by a
    sample.
    """
    if isinstance(value, Mapping):
        return (), dict(value)
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return tuple(value), {}
    return (value,), {}


def input_names(model: nn.Module, value: Any) -> tuple[str, ...]:
    """Return the names of the forward's arguments for ``value``, a sample's inputs; empty for nested inputs."""
    args, kwargs = call_arguments(value)
    if not all(isinstance(part, Tensor) for part in [*args, *kwargs.values()]):
        return ()
    if kwargs:
        return tuple(kwargs)
    names: list[str] = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{name}_{i}" for i in range(len(args) - len(names))]
        elif parameter.kind is not parameter.VAR_KEYWORD:
            names.append(name)
    if len(names) < len(args):
        raise DescribeError(
            f"{type(model).__name__} takes {', '.join(names)}, but a sample has {len(args)} inputs"
        )
    return tuple(names[: len(args)])
