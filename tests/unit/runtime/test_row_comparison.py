"""Digests of batches: equal for equal rows, and another for any value that is changed on any rank."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from parallax.errors import DataError
from parallax.runtime.batch import TensorRows
from parallax.runtime.health.row_comparison import RowComparison, _folded

KINDS = (torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64)


class Given:
    """Rows as they were given."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        return len(self._targets)

    def inputs(self, start: int, stop: int) -> Any:
        return {key: value[start:stop] for key, value in self._inputs.items()}

    def targets(self, start: int, stop: int) -> Any:
        return self._targets[start:stop]


def raised(ranks: list[Any], times: int = 1) -> str:
    """Return the error of all ranks about their batches, within a number of steps."""
    answers: list[Any] = []
    meshes: list[Any] = [
        SimpleNamespace(world=1, device=torch.device("cpu"), all_gather_object=lambda mine: answers)
        for _ in ranks
    ]
    each = [RowComparison(mesh) for mesh in meshes]
    for _ in range(times):
        numbers = [found.numbers(batch) for found, batch in zip(each, ranks)]
        sums = [sum(column) for column in zip(*numbers)]
        answers[:] = [(found._digests, [True, True]) for found in each]
        try:
            for found in each:
                found.check(sums, "the batch")
        except DataError as error:
            return str(error).partition(" than ")[0]
    return ""


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_any_changed_value_on_any_rank_is_found(data: st.DataObject) -> None:
    world, rows = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 6))
    dtype = data.draw(st.sampled_from(KINDS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randint(0, 2, (rows, 3), generator=generator).to(dtype)
    batches = [({"x": values.clone(), "n": values.clone()}, values.clone()) for _ in range(world)]
    changed, rank = data.draw(st.booleans()), data.draw(st.integers(0, world - 1))
    part = data.draw(st.sampled_from(["x", "n", "targets"]))
    if changed:
        target: Any = batches[rank][1] if part == "targets" else batches[rank][0][part]
        place = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, 2))
        target[place] = ~target[place] if dtype is torch.bool else target[place] + 1
    in_memory = data.draw(st.booleans())
    kind = TensorRows if in_memory else Given
    output = raised([kind(*each) for each in batches], 1 if in_memory else 2 * rows)
    which = rank if world > 2 else 1  # of two, it is unknown which is wrong
    what = "targets" if part == "targets" else "inputs"
    assert output == (f"rank {which} has other {what}" if changed else "")


def test_a_digest_knows_shapes_types_and_places() -> None:
    one = torch.arange(6.0)
    others: list[Any] = [
        one,
        one.reshape(2, 3),
        one.double(),
        {"a": one},
        {"b": one},
        (one, one),
        [one, one + 0.5],
        one.to_sparse(),
        pack_sequence([one[:4], one[:2]]),
        torch.nested.nested_tensor([one[:4], one[:2]], layout=torch.jagged),
        np.arange(6),
        np.arange(6.0),
        "texts",
        6,
        None,
    ]
    digests = [_folded(each) for each in others]
    assert len(set(digests)) == len(others) - 1, "what is sparse has the same values"
    assert digests == [_folded(copy.deepcopy(each)) for each in others]


@pytest.mark.parametrize("broken", [0, 1])
def test_rows_that_a_rank_cannot_read_are_not_compared(broken: int) -> None:
    class Broken(TensorRows):
        def inputs(self, start: int, stop: int) -> Tensor:
            raise OSError("not on this host")

    batches: list[Any] = [TensorRows(torch.ones(2, 1), torch.ones(2)) for _ in range(3)]
    batches[broken] = Broken(torch.zeros(2, 1), torch.ones(2))
    assert raised(batches) == ""
    batches[2] = TensorRows(torch.ones(2, 1), torch.zeros(2))
    assert raised(batches) == "rank 2 has other targets"
