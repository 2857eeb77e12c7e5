"""Folders of transformers: every task, heads that are new, tensors that are computed, settings of nested models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallax.errors import CheckpointError, ConfigError, DescribeError
from parallax.model.describe import Chain, describe
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.materialise import check_weights, materialise
from parallax.run.job import usual_loss
from parallax.runtime.batch import TensorRows
from tests.unit.model.test_recorded import both, check_same
from tests.zoo import Entry

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (it comes with the hf extra)"
)

CPU = torch.device("cpu")
TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MOE = {**TEXT, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
VISION = {**TEXT, "image_size": 16, "patch_size": 8}
LLAVA = {
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {
        "model_type": "clip_vision_model",
        **{key: value for key, value in VISION.items() if key != "vocab_size"},
    },
    "image_token_index": 63,
    "vision_feature_layer": -1,
}


def tokens(rows: int) -> dict[str, Tensor]:
    ids = torch.arange(rows * 8).reshape(rows, 8) % 60
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def saved(folder: Path, model: nn.Module) -> nn.Module:
    """``model`` with numbers that no constructor makes, in ``folder``."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


def chain_of(config: HuggingFaceConfig, sample: Callable[[int], Any] = tokens) -> Chain:
    return describe(config.build, sample=sample, weights=config.weights, partial_weights=True)


