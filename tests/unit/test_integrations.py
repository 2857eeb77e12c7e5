"""Trainers of other libraries, with and without the callback: equal losses and weights, and tensors that moved."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from parallax.integrations import lightning_callback, transformers_callback

MIB = 2**20


@pytest.fixture(autouse=True)
def silent_and_offline() -> Iterator[None]:
    """What the libraries set in the environment themselves goes too."""
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
    }
    with mock.patch.dict(os.environ, wanted):
        yield


@pytest.fixture
def options(scratch: Path) -> dict[str, Any]:
    return {"directory": scratch, "minimum_bytes": 1024, "piece_bytes": MIB // 8}


def limit(model: nn.Module, free_bytes: int) -> int:
    return 2 * sum(p.nbytes for p in model.parameters()) + free_bytes


def assert_moved(callback: Any, *, states: bool = True) -> None:
    swapping = callback.training.swapping
    assert not swapping.open
    assert swapping.statistics.bytes_out > 0
    assert swapping.statistics.bytes_in > 0
    assert not states or swapping.states[0].bytes_in > 0
    assert "AdamW" in swapping.report()


# ---- transformers


class _Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self._rows = torch.randint(0, 128, (24, 64), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def _llama() -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    return transformers.LlamaForCausalLM(config)


def _transformers_trainer(model: Any, folder: Path, *callbacks: Any, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        **changes,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=_Tokens(), callbacks=list(callbacks)
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize(
    ("checkpointed", "changes"),
    [
        (False, {}),
        (True, {}),
        (False, {"bf16": True, "lr_scheduler_type": "cosine", "warmup_steps": 2}),
    ],
    ids=["plain", "checkpointed", "bf16"],
)
def test_transformers_trainer(
    checkpointed: bool, changes: dict[str, Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    model, other = _llama(), _llama()
    if checkpointed:
        model.gradient_checkpointing_enable()
        other.gradient_checkpointing_enable()
    without = _transformers_trainer(model, tmp_path, **changes)
    without.train()
    callback = transformers_callback(limit(other, MIB * 3 // 8 if checkpointed else MIB), **options)
    trainer = _transformers_trainer(other, tmp_path, callback, **changes)
    trainer.train()
    assert len(_losses(trainer)) == 4
    assert _losses(trainer) == _losses(without)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))
    assert_moved(callback)


def test_transformers_trainer_resumes(tmp_path: Path, options: dict[str, Any]) -> None:
    """A checkpoint written inside the scope holds all states, and one is loaded before it."""
    model, other = _llama(), _llama()

    def trainer(model: Any, folder: str, *callbacks: Any) -> Any:
        found = _transformers_trainer(model, tmp_path / folder, *callbacks)
        found.args.save_strategy, found.args.save_steps = "steps", 2
        return found

    without = trainer(model, "without")
    without.train()
    callbacks = [transformers_callback(limit(other, MIB), **options) for _ in range(2)]
    first = trainer(other, "with", callbacks[0])
    first.train()
    again = _llama()
    second = trainer(again, "with", callbacks[1])
    second.train(resume_from_checkpoint=str(tmp_path / "with" / "checkpoint-2"))
    assert _losses(second) == _losses(without)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))
    assert_moved(callbacks[1])


def test_transformers_training_that_failed_can_be_repeated(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")

    class Failing(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    model = _llama()
    callback = transformers_callback(limit(model, MIB), **options)
    trainer = _transformers_trainer(model, tmp_path, callback, Failing())
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert callback.training.swapping.open
    trainer.remove_callback(Failing)
    trainer.train()
    assert_moved(callback)


# ---- Lightning


def _lightning_module(fail_at: int | None = None) -> Any:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(5)]
            self.model = nn.Sequential(*layers, nn.Linear(128, 4))
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if index == fail_at:
                raise ZeroDivisionError
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[0][:, :4].argmax(1))
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return Module()


def _fit(module: Any, folder: Path, *callbacks: Any, **changes: Any) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = torch.randn(1024, 128, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **changes,
        )
        trainer.fit(module, loader)


@pytest.mark.parametrize(
    "changes",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulated and clipped", "bf16"],
)
def test_lightning_trainer(
    changes: dict[str, Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    module, other = _lightning_module(), _lightning_module()
    _fit(module, tmp_path, **changes)
    callback = lightning_callback(limit(other, MIB // 2), **options)
    _fit(other, tmp_path, callback, **changes)
    assert len(other.losses) == 8
    assert other.losses == module.losses
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), other.parameters()))
    assert_moved(callback)


def test_lightning_training_that_fails_leaves_the_scope(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    module = _lightning_module(fail_at=2)
    callback = lightning_callback(limit(module, MIB // 2), **options)
    with pytest.raises(ZeroDivisionError):
        _fit(module, tmp_path, callback)
    assert_moved(callback)


def test_libraries_are_not_imported_with_the_module() -> None:
    code = (
        "import sys, parallax.integrations; print({'transformers', 'lightning'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
