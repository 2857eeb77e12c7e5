"""A model that is given a PackedSequence or a nested tensor trains like any other, however it is cut."""

from __future__ import annotations

import copy
import itertools
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from parallax.model.describe import Chain, describe
from parallax.model.precision import PrecisionConfig
from parallax.model.recording.inputs import call_arguments
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan

LENGTHS, WIDTH = (3, 5, 1, 5, 4, 2, 7), 8
ROWS = len(LENGTHS)


class Packed(nn.Module):
    """The mean over padded rows: that of the longest row of the batch, whichever rows a micro-batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True)
        self.middle, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, words: PackedSequence, weights: Tensor) -> Tensor:
        packed = PackedSequence(self.embed(words.data), *words[1:])
        padded, lengths = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        means = torch.tanh(self.middle(padded)).mean(1)
        scores: Tensor = self.head(means * weights / lengths[:, None])
        return scores


class Nested(nn.Module):
    """Two nested tensors with the same offsets, and perhaps attention."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.embed = nn.Embedding(16, WIDTH)
        self.norm, self.keys = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, words: Tensor, features: Tensor) -> Tensor:
        x = self.norm(self.embed(words) + features)
        heads = (len(x), x.size(1), 2, WIDTH // 2)
        q, k = x.view(*heads).transpose(1, 2), self.keys(x).view(*heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, k) if self.attends else q * k
        x = x + mixed.transpose(1, 2).flatten(-2)
        padded = torch.tanh(self.middle(x.to_padded_tensor(0.0)))
        scores: Tensor = self.head(padded.mean(1))
        return scores


class Pads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, packed: PackedSequence) -> Tensor:
        return pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0].sum(1)


def in_a_row() -> nn.Module:
    return nn.Sequential(Pads(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


MODELS: dict[str, Any] = {
    "packed": Packed,
    "nested": partial(Nested, attends=False),
    "attends": partial(Nested, attends=True),
    "sorted": in_a_row,
}
WAYS: dict[str, dict[str, Any]] = {
    "stages": {"replicas": (1, 1)},
    "replicas": {"replicas": (2, 1)},
    "gathered": {"replicas": (1, 2), "gather_loss": True, "schedule": "gpipe"},
    "offload": {"replicas": (1, 1), "directive": "offload"},
    "recompute": {"replicas": (2, 1), "directive": "recompute"},
}


def make_batch(model: str) -> TensorRows:
    random = torch.Generator().manual_seed(5)
    words = [torch.randint(1, 16, (length,), generator=random) for length in LENGTHS]
    features = [
        torch.randn(len(row), WIDTH, generator=random, dtype=torch.float64) for row in words
    ]
    weights = torch.rand(ROWS, 1, generator=random, dtype=torch.float64)
    nested = torch.nested.nested_tensor(features, layout=torch.jagged)
    offsets: Tensor = nested.offsets()  # type: ignore[operator]
    twice = torch.nested.nested_tensor_from_jagged(torch.cat(words), offsets), nested
    inputs = {
        "packed": {"words": pack_sequence(words, enforce_sorted=False), "weights": weights},
        "nested": twice,
        "attends": twice,
        "sorted": pack_sequence(sorted(features, key=len, reverse=True)),
    }
    return TensorRows(inputs[model], torch.arange(ROWS) % 3)


def make_chain(model: str) -> Chain:
    batch = make_batch(model)
    return describe(
        MODELS[model],
        seed=3,
        dtype=torch.float64,
        sample=lambda rows: batch.inputs(0, min(rows, ROWS)),
    )


def train(model: str, options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    chain = make_chain(model)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.build(
            chain,
            make_plan(chain, global_batch=ROWS, microbatch=3, **options),
            loss=F.cross_entropy,
            precision=PrecisionConfig(parameters="fp64", compute="fp64"),
            swap=SwapConfig(minimum_bytes=1),
            scratch=Path(folder) / "swap",
        )
        loss = engine.gradients(make_batch(model))
        found = {name: gradient.clone() for name, gradient in engine.gradients_by_name.items()}
        engine.close()
    return loss, found


# Each way, and each model.
OFTEN = {
    ("stages", "packed"),
    ("replicas", "packed"),
    ("gathered", "nested"),
    ("offload", "sorted"),
    ("recompute", "attends"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "model"),
    [
        pytest.param(*case, marks=[] if case in OFTEN else pytest.mark.thorough)
        for case in itertools.product(WAYS, MODELS)
    ],
)
def test_trains_as_in_one_process(pool: Pool, model: str, way: str) -> None:
    options = WAYS[way]
    chain, batch = make_chain(model), make_batch(model)
    assert len(chain.blocks) > 1
    plain = copy.deepcopy(
        chain.model, chain.construction.values().parts(chain.model, chain.dtype, {})
    )
    args, kwargs = call_arguments(batch.inputs(0, ROWS))
    expected = F.cross_entropy(plain(*args, **kwargs), batch.targets(0, ROWS))
    expected.backward()
    results = pool.run(train, sum(options["replicas"]), model, options)
    assert {n for n, _ in plain.named_parameters()} == {n for _, found in results for n in found}
    for loss, gradients in results:
        assert abs(loss - expected.item()) <= 1e-12
        for name, gradient in gradients.items():
            wanted = plain.get_parameter(name).grad
            assert wanted is not None
            assert (gradient - wanted).norm() <= 1e-12 * max(1.0, float(wanted.norm())), name
