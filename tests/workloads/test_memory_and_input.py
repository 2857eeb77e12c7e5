"""The experiments of docs/workloads.md about memory and input, reduced: the order of the frontier, equal losses, the
agreement of planner and runs, flat memory, and input that keeps up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.predict_memory import measure_features, slope
from parallax.workloads import photographs
from parallax.workloads.vision import ViT, efficientnet, resnet
from tests.workloads.conftest import needs_photographs

Called = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.slow
MIB = 2**20


def outcomes(here: Path, sweep: str) -> dict[str, dict[str, Any]]:
    """The outcome of each point of a sweep by its label."""
    found = {}
    for file in (here / "runs" / sweep).glob("*/point.json"):
        outcome = json.loads(file.read_text())
        found[file.parent.name] = {**outcome, "folder": file.parent}
    return found


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: resnet(50, 1000), 25_557_032),
        (lambda: resnet(152, 1000), 60_192_808),
        (lambda: efficientnet(classes=1000), 66_347_960),
        (lambda: ViT(classes=1000), 22_050_664),
    ],
)
def test_models_have_the_sizes_of_their_papers(model: Callable[[], Any], count: int) -> None:
    assert sum(parameter.numel() for parameter in model().parameters()) == count


@needs_photographs
def test_frontier_is_ordered_and_the_planner_agrees_with_the_runs(
    called: Called, here: Path
) -> None:
    small = ["data.kwargs={count: 200, pixels: 32}", "model.kwargs.depth=14", "trainer.steps=2"]
    budget = 174 * MIB
    swept = ["trainer.global_batch=16,96", "plan.activations=keep,offload"]
    command = ["experiment=resnet50", *small, f"cluster.device_memory=cpu:{budget}"]
    code, out, _ = called("plan", *command, "--json", "--what-if", *swept)
    fits = {
        (o["settings"]["trainer.global_batch"], o["settings"]["plan.activations"]): o["fits"]
        for o in json.loads(out.splitlines()[-1])
    }
    assert code == 0
    assert fits == {
        ("16", "keep"): True,
        ("16", "offload"): True,
        ("96", "keep"): False,
        ("96", "offload"): True,
    }
    assert called("train", "-m", *command, "name=r", *swept)[0] == 1, "a point does not fit"
    points = outcomes(here, "r")
    assert len(points) == len(fits)
    found = {}
    for point in points.values():
        place = point["point"]["swept"]
        key = str(place["trainer.global_batch"]), str(place["plan.activations"])
        assert (point["status"] == "done") == fits[key]
        found[key] = point["folder"]
        if fits[key]:
            (rank,) = summary(found[key])["ranks"]
            assert rank["measured_peak_bytes"] <= rank["predicted_peak_bytes"] <= budget
    assert losses(found["16", "keep"]) == losses(found["16", "offload"])
    unlimited = ["cluster.device_memory=auto", "plan.activations=keep", "trainer.global_batch=96"]
    assert called("train", *command[:-1], *unlimited, "name=unlimited")[0] == 0
    (rank,) = summary(here / "runs" / "unlimited")["ranks"]
    assert rank["measured_peak_bytes"] > budget, "what the planner refuses does not fit"
    assert losses(here / "runs" / "unlimited") == losses(found["96", "offload"])


def test_more_devices_hold_twice_the_depth_but_no_longer_row(called: Called, here: Path) -> None:
    small = ["model.hidden=128", "model.heads=2", "model.sequence=64", "data.max_bytes=64KiB"]
    command = ["experiment=more_devices", *small, "cluster.device_memory=cpu:48MiB"]
    swept = ["model.layers=8,16", "cluster.devices=1,2"]
    code, out, _ = called("plan", *command, "--json", "--what-if", *swept)
    assert code == 0
    fits = [outcome["fits"] for outcome in json.loads(out.splitlines()[-1])]
    assert fits == [True, True, False, True]
    for number, (layers, devices) in enumerate(((8, 1), (16, 1), (16, 2))):
        run = [*command, f"model.layers={layers}", f"cluster.devices={devices}", "trainer.steps=2"]
        fitting = called("train", *run, f"name=run{number}")[0] == 0
        assert fitting == (devices == 2 or layers == 8)


@needs_photographs
def test_memory_of_feature_extraction_is_flat(tmp_path: Path) -> None:
    photographs.write(tmp_path / "photographs", count=640, pixels=32)
    found = measure_features(tmp_path / "photographs", 32, "npy", tmp_path, batch=2)
    assert found.rows == [128, 256, 384, 512, 640]
    assert len(set(found.live[1:])) == 1
    assert slope(found.rows, found.resident) < 4096, "bytes a row, of 8,192 that it writes"


@needs_photographs
def test_input_keeps_up_on_one_rank_and_on_two(called: Called, here: Path) -> None:
    photographs.write(here / "records", count=48, pixels=48, shards=2)
    small = ["data.size=32", "model.kwargs.depth=14", "trainer.steps=3", "trainer.global_batch=8"]
    assert called("plan", "experiment=records", *small, "cluster.devices=2")[0] == 0
    swept = ["cluster.devices=1,2", "data.workers=1"]
    assert called("train", "-m", "experiment=records", "name=r", *small, *swept)[0] == 0
    for point in outcomes(here, "r").values():
        assert summary(point["folder"])["input_share"] < 0.5
    assert "input_share" in called("report", "r", "--metric", "input_share")[1]


def test_llama_learns_conversations(called: Called, here: Path) -> None:
    pytest.importorskip("transformers")
    from parallax.workloads import conversations

    conversations.write(here / "conversations", vocabulary=512)
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64}
    small = [f"model.config.{key}={value}" for key, value in sizes.items()]
    small += ["model.config.num_attention_heads=2", "model.config.num_key_value_heads=2"]
    small += ["model.config.num_hidden_layers=2", "trainer.steps=12", "trainer.eval_batches=1"]
    assert called("train", "experiment=llama", "name=llama", *small)[0] == 0
    found = losses(here / "runs" / "llama")
    assert found[-1] < found[0]
