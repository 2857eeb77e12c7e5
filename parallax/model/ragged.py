"""Rows of several lengths in one tensor: a PackedSequence, or a nested tensor of jagged layout.

Neither has the rows in its first dimension, so neither can be cut by rows, or sent, as other tensors are.
:func:`rows_of` cuts them. What goes into a chain is opened (:func:`opened`): padded rows and their lengths, plain
tensors with the rows first, which travel as all others do. The first block closes them again (:func:`closed`) before
the model sees them, so that it is given what its author gives it, and never a padded element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from parallax.errors import DataError, DescribeError
from parallax.model.block import is_ragged, rebuild, transform


@dataclass(frozen=True)
class PackedRows:
    """An opened PackedSequence: rows as they were before they were sorted, zeros behind them, their ``lengths``, and
    the ``rank`` of each among all by length; None: they are in that order, and the sequence says so."""

    padded: Tensor
    lengths: Tensor
    rank: Tensor | None


@dataclass(frozen=True)
class NestedRows:
    """An opened nested tensor: rows with zeros behind them, their ``lengths``, the ``dimension`` that is ragged, and
    which nested tensor of the nest, counted from 0, has the same offsets; itself where it is the first."""

    nested: Tensor
    lengths: Tensor
    dimension: int
    shares: int

    @property
    def padded(self) -> Tensor:
        """The rows, as those of :class:`PackedRows` are called: inputs of one kind are not taken for the other."""
        return self.nested


_SHOWN = 8  # lengths in a message

Opened = PackedRows | NestedRows


def ragged_in(value: Any) -> list[Any]:
    """The PackedSequences and nested tensors of a nest, in order."""
    found: list[Any] = []
    transform(value, lambda part: found.append(part) if is_ragged(part) else None, _GIVEN)
    return found


def opened_in(value: Any) -> list[Any]:
    """What :func:`opened` made of them."""
    found: list[Any] = []
    transform(value, lambda part: found.append(part) if isinstance(part, Opened) else None, _OPENED)
    return found


def count_rows(part: Any) -> int:
    """How many rows a PackedSequence or a nested tensor has."""
    return int(part.batch_sizes[0]) if isinstance(part, PackedSequence) else part.size(0)


def longest_in(value: Any) -> tuple[int, ...]:
    """The longest row of each of :func:`ragged_in`."""
    return tuple([max(_lengths(part).tolist(), default=0) for part in ragged_in(value)])


def longest_rows(batch: Any) -> tuple[int, ...]:
    """How long the longest row of a whole batch is, for each PackedSequence and nested tensor of its inputs, so that
    all of its micro-batches are padded alike; empty where the batch does not say (``longest``)."""
    return tuple(getattr(batch, "longest", ()))


def rows_of(values: Any, start: int, stop: int) -> Any:
    """Rows [start, stop) of everything in a nest: a PackedSequence of those rows, a nested tensor of those; what is
    neither ragged nor a tensor stays as it is. Nested tensors that had the same offsets have the same afterwards."""
    offsets = _Shared()

    def cut(part: Any) -> Any:
        if isinstance(part, PackedSequence):
            return _packed_rows(part, start, stop)
        if isinstance(part, Tensor):
            return _nested_rows(part, start, stop, offsets) if part.is_nested else part[start:stop]
        return part[start:stop] if isinstance(part, np.ndarray) else part

    return transform(values, cut, _GIVEN)


def opened(values: Any, longest: Sequence[int] = ()) -> Any:
    """A nest with padded rows in the place of everything ragged; ``longest``: rows that are at least so long, of each
    of :func:`ragged_in`."""
    widths, shared = iter(longest), _Shared()

    def open_(part: Any) -> Any:
        if not is_ragged(part):
            return part
        width = max(next(widths, 0), max(_lengths(part).tolist(), default=0))
        if isinstance(part, PackedSequence):
            padded, lengths = pad_packed_sequence(part, batch_first=True, total_length=width)
            return PackedRows(padded, lengths.to(padded.device), part.unsorted_indices)
        check_jagged(part)
        return NestedRows(_padded(part, width), _lengths(part), _ragged(part), shared.index(part))

    return transform(values, open_, _GIVEN)


def closed(values: Any) -> Any:
    """What :func:`opened` was given."""
    offsets: list[Tensor] = []
    lengths: list[Tensor] = []

    def close(part: Any) -> Any:
        if isinstance(part, PackedRows):
            return _packed(part)
        if isinstance(part, NestedRows):
            lengths.append(part.lengths)
            if part.shares < len(offsets):
                check_alike(lengths[part.shares], part.lengths)
                offsets.append(offsets[part.shares])
            else:
                offsets.append(F.pad(part.lengths.cumsum(0), (1, 0)))
            return _nested(part, offsets[-1])
        return part

    return transform(values, close, _OPENED)


class ClosedInputs(nn.Module):
    """The first of a model's own blocks, called with what its author calls it with: ``template`` is a sample of that,
    opened, with a slot for each tensor."""

    def __init__(self, block: nn.Module, template: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block
        self._template, self._call = template, call

    def forward(self, *tensors: Tensor) -> Any:
        """Close the inputs and run the block."""
        args, kwargs = self._call(closed(rebuild(self._template, tensors)))
        return self.block(*args, **kwargs)


def with_lengths(values: Any, lengths: Callable[[int, int], Tensor]) -> Any:
    """An opened nest whose rows have the lengths that ``lengths(rows, longest)`` gives."""

    def change(part: Any) -> Any:
        if not isinstance(part, Opened):
            return part
        found = lengths(len(part.lengths), part.padded.shape[1])
        if isinstance(part, PackedRows):
            order = found.argsort(descending=True, stable=True)
            if part.rank is None:
                return replace(part, lengths=found[order])
            return replace(part, lengths=found, rank=order.argsort())
        return replace(part, lengths=found)

    return transform(values, change, _OPENED)


def check_alike(first: Tensor, second: Tensor) -> None:
    """Raise :class:`DescribeError` where two ragged inputs, which had rows of the same lengths in the sample, have
    others. Nothing is known of lengths without values."""
    if type(first) is Tensor and not first.is_meta and not torch.equal(first, second):
        raise DescribeError(
            f"two ragged inputs have rows of lengths {first.tolist()[:_SHOWN]} and {second.tolist()[:_SHOWN]}, and had "
            "the same lengths in the sample that the model was described with: describe it with a sample of the inputs "
            "that it is to be given"
        )


def check_jagged(part: Tensor) -> None:
    """Raise :class:`DataError` for a nested tensor whose rows do not lie one after the other."""
    if part.layout is not torch.jagged:
        raise DataError(
            f"a nested tensor of {part.size(0)} row(s) has the strided layout, whose rows cannot be cut: make it with "
            "torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )


_GIVEN = Tensor, PackedSequence
_OPENED = Tensor, PackedRows, NestedRows


class _Shared:
    """Nested tensors by their ragged size, which they have in common if they have the same offsets."""

    def __init__(self) -> None:
        self._seen: list[tuple[Any, int]] = []
        self._offsets: dict[int, Tensor] = {}

    def index(self, part: Tensor) -> int:
        """The number of the first one like ``part``; each is asked for once, in order."""
        size, here = part.shape[_ragged(part)], len(self._seen)
        first = next((index for other, index in self._seen if bool(other == size)), here)
        self._seen.append((size, first))
        return first

    def offsets(self, part: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` gave for the first one like ``part``."""
        index = self.index(part)
        if index not in self._offsets:
            self._offsets[index] = make()
        return self._offsets[index]


