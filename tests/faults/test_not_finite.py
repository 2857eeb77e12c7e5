"""NaN and infinity, in rows, in weights, in an update: named at once, and never in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import NonFiniteError
from parallax.model.describe import describe
from parallax.model.precision import PrecisionConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.checkpoint import list_checkpoints
from parallax.runtime.engine import Engine
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from tests.plans import make_plan
from tests.results import read_metrics

BAD = 3  # the batch in which it is, counted from 1


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs.float(), targets)


class Rows:
    """Row 70 of one batch, of its inputs or its targets, holds ``value``; held-out rows are that batch."""

    def __init__(self, where: str, value: float) -> None:
        self._count, self._where, self._value = 0, where, value

    def batch(self, rows: int) -> TensorRows:
        self._count += 1
        return self._rows(rows, bad=self._count == BAD)

    def _rows(self, rows: int, *, bad: bool) -> TensorRows:
        given = {"inputs": torch.randn(rows, 4), "targets": torch.randn(rows, 2)}
        if bad:
            given[self._where][70, 1] = self._value
        return TensorRows(given["inputs"], given["targets"])

    def validation(self, index: int, rows: int) -> TensorRows:
        return self._rows(rows, bad=index == 1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def training(
    folder: Path,
    rows: Rows,
    steps: int = 5,
    lr: float = 1e-3,
    nonfinite: str = "stop",
    **precision: Any,
) -> None:
    torch.manual_seed(1)
    chain = describe(build)
    plan = make_plan(chain, replicas=(1,), global_batch=80, microbatch=40)
    optimizer = SGDConfig(lr=lr)
    trainer = TrainerConfig(
        steps=steps,
        global_batch=80,
        eval_every=0,
        eval_batches=2,
        checkpoint_every=1,
        nonfinite=nonfinite,
    )
    engine = Engine.build(
        chain,
        plan,
        loss=loss,
        optimizer=optimizer,
        precision=PrecisionConfig(**precision),
        nonfinite_skips=trainer.nonfinite_skips,
    )
    try:
        train(engine, rows, trainer, LoggerConfig(to=[]), folder, tokens_per_row=1)
    finally:
        engine.close()


def test_a_policy_skips_shows_and_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a loss scale, no NaN or Inf is saved."""
    training(tmp_path, Rows("targets", float("nan")), nonfinite="skip")
    out = capsys.readouterr().out
    assert f"step {BAD} was skipped, loss nan: row 70 of the batch's targets holds nan" in out
    assert ["1 skipped" in line for line in out.splitlines() if line.startswith("step 5/")] == [
        True
    ]
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 2
    assert json.loads((tmp_path / "summary.json").read_text())["skipped_steps"] == 1


@pytest.mark.parametrize(("where", "value"), [("inputs", float("nan")), ("targets", float("inf"))])
def test_rows_are_named_and_the_run_ends(tmp_path: Path, where: str, value: float) -> None:
    expected = (
        rf"nothing was updated: row 70 of the batch's {where} holds {value} \(micro-batch 1\), seen first by rank 0 "
        r"\(stage 0, "
    )
    with pytest.raises(NonFiniteError, match=expected):
        training(tmp_path, Rows(where, value))
    assert list_checkpoints(tmp_path / "checkpoints")[-1].name == f"step-{BAD - 1:08d}"


def test_under_a_loss_scale_the_step_is_skipped_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training(tmp_path, Rows("inputs", float("nan")), compute="fp16", loss_scale=8.0)
    out = capsys.readouterr().out
    assert out.count("was skipped") == 1
    assert f"step {BAD} was skipped, loss nan: row 70 of the batch's inputs holds nan" in out
    assert "step 5: the validation loss is not finite: held-out batch 1 gives nan" in out
    skipped = [
        record["skipped_steps"]
        for record in read_metrics(tmp_path / "metrics.jsonl")
        if "loss" in record
    ]
    assert skipped == [0, 0, 1, 1, 1]


def test_weights_that_an_update_broke_are_in_no_checkpoint(tmp_path: Path) -> None:
    rows = Rows("inputs", 0.0)
    training(tmp_path, rows, steps=2)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(
        NonFiniteError, match=r"step 3: parameter \S+ holds (inf|nan), so no checkpoint is saved"
    ):
        training(tmp_path, rows, steps=6, lr=1e40)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["last-start.json", "step-00000001", "step-00000002"]
