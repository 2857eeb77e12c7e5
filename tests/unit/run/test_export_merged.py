"""Adapters merged into their base are what peft itself merges, and no other base is taken for theirs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from parallax.errors import CheckpointError, ConfigError
from parallax.model.describe import describe
from parallax.model.factory.adapters import AdaptableModelConfig
from parallax.model.factory.custom import CustomModelConfig
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.run.export import FORMS, export
from parallax.run.job import usual_loss
from parallax.runtime.batch import TensorRows
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.engine import Engine
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from tests.plans import make_plan
from tests.unit.model.test_pretrained import TEXT, saved, tokens

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (it comes with the hf extra)"
)
peft = pytest.importorskip("peft", reason="peft is not installed (it comes with the peft extra)")

HF, PLAIN, PEFT = FORMS["huggingface"], FORMS["safetensors"], FORMS["peft"]
LORA = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "down_proj"]}


def batch(rows: int = 4) -> TensorRows:
    inputs = tokens(rows)
    return TensorRows({**inputs, "labels": inputs["input_ids"]}, torch.zeros(rows))


def tuned(directory: Path, model: AdaptableModelConfig, batch: TensorRows, loss: Any) -> Any:
    """A run of ``model`` that has trained its adapters for two steps."""
    rows = len(batch)
    chain = describe(
        model.build,
        sample=lambda count: (
            {k: v[:count] for k, v in batch.inputs(0, rows).items()}
            if isinstance(batch.inputs(0, rows), dict)
            else batch.inputs(0, count)
        ),
        weights=model.stage_weights or None,
        partial_weights=model.partial_weights,
        base=model.base(1),
    )
    engine = Engine.build(
        chain,
        make_plan(chain, global_batch=rows, microbatch=2),
        loss=loss,
        steps=8,
        optimizer=AdamWConfig(lr=0.5),
        scratch=directory / "swap",
    )
    for _ in range(2):
        engine.step(batch)
    engine.save(directory / "checkpoints", {})
    engine.close()
    config = SimpleNamespace(
        model=model,
        seed=1,
        name="run",
        checkpoint=CheckpointConfig(),
        precision=PrecisionConfig(),
        optimizer=AdamWConfig(),
    )
    return SimpleNamespace(directory=directory, config=config)


def llama(folder: Path, **settings: Any) -> nn.Module:
    return saved(
        folder, transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **settings))
    )


def thorough(name: str, settings: dict[str, Any]) -> Any:
    return pytest.param(settings, id=name, marks=pytest.mark.thorough)


METHODS = [
    pytest.param({**LORA, "use_dora": True, "modules_to_save": ["lm_head"]}, id="dora and head"),
    pytest.param({"peft_type": "LN_TUNING", "target_modules": ["input_layernorm"]}, id="norms"),
    thorough("lora", {**LORA, "lora_alpha": 16, "use_rslora": True}),
    thorough("biases", {**LORA, "bias": "all"}),
    thorough("embedding", {**LORA, "target_modules": ["embed_tokens", "v_proj"]}),
    thorough("parameters", {**LORA, "target_parameters": ["mlp.up_proj.weight"]}),
    thorough("tokens", {**LORA, "trainable_token_indices": [3, 5]}),
    *(
        thorough(name, {"peft_type": name, "target_modules": ["q_proj"], **more})
        for name, more in {
            "IA3": {
                "target_modules": ["k_proj", "down_proj"],
                "feedforward_modules": ["down_proj"],
            },
            "LOHA": {"r": 2},
            "LOKR": {"r": 2},
            "OFT": {"oft_block_size": 4},
            "C3A": {"block_size": 4},
            "HRA": {"r": 2},
            "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1, 2]},
        }.items()
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", METHODS)
def test_merged_weights_are_those_that_peft_merges(adapter: dict[str, Any], tmp_path: Path) -> None:
    base = llama(tmp_path / "from", attention_bias=adapter.get("bias") == "all")
    begun = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = HuggingFaceConfig(pretrained=str(tmp_path / "from"), adapter=adapter)
    run = tuned(tmp_path / "run", model, batch(), usual_loss)
    export(run, PEFT, tmp_path / "peft")
    exported = export(run, HF, None, merge=True)
    assert exported.directory == tmp_path / "run" / "huggingface" / "step-00000002-merged"
    found, info = transformers.AutoModelForCausalLM.from_pretrained(
        exported.directory, output_loading_info=True
    )
    assert not any(info.values()), info
    wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    inputs = tokens(3)
    with torch.no_grad():
        unmerged = wrapped(**inputs).logits
    expected = wrapped.merge_and_unload()
    theirs = expected.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    assert any(not torch.equal(tensor, begun[name]) for name, tensor in theirs.items())
    with torch.no_grad():
        logits = found.eval()(**inputs).logits
        assert torch.equal(logits, expected.eval()(**inputs).logits)
    torch.testing.assert_close(logits, unmerged, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_adapter_run_for_transformers_is_a_folder_of_peft(tmp_path: Path) -> None:
    base = llama(tmp_path / "from")
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    model = HuggingFaceConfig(pretrained=str(tmp_path / "from"), adapter=LORA)
    run = tuned(tmp_path / "run", model, batch(), usual_loss)
    exported = export(run, HF, tmp_path / "adapters")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} == set(
        exported.files
    )
    assert any("--merge" in remark for remark in exported.remarks)
    # Transformers reads such a folder, with the base that it names.
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapters")
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    with torch.no_grad():
        assert torch.equal(found.eval()(**tokens(2)).logits, expected.eval()(**tokens(2)).logits)
    with pytest.raises(
        ConfigError, match="use --to peft; with --merge it gets the weights of both"
    ):
        export(run, PLAIN, tmp_path / "out")
    for form in ("peft", "dcp"):
        with pytest.raises(ConfigError, match=f"--to {form} cannot hold a base with merged"):
            export(run, FORMS[form], tmp_path / "out", merge=True)
    # Another base at the same place.
    torch.manual_seed(9)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).save_pretrained(
        tmp_path / "from"
    )
    with pytest.raises(CheckpointError, match="was trained on another base"):
        export(run, HF, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_adapter_on_one_of_two_names_of_a_tensor_is_refused(tmp_path: Path) -> None:
    llama(tmp_path / "from", tie_word_embeddings=True)
    adapter = {**LORA, "target_modules": ["embed_tokens"]}
    model = HuggingFaceConfig(pretrained=str(tmp_path / "from"), adapter=adapter)
    run = tuned(tmp_path / "run", model, batch(), usual_loss)
    with pytest.raises(
        CheckpointError, match="are one tensor of the base, and the adapters change"
    ):
        export(run, HF, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


class Net(nn.Module):
    """Has parameters outside of modules, a norm with statistics, and a constructor that draws numbers."""

    def __init__(self, *, recordable: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.norm, self.hidden, self.head = nn.BatchNorm1d(8), nn.Linear(8, 16), nn.Linear(16, 3)
        if not recordable:
            pickle.loads(pickle.dumps(self.head.weight.detach())).numpy()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.hidden(self.norm(x * self.scale)).relu())
        return found


def net(recordable: bool = True) -> nn.Module:
    return Net(recordable=recordable)


@pytest.mark.slow
@pytest.mark.parametrize("recordable", [True, False])
def test_a_model_of_ones_own_with_weights_of_its_constructor(
    recordable: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = CustomModelConfig(
        target=f"{__name__}:net",
        kwargs={"recordable": recordable},
        adapter={"peft_type": "LORA", "r": 2, "target_modules": ["hidden", "head"]},
    )
    torch.manual_seed(0)
    rows = TensorRows(torch.randn(8, 8), torch.arange(8) % 3)
    run = tuned(tmp_path / "run", model, rows, nn.functional.cross_entropy)
    assert ("cannot be recorded" in caplog.text) != recordable
    exported = export(run, PLAIN, tmp_path / "out", merge=True)
    found = net()
    found.load_state_dict(load_file(exported.directory / "model.safetensors"))
    trained = load_file(next((tmp_path / "run" / "checkpoints").rglob("*.safetensors")))
    assert torch.equal(found.norm.running_mean, trained["model/norm.running_mean"])
    export(run, PEFT, tmp_path / "peft")
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["r"] == 2
    lora = {n: trained[f"model/hidden.lora_{n}.default.weight"] for n in "AB"}
    base = found.hidden.weight.detach() - 4 * lora["B"] @ lora["A"]  # lora_alpha / r
    chain = describe(model.create, blocks=[""])
    (whole,) = materialise(chain, 0, 1, torch.device("cpu"))
    torch.testing.assert_close(base, whole.get_parameter("hidden.weight").detach())
    assert torch.equal(found.scale, whole.get_parameter("scale"))


def test_without_adapters_there_is_nothing_to_merge(tmp_path: Path) -> None:
    model = CustomModelConfig(target=f"{__name__}:net")
    rows = TensorRows(torch.randn(8, 8), torch.arange(8) % 3)
    run = tuned(tmp_path / "run", model, rows, nn.functional.cross_entropy)
    with pytest.raises(ConfigError, match="--merge: the run trains no adapters"):
        export(run, PLAIN, None, merge=True)