def _lengths(part: Any) -> Tensor:
    """Of each row, in the rows' own order."""
    if isinstance(part, PackedSequence):
        ranks = torch.arange(count_rows(part))
        lengths = (part.batch_sizes > ranks[:, None]).sum(1)
        return lengths if part.unsorted_indices is None else lengths[part.unsorted_indices.cpu()]
    check_jagged(part)
    jagged: Any = part
    found: Tensor = jagged.offsets().diff() if jagged.lengths() is None else jagged.lengths()
    return found


def _ragged(part: Tensor) -> int:
    """The dimension of a nested tensor that is ragged."""
    return next(d for d, size in enumerate(part.shape) if not isinstance(size, int))


def _packed_rows(packed: PackedSequence, start: int, stop: int) -> PackedSequence:
    """Rows as they lie in ``packed``, one step after the other, the longest first and equal ones as they were."""
    rows = torch.arange(count_rows(packed))[start:stop]
    ranks, order = rows, None
    if packed.unsorted_indices is not None:
        ranks, order = packed.unsorted_indices.cpu()[start:stop].sort()
    sizes = packed.batch_sizes
    there = ranks < sizes[:, None]
    begins = F.pad(sizes.cumsum(0), (1, 0))[:-1]
    places = (begins[:, None] + ranks)[there].to(packed.data.device)
    counts = there.sum(1)
    order = None if order is None else order.to(packed.data.device)
    return PackedSequence(packed.data.index_select(0, places), counts[counts > 0], order)


