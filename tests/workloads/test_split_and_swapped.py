"""The experiments of docs/workloads.md that split and swap, reduced: their outcomes, and what the planner says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallax.model.describe import describe
from parallax.workloads.inception import InceptionV1
from tests.faults.commands import check_same_weights
from tests.workloads.conftest import needs_photographs

Called = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.slow


def swept(
    called: Called, here: Path, name: str, *overrides: str, points: tuple[str, ...] = ()
) -> list[Path]:
    """The directories of the points of a sweep, in order; its report is printed without an error.

    ``points``: the values that the sweep tries, if not those of the experiment. The model is profiled in this process
    first, where :func:`kept_profiles` holds, so that no point measures it again.
    """
    assert called("plan", f"experiment={name}", *overrides)[0] == 0
    code, _, err = called("train", "-m", f"experiment={name}", f"name={name}", *overrides, *points)
    assert (code, err) == (0, "")
    points = [file.parent for file in (here / "runs" / name).glob("*/point.json")]
    return sorted(
        points, key=lambda p: int(json.loads((p / "point.json").read_text())["point"]["number"])
    )


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_gaussians_are_classified_the_same_with_and_without_swapping(
    called: Called, here: Path
) -> None:
    rows = ["data.kwargs.rows=1600", "data.validation.test.kwargs.rows=400", "optimizer.lr=0.01"]
    without, swapping = swept(called, here, "gaussian", *rows)
    assert len(losses(without)) == 400
    assert losses(without) == losses(swapping)
    check_same_weights(without, swapping)
    assert (
        summary(without)["validation_accuracy"] == summary(swapping)["validation_accuracy"] > 0.99
    )
    assert not (without / "swap-rank0.txt").exists()
    assert "moved: 800 tensors" in (swapping / "swap-rank0.txt").read_text()
    code, out, err = called("report", "gaussian")
    assert (code, err) == (0, "")
    assert "2,834.80 MiB" in out


def test_graph_split_by_sample_split_gives_one_loss(called: Called, here: Path) -> None:
    small = ["model.layers=2", "model.hidden=32", "model.heads=2", "model.sequence=32"]
    small += ["trainer.steps=3", "data.max_bytes=64KiB"]
    points = swept(called, here, "two_by_two", *small)
    layouts = [
        (len({r["stage"] for r in summary(p)["ranks"]}), len(summary(p)["ranks"])) for p in points
    ]
    assert layouts == [(1, 1), (1, 2), (2, 2), (2, 4)]
    for point in points[1:]:
        assert losses(point) == pytest.approx(losses(points[0]), rel=1e-12)


@needs_photographs
def test_branches_in_stages_swapped_or_recomputed_give_one_loss(called: Called, here: Path) -> None:
    small = ["model.kwargs={branches: 4, channels: 8}", "data.kwargs={count: 40, pixels: 32}"]
    small += ["cluster.device_memory=auto", "trainer.steps=2"]
    points = swept(called, here, "wide", *small, points=("plan.activations=offload,recompute",))
    assert len(points) == 4
    for point in points:
        assert losses(point) == pytest.approx(losses(points[0]), rel=1e-5)
        offloaded = sum(rank["offloaded_bytes_per_step"] for rank in summary(point)["ranks"])
        assert (offloaded > 0) == ("offload" in point.name)
        planned = sum(r["predicted_offloaded_bytes_per_step"] for r in summary(point)["ranks"])
        assert offloaded <= 1.01 * planned  # a tensor that is needed before it is written is not


TAGS = [
    "model.kwargs={width: 4, depth: 1}",
    "data.kwargs={count: 100, samples: 1296}",
    "data.validation=0.2",
]


def test_music_is_tagged_and_evaluated(called: Called, command_output: Callable[..., Any]) -> None:
    pytest.importorskip("soundfile")
    pytest.importorskip("torchmetrics")
    code, _, err = called(
        "train", "experiment=music", "name=music", *TAGS, "plan.stages=2", "plan.replicas=1"
    )
    assert code == 0, err
    found = summary(Path("runs/music"))
    assert found["steps"] == 4
    assert 0 < found["validation_auroc"] < 1
    assert {rank["stage"] for rank in found["ranks"]} == {0, 1}
    trains, evaluates = (
        command_output("plan", "experiment=music", *TAGS, "cluster.devices=1", f"task={task}")
        for task in ("training", "evaluation")
    )
    training, evaluation = (p["prediction"]["stages"][0]["memory"] for p in (trains, evaluates))
    assert evaluation["parameters"] == training["parameters"] > 0
    assert not evaluation.get("gradients")
    assert not evaluation.get("optimizer")


@needs_photographs
def test_the_planner_compares_branches_with_its_plan(called: Called) -> None:
    gpus = ["cluster=dgx_a100", "cluster.devices=4", "plan.stages=auto", "plan.replicas=auto"]
    code, out, err = called("plan", "experiment=inception", *gpus)
    assert (code, err) == (0, "")
    assert "branches: the longest path of blocks that depend on each other takes" in " ".join(
        out.split()
    )


def test_branches_are_known_from_the_trace() -> None:
    chain = describe(InceptionV1, sample=lambda rows: torch.zeros(rows, 3, 64, 64))
    stem = max(i for i, block in enumerate(chain.blocks) if block.name.startswith("stem"))
    first = [block for block in chain.blocks if block.name.startswith("modules_.0.")]
    assert len(first) == 4
    for block in first:
        assert block.reads[0][0] in (stem, stem + 1)
        assert all(size > 0 for _, size in block.reads)
