"""Outputs of ForwardEngine are the model's own forward bit for bit, for models as people bring them."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.zoo.catalog import entries
from benchmarks.zoo.entry import EntryRows, call
from benchmarks.zoo.training import ROWS, SEED, named_tensors, plain_model
from parallax.model.block import flatten
from parallax.model.describe import Chain, describe
from parallax.runtime.forward import ForwardEngine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan

NAMES = (
    "vision/resnet",
    "vision/mobilenet",
    "vision/densenet",
    "text/mingpt",
    "transformers/causal/Qwen2ForCausalLM",
    "transformers/masked/BertForMaskedLM",
    "transformers/translation/T5ForConditionalGeneration",
    "transformers/image/ViTForImageClassification",
    "adapters/lora-llama",
    "adapters/lora-vit",
    "timm/resnet10t",
    "timm/convnext_atto",
)
"""Models of torch alone, of transformers, of peft, and of timm where it is installed."""
DTYPE = torch.float32
PLANS: tuple[dict[str, Any], ...] = tuple(
    {"replicas": (1,) * stages, "parameter_offload": offloaded}
    for stages, offloaded in itertools.product((1, 2, 4), (0.0, 1.0))
)


@functools.cache
def chain_of(name: str) -> Chain:
    entry = entries()[name]

    def sample(rows: int) -> Any:
        return EntryRows(entry, rows, 0, DTYPE).inputs(0, rows)

    return describe(entry.build, seed=SEED, dtype=DTYPE, sample=sample)


def outputs(
    name: str, options: dict[str, Any], folder: Path
) -> tuple[list[tuple[int, tuple[Tensor, ...]]], dict[str, Tensor]]:
    """This rank's parts of the outputs, each with its first row, and its weights."""
    chain = chain_of(name)
    plan = make_plan(chain, global_batch=ROWS, microbatch=4, **options)
    engine = ForwardEngine.build(
        chain, plan, swap=SwapConfig(minimum_bytes=1), scratch=folder / "swap"
    )
    found = engine.predict(EntryRows(entries()[name], ROWS, 0, DTYPE))
    weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    engine.close()
    return [(first, flatten(results)[0]) for first, results in found], weights


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_the_models_own(pool: Pool, tmp_path: Path, name: str) -> None:
    """With the same rows of a micro-batch: kernels of torch differ between sizes."""
    if name not in entries():
        pytest.skip("its library is not installed")
    entry = entries()[name]
    rows = EntryRows(entry, ROWS, 0, DTYPE)
    model = plain_model(entry, DTYPE).eval()
    for options in PLANS:
        ranks = pool.run(outputs, len(options["replicas"]), name, options, tmp_path)
        own = named_tensors(model)
        with torch.no_grad():
            for key, value in ((k, v) for _, weights in ranks for k, v in weights.items()):
                own[key].copy_(value)
        parts = sorted((part for found, _ in ranks for part in found), key=lambda part: part[0])
        bounds = [first for first, _ in parts] + [ROWS]
        assert bounds[0] == 0
        assert len(parts) == 2
        for (first, found), stop in zip(parts, bounds[1:]):
            with torch.no_grad():
                expected = flatten(call(model, rows.inputs(first, stop)))[0]
            assert len(found) == len(expected)
            different = [n for n, pair in enumerate(zip(found, expected)) if not torch.equal(*pair)]
            assert not different, (options, first, different)
