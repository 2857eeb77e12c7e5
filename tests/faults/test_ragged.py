"""Rows of several lengths that cannot be divided into micro-batches end in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.commands import one_line

MODULE = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, given):
        return self.head(self.layer(given)[1][0][-1])


class Rows:
    def __init__(self, kind, rows):
        self.kind, self.rows = kind, rows

    def __len__(self):
        return self.rows

    def inputs(self, start, stop):
        padded, lengths = torch.ones(stop - start, 3, 4), torch.arange(start, stop) % 3 + 1
        rows = [row[:length] for row, length in zip(padded, lengths)]
        if self.kind == "packed":
            return (pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False),)
        if self.kind == "nested":
            return (torch.nested.as_nested_tensor(rows, layout=torch.jagged),)
        if self.kind == "strided":
            return (torch.nested.as_nested_tensor(rows, layout=torch.strided),)
        return (rows,)

    def targets(self, start, stop):
        return torch.zeros(stop - start, dtype=torch.int64)


class Source:
    def __init__(self, kind="packed"):
        self.kind = kind

    def batch(self, rows):
        return Rows(self.kind, rows)

    def validation(self, index, rows):
        return self.batch(rows)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
"""


@pytest.mark.parametrize(
    ("kind", "message", "remedy"),
    [
        ("packed", "inputs hold a PackedSequence", "pad_packed_sequence(packed, batch_first=True)"),
        ("nested", "inputs hold a nested tensor", "nested.to_padded_tensor(0.0)"),
        ("strided", "inputs hold a nested tensor", "nested.to_padded_tensor(0.0)"),
        (
            "list",
            "the inputs of one row are 1 tensor(s) and of two rows 2",
            "pad_sequence(rows, batch_first=True)",
        ),
    ],
)
def test_ragged_rows_are_one_line(
    here: Path, called: Callable[..., tuple[int, str, str]], kind: str, message: str, remedy: str
) -> None:
    (here / "ragged.py").write_text(MODULE)
    own = ["model=custom", "model.target=ragged:Model", "data=custom", "data.target=ragged:Source"]
    code, _, err = called("plan", *own, f"data.kwargs.kind={kind}", "cluster.devices=1")
    assert code == 2
    line = one_line(err)
    assert message in line
    assert remedy in line
