"""Models of transformers divided into blocks: the same numbers, the same names, weights read stage by stage."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from parallax.config import compose
from parallax.errors import CheckpointError, ConfigError
from parallax.model.describe import Chain, as_tuple, describe, parameter_names
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling.count import count
from parallax.run.job import build_chain
from tests.unit.model.test_recorded import both, check_same
from tests.zoo import FAMILIES, Entry, llama, logits_loss, padded_batch, t5, t5_batch, tokens_batch

pytestmark = pytest.mark.slow

pytest.importorskip(
    "transformers", reason="transformers is not installed (it comes with the hf extra)"
)

CPU = torch.device("cpu")
TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


@functools.cache
def chain_of(name: str) -> Chain:
    """To describe one takes longer than what is asserted of it."""
    return describe(FAMILIES[name].build, seed=3, sample=FAMILIES[name].sample)


def llama_of(weights: Path) -> Chain:
    """As ``describe`` gives it with ``weights``, which it does not open."""
    return replace(chain_of("llama"), weights=weights)


def build(attention: str, entry: Entry) -> nn.Module:
    model = entry.build()
    model.set_attn_implementation(attention)
    return model


def in_turn(names: Iterable[str], variants: Iterable[str]) -> list[Any]:
    """Each name with one of the two options, in turn; the other combinations are thorough."""
    return [
        pytest.param(name, variant, marks=[pytest.mark.thorough] if (i + j) % 2 else [])
        for i, name in enumerate(names)
        for j, variant in enumerate(variants)
    ]


@pytest.mark.parametrize(("name", "attention"), in_turn(FAMILIES, ["sdpa", "eager"]))
def test_blocks_compute_what_the_model_computes(name: str, attention: str) -> None:
    entry = FAMILIES[name]
    entry = Entry(lambda: build(attention, FAMILIES[name]), entry.loss, entry.batch)
    chain, blocks, plain = both(entry)
    assert len(chain.blocks) > 3
    plain.train()
    for step, rows in enumerate([2, 3]):
        check_same(entry, chain, blocks, plain, rows, step)


@pytest.mark.parametrize(
    ("factory", "batch"),
    [
        (llama, lambda rows, step: tokens_batch(rows, step, 5, 64)),
        (llama, lambda rows, step: padded_batch(rows, step, 12)),
        (t5, lambda rows, step: _without_mask(t5_batch(rows, step))),
    ],
)
def test_masks_may_be_left_out_and_lengths_vary(factory: Any, batch: Any) -> None:
    entry = Entry(factory, logits_loss, batch)
    chain, blocks, plain = both(entry)
    check_same(entry, chain, blocks, plain, 3)
    assert chain.template is not None, "outputs are what the model returns"


def test_texts_of_one_length_in_the_sample_may_have_two_lengths_later() -> None:
    """Source and target, each padded to the longest of its batch."""
    from transformers import BartConfig, BartForConditionalGeneration

    size = {"d_model": 16, "vocab_size": 30, "max_position_embeddings": 40}
    for side in ("encoder", "decoder"):
        size |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 16}

    def texts(rows: int, source: int = 12, target: int = 12) -> dict[str, Tensor]:
        ones = torch.ones(rows, max(source, target), dtype=torch.int64)
        return {"input_ids": 3 * ones[:, :source], "labels": 4 * ones[:, :target]}

    chain = describe(lambda: BartForConditionalGeneration(BartConfig(**size)), sample=texts)
    blocks = materialise(chain, 0, len(chain.blocks), CPU)
    for lengths in ((12, 12), (7, 5), (5, 8), (13, 20)):
        values: Any = chain.arguments(texts(3, *lengths))
        for block in blocks:
            values = as_tuple(block(*values))
        assert chain.results(values).logits.shape == (3, lengths[1], 30)


def _without_mask(rows: Any) -> Any:
    from parallax.runtime.batch import TensorRows

    inputs = rows.inputs(0, len(rows))
    del inputs["attention_mask"]
    return TensorRows(inputs, rows.targets(0, len(rows)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_is_initialised_alone_and_as_the_model_would(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    chain = chain_of(name)
    whole = materialise(chain, 0, len(chain.blocks), CPU)
    plain = FAMILIES[name].build()
    buffers = {id(b): n for n, b in chain.model.named_buffers()}
    for index, block in enumerate(whole):
        (alone,) = materialise(chain, index, index + 1, CPU)
        for a, b in zip(alone.state_dict().values(), block.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        for inner, tensor in chain.blocks[index].module.named_buffers():
            assert torch.equal(block.get_buffer(inner), plain.get_buffer(buffers[id(tensor)])), (
                inner
            )
    assert "on the host" not in caplog.text
    ours = parameter_names(chain, range(len(whole)))
    for parameter_name, parameter in plain.named_parameters():
        index, inner = ours[parameter_name]
        made = whole[index].get_parameter(inner)
        assert made.shape == parameter.shape
        if parameter.numel() > 100:
            assert made.std().item() == pytest.approx(parameter.std().item(), rel=0.5), (
                parameter_name
            )
        else:
            assert made.abs().max() <= 10 * parameter.abs().max() + 1e-6, parameter_name


def test_tied_names_are_those_of_transformers() -> None:
    chain = chain_of("t5")
    assert set(chain.ties) == {"shared.weight"}
    users = [i for i, _ in chain.ties["shared.weight"]]
    assert len(users) == 3, "the embeddings of both sides, and the head"
    assert users[0] == 0
    assert users[-1] == len(chain.blocks) - 1


@pytest.mark.parametrize("name", ["llama", "positions", "adapted"])
def test_shapes_can_be_counted_without_a_weight(name: str) -> None:
    from tests.zoo import ADAPTED, ZOO

    entry = {**FAMILIES, **ZOO, **ADAPTED}[name]
    chain = describe(entry.build, sample=entry.sample)

    def sample(rows: int) -> Any:
        return chain.arguments(entry.sample(rows)), entry.batch(rows, 0).targets(0, rows)

    work = count(chain, entry.loss, sample, precision=PrecisionConfig(), minimum_bytes=1)
    assert len(work.blocks) == len(chain.blocks)


# ---- weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shard"), in_turn(["llama", "gpt2", "t5", "bert", "vit"], ["4KB", "1GB"])
)
def test_weights_are_read_stage_by_stage(name: str, shard: str, tmp_path: Path) -> None:
    entry = FAMILIES[name]
    saved = entry.build()
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    assert (shard == "1GB") == (not (tmp_path / "model.safetensors.index.json").exists())
    chain = describe(entry.build, weights=tmp_path, sample=entry.sample)
    expected = saved.state_dict()
    for index in range(len(chain.blocks)):
        (block,) = materialise(chain, index, index + 1, CPU)
        for inner, tensor in block.state_dict().items():
            assert torch.equal(tensor, expected[chain.names[index][inner]]), inner


def test_a_stage_reads_its_own_shards_only(tmp_path: Path) -> None:
    saved = llama()
    saved.save_pretrained(tmp_path, max_shard_size="4KB")
    chain = llama_of(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    mine = {index[name] for name in chain.names[1].values()}
    opened: list[str] = []
    from parallax.model.construction import weights as module

    class Spy(module.CheckpointWeights):
        def fill(self, tensor: torch.Tensor, name: str) -> None:
            opened.append(index[name])
            super().fill(tensor, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parallax.model.materialise.CheckpointWeights", Spy)
        materialise(chain, 1, 2, CPU)
    assert set(opened) == mine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "it lacks lm_head.weight"),
        (lambda t: t.update(more=torch.ones(1)), "it has more, which the model does not have"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            r"model.norm.weight is \[3\] and must be \[16\]",
        ),
    ],
)
def test_weights_of_another_model_are_refused_by_name(
    change: Any, message: str, tmp_path: Path
) -> None:
    tensors = {name: tensor.clone() for name, tensor in llama().state_dict().items()}
    change(tensors)
    save_file(tensors, tmp_path / "other.safetensors")
    chain = llama_of(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=message):
        materialise(chain, 1, 2, CPU)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no model.safetensors; give a safetensors file, or a folder"),
        ('{"weight_map": {"a": "../../etc/x"}}', "shards must be beside their index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "there is no gone.safetensors"),
        ("{}", "it is no valid index of shards"),
    ],
)
def test_broken_folders_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text:
        (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        materialise(llama_of(tmp_path), 0, 1, CPU)


def test_pickled_weights_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="load and save it again with transformers"):
        materialise(llama_of(tmp_path), 0, 1, CPU)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="no readable safetensors file"):
        materialise(llama_of(tmp_path), 0, 1, CPU)


# ---- configuration -----------------------------------------------------------------------------------


def test_a_model_from_its_configuration(tmp_path: Path) -> None:
    options = ["model=huggingface", "model.architecture=LlamaForCausalLM", "model.sequence=8"]
    config = compose([*options, *(f"+model.config.{key}={value}" for key, value in TINY.items())])
    assert isinstance(config.model, HuggingFaceConfig)
    assert config.model.vocabulary == 256
    chain = build_chain(config)
    assert [b.name for b in chain.blocks][:1] == ["model.embed_tokens"]
    saved = config.model.build()
    saved.save_pretrained(tmp_path)
    loaded = compose(["model=huggingface", f"model.pretrained={tmp_path}", "model.sequence=8"])
    chain = build_chain(loaded)
    last, inner = parameter_names(chain, range(len(chain.blocks)))["lm_head.weight"]
    (head,) = materialise(chain, last, last + 1, CPU)
    assert torch.equal(head.state_dict()[inner], saved.lm_head.weight)


def test_a_setting_that_t5_reads_and_does_not_declare_is_accepted() -> None:
    sizes = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = {**sizes, "decoder_start_token_id": 0}
    model = HuggingFaceConfig(architecture="T5ForConditionalGeneration", config=config).build()
    tokens = torch.tensor([[3, 4, 5]])
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()
    with pytest.raises(ConfigError, match="LlamaConfig has no such setting"):
        HuggingFaceConfig(
            architecture="LlamaForCausalLM", config={"decoder_start_token_id": 0}
        ).build()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model.architecture=auto: name a class"),
        ({"architecture": "Lama"}, "model.architecture=Lama: transformers .* has no such model"),
        ({"architecture": "BertTokenizer"}, "has no such model"),
        (
            {"architecture": "LlamaForCausalLM", "config": {"hiden_size": 8}},
            r"model.config.hiden_size: LlamaConfig has no such setting \(did you mean 'hidden_size'\?\)",
        ),
        ({"pretrained": "/nowhere"}, "does not name an architecture"),
    ],
)
def test_mistakes_in_the_configuration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HuggingFaceConfig(**options).build()


def test_settings_are_checked_early() -> None:
    with pytest.raises(ConfigError, match=r"model.attention=flash: .*sdpa"):
        HuggingFaceConfig(attention="flash")