def _nested_rows(nested: Tensor, start: int, stop: int, shared: _Shared) -> Tensor:
    check_jagged(nested)
    dimension = _ragged(nested)
    jagged: Any = nested
    given: Tensor = jagged.offsets()
    start, stop, _ = slice(start, stop).indices(len(nested))
    lengths = _lengths(nested)[start:stop]
    offsets = shared.offsets(nested, lambda: F.pad(lengths.cumsum(0), (1, 0)))
    values = _values(nested)
    if jagged.lengths() is None:
        low, high = int(given[start]), int(given[stop])
        found = values.narrow(dimension - 1, low, high - low)
    else:  # there are holes between rows
        parts = [
            values.narrow(dimension - 1, low, length)
            for low, length in zip(given[start:stop].tolist(), lengths.tolist())
        ]
        found = torch.cat(parts, dimension - 1) if parts else values.narrow(dimension - 1, 0, 0)
    return _jagged(found, offsets, dimension, max(lengths.tolist(), default=0))


def _values(nested: Tensor) -> Tensor:
    jagged: Any = nested
    values: Tensor = jagged.values()
    return values


def _padded(nested: Tensor, width: int) -> Tensor:
    """Rows of ``width`` elements each in dimension 1, and zeros."""
    rows = _nested_rows(nested, 0, len(nested), _Shared())
    values, lengths = _values(rows).movedim(_ragged(nested) - 1, 0), _lengths(rows)
    padded = values.new_zeros((len(nested), width, *values.shape[1:]))
    padded[_there(lengths, width)] = values
    return padded


def _there(lengths: Tensor, width: int) -> Tensor:
    """Which elements of padded rows are no filler."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def _packed(part: PackedRows) -> PackedSequence:
    padded, lengths = part.padded, part.lengths
    if part.rank is None:
        return pack_padded_sequence(padded, lengths.cpu(), batch_first=True)
    order = torch.argsort(part.rank)
    found = pack_padded_sequence(padded[order], lengths[order].cpu(), batch_first=True)
    return PackedSequence(found.data, found.batch_sizes, order)


def _nested(part: NestedRows, offsets: Tensor) -> Tensor:
    width = part.padded.shape[1]
    values = part.padded[_there(part.lengths, width)].movedim(0, part.dimension - 1)
    return _jagged(values, offsets, part.dimension, width)


def _jagged(values: Tensor, offsets: Tensor, dimension: int, longest: int) -> Tensor:
    found: Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, jagged_dim=dimension, max_seqlen=longest
    )
    return found


def plain_rows(tensor: Tensor) -> Tensor:
    """The rows of a nested tensor, one after the other; of any other, itself."""
    return _values(tensor) if tensor.layout is torch.jagged else tensor
