"""Transformers from their sizes: against published models and formulas, and against torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError
from parallax.model.factory.gpt import GPT, GPTConfig, Layer
from parallax.plan.analytic.efficiency import price
from parallax.plan.analytic.hardware import device_kind
from parallax.plan.analytic.recipe import AUTOCAST, RECIPES, recipe
from parallax.plan.analytic.transformer import TransformerConfig
from parallax.plan.cost.stage import load_stage
from parallax.plan.plan import Directive
from parallax.plan.profile import Affine
from parallax.plan.work import BlockWork, ModelWork
from tests.unit.plan_fakes import cluster

LLAMA: dict[str, Any] = {"gated": True, "positions": "rotary", "bias": False, "tied": False}
PUBLISHED = {
    "GPT-2": (TransformerConfig(layers=12, hidden=768, heads=12), 124_439_808),
    "GPT-2 XL": (TransformerConfig(), 1_557_611_200),
    "Llama 2 7B": (
        TransformerConfig(
            layers=32, hidden=4096, heads=32, vocabulary=32000, sequence=4096, **LLAMA
        ),
        6_738_415_616,
    ),
    "Llama 2 70B": (
        TransformerConfig(
            layers=80,
            hidden=8192,
            heads=64,
            kv_heads=8,
            ffn=28672,
            vocabulary=32000,
            sequence=4096,
            **LLAMA,
        ),
        68_976_648_192,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_published_models(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert config.parameters == parameters


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_our_gpt_block_by_block(tied: bool) -> None:
    sizes: dict[str, Any] = {
        "layers": 3,
        "hidden": 64,
        "heads": 4,
        "vocabulary": 100,
        "sequence": 32,
        "tied": tied,
    }
    with torch.device("meta"):
        model = GPT(GPTConfig(**sizes))
    config = TransformerConfig(**sizes)
    counted = [block.parameters for block in config.work("fp32").blocks]
    assert counted == [sum(p.numel() for p in block.parameters()) for block in model.blocks()]
    assert config.parameters == sum(p.numel() for p in model.parameters())


def test_widths_of_the_gated_mlp_are_the_usual_ones() -> None:
    widths = {
        hidden: TransformerConfig(hidden=hidden, heads=16, gated=True).width
        for hidden in (2048, 2560, 4096)
    }
    assert widths == {2048: 5632, 2560: 6912, 4096: 11008}
    assert TransformerConfig(hidden=64, heads=4).width == 256
    assert TransformerConfig(hidden=64, heads=4, ffn=100, gated=True).width == 100


@pytest.mark.parametrize(
    ("s", "b", "h", "a"), [(512, 1, 1024, 16), (1024, 3, 1536, 16), (2048, 8, 6144, 64)]
)
def test_saved_activations_are_those_of_korthikanti(s: int, b: int, h: int, a: int) -> None:
    full = TransformerConfig(layers=1, hidden=h, heads=a, sequence=s, attention="full", dropout=0.1)
    assert _layer(full.work("fp16")).moved.at(b) == pytest.approx(
        s * b * h * (34 + 5 * a * s / h), rel=1e-12
    )
    flash = dataclasses.replace(full, attention="flash")
    assert _layer(flash.work("fp16")).moved.at(b) == s * b * h * 34
    assert (
        _layer(dataclasses.replace(flash, dropout=0.0).work("fp16")).moved.at(b) == s * b * h * 32
    )


def test_saved_activations_are_those_that_torch_saves() -> None:
    config = GPTConfig(layers=1, hidden=128, heads=4, sequence=64)
    rows, saved = 2, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    layer = Layer(config)
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    x = torch.randn(rows, config.sequence, config.hidden, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x)
    measured = sum(size for pointer, size in saved.items() if pointer not in weights)
    block = _layer(TransformerConfig(layers=1, hidden=128, heads=4, sequence=64).work("fp32"))
    assert out.shape == x.shape
    assert block.moved.at(rows) + block.stays.at(rows) == pytest.approx(measured, rel=0.08)


def test_operations_are_those_of_narayanan() -> None:
    layers, h, s, v, b = 24, 2048, 1024, 51200, 4
    config = TransformerConfig(
        layers=layers, hidden=h, heads=16, sequence=s, vocabulary=v, attention="full"
    )
    blocks = config.work("bf16").blocks
    passes = sum(
        sum(p.flops.at(b) for p in (k.forward, k.input_gradient, k.weight_gradient)) for k in blocks
    )
    again = sum(block.forward.flops.at(b) for block in blocks[1:-1])
    # Section 5.1's formula is for full recomputation of the layers.
    assert passes + again == pytest.approx(
        96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    )


def test_flash_attention_computes_half_of_the_scores_and_again_backward() -> None:
    sizes: dict[str, Any] = {"layers": 1, "hidden": 256, "heads": 4, "sequence": 512}
    full, flash = (
        _layer(TransformerConfig(**sizes, attention=kind).work("bf16"))
        for kind in ("full", "flash")
    )
    scores = 4 * 512 * 512 * 256
    assert full.forward.flops.at(1) - flash.forward.flops.at(1) == scores / 2
    assert full.input_gradient.flops.at(1) - flash.input_gradient.flops.at(1) == pytest.approx(
        scores * 0.75
    )
    assert full.weight_gradient.flops == flash.weight_gradient.flops
    assert full.forward.attention_flops.at(1) == scores
    assert flash.input_gradient.attention_flops.at(1) == pytest.approx(1.25 * scores)
    assert full.forward.operands.at(1) == (4 + 2 + 5 + 5) * 256 * 512


def test_recipes_use_their_known_properties() -> None:
    assert {
        name: how.weight + how.gradient + how.master + how.optimizer
        for name, how in RECIPES.items()
    } == {
        "fp32": 16,
        "tf32": 16,
        "fp64": 32,
        "fp16": 16,
        "bf16": 16,
        AUTOCAST: 16,
        "fp32+fp16 autocast": 16,
    }
    assert {name: (how.compute, how.cast) for name, how in RECIPES.items()} == {
        **{"fp32": (4, 0), "tf32": (4, 0), "fp64": (8, 0), "fp16": (2, 0), "bf16": (2, 0)},
        **{AUTOCAST: (2, 2), "fp32+fp16 autocast": (2, 2)},
    }
    with pytest.raises(ConfigError, match="did you mean 'bf16'"):
        recipe("bf6")


def test_autocast_keeps_casts_of_weights_and_a_stream_in_full_precision() -> None:
    config = TransformerConfig(layers=1, hidden=128, heads=4, sequence=64)
    mixed, cast = config.work("bf16"), config.work(AUTOCAST)
    layer = _layer(cast)
    assert layer.stays.fixed == 2 * 12 * 128**2
    assert layer.parameter_bytes == 2 * _layer(mixed).parameter_bytes
    assert layer.output.per_row == 2 * _layer(mixed).output.per_row
    # The inputs of two norms.
    assert layer.moved.per_row - _layer(mixed).moved.per_row == 2 * 2 * 64 * 128
    assert (cast.master_bytes, cast.gradient_bytes, cast.optimizer_bytes) == (0.0, 1.0, 2.0)
    assert (mixed.master_bytes, mixed.gradient_bytes, mixed.optimizer_bytes) == (2.0, 1.0, 4.0)


@pytest.mark.parametrize("precision", RECIPES)
def test_states_that_the_planner_counts_are_the_recipes(precision: str) -> None:
    config, how = (
        TransformerConfig(layers=4, hidden=128, heads=4, sequence=64, vocabulary=1000),
        recipe(precision),
    )
    profile = price(config.work(precision), device_kind("a100-80"))
    load = load_stage(profile, 0, [Directive.KEEP] * 6, 3, device=cluster(1).devices[0])
    counted = load.memory(in_flight=1, swap_limit=0)
    assert counted["parameters"] == how.weight * config.parameters
    assert counted["gradients"] == how.gradient * config.parameters
    assert counted["optimizer"] == how.optimizer * config.parameters
    assert counted["master"] == how.master * config.parameters
    assert counted["loss"] == max(4, how.compute) * 3 * 64 * 1000


CONFIGS = st.builds(
    TransformerConfig,
    layers=st.integers(1, 8),
    hidden=st.integers(1, 8).map(lambda k: 64 * k),
    heads=st.sampled_from([4, 8, 16]),
    kv_heads=st.sampled_from([0, 1, 4]),
    vocabulary=st.integers(1, 2000),
    sequence=st.integers(1, 300),
    attention=st.sampled_from(["flash", "full"]),
    gated=st.booleans(),
    positions=st.sampled_from(["learned", "rotary"]),
    bias=st.booleans(),
    tied=st.booleans(),
    dropout=st.sampled_from([0.0, 0.1]),
)


@settings(deadline=None, max_examples=60)
@given(
    config=CONFIGS,
    precision=st.sampled_from(list(RECIPES)),
    key=st.sampled_from(["layers", "hidden", "sequence"]),
)
def test_more_of_anything_takes_more(config: TransformerConfig, precision: str, key: str) -> None:
    larger = dataclasses.replace(config, **{key: 2 * getattr(config, key)})
    less, more = _totals(config.work(precision)), _totals(larger.work(precision))
    assert all(more[term] >= less[term] for term in less)
    assert all(more[term] > less[term] for term in ("flops", "traffic", "moved"))
    assert larger.parameters > config.parameters or (
        key == "sequence" and config.positions == "rotary"
    )
    assert config.work(precision).fingerprint != larger.work(precision).fingerprint


@settings(deadline=None, max_examples=30)
@given(config=CONFIGS, precision=st.sampled_from(list(RECIPES)), rows=st.integers(1, 7))
def test_storage_of_rows_is_that_many_times_the_storage_of_one(
    config: TransformerConfig, precision: str, rows: int
) -> None:
    for block in config.work(precision).blocks:
        for line in (block.moved, block.by_loss, block.input, block.output):
            assert line.at(rows) == pytest.approx(rows * line.at(1))
        assert all(part >= 0 for line in _lines(block) for part in (line.fixed, line.per_row))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 7}, "model.heads=7: must divide model.hidden=64"),
        ({"heads": 8, "kv_heads": 3}, "model.kv_heads=3: must divide model.heads=8"),
        ({"attention": "flush"}, "did you mean 'flash'"),
        ({"positions": "rotory"}, "did you mean 'rotary'"),
        ({"layers": 0}, "model.layers=0: accepted are numbers above 0"),
        ({"ffn": -1}, "model.ffn=-1: accepted are numbers from 0"),
        ({"dropout": 1.0}, "model.dropout=1.0"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(**{"hidden": 64, "heads": 4, **wrong})


def _layer(work: ModelWork) -> BlockWork:
    return work.blocks[1]


def _lines(block: BlockWork) -> list[Affine]:
    values = [getattr(block, field.name) for field in dataclasses.fields(block)]
    return [value for value in values if isinstance(value, Affine)]


def _totals(work: ModelWork) -> dict[str, float]:
    passes = [
        p
        for block in work.blocks
        for p in (block.forward, block.input_gradient, block.weight_gradient)
    ]
    totals = {
        "flops": sum(p.flops.at(2) for p in passes),
        "traffic": sum(p.bytes.at(2) for p in passes),
    }
    totals |= {
        name: sum(getattr(b, name).at(2) for b in work.blocks)
        for name in ("moved", "stays", "backward_work")
    }
    return totals
