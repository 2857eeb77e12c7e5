"""Targets that are ignored count alike under every plan, as in one process with the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.model.describe import Chain, describe, parameter_names
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.model.verification.verify import verify
from parallax.run.job import usual_loss
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from tests.distributed.pool import Pool
from tests.plans import make_plan

ROWS, LENGTH, CLASSES = 6, 5, 7
FP64 = PrecisionConfig(parameters="fp64", compute="fp64")
LLAMA = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
BERT = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {"model_type": "bert"}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("LlamaForCausalLM", LLAMA),
    "masked": ("AutoModelForMaskedLM", BERT),
    "tokens": ("AutoModelForTokenClassification", {**BERT, "num_labels": 16}),
    "classes": ("AutoModelForSequenceClassification", {**BERT, "num_labels": 3}),
}


def masked(rows: int = ROWS, classes: int = CLASSES, length: int = LENGTH) -> Tensor:
    """Of one row nothing counts, of another all, of others some; of the last two nothing."""
    random = torch.Generator().manual_seed(5)
    targets = torch.randint(0, classes, (rows, length), generator=random)
    mask = torch.rand(rows, length, generator=random) < 0.4
    mask[0], mask[1], mask[-2:] = True, False, True
    return targets.masked_fill(mask, -100)


def plain_batch() -> TensorRows:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, LENGTH, 4, dtype=torch.float64, generator=random)
    return TensorRows(inputs, masked())


@functools.cache
def plain_chain() -> Chain:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    return describe(build, seed=3, dtype=torch.float64)


def labelled_batch(kind: str) -> TensorRows:
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 16, (ROWS, LENGTH), generator=random)
    labels = masked(classes=16) if kind != "classes" else torch.arange(ROWS) % 3
    return TensorRows({"input_ids": tokens, "labels": labels}, torch.zeros(ROWS))


@functools.cache
def labelled_chain(kind: str, dtype: torch.dtype = torch.float64) -> Chain:
    name, config = MODELS[kind]
    factory = HuggingFaceConfig(architecture=name, config=config)
    batch = labelled_batch(kind)
    return describe(factory.build, seed=3, dtype=dtype, sample=lambda rows: batch.inputs(0, rows))


def case(kind: str) -> tuple[Chain, TensorRows]:
    return (
        (plain_chain(), plain_batch())
        if kind == "plain"
        else (labelled_chain(kind), labelled_batch(kind))
    )


def whole(kind: str) -> tuple[float, dict[str, Tensor]]:
    chain, batch = case(kind)
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    values: Any = chain.arguments(batch.inputs(0, ROWS))
    for block in blocks:
        values = block(*values)
        values = values if isinstance(values, tuple) else (values,)
    loss = usual_loss(chain.results(values), batch.targets(0, ROWS))
    loss.backward()
    names = parameter_names(chain, range(len(blocks)))
    return loss.item(), {
        n: grad
        for n, (i, inner) in names.items()
        if (grad := getattr(dict(blocks[i].named_parameters()).get(inner), "grad", None))
        is not None
    }


def partitioned(
    kind: str, replicas: tuple[int, ...], schedule: str, micro: int, gathers: bool
) -> tuple[float, float, float, dict[str, Tensor]]:
    chain, batch = case(kind)
    plan = make_plan(
        chain,
        replicas=replicas,
        schedule=schedule,
        global_batch=ROWS,
        microbatch=micro,
        gather_loss=gathers,
    )
    engine = Engine.build(chain, plan, loss=usual_loss, precision=FP64)
    loss = engine.gradients(batch)
    found = {name: each.clone() for name, each in engine.gradients_by_name.items()}
    evaluated = engine.evaluate(batch)
    stepped = engine.step(batch).loss
    engine.close()
    return loss, evaluated, stepped, found


PLANS = [
    ((1,), "1f1b", 1, False),
    ((1, 2), "1f1b", 2, False),
    ((2, 1), "zb-h1", 3, False),
    ((1, 2), "gpipe", 2, True),
]


def check(pool: Pool, kind: str, plan: tuple[tuple[int, ...], str, int, bool]) -> None:
    expected, gradients = whole(kind)
    names = set[str]()
    for loss, evaluated, stepped, found in pool.run(partitioned, sum(plan[0]), kind, *plan):
        assert (loss, evaluated, stepped) == pytest.approx((expected,) * 3, rel=1e-6)
        for name, gradient in found.items():
            names.add(name)
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-5, atol=1e-9)
    assert names == gradients.keys()


@pytest.mark.sampled
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_ignored_targets_count_nothing_under_any_plan(pool: Pool, plan: Any) -> None:
    check(pool, "plain", plan)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("causal", PLANS[0]),
        pytest.param("causal", PLANS[1], marks=pytest.mark.slow),
        *(pytest.param(kind, PLANS[0], marks=pytest.mark.slow) for kind in list(MODELS)[1:]),
    ],
    ids=str,
)
def test_labels_among_the_inputs_of_a_model_count(pool: Pool, kind: str, plan: Any) -> None:
    check(pool, kind, plan)


def test_labels_among_the_inputs_are_verified() -> None:
    """Some are ignored, and the batch may be partitioned all the same."""
    chain, batch = labelled_chain("causal", torch.float32), labelled_batch("causal")
    assert verify(chain, usual_loss, batch, when=True).coupled == ""
