"""Forwards that are given rows of several lengths, or pack them, and their chains: the same on any rows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
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

from parallax.errors import DescribeError
from parallax.model.describe import Chain, as_tuple, describe
from parallax.model.materialise import materialise
from parallax.model.recording.inputs import call_arguments
from parallax.model.verification.verify import verify
from parallax.runtime.batch import TensorRows

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


class TwoLayers(Layers):
    def forward(self, words: PackedSequence) -> Tensor:
        found, _ = self.second(self.first(self.data(words))[0])
        return self.scores(*pad_packed_sequence(found, batch_first=True))


class LastStates(Layers):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        _, (hidden, _) = self.first(self.data(batch["words"]))
        scores: Tensor = self.head(torch.tanh(self.middle(hidden[-1])) * batch["weights"])
        return scores


class PacksItself(Layers):
    """In its own forward, and pads to the longest row of those it is given."""

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.scores(*pad_packed_sequence(self.first(packed)[0], batch_first=True))


class SortsItself(Layers):
    """And pads to what it was given."""

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        length = words.shape[1]
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(self.embed(words)[order], lengths.cpu(), batch_first=True)
        padded, _ = pad_packed_sequence(self.first(packed)[0], True, total_length=length)
        found, back = torch.tanh(self.middle(padded)), order.argsort()
        scores: Tensor = self.head(found[back].mean(1))
        return scores


class TwoInputs(Layers):
    """Of the same lengths."""

    def forward(self, features: PackedSequence, words: PackedSequence) -> Tensor:
        both = PackedSequence(features.data + self.embed(words.data), *words[1:])
        return self.scores(*pad_packed_sequence(self.first(both)[0], batch_first=True))


class ReturnsPacked(Layers):
    def forward(self, words: PackedSequence) -> PackedSequence:
        found, _ = self.first(self.data(words))
        return PackedSequence(self.head(found.data), *found[1:])


class Nested(Layers):
    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        padded = F.layer_norm(x, (WIDTH,)).to_padded_tensor(0.0)
        return self.scores(padded, words.offsets().diff())  # type: ignore[operator]


class Attends(Layers):
    def forward(self, words: Tensor, features: Tensor) -> Tensor:
        x = self.embed(words) + features
        q = self.middle(x).view(x.size(0), x.size(1), 2, WIDTH // 2).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(len(x), -1, WIDTH)
        scores: Tensor = self.head(torch.tanh(x.to_padded_tensor(0.0)).sum(1))
        return scores


class AsksForLengths(Layers):
    def forward(self, words: Tensor) -> Tensor:
        rows = [row.sum(0) for row in self.embed(words).unbind()]
        scores: Tensor = self.head(torch.stack(rows))
        return scores


class Pads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, packed: PackedSequence) -> Tensor:
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0].sum(1)


def in_a_row() -> nn.Module:
    return nn.Sequential(Pads(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))


RANDOM = torch.Generator().manual_seed(5)
WORDS = [torch.randint(1, 16, (length,), generator=RANDOM) for length in LENGTHS]
FEATURES = [torch.randn(length, WIDTH, generator=RANDOM, dtype=torch.float64) for length in LENGTHS]


def packed(rows: list[Tensor]) -> PackedSequence:
    return pack_sequence(rows, enforce_sorted=False)


def nested() -> tuple[Tensor, Tensor]:
    features = torch.nested.nested_tensor(FEATURES, layout=torch.jagged)
    offsets: Tensor = features.offsets()  # type: ignore[operator]
    return torch.nested.nested_tensor_from_jagged(torch.cat(WORDS), offsets), features


def padded() -> tuple[Tensor, Tensor]:
    return pad_sequence(WORDS, batch_first=True), torch.tensor(LENGTHS)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], int]] = {
    "two layers": (TwoLayers, lambda: packed(WORDS), 3),
    "sorted": (TwoLayers, lambda: pack_sequence(sorted(WORDS, key=len, reverse=True)), 3),
    "last states": (
        LastStates,
        lambda: ({"words": packed(WORDS), "weights": torch.ones(ROWS, 1)},),
        3,
    ),
    "packs itself": (PacksItself, padded, 4),
    "sorts itself": (SortsItself, padded, 2),
    "two inputs": (TwoInputs, lambda: (packed(FEATURES), packed(WORDS)), 3),
    "returns packed": (ReturnsPacked, lambda: packed(WORDS), 1),
    "nested": (Nested, lambda: nested()[0], 3),
    "attends": (Attends, nested, 2),
    "in a row": (in_a_row, lambda: {"packed": packed(FEATURES)}, 3),
}


def make_chain(build: Callable[[], nn.Module], batch: TensorRows) -> Chain:
    return describe(
        build,
        seed=3,
        dtype=torch.float64,
        sample=lambda rows: batch.inputs(0, min(rows, ROWS)),
    )


def run(chain: Chain, inputs: Any, longest: tuple[int, ...] = ()) -> Any:
    found = chain.arguments(inputs, longest)
    for block in materialise(chain, 0, len(chain.blocks), torch.device("cpu")):
        found = as_tuple(block(*found))
    return chain.results(found)


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_gives_what_the_model_gives(name: str, caplog: pytest.LogCaptureFixture) -> None:
    build, inputs, blocks = MODELS[name]
    targets: Any = torch.arange(ROWS) % 3
    if name == "returns packed":
        targets = packed([row % 3 for row in WORDS])
    batch = TensorRows(inputs(), targets)
    chain = make_chain(build, batch)
    assert len(chain.blocks) >= blocks
    plain = copy.deepcopy(
        chain.model, chain.construction.values().parts(chain.model, chain.dtype, {})
    )
    if name == "in a row":
        plain.forward = lambda packed: nn.Sequential.forward(plain, packed)  # type: ignore[arg-type]
    for start, stop in PARTS:
        args, kwargs = call_arguments(batch.inputs(start, stop))
        wanted, found = plain(*args, **kwargs), run(chain, batch.inputs(start, stop))
        if isinstance(wanted, PackedSequence):
            assert torch.equal(found.sorted_indices, wanted.sorted_indices)
            wanted, found = wanted.data, found.data
        assert torch.equal(found, wanted), (start, stop)

    def loss(outputs: Any, aims: Any) -> Tensor:
        if isinstance(outputs, PackedSequence):
            outputs, aims = outputs.data, aims.data
        return F.cross_entropy(outputs, aims)

    with caplog.at_level(logging.WARNING):
        if name != "in a row":  # called by the names of its first block
            verify(chain, loss, batch, when=True)
    assert "was not checked" not in caplog.text


def test_micro_batches_are_padded_as_the_batch_is() -> None:
    """The mean over padded rows is that of the whole batch, whichever rows there are."""
    batch = TensorRows(packed(WORDS), torch.arange(ROWS))
    chain = make_chain(TwoLayers, batch)
    whole = run(chain, batch.inputs(0, ROWS))
    parts = [run(chain, batch.inputs(i, i + 4), batch.longest) for i in range(0, ROWS, 4)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-13, atol=1e-13)


def test_an_order_of_rows_does_not_pass_a_cut() -> None:
    """Half of it would order nothing: what is sorted is put back in the same block."""
    chain = make_chain(SortsItself, TensorRows(padded(), torch.arange(ROWS)))
    assert [block.name for block in chain.blocks] == ["embed", "head"]


@pytest.mark.parametrize(
    ("build", "sample", "message"),
    [
        (TwoLayers, lambda rows: WORDS[:rows], "of one row has 1 tensor.s. and of two rows 2"),
        (
            AsksForLengths,
            lambda rows: tuple(TensorRows(nested()[0], nested()[0]).inputs(0, rows)),
            "it asks how long a nested tensor's rows are, at ",
        ),
        (in_a_row, None, "hold a PackedSequence, and the model was described without one"),
    ],
    ids=["list", "lengths", "no sample"],
)
def test_what_cannot_be_described_is_one_line(
    build: Callable[[], nn.Module], sample: Any, message: str
) -> None:
    with pytest.raises(DescribeError, match=message) as error:
        describe(build, sample=sample).arguments((packed(FEATURES),))
    assert "Traceback" not in str(error.value)


def test_a_packed_sequence_between_blocks_of_ones_own_is_one_line() -> None:
    with pytest.raises(
        DescribeError, match=r"returned a PackedSequence.*pack or nest them"
    ) as error:
        as_tuple(packed(FEATURES))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (lambda: packed(WORDS), "0.padded, 0.lengths, 0.rank"),
        (lambda: nested()[0], "0.nested, 0.lengths"),
        (lambda: padded()[0], "0"),
    ],
    ids=["unsorted", "nested", "padded"],
)
def test_inputs_of_another_kind_are_one_line(given: Any, names: str) -> None:
    """A model that was described with sorted rows does not sort them."""
    chain = make_chain(TwoLayers, TensorRows(MODELS["sorted"][1](), torch.arange(ROWS)))
    with pytest.raises(DescribeError) as error:
        chain.arguments((given(),))
    assert f"inputs are {names}, and the model was described with 0.padded, 0.lengths: " in str(
        error.value
    )
    assert "\n" not in str(error.value)


def test_inputs_that_do_not_have_the_lengths_of_the_sample_are_one_line() -> None:
    chain = make_chain(TwoInputs, TensorRows((packed(FEATURES), packed(WORDS)), torch.arange(ROWS)))
    with pytest.raises(DescribeError, match=r"lengths \[3, 5\] and \[5, 1\]") as error:
        run(chain, (packed(FEATURES[:2]), packed(WORDS[1:3])))
    assert "\n" not in str(error.value)