def values(chain: Chain) -> dict[str, Tensor]:
    """What the stages of ``chain``, two of them, have."""
    count, found = len(chain.blocks), {}
    for start, stop in ((0, count // 2), (count // 2, count)):
        for index, block in zip(range(start, stop), materialise(chain, start, stop, CPU)):
            state = block.state_dict()
            found |= {name: state[inner] for inner, name in chain.names[index].items()}
    return found


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def rows(count: int, step: int) -> TensorRows:
    del step
    return TensorRows(tokens(count), torch.zeros(count))


# ---- which class -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "kind", "settings", "expected"),
    [
        ("AutoModelForCausalLM", "llama", TEXT, "LlamaForCausalLM"),
        ("AutoModelForMaskedLM", "bert", TEXT, "BertForMaskedLM"),
        ("AutoModelForTokenClassification", "bert", TEXT, "BertForTokenClassification"),
        ("AutoModelForQuestionAnswering", "roberta", TEXT, "RobertaForQuestionAnswering"),
        ("AutoModelForMultipleChoice", "electra", TEXT, "ElectraForMultipleChoice"),
        ("AutoModelForSeq2SeqLM", "t5", {"d_model": 16, "d_ff": 32}, "T5ForConditionalGeneration"),
        ("AutoModelForImageClassification", "vit", VISION, "ViTForImageClassification"),
        ("AutoModelForImageTextToText", "llava", LLAVA, "LlavaForConditionalGeneration"),
        ("AutoModel", "bert", TEXT, "BertModel"),
    ],
)
def test_a_task_and_a_type_name_a_class(
    task: str, kind: str, settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    requested = {
        key: value for key, value in settings.items() if kind not in ("vit",) or key != "vocab_size"
    }
    config = HuggingFaceConfig(architecture=task, config={"model_type": kind, **requested})
    with torch.device("meta"):
        model = config.build()
    assert type(model).__name__ == expected
    model.config.save_pretrained(tmp_path)  # type: ignore[union-attr,operator]
    again = HuggingFaceConfig(architecture=task, pretrained=str(tmp_path))
    with torch.device("meta"):
        assert type(again.build()).__name__ == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "AutoModelForCausalLM"}, "it is a task; name the model"),
        (
            {"architecture": "AutoModelForCausalLM", "config": {"model_type": "lama"}},
            r"model_type=lama: transformers .* has no such type \(did you mean 'llama'\?\)",
        ),
        (
            {"architecture": "AutoModelForImageClassification", "config": {"model_type": "llama"}},
            "model_type=llama does not support it; accepted are .*AutoModelForCausalLM",
        ),
        (
            {"architecture": "LlamaForCausalLM", "config": {"model_type": "bert"}},
            "model.architecture=LlamaForCausalLM is of type llama",
        ),
        (
            {"architecture": "LlamaForCausalLM", "config": {"dtype": "bfloat16"}},
            "model.config.dtype: set the number format with precision",
        ),
        (
            {
                "architecture": "LlavaForConditionalGeneration",
                "config": {"text_config": {"model_type": "llama", "hiden_size": 16}},
            },
            r"model.config.text_config.hiden_size: LlamaConfig has no such setting .*'hidden_size'",
        ),
        (
            {"architecture": "LlamaForCausalLM", "config": {"gradient_checkpointing": True}},
            "plan.activations=recompute",
        ),
        (
            {"architecture": "LlamaForCausalLM", "config": {"num_hidden_layers": "two"}},
            "model.config=.*num_hidden_layers",
        ),
        (
            {"architecture": "XLNetLMHeadModel", "attention": "sdpa"},
            "model.attention=sdpa: XLNetLMHeadModel lacks it; use model.attention=auto",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught, torch.device("meta"):
        HuggingFaceConfig(**options).build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_is_that_of_every_part(attention: str, tmp_path: Path) -> None:
    made = HuggingFaceConfig(
        architecture="LlavaForConditionalGeneration", config=LLAVA, attention=attention
    )
    with torch.device("meta"):
        made.build().config.save_pretrained(tmp_path)  # type: ignore[union-attr,operator]
    narrow = {"text_config": {"num_hidden_layers": 1}}
    loaded = HuggingFaceConfig(
        architecture="LlavaForConditionalGeneration",
        config=narrow,
        pretrained=str(tmp_path),
        attention=attention,
    )
    for config in (made, loaded):
        with torch.device("meta"):
            found: Any = config.build()
        parts = [module for module in found.modules() if hasattr(module, "set_attn_implementation")]
        assert {part.config._attn_implementation for part in parts} == {attention}
    assert found.config.text_config.num_hidden_layers == 1
    assert found.config.text_config.hidden_size == 16, "the rest is the folder's"


def test_labels_and_a_number_format_of_the_folder(tmp_path: Path) -> None:
    config = HuggingFaceConfig(
        architecture="BertForSequenceClassification",
        config={**TEXT, "id2label": {0: "bad", 1: "good", 2: "best"}},
    )
    model: Any = config.build()
    assert model.classifier.out_features == 3
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = HuggingFaceConfig(pretrained=str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    found = values(chain_of(loaded))
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}, "precision's"
    expected = {name: tensor.float() for name, tensor in model.state_dict().items()}
    check_equal(found, expected)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    text["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, match=r"its weights are quantized \(fp8\)"):
        HuggingFaceConfig(pretrained=str(tmp_path)).build()


# ---- which tensors -----------------------------------------------------------------------------------


def test_a_new_head_is_made_by_the_constructor_and_named(tmp_path: Path) -> None:
    base = saved(tmp_path, transformers.BertModel(transformers.BertConfig(**TEXT)))
    config = HuggingFaceConfig(
        architecture="AutoModelForSequenceClassification",
        pretrained=str(tmp_path),
        config={"num_labels": 5},
    )
    chain = chain_of(config)
    (remark,) = check_weights(chain)
    assert "they lack classifier.weight, classifier.bias" in remark
    found = values(chain)
    check_equal(
        {name: value for name, value in found.items() if name.startswith("bert.")},
        {f"bert.{name}": value for name, value in base.state_dict().items()},
    )
    fresh = values(describe(config.build, sample=tokens))
    assert found["classifier.weight"].shape == (5, 16)
    assert torch.equal(found["classifier.weight"], fresh["classifier.weight"])
    assert 0 < found["classifier.weight"].std() < 0.05, "as transformers begins"


def test_a_head_that_the_model_has_not_is_left_unread_and_named(tmp_path: Path) -> None:
    full = saved(tmp_path, transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)))
    chain = chain_of(HuggingFaceConfig(architecture="AutoModel", pretrained=str(tmp_path)))
    lacking, unread = check_weights(chain)
    assert "pooler.dense.weight" in lacking
    assert "cls.predictions" in unread
    assert "ignored" in unread
    expected = {name.removeprefix("bert."): value for name, value in full.state_dict().items()}
    found = values(chain)
    check_equal({n: v for n, v in found.items() if not n.startswith("pooler")}, expected)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("bert.encoder.layer.1.output.dense.weight"),
            r"it lacks bert.encoder.layer.1.output.dense.weight;",
        ),
        (
            lambda t: t.update({"classifier.weight": torch.ones(7, 16)}),
            r"classifier.weight is \[7, 16\] and must be \[2, 16\]",
        ),
        (
            lambda t: [t.update({f"other.{n}": t.pop(n)}) for n in list(t)],
            r"it lacks bert.embeddings.word_embeddings.weight, .* more",
        ),
    ],
    ids=["one layer", "a shape", "all"],
)
def test_only_a_head_is_initialized_by_the_constructor(
    change: Any, message: str, tmp_path: Path
) -> None:
    saved(tmp_path, transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT)))
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        check_weights(chain_of(HuggingFaceConfig(pretrained=str(tmp_path))))


