"""Inputs and targets that are not as many as the rows are refused; what has no rows, or lists of them, is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallax.errors import DataError
from parallax.runtime.health.row_check import RowCheck

ROWS = 16
Values = Callable[[int, int], Any]


class OwnRows:
    def __init__(self, inputs: Values, targets: Values, rows: int = ROWS) -> None:
        self.inputs, self.targets, self.rows, self.name = inputs, targets, rows, "own"

    def __len__(self) -> int:
        return self.rows


def of(count: int, *shape: int) -> Values:
    values = torch.zeros(count, *shape)
    return lambda start, stop: values[start:stop]


def boxes(start: int, stop: int) -> torch.Tensor:
    """One for the first row, none for the second, two for the third."""
    return torch.zeros(sum(row % 3 if row else 1 for row in range(start, stop)), 4)


def take(batch: Any, rows: int) -> None:
    """Inputs and targets as a step takes them, so many rows at a time."""
    checked = RowCheck().of(batch, "the batch of step 3")
    for start in range(0, len(batch), rows):
        for ask in (checked.inputs, checked.targets):
            ask(start, min(start + rows, len(batch)))


TABLE, LISTED = torch.zeros(8, 4), [torch.zeros(n % 3, 4) for n in range(ROWS)]
WHOLE: dict[str, Values] = {
    "a table": lambda start, stop: (torch.zeros(stop - start), TABLE),
    "one number": lambda start, stop: {"x": torch.zeros(stop - start, 2), "t": torch.tensor(2.0)},
    "one row for all": lambda start, stop: torch.zeros(1, 5),
    "nothing": lambda start, stop: None,
    "no elements": lambda start, stop: torch.zeros(0),
    "a list for each row": lambda start, stop: LISTED[start:stop],
    "two in a list": lambda start, stop: [torch.zeros(stop - start), torch.zeros(stop - start, 2)],
    "several for a row": boxes,
}


@pytest.mark.parametrize("rows", [1, 3, 4, ROWS])
@pytest.mark.parametrize("kind", WHOLE)
def test_what_has_no_rows_is_let_be(kind: str, rows: int) -> None:
    take(OwnRows(of(ROWS, 4), WHOLE[kind]), rows)
    take(OwnRows(WHOLE[kind], of(ROWS)), rows)


SHORT: dict[str, tuple[Values, Values, str]] = {
    "targets": (of(ROWS, 4), of(12), "its targets have 12"),
    "one target": (of(ROWS, 4), of(1), "its targets have 1"),
    "inputs": (of(9, 4), of(ROWS), "its inputs have 9"),
    "a part": (
        lambda start, stop: (of(ROWS)(start, stop), of(15, 2)(start, stop)),
        of(ROWS),
        r"its inputs\[1\] have 15",
    ),
    "a part with a name": (
        of(ROWS),
        lambda start, stop: {"a\n": [of(ROWS)(start, stop), of(12)(start, stop)]},
        r"its targets\['a\\n'\]\[1\] have 12",
    ),
    "a list": (of(ROWS), lambda start, stop: LISTED[:12][start:stop], "its targets have 12"),
}


@pytest.mark.parametrize("rows", [1, 3, 4, ROWS])
@pytest.mark.parametrize("kind", SHORT)
def test_too_few_are_refused_with_both_numbers(kind: str, rows: int) -> None:
    inputs, targets, output = SHORT[kind]
    with pytest.raises(DataError, match=rf"^the batch of step 3 has 16 row\(s\), and {output}: "):
        take(OwnRows(inputs, targets), rows)
    with pytest.raises(DataError, match=output):
        RowCheck().of(OwnRows(inputs, targets), "a batch").check_last()


def test_more_rows_than_requested() -> None:
    def more(start: int, stop: int) -> torch.Tensor:
        return torch.zeros(stop - start + (stop - start > 2))

    with pytest.raises(DataError, match=r"its targets are 5 for 4 row\(s\)"):
        take(OwnRows(of(ROWS), more), 4)


def test_rows_are_requested_again_only_for_an_unexpected_length() -> None:
    requested: list[tuple[int, int]] = []

    def targets(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        requested.append((start, stop))
        return torch.zeros(stop - start), TABLE

    check = RowCheck()
    for step in range(2):
        checked = check.of(OwnRows(of(ROWS), targets), "a batch")
        checked.targets(0, 8)
        assert requested == [(0, 8)]
        requested.clear()
        checked.targets(8, 12)
        assert requested[0] == (8, 12)
        assert (len(requested) > 1) == (step == 0)
        requested.clear()


def test_a_source_that_does_not_give_single_rows() -> None:
    def targets(start: int, stop: int) -> torch.Tensor:
        if stop - start == 1:
            raise ValueError
        return torch.zeros(3)

    take(OwnRows(of(ROWS), targets), 4)


def test_what_else_a_batch_says_is_passed_on() -> None:
    checked = RowCheck().of(OwnRows(of(4), of(4), 4), "a batch")
    assert (len(checked), checked.name) == (4, "own")
    with pytest.raises(AttributeError):
        checked.other  # noqa: B018
