"""``parallax export``: what a run has trained computes outside what it computed inside; mistakes are one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from parallax import cli, config
from parallax.run.job import open_source, usual_loss
from tests.faults.commands import ON_ONE_RANK_AND_ON_TWO, TINY, one_line, prepared, weights
from tests.results import read_metrics

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (it comes with the hf extra)"
)

SMALL = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
}
RUN = (
    *("model=huggingface", "model.pretrained=from", "model.sequence=16", "model.verify=false"),
    *("data.max_bytes=64KiB", "trainer.global_batch=4", "trainer.steps=2", "trainer.eval_every=2"),
    *("trainer.eval_batches=1", "logger=none"),
)


@pytest.mark.thorough  # as tests/distributed/test_export.py, but of processes that the command starts
def test_a_trained_run_computes_the_same_outside(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(here / "from")
    (here / "from" / "tokenizer.json").write_text("{}")
    run = prepared(*RUN)
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    code, out, err = called("export", "run", "--to", "huggingface", "--out", "out")
    assert code == 0, err
    assert "tokenizer.json" in out
    assert "exported to out" in out
    model, info = transformers.AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not any(info.values()), info
    assert model.lm_head.weight is model.model.embed_tokens.weight
    trained = weights(run)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, trained[f"model/{name}"]), name
    batch = open_source(config.load((run / "config.yaml").read_text())).validation(0, 4)
    with torch.no_grad():
        loss = usual_loss(model.eval()(batch.inputs(0, 4)), batch.targets(0, 4))
    measured = [
        r["validation_loss"] for r in read_metrics(run / "metrics.jsonl") if "validation_loss" in r
    ]
    assert loss.item() == pytest.approx(measured[-1], rel=1e-6)
    code, _, err = called("export", "run", "--to", "huggingface", "--out", "out")
    assert code == 2
    assert "--out out: it is not empty" in one_line(err)


@pytest.mark.faults
@ON_ONE_RANK_AND_ON_TWO
def test_peft_loads_the_adapters_of_a_run(
    here: Path,
    called: Callable[..., tuple[int, str, str]],
    capfd: pytest.CaptureFixture[str],
    replicas: tuple[int, ...],
) -> None:
    peft = pytest.importorskip(
        "peft", reason="peft is not installed (it comes with the peft extra)"
    )
    torch.manual_seed(3)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    base.save_pretrained(here / "from")
    adapter = ("+model.adapter.peft_type=LORA", "+model.adapter.target_modules=[q_proj,v_proj]")
    run = prepared(*RUN, *adapter, "trainer.eval_every=0", replicas=replicas)
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    assert cli.main(["export", "run", "--to", "peft", "--out", "out"]) == 0
    found = peft.PeftModel.from_pretrained(base, "out").base_model.model.state_dict()
    trained = weights(run)
    moved = [name for name in found if "lora_B" in name]
    assert len(moved) == 4
    for name in moved:
        assert torch.equal(found[name], trained[f"model/{name}"]), name
        assert found[name].any(), name
    capfd.readouterr()
    for arguments, message in (
        (["--to", "safetensors"], "use --to peft; with --merge"),
        (
            ["--to", "huggingface", "--step", "9"],
            "--step 9: accepted are the existing checkpoints, step 2",
        ),
    ):
        assert cli.main(["export", "run", *arguments, "--out", "other"]) == 2
        assert message in one_line(capfd.readouterr().err)
        assert not (here / "other").exists()
    assert (
        cli.main(["export", "run", "--to", "huggingface", "--merge", "--best", "--out", "whole"])
        == 0
    )
    whole = transformers.AutoModelForCausalLM.from_pretrained("whole").state_dict()
    theirs = peft.PeftModel.from_pretrained(base, "out").merge_and_unload().state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere", "--to", "huggingface"],
            "runs/nowhere is no run directory: there is no such folder",
        ),
        (["run", "--to", "huggingface"], "runs/run has no checkpoint yet"),
        (["run", "--to", "onnx"], "invalid choice: 'onnx'"),
        (["run"], "the following arguments are required: --to"),
        (["run", "--to", "safetensors", "trainer.steps=3"], "the files have the settings"),
    ],
)
def test_mistakes_are_one_line(
    here: Path,
    called: Callable[..., tuple[int, str, str]],
    arguments: list[str],
    message: str,
) -> None:
    prepared(*TINY)
    code, out, err = called("export", *arguments)
    assert code == 2
    assert message in one_line(err)
    assert out == ""
    assert [path.name for path in (here / "runs").iterdir()] == ["run"]
