"""An exported checkpoint has equal tensors in folders that from_pretrained loads, and is never incomplete."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.zoo.catalog import TRANSFORMERS
from benchmarks.zoo.models import hugging
from parallax.common.metrics import larger_is_better
from parallax.errors import CheckpointError, ConfigError
from parallax.model.describe import Chain, describe
from parallax.model.factory.custom import CustomModelConfig
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.factory.mlp import MLPConfig
from parallax.model.materialise import check_weights, materialise
from parallax.run.export import FORMS, CheckpointChoice, Exported, export, exporting, shards
from parallax.runtime import checkpoint
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.metrics import MetricsConfig
from parallax.runtime.optim.emas.off import EmaOff
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.swap.optimizer.averaging import AVERAGE
from tests.unit.model.test_pretrained import CPU, MOE, TEXT, saved, tokens

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (it comes with the hf extra)"
)

HF, PLAIN = FORMS["huggingface"], FORMS["safetensors"]
NORMS = ("model/model.norm.weight",)


def write(
    run: Path,
    chain: Chain,
    step: int = 2,
    started: float = 1.0,
    metrics: dict[str, float] | None = None,
    *,
    averaged: bool = False,
) -> None:
    """A checkpoint of what ``chain`` begins with, as two stages of a start at that time write it. Values of a norm are
    the step, so that checkpoints differ; with ``averaged``, averages are higher by one."""
    partial = checkpoint.partial_folder(run / "checkpoints", step)
    checkpoint.begin(partial)
    count, checksums, seen = len(chain.blocks), {}, set[str]()
    for stage, (start, stop) in enumerate(((0, count // 2), (count // 2, count))):
        found: dict[str, Tensor] = {}
        for index, block in zip(range(start, stop), materialise(chain, start, stop, CPU)):
            state = block.state_dict()
            found |= {
                f"model/{name}": state[inner]
                for inner, name in chain.names[index].items()
                if name not in seen
            }
            seen |= set(chain.names[index].values())
        found |= {n: torch.full_like(t, step) for n, t in found.items() if step > 2 and n in NORMS}
        if averaged:
            found |= {
                name.replace("model", AVERAGE): value.float() + 1 for name, value in found.items()
            }
        checksums |= checkpoint.write_parts(partial, f"stage-{stage:02d}", found.items()).checksums
    index = {"step": step, "state": {}, "fingerprint": chain.fingerprint(), "optimizer": []}
    index |= {"started": started, "metrics": metrics or {}}
    if averaged:
        index |= {"optimizer": [AVERAGE], "averages": {"updates": 1}}
    checkpoint.finish(partial, {**index, "checksums": checksums})


def configured(model: Any) -> Any:
    """What an export asks of a run's settings."""
    return SimpleNamespace(
        model=model,
        seed=1,
        name="run",
        checkpoint=CheckpointConfig(),
        metrics_config=MetricsConfig(metrics=MetricsConfig.read(["mcc"])),
        optimizer=AdamWConfig(),
        ema=EmaOff(),
    )


def run_of(
    directory: Path, config: Any, sample: Callable[[int], Any] = tokens, dtype: Any = torch.float32
) -> Any:
    weights = config.weights if isinstance(config, HuggingFaceConfig) else None
    chain = describe(
        config.build, sample=sample, weights=weights, partial_weights=True, dtype=dtype
    )
    write(directory, chain)
    return SimpleNamespace(directory=directory, config=configured(config))


LLAMA = HuggingFaceConfig(architecture="LlamaForCausalLM", config=TEXT)


@functools.cache
def llama() -> Chain:
    return describe(LLAMA.build, sample=tokens, partial_weights=True)


def run_of_llama(directory: Path) -> Any:
    """For tests of what becomes of any: most of what a run takes here is that its model is described."""
    write(directory, llama())
    return SimpleNamespace(directory=directory, config=configured(LLAMA))


