"""Rows of several lengths, cut: a PackedSequence of some rows is what packing those rows alone gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from parallax.errors import DataError
from parallax.model.block import to_device
from parallax.model.ragged import closed, longest_in, opened, rows_of
from parallax.runtime.batch import TensorRows

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=9)


def make_rows(lengths: list[int], *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    random = torch.Generator().manual_seed(len(lengths))
    return [
        torch.randint(1, 99, (length, *shape), generator=random).to(dtype) for length in lengths
    ]


def same(one: PackedSequence, other: PackedSequence) -> bool:
    return all(
        (a is None and b is None) or (a.dtype is b.dtype and torch.equal(a, b))
        for a, b in zip(one, other)
    )


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.data())
def test_rows_of_a_packed_sequence(lengths: list[int], data: st.DataObject) -> None:
    """In any order of lengths, and sorted, however it was padded; whole numbers and rows of numbers."""
    start = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(start + 1, len(lengths)))
    for rows in (make_rows(lengths, 3), make_rows(lengths, dtype=torch.int64)):
        batch = TensorRows(pack_sequence(rows, enforce_sorted=False), torch.arange(len(rows)))
        (found,) = batch.inputs(start, stop)
        assert same(found, pack_sequence(rows[start:stop], enforce_sorted=False))
        longest_first = sorted(rows, key=len, reverse=True)
        batch = TensorRows({"x": [pack_sequence(longest_first)]}, torch.arange(len(rows)))
        found = batch.inputs(start, stop)["x"][0]
        assert found.sorted_indices is None
        assert same(found, pack_sequence(longest_first[start:stop]))
        assert batch.longest == (max(lengths),)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.data())
def test_rows_of_a_nested_tensor(lengths: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(start + 1, len(lengths)))
    rows = make_rows(lengths, 3)
    first = jagged(rows)
    second = torch.nested.nested_tensor_from_jagged(2 * first.values(), first.offsets())  # type: ignore[operator]
    batch = TensorRows((first, second), {"aims": first})
    found = batch.inputs(start, stop)
    for one, other in ((found, 3), (closed(opened(found, (9, 9))), 3)):
        together = one[0] + one[1]  # which have the same offsets, as before
        assert [torch.equal(a, other * b) for a, b in zip(together.unbind(), rows[start:stop])]
        assert len(one[0].unbind()) == stop - start
    assert torch.equal(batch.targets(start, stop)["aims"].unbind()[-1], rows[stop - 1])


def test_equal_rows_keep_their_order() -> None:
    """Which of two rows of one length comes first is the sequence's own."""
    padded = torch.arange(12.0).view(4, 3)
    packed = pack_padded_sequence(
        padded[[2, 0, 3, 1]], torch.tensor([3, 3, 2, 2]), batch_first=True
    )
    own = PackedSequence(packed.data, packed.batch_sizes, torch.tensor([2, 0, 3, 1]))
    assert same(rows_of(own, 0, 4), own)
    (found,) = closed(opened((rows_of(own, 0, 3),)))
    assert found.sorted_indices.tolist() == [2, 0, 1]
    assert found.data.tolist() == [6, 0, 3, 7, 1, 4, 8, 2]


def test_a_dimension_of_several_lengths_that_is_not_the_first() -> None:
    rows = [torch.ones(2, length) * length for length in (3, 1, 2, 2)]
    (found,) = TensorRows(jagged(rows), torch.arange(4)).inputs(1, 4)
    for each in (found, closed(opened(found))):
        assert all(torch.equal(a, b) for a, b in zip(each.unbind(), rows[1:], strict=True))


def test_rows_with_holes_between_them() -> None:
    whole = torch.arange(24.0).view(4, 6)
    starts, lengths = torch.tensor([0, 1, 0, 2]), torch.tensor([3, 2, 5, 4])
    narrowed = torch.nested.narrow(whole, 1, starts, lengths, layout=torch.jagged)
    (found,) = TensorRows(narrowed, torch.arange(4)).inputs(1, 4)
    wanted = [whole[1, 1:3], whole[2, :5], whole[3, 2:]]
    for each in (found, closed(opened(found))):
        assert all(torch.equal(a, b) for a, b in zip(each.unbind(), wanted, strict=True))


def test_opened_rows_may_be_longer_than_their_longest() -> None:
    packed, nested = pack_sequence(make_rows([3, 1])), jagged(make_rows([2, 4]))
    assert longest_in((packed, nested)) == (3, 4)
    found = opened((packed, nested), (5, 6))
    assert [part.padded.shape[1] for part in found] == [5, 6]
    again = closed(found)
    assert same(again[0], packed)
    assert again[1].to_padded_tensor(0.0).shape == (2, 6)  # as long as the whole batch's


def test_numbers_of_rows_stay_on_the_cpu() -> None:
    packed = pack_sequence(make_rows([2, 3], 2), enforce_sorted=False)
    moved = to_device({"x": packed}, torch.device("meta"))["x"]
    assert moved.data.is_meta
    assert moved.batch_sizes.device.type == "cpu"


def test_no_rows_at_all() -> None:
    batch = TensorRows(
        (pack_sequence(make_rows([2, 3][::-1])), jagged(make_rows([1, 2]))), [torch.ones(2)]
    )
    packed, nested = batch.inputs(1, 1)
    assert (packed.data.numel(), packed.batch_sizes.numel(), nested.size(0)) == (0, 0, 0)


def strided() -> Any:
    rows = make_rows([1, 2])
    return torch.nested.nested_tensor(rows, layout=torch.strided)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (strided, r"^a nested tensor of 2 row.s. has the strided layout.*layout=torch.jagged"),
        (
            lambda: pack_sequence(make_rows([3, 2, 1])),
            r"the same number of rows.*\[\(3, 3\), \(2,\)\]",
        ),
        (lambda: {"x": jagged(make_rows([3, 2, 1]))}, "the same number of rows"),
    ],
    ids=["strided", "packed", "nested"],
)
def test_what_cannot_be_a_batch_is_one_line(inputs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        TensorRows(inputs(), torch.zeros(2))
    assert "\n" not in str(error.value)
