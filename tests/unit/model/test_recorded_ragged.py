"""Chains of models that pack or nest padded rows inside their forward give what the model gives, on any rows."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)

from parallax.errors import DataError, DescribeError
from parallax.model.describe import Chain, as_tuple, describe
from parallax.model.materialise import materialise
from parallax.model.recording.inputs import call_arguments
from parallax.model.verification.verify import verify
from parallax.runtime.batch import TensorRows
from parallax.runtime.health.row_check import RowCheck

LENGTHS, WIDTH = (3, 5, 1, 5, 4, 2, 7, 6, 2, 3, 8, 1), 8
ROWS = len(LENGTHS)
PARTS = (0, ROWS), (0, 1), (2, 5), (5, 9), (8, 10)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def scores(self, padded: Tensor, lengths: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.middle(padded)).mean(1) / lengths[:, None])
        return found

    def data(self, packed: PackedSequence) -> PackedSequence:
        return PackedSequence(self.embed(packed.data), *packed[1:])


class PacksItself(Layers):
    """In its own forward, and pads to the longest row of those it is given."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.scores(*pad_packed_sequence(self.first(packed)[0], batch_first=True))


class SortsItself(Layers):
    """And pads to what it was given."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        length = tokens.shape[1]
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(self.embed(tokens)[order], lengths.cpu(), batch_first=True)
        padded, _ = pad_packed_sequence(self.first(packed)[0], True, total_length=length)
        found, back = torch.tanh(self.middle(padded)), order.argsort()
        scores: Tensor = self.head(found[back].mean(1))
        return scores


class ReturnsPacked(Layers):
    def forward(self, tokens: Tensor, lengths: Tensor) -> PackedSequence:
        packed = pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        found, _ = self.first(packed)
        return PackedSequence(self.head(found.data), *found[1:])


RANDOM = torch.Generator().manual_seed(5)
SEQUENCES = [torch.randint(1, 16, (length,), generator=RANDOM) for length in LENGTHS]


def padded() -> tuple[Tensor, Tensor]:
    return pad_sequence(SEQUENCES, batch_first=True), torch.tensor(LENGTHS)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], int]] = {
    "packs itself": (PacksItself, padded, 4),
    "sorts itself": (SortsItself, padded, 2),
    "returns packed": (ReturnsPacked, padded, 1),
}


def make_chain(build: Callable[[], nn.Module], batch: TensorRows) -> Chain:
    return describe(
        build,
        seed=3,
        dtype=torch.float64,
        sample=lambda rows: batch.inputs(0, min(rows, ROWS)),
    )


def run(chain: Chain, inputs: Any) -> Any:
    found = chain.arguments(inputs)
    for block in materialise(chain, 0, len(chain.blocks), torch.device("cpu")):
        found = as_tuple(block(*found))
    return chain.results(found)


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_gives_what_the_model_gives(name: str, caplog: pytest.LogCaptureFixture) -> None:
    build, inputs, blocks = MODELS[name]
    targets: Any = torch.arange(ROWS) % 3
    if name == "returns packed":
        targets = pad_sequence([row % 3 for row in SEQUENCES], batch_first=True)
    batch = TensorRows(inputs(), targets)
    chain = make_chain(build, batch)
    assert len(chain.blocks) >= blocks
    plain = copy.deepcopy(
        chain.model, chain.deferred.values().deepcopy_memo(chain.model, chain.dtype, {})
    )
    for start, stop in PARTS:
        args, kwargs = call_arguments(batch.inputs(start, stop))
        wanted, found = plain(*args, **kwargs), run(chain, batch.inputs(start, stop))
        if isinstance(wanted, PackedSequence):
            assert torch.equal(found.sorted_indices, wanted.sorted_indices)
            wanted, found = wanted.data, found.data
        assert torch.equal(found, wanted), (start, stop)

    def loss(outputs: Any, aims: Any) -> Tensor:
        if isinstance(outputs, PackedSequence):
            scores, lengths = pad_packed_sequence(outputs, batch_first=True)
            there = torch.arange(scores.shape[1]) < lengths[:, None]
            return F.cross_entropy(scores[there], aims[:, : scores.shape[1]][there])
        return F.cross_entropy(outputs, aims)

    with caplog.at_level(logging.WARNING):
        verify(chain, loss, batch, when=True)
    assert "was not checked" not in caplog.text


def test_a_row_permutation_does_not_cross_a_boundary() -> None:
    """Half of it would order nothing: what is sorted is put back in the same block."""
    chain = make_chain(SortsItself, TensorRows(padded(), torch.arange(ROWS)))
    assert [block.name for block in chain.blocks] == ["embed", "head"]


def test_a_packed_sequence_between_blocks_of_ones_own_is_one_line() -> None:
    packed = pack_sequence(SEQUENCES, enforce_sorted=False)
    with pytest.raises(
        DescribeError, match=r"returned a PackedSequence.*pack or nest them"
    ) as error:
        as_tuple(packed)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("name", "kind", "given"),
    [
        ("packed", "PackedSequence", lambda rows: pack_sequence(rows, enforce_sorted=False)),
        ("packed", "PackedSequence", lambda rows: pack_sequence(sorted(rows, key=len)[::-1])),
        ("nested", "nested tensor", partial(torch.nested.nested_tensor, layout=torch.jagged)),
        ("nested", "nested tensor", partial(torch.nested.nested_tensor, layout=torch.strided)),
    ],
    ids=["packed", "sorted", "jagged", "strided"],
)
def test_rows_that_are_not_padded_are_refused_with_what_pads_them(
    name: str, kind: str, given: Callable[[list[Tensor]], Any]
) -> None:
    """As inputs, targets, in a nest, from a source of one's own, in a sample: in one line, which works as it stands."""
    value = given([row.double() for row in SEQUENCES])
    rows = {"x": torch.zeros(ROWS)}

    class Own:
        def __len__(self) -> int:
            return ROWS

        def inputs(self, start: int, stop: int) -> Any:
            return {"x": [value]}

    tries: list[tuple[str, Callable[[], object]]] = [
        ("inputs", lambda: TensorRows(value, torch.zeros(ROWS))),
        ("inputs", lambda: TensorRows({"x": [value]}, torch.zeros(ROWS))),
        ("targets", lambda: TensorRows(rows, {"aims": (value,)})),
        ("inputs", lambda: RowCheck().of(Own(), "a batch").inputs(0, 2)),  # type: ignore[arg-type]
        (
            "a sample's inputs",
            lambda: describe(PacksItself, sample=lambda rows: (value, value)),
        ),
    ]
    for what, call in tries:
        with pytest.raises(DataError, match=f"^{what} hold a {kind}, .*lengths: give pad") as error:
            call()
        message = str(error.value)
        assert "\n" not in message
    code = re.search(r"\(padded, lengths = (.*)\), and pack", message)
    assert code is not None
    padded, lengths = eval(code[1], {"torch": torch, name: value})
    assert sorted(lengths.tolist()) == sorted(LENGTHS)
    assert padded.shape == (ROWS, max(LENGTHS))
    TensorRows((padded, lengths), torch.zeros(ROWS))


def test_a_list_of_rows_is_refused_with_what_pads_it() -> None:
    with pytest.raises(
        DescribeError, match=r"of one row has 1 tensor.s. and of two rows 2"
    ) as error:
        describe(PacksItself, sample=lambda rows: SEQUENCES[:rows])
    code = re.search(r"\(padded, lengths = (.*)\)$", str(error.value))
    assert code is not None
    found, lengths = eval(code[1], {"torch": torch, "rows": SEQUENCES})
    assert torch.equal(found, padded()[0])
    assert torch.equal(lengths, padded()[1])
