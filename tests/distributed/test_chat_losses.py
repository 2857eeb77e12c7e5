"""Of conversations the loss is the mean over all counted tokens, whoever reads and computes which rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.model.describe import Chain, describe, parameter_names
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.model.source import ModelConfig
from parallax.run.job import usual_loss
from parallax.runtime.batch import Rows
from parallax.runtime.engine import Engine
from parallax.train.data.chat import ChatDataConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan
from tests.unit.train.tokenizers_ import CHATML, save

pytest.importorskip("transformers")

ROWS, LENGTH, VOCABULARY = 8, 24, 400
FP64 = PrecisionConfig(parameters="fp64", compute="fp64")
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
PLANS = [((2, 2), "1f1b", 1), ((2, 2), "gpipe", 2), ((2, 2), "zb-h1", 4)]


def write(folder: Path) -> None:
    """Conversations of which one to about twenty tokens count."""
    save(folder / "tokenizer", template=CHATML)
    with (folder / "chat.jsonl").open("w") as file:
        for row in range(12):
            pair = {"question": "one " * (row % 4), "answer": "two" * (row * row % 7)}
            file.write(json.dumps(pair) + "\n")


def model_of(kind: str) -> ModelConfig:
    if kind == "labels":
        return HuggingFaceConfig(architecture="LlamaForCausalLM", config=LLAMA, sequence=LENGTH)
    return GPTConfig(vocabulary=VOCABULARY, sequence=LENGTH, layers=2, hidden=8, heads=2)


def loss_of(kind: str) -> Callable[[Any, Any], Tensor]:
    return usual_loss if kind == "labels" else GPT.loss


def batch_of(folder: Path, kind: str) -> Rows:
    config = ChatDataConfig(
        path=str(folder / "chat.jsonl"), tokenizer=str(folder / "tokenizer"), validation=0
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return config.open(model_of(kind), 0).batch(ROWS)


def chain_of(kind: str, batch: Rows) -> Chain:
    return describe(
        model_of(kind).build, seed=3, dtype=torch.float64, sample=lambda rows: batch.inputs(0, rows)
    )


def trained(
    folder: Path, kind: str, replicas: tuple[int, ...], schedule: str, micro: int
) -> tuple[float, float, dict[str, Tensor]]:
    batch = batch_of(folder, kind)
    chain = chain_of(kind, batch)
    plan = make_plan(
        chain, replicas=replicas, schedule=schedule, global_batch=ROWS, microbatch=micro
    )
    engine = Engine.build(chain, plan, loss=loss_of(kind), precision=FP64)
    loss = engine.gradients(batch)
    found = {name: each.clone() for name, each in engine.gradients_by_name.items()}
    evaluated = engine.evaluate(batch)
    engine.close()
    return loss, evaluated, found


def whole(folder: Path, kind: str) -> tuple[float, dict[str, Tensor]]:
    """The mean over the counted tokens of all rows at once, and its gradients, without an engine."""
    batch = batch_of(folder, kind)
    chain = chain_of(kind, batch)
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    values: Any = chain.arguments(batch.inputs(0, ROWS))
    for block in blocks:
        values = block(*values)
        values = values if isinstance(values, tuple) else (values,)
    found, targets = chain.results(values), batch.targets(0, ROWS)
    counts = (targets != -100).sum(1)
    assert counts.min() != counts.max()  # else a mean of means would do
    if kind == "labels":
        loss = found.loss
    else:
        losses = nn.functional.cross_entropy(
            found.flatten(0, 1), targets.flatten(), reduction="none"
        )
        loss = losses.sum() / counts.sum()
    loss.backward()
    names = parameter_names(chain, range(len(blocks)))
    parameters = [dict(block.named_parameters()) for block in blocks]
    return loss.item(), {name: parameters[i][inner].grad for name, (i, inner) in names.items()}  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["tokens", pytest.param("labels", marks=pytest.mark.slow)])
def test_the_loss_is_the_mean_over_counted_tokens(pool: Pool, tmp_path: Path, kind: str) -> None:
    write(tmp_path)
    ((expected, gradients),) = pool.run(whole, 1, tmp_path, kind)
    for plan in PLANS if kind == "tokens" else PLANS[:1]:
        names = set[str]()
        for loss, evaluated, found in pool.run(trained, 4, tmp_path, kind, *plan):
            assert (loss, evaluated) == pytest.approx((expected,) * 2, rel=1e-6)
            for name, gradient in found.items():
                names.add(name)
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-5, atol=1e-9)
        assert names == gradients.keys()