def loaded(exported: Exported, kind: type) -> nn.Module:
    """The model, which transformers finds whole."""
    model, info = kind.from_pretrained(exported.directory, output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(info.values()), info
    return model  # type: ignore[no-any-return]


def check_same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def images(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(rows, 3, 16, 16)}


def chat(rows: int) -> dict[str, Tensor]:
    return {**tokens(rows), **images(rows)}


def t5_tokens(rows: int) -> dict[str, Tensor]:
    ids = tokens(rows)["input_ids"]
    return {"input_ids": ids, "decoder_input_ids": ids}


VIT = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 8}
CLIP = {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": VIT, "projection_dim": 8}
KINDS: dict[str, tuple[str, dict[str, Any], Callable[[int], Any]]] = {
    "tied": (
        "GPT2LMHeadModel",
        {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2},
        tokens,
    ),
    "masked": ("BertForMaskedLM", TEXT, tokens),
    "experts": ("MixtralForCausalLM", MOE, tokens),
    "two sides": (
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2},
        t5_tokens,
    ),
    "images": ("ViTForImageClassification", VIT, images),
    "images and text": ("CLIPModel", CLIP, chat),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_loaded_comes_out_again(kind: str, tmp_path: Path) -> None:
    name, settings, sample = KINDS[kind]
    cls = getattr(transformers, name)
    model = saved(tmp_path / "from", cls(cls.config_class(**settings)))
    run = run_of(tmp_path / "run", HuggingFaceConfig(pretrained=str(tmp_path / "from")), sample)
    exported = export(run, HF, tmp_path / "out")
    assert exported.directory == tmp_path / "out"
    assert "config.json" in exported.files
    check_same(loaded(exported, cls), model.state_dict())
    ours, theirs = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "from"))
    assert ours.keys() == theirs.keys(), "what save_pretrained writes, no tensor twice"
    configs = [json.loads((tmp_path / d / "config.json").read_text()) for d in ("out", "from")]
    assert configs[0] == configs[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", sorted({n for names in TRANSFORMERS.values() for n in names.split()})
)
def test_every_head_comes_out_as_it_went_in(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "from", hugging.build(name))
    cls = getattr(transformers, name)
    expected = cls.from_pretrained(tmp_path / "from").state_dict()
    config = HuggingFaceConfig(pretrained=str(tmp_path / "from"))
    chain = describe(config.build, blocks=[""], weights=config.weights, partial_weights=True)
    assert check_weights(chain) == []
    write(tmp_path / "run", chain)
    run: Any = SimpleNamespace(directory=tmp_path / "run", config=configured(config))
    check_same(loaded(export(run, HF, tmp_path / "out"), cls), expected)


def test_large_models_are_written_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(
        tmp_path / "from", transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))
    )
    run = run_of(tmp_path / "run", HuggingFaceConfig(pretrained=str(tmp_path / "from")))
    monkeypatch.setattr(shards, "SHARD_BYTES", 5000)
    exported = export(run, HF, None)
    assert exported.directory == tmp_path / "run" / "huggingface" / "step-00000002"
    index = json.loads((exported.directory / "model.safetensors.index.json").read_text())
    named = set(index["weight_map"].values())
    assert len(named) > 2
    assert named < set(exported.files)
    assert index["metadata"]["total_size"] == exported.weight_bytes
    check_same(loaded(exported, transformers.LlamaForCausalLM), model.state_dict())
    again = HuggingFaceConfig(pretrained=str(exported.directory))
    chain = describe(again.build, sample=tokens, weights=again.weights)
    materialise(chain, 0, len(chain.blocks), CPU)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_number_format_is_that_of_the_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    config = HuggingFaceConfig(architecture="LlamaForCausalLM", config=TEXT)
    exported = export(run_of(tmp_path, config, dtype=dtype), HF, None)
    kept = json.loads((exported.directory / "config.json").read_text())
    assert kept["dtype"] == str(dtype).removeprefix("torch.")
    assert kept["architectures"] == ["LlamaForCausalLM"]
    found = loaded(exported, transformers.AutoModelForCausalLM)
    assert {parameter.dtype for parameter in found.parameters()} == {dtype}
    assert "generation_config.json" in exported.files
    assert any("no tokenizer" in remark for remark in exported.remarks)


def test_what_lies_beside_the_weights_comes_along(tmp_path: Path) -> None:
    folder = tmp_path / "from"
    saved(folder, transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)))
    carried = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"chat_template": "hi"}',
        "special_tokens_map.json": "{}",
        "vocab.txt": "a\nb",
        "spiece.model": "\0\1",
        "chat_template.jinja": "{{ hi }}",
        "preprocessor_config.json": "{}",
        "additional_chat_templates/tool.jinja": "{{ tool }}",
    }
    left = [
        "pytorch_model.bin",
        "optimizer.pt",
        "README.md",
        "trainer_state.json",
        ".gitattributes",
    ]
    (folder / "additional_chat_templates").mkdir()
    (folder / "onnx").mkdir()
    for name, text in {**carried, **dict.fromkeys(left, "x")}.items():
        (folder / name).write_text(text)
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    run = run_of(tmp_path / "run", HuggingFaceConfig(pretrained=str(folder)))
    exported = export(run, HF, None)
    for name, text in carried.items():
        assert (exported.directory / name).read_text() == text
    assert not {*left, "onnx"} & set(exported.files)
    assert exported.remarks == ()
    assert loaded(exported, transformers.LlamaForCausalLM).generation_config.temperature == 0.25  # type: ignore[union-attr]


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", MLPConfig(), lambda rows: torch.zeros(rows, 1))
    with pytest.raises(
        ConfigError, match="which is no model of transformers; use --to safetensors"
    ):
        export(run, HF, None)
    exported = export(run, PLAIN, None)
    assert exported.files == ("model.safetensors",)
    chain = describe(MLPConfig().build, weights=exported.directory)
    materialise(chain, 0, len(chain.blocks), CPU)


