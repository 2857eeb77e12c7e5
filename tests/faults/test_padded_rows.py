"""Rows with padding, and models that would read it: refused before the first step, with a way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.commands import one_line
from tests.unit.train.tokenizers_ import CHATML, save

Called = Callable[..., tuple[int, str, str]]
MODULE = """
import torch.nn.functional as F
from torch import nn

class Both(nn.Module):
    def __init__(self, sequence, vocabulary, causal=False):
        super().__init__()
        self.embed, self.head, self.causal = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary), causal

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=self.causal))

    @staticmethod
    def loss(scores, targets):
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())
"""
CUSTOM = ["model=custom", "model.target=both:Both", "+model.kwargs={sequence:64,vocabulary:1000}"]


@pytest.fixture
def chats(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(here.parent / "cache"))
    with (here / "chats.jsonl").open("w") as file:
        for row in range(30):
            file.write(
                json.dumps({"prompt": f"say {row}", "completion": "one " * (row % 5 + 1)}) + "\n"
            )
    tokenizer = save(here / "tokenizer", template=CHATML)
    return [
        *("data=chat", "data.path=chats.jsonl", f"data.tokenizer={tokenizer}"),
        *("trainer.global_batch=4", "trainer.steps=2", "cluster.kind=cpu", "cluster.devices=1"),
        *("logger=none", "trainer.eval_every=0", "schedule.warmup=1"),
    ]


@pytest.mark.parametrize(
    "model",
    [
        ["model=mlp", "model.vocabulary=1000", "model.sequence=64"],
        CUSTOM,
    ],
    ids=["mlp", "both ways"],
)
def test_a_model_that_reads_the_padding_is_refused(
    here: Path, called: Called, chats: list[str], model: list[str]
) -> None:
    (here / "both.py").write_text(MODULE)
    for _ in range(2):  # from the cached verdict too
        code, _, err = called("train", *chats, *model)
        assert code == 2
        text = one_line(err)
        assert (
            "rows of data=chat are padded, and the model reads the padding: the loss of a row"
            in text
        )
        assert "model=huggingface" in text
    assert not (here / "runs").exists()


@pytest.mark.faults
@pytest.mark.parametrize("setting", ["+model.kwargs.causal=true", "model.verify=false"])
def test_a_causal_model_and_one_that_is_not_verified_train(
    here: Path, called: Called, chats: list[str], setting: str
) -> None:
    (here / "both.py").write_text(MODULE)
    code, _, err = called("train", *chats, *CUSTOM, setting)
    assert code == 0, err
