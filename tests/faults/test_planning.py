"""Commands that plan, simulate, explain and estimate, mostly for machines that are not here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallax import cli
from parallax.plan.analytic.efficiency import describe_figures
from parallax.plan.explained import explain
from parallax.plan.plan import Plan
from tests.faults.commands import (
    DGX,
    GPT2,
    TINY,
    one_line,
    prepared,
)


def test_plan_as_json_of_an_own_folder(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    texts = here / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("All happy families are alike. " * 400)
    folder = f"data.path={texts}"
    code, out, err = called(
        "plan", *TINY, folder, "cluster.devices=2", "--json", "--output", "mine.yaml"
    )
    assert (code, err.strip()) == (0, "")
    assert len(out.splitlines()) == 1
    assert json.loads(out)["hash"] == Plan.load(Path("mine.yaml")).hash()
    assert {path.name for path in here.iterdir()} == {"texts", "mine.yaml", "mine.inputs.json"}


def test_plan_simulate_explain_and_diff_without_measuring(
    here: Path, command_output: Callable[..., Any]
) -> None:
    planned = command_output(
        "plan",
        *DGX,
        "plan.stages=2",
        "plan.replicas=2",
        "plan.schedule=1f1b",
        "trainer.microbatch=4",
    )
    plan = Plan.load(Path("plan.yaml"))
    assert planned["hash"] == plan.hash()
    assert plan.world_size == 4
    assert Path("plan.inputs.json").is_file()

    simulated = command_output(
        "simulate", "plan.yaml", "--trace", "trace.json", "--png", "timeline.png"
    )
    assert simulated["step_seconds"] == pytest.approx(plan.prediction.step_seconds, abs=1e-6)
    assert [rank["peak_bytes"] for rank in simulated["ranks"]] == [
        r.peak_bytes for r in plan.prediction.ranks
    ]
    assert Path("timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}

    explained = command_output("explain", "plan.yaml")
    assert explained["lines"] == explain(plan, [describe_figures("a100-80")])
    assert any("Megatron-LM" in line and "error" in line for line in explained["lines"])
    assert len(explained["stages"]) == 2

    command_output("plan", *DGX, "plan.stages=1", "--output", "other.yaml")
    assert command_output("plan", "--diff", "plan.yaml", "plan.yaml") == {
        "equal": True,
        "differences": [],
    }
    different = command_output("plan", "--diff", "plan.yaml", "other.yaml")
    assert not different["equal"]
    assert any(line.startswith("microbatch: 4 -> ") for line in different["differences"])


def test_people_get_tables(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *DGX, "plan.stages=2", "cluster.price_per_hour=2.5"]) == 0
    out, err = capfd.readouterr()
    assert "peak of budget" in out
    assert " per step, 10 per hour" in out
    assert "parameters" in out
    assert "candidates compared" in out
    assert "plan: plan.yaml" in out
    for command in (
        ["simulate", "plan.yaml"],
        ["explain", "plan.yaml"],
        ["estimate", *DGX],
        ["profile", *DGX],
    ):
        assert cli.main(command) == 0
        out, err = capfd.readouterr()
        assert out.strip()
        assert not err.strip()


def test_a_profile_says_why_nothing_moves(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    note = "tensors smaller than swap.minimum_bytes="
    small = ["profile", "model=mlp", "model.layers=1", "model.hidden=64"]
    assert cli.main(small) == 0
    assert f"can be offloaded: {note}65536 stay" in capfd.readouterr().out
    assert cli.main([*small, "swap.minimum_bytes=1"]) == 0
    assert note not in capfd.readouterr().out


def test_a_profile_is_used_instead_of_measuring(
    here: Path, command_output: Callable[..., Any]
) -> None:
    profile = command_output("profile", *DGX, "--output", "mine.json")
    assert profile["source"] == "analytic"
    assert json.loads(Path("mine.json").read_text()) == profile
    slow = dict(
        profile,
        blocks=[
            dict(b, forward_seconds={**b["forward_seconds"], "fixed": 7.0})
            for b in profile["blocks"]
        ],
    )
    Path("slow.json").write_text(json.dumps(slow))
    quick = command_output("plan", *DGX, "--profile", "mine.json")["prediction"]["step_seconds"]
    assert command_output("plan", *DGX)["prediction"]["step_seconds"] == quick
    assert command_output("plan", *DGX, "--profile", "slow.json")["prediction"]["step_seconds"] > 7


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        (TINY, 2, "fits no trained parameter"),
        (GPT2, 0, "patterns are checked when training starts"),
    ],
)
def test_patterns_of_groups_in_plans_for_catalog_clusters(
    here: Path, capfd: pytest.CaptureFixture[str], model: list[str], code: int, message: str
) -> None:
    """A model of sizes alone has no names to compare with."""
    groups = "optimizer.groups=[{match: nowhere, lr: 0.1}]"
    assert cli.main(["plan", *model, "cluster=dgx_a100", groups]) == code
    found = capfd.readouterr()
    assert message in " ".join((found.err if code else found.out).split())


def test_what_if(command_output: Callable[..., Any]) -> None:
    found = command_output(
        *("plan", *GPT2, "cluster=dgx_a100", "cluster.price_per_hour=3", "plan.activations=keep"),
        *("--what-if", "devices=1,2", "trainer.global_batch=8,16", "plan.replicas=1,[2]"),
    )
    assert len(found) == 8
    assert [o["settings"]["cluster.devices"] for o in found] == ["1"] * 4 + ["2"] * 4
    assert [o["settings"]["plan.replicas"] for o in found] == ["1", "[2]"] * 4
    one, _, _, refused, *_ = found
    assert one["fits"]
    assert one["tokens_per_second"] == pytest.approx(8 * 1024 / one["step_seconds"])
    assert (one["cost_per_hour"], one["replicas"]) == (3, [1])
    assert one["cost_per_step"] == pytest.approx(3 * one["step_seconds"] / 3600)
    assert not refused["fits"]
    assert "needs 2 devices, and there are 1" in refused["reason"]


def test_what_cannot_be_combined_is_a_row(command_output: Callable[..., Any]) -> None:
    found = command_output("plan", *DGX, "plan.optimizer=host", "--what-if", "swap=off,auto")
    assert [outcome["fits"] for outcome in found] == [False, True]
    assert "plan.optimizer=host needs a host" in found[0]["reason"]


def test_estimate(command_output: Callable[..., Any]) -> None:
    found = command_output(
        "estimate", *GPT2, "precision=bf16", "trainer.global_batch=8", "trainer.microbatch=2"
    )
    assert (found["rows"], found["micro_batches"], found["precision"]) == (
        2,
        4,
        "fp32+bf16 autocast",
    )
    assert found["keep"]["optimizer"] == 8 * found["parameters"]
    assert found["recompute"]["activations"] < found["keep"]["activations"]
    assert [need["stages"] for need in found["pipelines"]] == [1, 2, 4, 6]
    mixed = command_output("estimate", *GPT2, "precision=mixed_bf16")
    assert mixed["keep"]["master"] == 2 * mixed["keep"]["gradients"] == 4 * mixed["parameters"]
    counted = command_output("estimate", "experiment=tiny")
    assert counted["keep"]["parameters"] == 4 * counted["parameters"]


def test_frozen_groups_of_a_model_without_names_are_refused(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    groups = 'optimizer.groups=[{match: "*", freeze: true}]'
    for command in ("plan", "estimate"):
        assert cli.main([command, *DGX, *GPT2, groups]) == 2
        assert "model=transformer has only sizes, and no names" in one_line(capfd.readouterr().err)


def test_files_that_do_not_belong_together(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", *DGX]) == 0
    assert cli.main(["plan", *DGX]) == 0
    for arguments, expected in (
        (
            ["plan", *DGX, "model.layers=3", "--profile", "profile.json"],
            "--profile profile.json: it is of gpt",
        ),
        (["simulate", "plan.yaml"], "cannot read plan.inputs.json"),
    ):
        Path("plan.inputs.json").unlink(missing_ok=True)
        capfd.readouterr()
        assert cli.main(arguments) == 2
        assert expected in one_line(capfd.readouterr().err)


def test_a_run_that_measured_nothing_cannot_be_calibrated(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *DGX]) == 0
    run = prepared("experiment=tiny")
    for name in ("plan.yaml", "plan.inputs.json"):
        Path(name).rename(run / name)
    capfd.readouterr()
    assert cli.main(["calibrate", "run"]) == 2
    assert "runs/run has measured no steps" in one_line(capfd.readouterr().err)


@pytest.mark.thorough  # as a trillion parameters on a thousand devices, in tests/unit/plan/test_candidates.py
def test_a_thousand_devices_are_planned_for(command_output: Callable[..., Any]) -> None:
    """How long deeper models take is kept by benchmarks/regret.py."""
    model = [
        "model=transformer",
        "model.layers=32",
        "model.hidden=8192",
        "model.heads=64",
        "precision=bf16",
    ]
    planned = command_output(
        "plan", *model, "cluster=dgx_a100", "cluster.nodes=128", "trainer.global_batch=1024"
    )
    assert sum(stage["replicas"] for stage in planned["stages"]) >= 1024


def test_batches_of_one_row_for_a_catalog_device(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    np.savez(here / "rows.npz", x=np.ones((8, 3), "f4"), y=np.zeros(8, "i8"))
    model = ["model=custom", "model.target=torch.nn:Linear"]
    sizes = "model.kwargs={in_features: 3, out_features: 2}"
    data = ["data=arrays", "data.path=rows.npz", "loss=cross_entropy", "metrics=[]"]
    one = ["cluster=v100", "cluster.devices=1", "trainer.steps=1", "trainer.global_batch=1"]
    code, _, err = called("plan", *model, sizes, *data, *one)
    assert (code, err.strip()) == (0, "")
    assert Plan.load(Path("plan.yaml")).global_batch == 1
