"""Rows of several lengths: padded between blocks, packed or nested inside one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from parallax.errors import TransportError
from parallax.model.describe import Chain, describe, parameter_names
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.channels.message import lay_out, spec_of
from parallax.runtime.engine import Engine
from tests.distributed.pool import Pool, WorkerError
from tests.plans import make_plan

ROWS, LONGEST, WIDTH = 7, 5, 8


class Packs(nn.Module):
    """Padded tokens and their lengths; packed inside."""

    def __init__(self, *, total: bool) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(16, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.total = total

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        length = tokens.shape[1] if self.total else None
        padded, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=length)
        return padded, lengths


class Nests(nn.Module):
    """What a block before it has padded; nested inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        there = torch.arange(padded.shape[1], device=lengths.device) < lengths[:, None]
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        nested = torch.nested.nested_tensor_from_jagged(padded[there], offsets)
        size = len(padded), padded.shape[1], WIDTH
        return torch.tanh(self.layer(nested)).to_padded_tensor(0.0, output_size=size), lengths


class Reads(nn.Module):
    """The mean over each row's length, and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, padded: Tensor, lengths: Tensor) -> Tensor:
        scores: Tensor = self.layer(padded.sum(1) / lengths[:, None])
        return scores


def make_chain(*, total: bool) -> Chain:
    def build() -> nn.Module:
        return nn.Sequential(Packs(total=total), Nests(), Reads())

    return describe(build, seed=3, dtype=torch.float64)


def make_batch() -> TensorRows:
    tokens = torch.randint(1, 16, (ROWS, LONGEST), generator=torch.Generator().manual_seed(5))
    return TensorRows((tokens, torch.tensor([5, 3, 4, 2, 5, 1, 4])), torch.arange(ROWS) % 3)


def train(
    replicas: tuple[int, ...], total: bool, directive: str = "keep"
) -> tuple[float, dict[str, Tensor]]:
    chain = make_chain(total=total)
    engine = Engine.build(
        chain,
        make_plan(chain, replicas=replicas, global_batch=ROWS, microbatch=3, directive=directive),
        loss=F.cross_entropy,
        precision=PrecisionConfig(parameters="fp64", compute="fp64"),
    )
    loss = engine.gradients(make_batch())
    found = {name: gradient.clone() for name, gradient in engine.gradients_by_name.items()}
    engine.close()
    return loss, found


@pytest.mark.parametrize(
    ("replicas", "total", "directive"),
    [
        ((1, 1), False, "keep"),
        ((1, 2), False, "keep"),
        ((2, 1), True, "keep"),
        ((1, 1), False, "recompute"),
    ],
    ids=str,
)
def test_lengths_are_the_matter_of_blocks(
    pool: Pool, replicas: tuple[int, ...], total: bool, directive: str
) -> None:
    """Micro-batches are as long as their longest row, or all as long as the batch. A nested tensor that is made again
    has the sizes that it had."""
    chain, batch = make_chain(total=total), make_batch()
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    found = batch.inputs(0, ROWS)
    for block in blocks[:-1]:
        found = block(*found)
    expected = F.cross_entropy(blocks[-1](*found), batch.targets(0, ROWS))
    expected.backward()
    results = pool.run(train, sum(replicas), replicas, total, directive)
    names = parameter_names(chain, range(len(blocks)))
    assert set(names) == {name for _, gradients in results for name in gradients}
    for loss, gradients in results:
        assert abs(loss - expected.item()) <= 1e-12
        for name, gradient in gradients.items():
            wanted = blocks[names[name][0]].get_parameter(names[name][1]).grad
            assert wanted is not None
            assert (gradient - wanted).norm() <= 1e-12 * wanted.norm(), name


def test_rows_of_two_sizes_do_not_meet(pool: Pool) -> None:
    """Those of one micro-batch, padded by two replicas each for itself."""
    with pytest.raises(
        WorkerError, match=r"TransportError: .* rows of sizes \(5, 8\) and \(3, 8\)"
    ):
        pool.run(train, 3, (2, 1), False)


def test_a_nested_tensor_does_not_cross_a_boundary() -> None:
    nested = torch.nested.nested_tensor_from_jagged(torch.zeros(3, WIDTH), torch.tensor([0, 1, 3]))
    with pytest.raises(TransportError, match="a block returned a nested tensor") as caught:
        lay_out(spec_of([nested]))
    assert "\n" not in str(caught.value)