@pytest.mark.slow
def test_ties_that_the_files_do_not_have_are_refused(tmp_path: Path) -> None:
    untied = transformers.LlamaConfig(**TEXT, tie_word_embeddings=False)
    model = saved(tmp_path, transformers.LlamaForCausalLM(untied))
    tied = HuggingFaceConfig(pretrained=str(tmp_path), config={"tie_word_embeddings": True})
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight and lm_head.weight, which dif"):
        check_weights(chain_of(tied))
    chain = chain_of(HuggingFaceConfig(pretrained=str(tmp_path)))
    assert check_weights(chain) == []
    check_equal(values(chain), model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("MixtralForCausalLM", "MixtralConfig", MOE),
        ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**MOE, "num_experts": 3, "head_dim": 4}),
    ],
)
def test_experts_of_the_files_are_put_together(
    name: str, kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**settings, "moe_intermediate_size": 8} if "Qwen" in name else settings
    model = saved(tmp_path, getattr(transformers, name)(getattr(transformers, kind)(**settings)))
    files = load_file(tmp_path / "model.safetensors")
    assert any(".experts.2." in name for name in files), "one by one"
    chain = chain_of(HuggingFaceConfig(pretrained=str(tmp_path)))
    assert check_weights(chain) == []
    check_equal(values(chain), model.state_dict())
    del files[next(name for name in files if ".experts.2." in name)]
    save_file(files, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="experts"):
        check_weights(chain_of(HuggingFaceConfig(pretrained=str(tmp_path))))


# ---- what is computed --------------------------------------------------------------------------------


def test_the_loss_of_a_head_is_its_own_where_labels_are_inputs() -> None:
    config = HuggingFaceConfig(
        architecture="AutoModelForQuestionAnswering", config={"model_type": "bert", **TEXT}
    )
    model = config.build().eval()
    places = torch.tensor([1, 2])
    with_labels = model(**tokens(2), start_positions=places, end_positions=places)
    assert torch.equal(usual_loss(with_labels, places), with_labels.loss)
    with pytest.raises(DescribeError, match="without logits or loss: let the rows' inputs have la"):
        usual_loss(model(**tokens(2)), places)
    with pytest.raises(DescribeError, match=r"scores have shape \[2, 5, 4, 4\] and the targets"):
        usual_loss(torch.zeros(2, 5, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64))
    with pytest.raises(DescribeError, match=r"targets are torch\.float32 .*type loss=mse_loss"):
        usual_loss(torch.zeros(2, 1), torch.zeros(2, 1))


def test_gradient_checkpointing_is_left_to_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    config = HuggingFaceConfig(architecture="LlamaForCausalLM", config=TEXT)

    def flagged() -> nn.Module:
        model: Any = config.build()
        model.gradient_checkpointing_enable()
        return model

    with caplog.at_level(logging.INFO, "parallax"):
        chain = describe(flagged, sample=tokens)
    assert (
        "LlamaForCausalLM enables gradient checkpointing, which is replaced: the plan decides"
        in caplog.text
    )
    assert not chain.model.is_gradient_checkpointing
    assert chain.fingerprint() == describe(config.build, sample=tokens).fingerprint()
    entry = Entry(flagged, lambda outputs, targets: outputs.logits.sum(), rows)
    chain, blocks, plain = both(entry)
    for module in (*blocks, plain.train()):
        module.train()
    assert plain.model.gradient_checkpointing, "by itself it computes again"  # type: ignore[union-attr]
    check_same(entry, chain, blocks, plain, 3)


@pytest.mark.slow
def test_one_structure_in_every_number_format() -> None:
    """Its forward looks at the format, so what is recorded of it does; the weights are the same."""
    config = HuggingFaceConfig(architecture="LlamaForCausalLM", config=TEXT)
    wide, short = (
        describe(config.build, sample=tokens, partial_weights=True, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert wide.fingerprint() != short.fingerprint()
    assert wide.structure() == short.structure()
    deeper = HuggingFaceConfig(
        architecture="LlamaForCausalLM", config={**TEXT, "num_hidden_layers": 3}
    )
    assert (
        describe(deeper.build, sample=tokens, partial_weights=True).structure() != wide.structure()
    )
