"""The order of rows: each row once an epoch, the same from any step, without memory for the rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.errors import ConfigError
from parallax.train.data.order import LAST, Permutation, Place, RowOrder, mixed


@given(size=st.integers(1, 3000), key=st.integers(0, 2**63 - 1))
def test_a_permutation_maps_each_number_to_another(size: int, key: int) -> None:
    found = Permutation(size, key)(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))


def test_a_permutation_of_many_rows_is_computed_where_it_is_read() -> None:
    size = 10**12 + 7
    numbers = np.array([0, 1, 2, size - 1])
    found = Permutation(size, 5)(numbers)
    assert len(set(found.tolist())) == 4
    assert (found < size).all()
    assert (found >= 0).all()


def test_orders_are_spread_evenly() -> None:
    """Over many keys, each row comes about as often at each place; and neighbours do not stay neighbours."""
    size, keys = 7, 4000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), Permutation(size, key)(np.arange(size))] += 1
    expected = keys / size
    assert (
        ((counts - expected) ** 2 / expected).sum()
    ) < 90  # chi², 36 degrees of freedom: 90 is 1e-6
    order = Permutation(10_000, 3)(np.arange(10_000))
    assert np.count_nonzero(np.abs(np.diff(order)) == 1) < 20
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


def test_the_order_never_changes_between_versions() -> None:
    """A checkpoint of today must continue in the same order on next year's numpy."""
    assert Permutation(10, 1, 2)(np.arange(10)).tolist() == [5, 8, 7, 6, 2, 4, 9, 0, 3, 1]
    assert mixed(1, np.array([2, 3])).tolist() == [13608149317741381227, 9716232063330790915]


def taken(order: RowOrder, place: Place, batches: list[int]) -> tuple[list[tuple[int, int]], Place]:
    found = []
    for rows in batches:
        batch, place = order.take(place, rows)
        found += list(zip(batch.epochs.tolist(), batch.rows.tolist()))
    return found, place


@given(
    size=st.integers(1, 40),
    rows=st.integers(1, 50),
    seed=st.integers(0, 100),
    last=st.sampled_from(LAST),
    shuffle=st.booleans(),
)
def test_each_row_comes_once_an_epoch(
    size: int, rows: int, seed: int, last: str, shuffle: bool
) -> None:
    order = RowOrder(size, seed, shuffle=shuffle, last=last)
    steps = order.steps(3, rows)
    found, place = taken(order, Place(), [rows] * steps)
    for epoch in range(3):
        read = [row for known, row in found if known == epoch]
        if last == "drop":
            whole = min(rows, size) * max(1, size // rows)
            assert len(read) == len(set(read)) == whole
        elif last == "repeat":
            assert set(read) == set(range(size))
            assert len(read) == rows * -(-size // rows)
        else:
            assert sorted(read) == list(range(size))
    assert order.place(steps, rows) == place or last != "continue"
    # From any step on, the rows are those of the whole run.
    middle = steps // 2
    skipped = len(taken(order, Place(), [rows] * middle)[0])
    rest, _ = taken(order, order.place(middle, rows), [rows] * (steps - middle))
    assert rest == found[skipped:]


@given(size=st.integers(1, 30), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_any_batch_size_continues_the_same_sequence(size: int, sizes: list[int]) -> None:
    order = RowOrder(size, 4)
    whole, _ = taken(order, Place(), [sum(sizes)])
    assert taken(order, Place(), sizes)[0] == whole


def test_random_numbers_of_a_row_depend_on_seed_epoch_and_row() -> None:
    order = RowOrder(50, 1)
    batch, _ = order.take(Place(), 100)
    seeds = batch.seeds(1)
    assert len(set(seeds.tolist())) == 100
    again, _ = order.take(Place(0, 20), 10)
    assert again.seeds(1).tolist() == seeds[20:30].tolist()
    assert set(batch.seeds(2).tolist()).isdisjoint(seeds.tolist())


@pytest.mark.parametrize("rows", [0, -1])
def test_refuses_what_is_no_number_of_rows(rows: int) -> None:
    with pytest.raises(ConfigError, match="rows"):
        RowOrder(10, 0).take(Place(), rows)