def test_averaged_weights(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", MLPConfig(), lambda rows: torch.zeros(rows, 1))
    with pytest.raises(ConfigError, match=r"--weights ema: .* has no averaged weights \(ema=off\)"):
        export(run, PLAIN, None, averaged=True)
    write(run.directory, describe(MLPConfig().build), step=3, averaged=True)
    trained, averaged = (
        load_file(export(run, PLAIN, None, averaged=each).directory / "model.safetensors")
        for each in (False, True)
    )
    assert trained.keys() == averaged.keys()
    assert all(torch.equal(averaged[name], value + 1) for name, value in trained.items())


def test_a_factory_that_makes_a_model_of_transformers(tmp_path: Path) -> None:
    config = CustomModelConfig(target="tests.zoo:llama")
    exported = export(run_of(tmp_path, config), HF, None)
    loaded(exported, transformers.LlamaForCausalLM)


class Changed(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
    """Has a head that its configuration does not know."""

    def __init__(self, config: Any, *, changed: str) -> None:
        super().__init__(config)
        if changed == "more":
            self.score = nn.Linear(16, 1)
        elif changed == "other":
            self.lm_head = nn.Linear(16, 5)
        elif changed == "tied":
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, **inputs: Any) -> Any:
        found = super().forward(**inputs)
        head = getattr(self, "score", nn.Identity())
        return found.logits, head(found.logits[..., :16])


def changed_llama(changed: str = "") -> nn.Module:
    return Changed(transformers.LlamaConfig(**TEXT), changed=changed)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("changed", "what"),
    [("more", "score.weight, score.bias"), ("other", "lm_head.weight"), ("tied", "lm_head.weight")],
)
def test_what_its_configuration_does_not_say_is_no_folder_of_transformers(
    changed: str, what: str, tmp_path: Path
) -> None:
    target = f"{__name__}:changed_llama"
    run = run_of(tmp_path, CustomModelConfig(target=target, kwargs={"changed": changed}))
    with pytest.raises(ConfigError, match=f"no LlamaForCausalLM of its configuration: .*{what}"):
        export(run, HF, None)
    assert "model.safetensors" in export(run, PLAIN, None).files


def test_a_class_derived_from_one_of_transformers_is_that_one(tmp_path: Path) -> None:
    exported = export(
        run_of(tmp_path, CustomModelConfig(target=f"{__name__}:changed_llama")), HF, None
    )
    loaded(exported, transformers.LlamaForCausalLM)


@pytest.mark.parametrize("lacking", ["checkpoint", "space", "empty", "folder", "parent"])
def test_what_cannot_be_written_is_refused_and_leaves_nothing(lacking: str, tmp_path: Path) -> None:
    out, directory = tmp_path / "out", tmp_path / "run"
    if lacking == "checkpoint":
        run: Any = SimpleNamespace(directory=directory, config=configured(LLAMA))
        with pytest.raises(ConfigError, match="has no checkpoint yet: a run saves every"):
            export(run, HF, out)
        return
    run = run_of_llama(directory)
    if lacking == "space":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exporting, "disk_free_bytes", lambda path: 1000)
            with pytest.raises(CheckpointError, match=r"its tensors take .*1000 B are free there"):
                export(run, HF, out)
    elif lacking == "empty":
        out.mkdir()
        (out / "mine").touch()
        with pytest.raises(ConfigError, match="it is not empty; name another folder"):
            export(run, HF, out)
        assert [path.name for path in out.iterdir()] == ["mine"]
        return
    elif lacking == "folder":
        out.touch()
        with pytest.raises(ConfigError, match="it is no folder"):
            export(run, HF, out)
        return
    else:
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
            export(run, HF, tmp_path / "file" / "out")
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "file") == ["run"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = run_of_llama(tmp_path / "run"), tmp_path / "out"
    out.mkdir()  # an empty one is as good as none
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: Any) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_tensors", fail)
        with pytest.raises(CheckpointError, match=r"No space left on device, .* free; noth"):
            export(run, HF, out)
    assert list(out.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    export(run, HF, out)
    assert (out / "model.safetensors").exists()


def test_the_checkpoint_is_the_one_that_the_run_resumes_from(tmp_path: Path) -> None:
    """The latest start's: a partitioned half may have advanced further."""
    run = run_of_llama(tmp_path)
    write(tmp_path, llama(), step=9, started=2.0)
    write(tmp_path, llama(), step=4, started=3.0)
    assert export(run, PLAIN, out=tmp_path / "out").step == 4


def exported_step(run: Any, out: Path, **choice: Any) -> Exported:
    """An export of the chosen checkpoint; its tensors are that checkpoint's."""
    exported = export(run, PLAIN, out, choice=CheckpointChoice(**choice))
    reader = checkpoint.CheckpointReader(
        run.directory / "checkpoints" / checkpoint.checkpoint_name(exported.step)
    )
    found = load_file(out / "model.safetensors")
    assert found.keys() == reader.model_tensors().keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, reader.read(f"model/{name}")), name
    return exported


