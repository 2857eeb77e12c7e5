"""A model that reads the padding of rows of tokens is distinguished from one that does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.model.describe import describe
from parallax.model.factory.custom import CustomModelConfig
from parallax.model.factory.gpt import GPTConfig
from parallax.model.factory.mlp import MLP, MLPConfig
from parallax.model.verification.rows import Verdict
from parallax.model.verification.verify import verify
from parallax.runtime.batch import TensorRows

VOCABULARY, SEQUENCE = 50, 8


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Attention(nn.Module):
    """Each output is of all tokens, of those up to its own, or of the mean of all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.kind == "mean":
            x = x + x.mean(1, keepdim=True)
        else:
            x = F.scaled_dot_product_attention(x, x, x, is_causal=self.kind == "causal")
        scores: Tensor = self.head(x)
        return scores


def scores_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def gpt() -> nn.Module:
    return GPTConfig(vocabulary=VOCABULARY, sequence=SEQUENCE, hidden=16, heads=2, layers=2).build()


def mlp() -> nn.Module:
    return MLPConfig(vocabulary=VOCABULARY, sequence=SEQUENCE, hidden=16, layers=1).build()


def rows(ends: list[int]) -> TensorRows:
    """Rows of tokens whose targets end where ``ends`` says."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (len(ends), SEQUENCE + 1), generator=random)
    inputs, targets = ids[:, :-1].clone(), ids[:, 1:].clone()
    for row, end in enumerate(ends):
        inputs[row, end + 1 :], targets[row, end:] = 0, -100
    return TensorRows(inputs, targets)


def verdict(
    build: Callable[[], nn.Module], loss: Callable[[Tensor, Tensor], Tensor], ends: list[int]
) -> Verdict:
    chain = describe(build, sample=lambda count: torch.ones(count, SEQUENCE, dtype=torch.int64))
    return verify(chain, loss, rows([SEQUENCE] * 6), padded=lambda: rows(ends))


@pytest.mark.parametrize("build", [lambda: Attention("causal"), gpt], ids=["attention", "gpt"])
def test_a_model_that_does_not_look_ahead_may_have_padded_rows(
    build: Callable[[], nn.Module],
) -> None:
    assert verdict(build, scores_loss, [8, 3, 5, 0]).padded == ""


@pytest.mark.parametrize("kind", ["both ways", "mean"])
def test_a_model_that_reads_the_padding_is_named_with_the_row(kind: str) -> None:
    found = verdict(lambda: Attention(kind), scores_loss, [8, 3, 5, 0]).padded
    assert "the loss of a row whose targets end after 3 of 8 tokens is " in found
    assert "with other tokens after them" in found


def test_a_loss_of_the_last_token_alone_has_none_in_a_padded_row() -> None:
    found = verdict(mlp, MLP.loss, [8, 3]).padded
    assert found == "the loss of a row whose targets end after 3 of 8 tokens is nan"


@pytest.mark.parametrize("ends", [[8, 8], [0, 8]])
def test_rows_without_padding_are_not_checked(ends: list[int]) -> None:
    assert verdict(lambda: Attention("both ways"), scores_loss, ends).padded == ""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"sequence": 9, "vocabulary": 300}, (9, 300)), ({"vocabulary": "words.txt"}, (256, 256))],
)
def test_tokens_of_a_model_of_ones_own(given: dict[str, Any], expected: tuple[int, int]) -> None:
    config = CustomModelConfig(target="x:y", kwargs=given)
    assert (config.sequence, config.vocabulary) == expected
