"""What a plan was made from comes back from its file as it was, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parallax.errors import PlanError
from parallax.plan.analytic.catalog import CatalogClusterConfig
from parallax.plan.analytic.efficiency import price
from parallax.plan.analytic.hardware import DEVICE_KINDS
from parallax.plan.analytic.transformer import TransformerConfig
from parallax.plan.config import PlanConfig
from parallax.plan.inputs import Inputs, inputs_path
from parallax.plan.search.search import search

MODEL = TransformerConfig(layers=4, hidden=64, heads=2, vocabulary=128, sequence=32)


def inputs(**fields: object) -> Inputs:
    mixed = CatalogClusterConfig(device=["a100-80", "v100"], nodes=[1, 2], devices_per_node=[4, 2])
    cluster = mixed.build(dtype="fp32")
    first = replace(cluster.nodes[0], speeds=(1.0, 0.9))
    return Inputs(
        price(MODEL.work("fp32"), DEVICE_KINDS["a100-80"]),
        replace(cluster, nodes=(first, *cluster.nodes[1:])),
    )


def test_there_and_back(tmp_path: Path) -> None:
    found = inputs()
    found.save(tmp_path / "plan.inputs.json")
    assert Inputs.load(tmp_path / "plan.inputs.json") == found


def test_a_thousand_devices_take_a_few_lines(tmp_path: Path) -> None:
    small, large = (
        replace(inputs(), cluster=CatalogClusterConfig(nodes=nodes).build()) for nodes in (1, 128)
    )
    small.save(tmp_path / "small")
    large.save(tmp_path / "large")
    assert Inputs.load(tmp_path / "large") == large
    assert (tmp_path / "large").stat().st_size < (tmp_path / "small").stat().st_size + 20_000


def test_the_file_stands_beside_the_plan() -> None:
    assert inputs_path(Path("a/plan.yaml")) == Path("a/plan.inputs.json")
    assert inputs_path(Path("mine")) == Path("mine.inputs.json")


def test_a_plan_of_other_inputs_is_refused() -> None:
    found = inputs()
    plan, _ = search(found.profile, found.cluster, PlanConfig(), global_batch=8)
    found.check(plan)
    with pytest.raises(PlanError, match=r"the plan is of transformer .* its inputs of other"):
        replace(found, profile=replace(found.profile, model="other", fingerprint="f")).check(plan)
    with pytest.raises(PlanError, match="the plan has 8 ranks, its inputs 2 devices"):
        replace(found, cluster=CatalogClusterConfig(devices=2).build()).check(plan)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: "{",
        lambda data: "[]",
        lambda data: json.dumps({**data, "version": 99}),
        lambda data: json.dumps({**data, "cluster": {**data["cluster"], "nodes": []}}),
        lambda data: json.dumps({**data, "cluster": {**data["cluster"], "devices": []}}),
        lambda data: json.dumps({**data, "cluster": {**data["cluster"], "wires": 3}}),
        lambda data: json.dumps({**data, "cluster": {**data["cluster"], "local": None}}),
        lambda data: json.dumps({**data, "profile": {}}),
        lambda data: json.dumps({**data, "profile": 3}),
        lambda data: json.dumps({key: value for key, value in data.items() if key != "profile"}),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.inputs.json"
    inputs().save(path)
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(PlanError) as caught:
        Inputs.load(path)
    assert str(caught.value).isprintable()


def test_a_missing_file_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="write both with `parallax plan`"):
        Inputs.load(tmp_path / "plan.inputs.json")
