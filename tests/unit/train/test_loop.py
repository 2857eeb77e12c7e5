"""The loop on one rank: it holds the plan's prediction against its steps, and says where the seconds went."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallax import cli
from parallax.common.events import EventLog, Span, read_events
from parallax.model.describe import describe
from parallax.model.factory.mlp import MLP, MLPConfig
from parallax.report.occupancy import Occupancy, occupancy_path
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.swap.config import SwapConfig
from parallax.train.loop import OnDrift, TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from parallax.train.record import MEASURED_EVENTS, PREDICTED_EVENTS, WARM_UP
from parallax.train.stop import STEPS_TO_EVALUATE, drift
from tests.plans import GIB, make_plan
from tests.results import read_metrics

STEPS = WARM_UP + STEPS_TO_EVALUATE + 3


class SameRows:
    """Every batch alike."""

    def batch(self, rows: int) -> TensorRows:
        return TensorRows(
            torch.zeros(rows, 4, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        )

    def validation(self, index: int, rows: int) -> TensorRows:
        return self.batch(rows)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def looping(
    folder: Path,
    predicted_seconds: float,
    on_drift: OnDrift,
    *,
    schedule: str = "1f1b",
    limit: int = 0,
) -> dict[str, Any]:
    chain = describe(MLPConfig(layers=2, hidden=16, embedding=4, sequence=4).build)
    directive = "offload" if limit else "keep"
    plan = make_plan(
        chain,
        schedule=schedule,
        global_batch=4,
        microbatch=2,
        directive=directive,
        swap_limit=limit or GIB,
    )
    plan = replace(plan, prediction=replace(plan.prediction, step_seconds=predicted_seconds))
    plan.save(folder / "plan.yaml")
    engine = Engine.build(
        chain,
        plan,
        loss=MLP.loss,
        scratch=folder / "swap",
        swap=SwapConfig(tier="disk", minimum_bytes=1),
    )
    trainer = TrainerConfig(
        steps=STEPS, global_batch=4, eval_every=0, eval_batches=1, checkpoint_every=1
    )
    logger = LoggerConfig(to=[], events=False)
    try:
        return train(
            engine, SameRows(), trainer, logger, folder, tokens_per_row=1, on_drift=on_drift
        )
    finally:
        engine.close()


def test_a_wrong_prediction_ends_the_loop_at_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = looping(tmp_path, 1e-9, OnDrift.STOP)
    assert summary["ended"] == "drift"
    # The first checkpoint at which enough steps are known.
    assert summary["steps"] == WARM_UP + STEPS_TO_EVALUATE
    assert "times the 0.00 µs that were predicted" in summary["drift"]
    assert json.loads((tmp_path / "summary.json").read_text())["ended"] == "drift"
    assert "another plan continues from here" in capsys.readouterr().out
    again = looping(tmp_path, 1e-9, OnDrift.IGNORE)
    assert (again["ended"], again["steps"], again["drift"]) == ("steps", STEPS, "")
    assert f"continuing after step {WARM_UP + STEPS_TO_EVALUATE}" in capsys.readouterr().out


def test_metrics_hold_the_learning_rate_of_each_step(tmp_path: Path) -> None:
    looping(tmp_path, 1.0, OnDrift.IGNORE)
    rates = [each["learning_rate"] for each in read_metrics(tmp_path / "metrics.jsonl")[:3]]
    usual = AdamWConfig()
    assert rates == [usual.lr] * 3


def test_a_fixed_world_only_notes_it_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = looping(tmp_path, 1e-9, OnDrift.NOTE)
    assert (summary["ended"], summary["steps"]) == ("steps", STEPS)
    assert capsys.readouterr().out.count("that were predicted") == 1


@pytest.mark.parametrize(
    ("seconds", "predicted", "wrong"),
    [
        ([9.0] * WARM_UP + [1.0] * STEPS_TO_EVALUATE, 1.0, False),
        ([1.0] * WARM_UP + [1.19] * STEPS_TO_EVALUATE, 1.0, False),
        ([1.0] * WARM_UP + [1.21] * STEPS_TO_EVALUATE, 1.0, True),
        ([1.0] * WARM_UP + [0.79] * STEPS_TO_EVALUATE, 1.0, True),
        ([2.0] * (WARM_UP + STEPS_TO_EVALUATE - 1), 1.0, False),  # too early to tell
        ([2.0] * 20, 0.0, False),  # a plan made by hand predicts nothing
    ],
)
def test_drift_is_a_fifth_of_the_prediction(
    seconds: list[float], predicted: float, wrong: bool
) -> None:
    assert bool(drift(seconds, predicted)) == wrong


def test_the_summary_says_where_the_seconds_went(tmp_path: Path) -> None:
    with EventLog(tmp_path / PREDICTED_EVENTS) as events:
        events.extend(
            [Span(0, 0, "forward", 0, 0, 0.0, 1.0), Span(0, 0, "backward", 0, 0, 1.0, 4.0, 0.5)]
        )
    (rank,) = looping(tmp_path, 1.0, OnDrift.IGNORE)["ranks"]
    predicted, measured = rank["predicted_seconds"], rank["seconds"]
    assert (predicted["forward"], predicted["backward"], predicted["stall"]) == (1.0, 2.5, 0.5)
    assert predicted.keys() == measured.keys()
    assert min(measured["forward"], measured["backward"], measured["update"]) > 0
    spans = list(read_events(tmp_path / MEASURED_EVENTS))
    assert [span.kind for span in spans] == [
        "forward",
        "backward",
        "forward",
        "backward",
        "reduce",
        "update",
    ]
    assert spans[0].step >= WARM_UP


def test_an_interrupted_report_is_completed(tmp_path: Path) -> None:
    """By a start that has no step to take; what there is stays as it was."""
    with EventLog(tmp_path / PREDICTED_EVENTS) as events:
        events.extend(
            [Span(0, 0, "forward", 0, 0, 0.0, 1.0), Span(0, 0, "backward", 0, 0, 1.0, 4.0)]
        )
    looping(tmp_path, 1.0, OnDrift.IGNORE)
    measured, summary = tmp_path / MEASURED_EVENTS, tmp_path / "summary.json"
    known = measured.read_bytes(), summary.read_bytes()
    assert known[0]
    (tmp_path / "timeline.png").unlink()
    looping(tmp_path, 1.0, OnDrift.IGNORE)
    assert (tmp_path / "timeline.png").stat().st_size > 1000
    assert (measured.read_bytes(), summary.read_bytes()) == known
    summary.unlink()
    looping(tmp_path, 1.0, OnDrift.IGNORE)
    before, after = json.loads(known[1]), json.loads(summary.read_bytes())
    assert before["loss_first"] > before["loss_last"] > 0
    assert before["validation_loss"] > 0
    for key in ("loss_first", "loss_last", "validation_loss", "step_seconds_median"):
        assert after[key] == before[key]
    assert measured.read_bytes() == known[0]
    measured.unlink()
    looping(tmp_path, 1.0, OnDrift.IGNORE)
    assert measured.exists()


# ---- the swap explains itself

LIMIT = 1024  # bytes: enough for one micro-batch, too few for the two that gpipe has in flight


def explained(folder: Path, capfd: pytest.CaptureFixture[str], *options: str) -> str:
    capfd.readouterr()
    assert cli.main(["explain", str(folder), *options]) == 0
    out, err = capfd.readouterr()
    assert not err
    return out


def test_a_run_says_what_its_swap_did(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (rank,) = looping(tmp_path, 1.0, OnDrift.IGNORE, schedule="gpipe", limit=LIMIT)["ranks"]
    lines = [line for line in capfd.readouterr().out.splitlines() if "  memory " in line]
    assert len(lines) == STEPS
    assert all(" overlapped, " in line and " stalled)" in line for line in lines)
    swap, last = rank["swap"], rank["swap"]["last_step"]
    assert swap["limit_bytes"] == LIMIT
    assert 0 < swap["device_high_water_bytes"] <= LIMIT
    assert swap["tier_high_water_bytes"] > 0
    assert rank["offloaded_bytes_per_step"] == swap["bytes_out_per_step"] > 0
    assert 0 <= swap["overlap"] <= 1
    assert {found["micro"] for found in last["micro_batches"]} <= {0, 1}, (
        "those of which anything moved"
    )
    for key in ("bytes_out", "bytes_in", "stall_seconds"):
        assert sum(found[key] for found in last["micro_batches"]) == pytest.approx(last[key])
    assert last["decisions"]["moved"]["bytes"] > 0
    metrics = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "loss" in record]
    assert metrics[-1]["offloaded_bytes"] == last["bytes_out"]
    assert metrics[-1]["fetched_bytes"] == last["bytes_in"]
    assert metrics[-1]["swap_overlap"] == pytest.approx(last["overlap"])
    step = Occupancy.load(tmp_path, 0)
    assert (step.step, step.limit_bytes) == (STEPS, LIMIT)
    assert 0 < max(device for _, device, _ in step.samples) <= swap["device_high_water_bytes"]
    assert [span.kind for span in step.spans] == [
        "forward",
        "forward",
        "backward",
        "backward",
        "update",
    ]


def test_explain_tells_and_draws_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    looping(tmp_path, 1.0, OnDrift.IGNORE, schedule="gpipe", limit=LIMIT)
    shown = explained(tmp_path, capfd, "--png", str(tmp_path / "swap.png"))
    assert "last step, of each stage the rank that stalled most" in shown
    assert "saved tensors of the last step" in shown
    assert "moved" in shown
    assert (tmp_path / "swap.png").read_bytes().startswith(b"\x89PNG")
    (rank,) = json.loads(explained(tmp_path, capfd, "--json"))["swap"]
    assert (rank["rank"], rank["stage"], rank["replica"]) == (0, 0, 0)
    assert rank["swap"] == json.loads((tmp_path / "summary.json").read_text())["ranks"][0]["swap"]
    assert cli.main(["explain", str(tmp_path), "--png", str(tmp_path / "no" / "swap.png")]) == 2
    assert "--png" in capfd.readouterr().err
    occupancy_path(tmp_path, 0).unlink()
    assert cli.main(["explain", str(tmp_path), "--png", str(tmp_path / "swap.png")]) == 2
    assert "swap-rank0.json is missing" in capfd.readouterr().err


def test_a_run_without_swap_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    occupancy_path(tmp_path, 0).write_text("what a run under another plan left here")
    (rank,) = looping(tmp_path, 1.0, OnDrift.IGNORE)["ranks"]
    assert "overlapped" not in capfd.readouterr().out
    assert (rank["swap"], rank["offloaded_bytes_per_step"], rank["stall_seconds_per_step"]) == (
        None,
        0.0,
        0.0,
    )
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["swap_overlap"] is None
    assert not occupancy_path(tmp_path, 0).exists()
    assert "swap: the plan offloads nothing" in explained(tmp_path, capfd)
    assert "swap:" not in explained(tmp_path / "plan.yaml", capfd)
    assert json.loads(explained(tmp_path, capfd, "--json"))["swap"] == []
    for expected in ("the plan offloads nothing", "there is no", "cannot read"):
        assert cli.main(["explain", str(tmp_path), "--png", str(tmp_path / "swap.png")]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert expected in line
        summary = tmp_path / "summary.json"
        summary.unlink() if summary.exists() else summary.write_text("{")
    assert not (tmp_path / "swap.png").exists()