def test_the_best_checkpoint_and_that_of_a_step(tmp_path: Path) -> None:
    run, losses = run_of_llama(tmp_path), {3: 1.5, 5: 1.25, 7: math.nan, 8: 1.25, 9: 2.0}
    for step, loss in losses.items():
        write(
            tmp_path,
            llama(),
            step,
            metrics={"validation_loss": loss, "loss": 9.0 - step, "validation_mcc": -step},
        )
    write(tmp_path, llama(), step=12, started=0.5, metrics={"validation_loss": 0.1})
    for step in (2, 5, 9):
        assert exported_step(run, tmp_path / f"step-{step}", step=step).step == step
    best = exported_step(run, tmp_path / "best", best=True)
    assert best.step == 8, "of equal ones the latest, and none that the run did not resume from"
    assert best.remarks[0] == ("step 8 has the best validation_loss, 1.25, of steps 3, 5, 8, 9")
    run.config.checkpoint = CheckpointConfig(metric="loss")
    assert exported_step(run, tmp_path / "loss", best=True).step == 9
    run.config.checkpoint = CheckpointConfig(metric="validation_mcc")
    assert exported_step(run, tmp_path / "mcc", best=True).step == 3, "of which higher is better"
    with pytest.raises(ConfigError) as refused:
        exported_step(run, tmp_path / "none", step=4)
    assert (
        str(refused.value)
        == "--step 4: accepted are the existing checkpoints, steps 2, 3, 5, 7, 8, 9, 12"
    )
    assert not (tmp_path / "none").exists()


def test_the_class_of_a_metric_says_which_value_is_best(tmp_path: Path) -> None:
    run = run_of_llama(tmp_path)
    entry = {"name": "mine", "target": "torchmetrics.classification:MulticlassFBetaScore"}
    run.config.metrics_config = MetricsConfig(metrics=MetricsConfig.read([entry]))
    run.config.checkpoint = CheckpointConfig(metric="validation_mine")
    for step, value in {3: 0.5, 5: 0.75, 8: 0.25}.items():
        write(tmp_path, llama(), step, metrics={"validation_mine": value})
    assert exported_step(run, tmp_path / "best", best=True).step == 5


def test_without_a_metric_there_is_no_best_checkpoint(tmp_path: Path) -> None:
    run = run_of_llama(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"--best: no checkpoint records validation_loss; name one .*--step: step 2",
    ):
        exported_step(run, tmp_path / "none", best=True)


@pytest.mark.parametrize(
    ("name", "larger"),
    [
        ("validation_accuracy", True),
        ("validation_accuracy/de", True),
        ("top5_accuracy", True),
        ("rows_per_second", True),
        ("f1", True),
        ("validation_jaccard", True),
        ("validation_kappa", True),
        ("validation_mcc", True),
        ("validation_explained_variance", True),
        ("validation_pearson", True),
        ("validation_spearman", True),
        ("validation_specificity", True),
        ("validation_calibration_error", False),
        ("validation_mae", False),
        ("validation_loss", False),
        ("validation_loss/accuracy_set", False),
        ("step_seconds_median", False),
        ("perplexity", False),
        ("score_error", False),
    ],
)
def test_which_of_two_values_is_better(name: str, larger: bool) -> None:
    assert larger_is_better(name) == larger


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = run_of_llama(tmp_path)
    for other in ({"num_hidden_layers": 3}, {"num_hidden_layers": 1}, {"intermediate_size": 24}):
        run.config.model = replace(LLAMA, config={**TEXT, **other})
        with pytest.raises(
            CheckpointError, match="is not of the model in the run's present settings"
        ):
            export(run, HF, None)
