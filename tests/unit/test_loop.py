"""The loop on one rank: it holds the plan's prediction against its steps, and says where the seconds went."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallax.events import EventLog, Span, read_events
from parallax.model.describe import describe
from parallax.model.mlp import MLP, MLPConfig
from parallax.monitor import LoggerConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.train.loop import JUDGED, MEASURED_EVENTS, PREDICTED_EVENTS, WARM_UP, OnDrift, TrainerConfig, drift, train
from tests.plans import make_plan

STEPS = WARM_UP + JUDGED + 3


class SameRows:
    """Every batch alike."""

    def batch(self, rows: int) -> TensorRows:
        return TensorRows(torch.zeros(rows, 4, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))

    def validation(self, index: int, rows: int) -> TensorRows:
        return self.batch(rows)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def looping(folder: Path, predicted_seconds: float, on_drift: OnDrift) -> dict[str, Any]:
    chain = describe(MLPConfig(layers=2, hidden=16, embedding=4, sequence=4).build)
    plan = make_plan(chain, global_batch=4, microbatch=2)
    plan = replace(plan, prediction=replace(plan.prediction, step_seconds=predicted_seconds))
    engine = Engine.build(chain, plan, loss=MLP.loss, scratch=folder / "swap")
    trainer = TrainerConfig(steps=STEPS, global_batch=4, eval_every=0, eval_batches=1, checkpoint_every=1)
    logger = LoggerConfig(tensorboard=False, events=False)
    try:
        return train(engine, SameRows(), trainer, logger, folder, tokens_per_row=1, on_drift=on_drift)
    finally:
        engine.close()


def test_a_wrong_prediction_ends_the_loop_at_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = looping(tmp_path, 1e-9, OnDrift.STOP)
    assert summary["ended"] == "drift"
    assert summary["steps"] == WARM_UP + JUDGED  # the first checkpoint at which enough steps are known
    assert "times the 0.000 s that were predicted" in summary["drift"]
    assert json.loads((tmp_path / "summary.json").read_text())["ended"] == "drift"
    assert "another plan continues from here" in capsys.readouterr().out
    again = looping(tmp_path, 1e-9, OnDrift.IGNORE)
    assert (again["ended"], again["steps"], again["drift"]) == ("steps", STEPS, "")
    assert f"continuing after step {WARM_UP + JUDGED}" in capsys.readouterr().out


def test_a_fixed_world_only_notes_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = looping(tmp_path, 1e-9, OnDrift.NOTE)
    assert (summary["ended"], summary["steps"]) == ("steps", STEPS)
    assert capsys.readouterr().out.count("that were predicted") == 1


@pytest.mark.parametrize(
    ("seconds", "predicted", "wrong"),
    [
        ([9.0] * WARM_UP + [1.0] * JUDGED, 1.0, False),
        ([1.0] * WARM_UP + [1.19] * JUDGED, 1.0, False),
        ([1.0] * WARM_UP + [1.21] * JUDGED, 1.0, True),
        ([1.0] * WARM_UP + [0.79] * JUDGED, 1.0, True),
        ([2.0] * (WARM_UP + JUDGED - 1), 1.0, False),  # too early to tell
        ([2.0] * 20, 0.0, False),  # a plan made by hand predicts nothing
    ],
)
def test_drift_is_a_fifth_of_the_prediction(seconds: list[float], predicted: float, wrong: bool) -> None:
    assert bool(drift(seconds, predicted)) == wrong


def test_the_summary_says_where_the_seconds_went(tmp_path: Path) -> None:
    with EventLog(tmp_path / PREDICTED_EVENTS) as events:
        events.extend([Span(0, 0, "forward", 0, 0, 0.0, 1.0), Span(0, 0, "backward", 0, 0, 1.0, 4.0, 0.5)])
    (rank,) = looping(tmp_path, 1.0, OnDrift.IGNORE)["ranks"]
    predicted, measured = rank["predicted_seconds"], rank["seconds"]
    assert (predicted["forward"], predicted["backward"], predicted["stall"]) == (1.0, 2.5, 0.5)
    assert predicted.keys() == measured.keys()
    assert min(measured["forward"], measured["backward"], measured["update"]) > 0
    spans = list(read_events(tmp_path / MEASURED_EVENTS))
    assert [span.kind for span in spans] == ["forward", "backward", "forward", "backward", "reduce", "update"]
    assert spans[0].step >= WARM_UP
