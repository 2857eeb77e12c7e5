"""Names of points, and the files that say what became of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallax.config import compose, dump, is_name
from parallax.errors import ConfigError
from parallax.model.factory.mlp import MLPConfig
from parallax.run.sweep.points import POINT, Point, PointOutcome, PointStatus, outcomes
from parallax.run.sweep.results import find_folder, read_results
from tests.plans import described, make_plan


def named(*typed: str) -> str:
    return Point.of(1, typed, frozenset({"fixed"})).name


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (["model=gpt", "cluster.devices=2", "fixed=3"], "model-gpt_devices-2"),
        (["model.layers=1", "other.layers=2"], "model.layers-1_other.layers-2"),
        (["optimizer.lr=1e-3"], "lr-1e-3"),
        (["fixed=1"], "point"),
    ],
)
def test_names_say_what_differs(typed: list[str], name: str) -> None:
    assert named(*typed) == name


def test_every_point_has_a_name_of_its_own_that_is_a_folders() -> None:
    values = ["a b", "a-b", "a_b", "'a b'", "[1,1]", "[1, 1]", "1-1", "a/b", "../..", "ü", "", "x" * 300]  # fmt: skip
    values += ["{a:1}", "-1", ".", "\x1b[31m", "y" * 300]
    names = [named(f"data.path={value}") for value in values]
    assert len(set(names)) == len(values)
    assert all(is_name(f"sweep/{name}") for name in names), names
    assert names == [named(f"data.path={value}") for value in values], "the same each time"


def test_outcomes_come_back_in_the_order_of_their_points(tmp_path: Path) -> None:
    written = {}
    for number, status in enumerate([PointStatus.FAILED, PointStatus.DONE, PointStatus.RUNNING]):
        point = Point.of(9 - number, [f"seed={number}"], frozenset())
        (tmp_path / point.name).mkdir()
        written[point.name] = PointOutcome(point, status, "why", 1.5)
        written[point.name].save(tmp_path / point.name)
    assert list(outcomes(tmp_path).items()) == list(reversed(written.items()))


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"point": 3}', "\x00"])
def test_damaged_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / POINT).write_text(text)
    with pytest.raises(ConfigError, match=r"cannot read .*point\.json"):
        outcomes(tmp_path)


@pytest.mark.parametrize("name", ["nothing", "a\0b", "x" * 5000, "."])
def test_what_is_neither_a_sweep_nor_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="accepted is a sweep or a run"):
        find_folder(Path(name))


@pytest.mark.parametrize("file", ["config.yaml", "summary.json", "plan.yaml"])
def test_a_point_whose_files_are_damaged_says_so(tmp_path: Path, file: str) -> None:
    (tmp_path / "sweep.json").write_text('{"overrides": ["seed=1,2"]}')
    point = Point.of(1, ["seed=1"], frozenset())
    (tmp_path / point.name).mkdir()
    PointOutcome(point, PointStatus.DONE).save(tmp_path / point.name)
    for name in {"config.yaml", file}:
        (tmp_path / point.name / name).write_text("{")
    results = read_results(tmp_path)
    assert results.command == "parallax train -m seed=1,2"
    (found,) = results.points
    assert found.status == "failed"
    assert "cannot be read" in found.reason


def point_of(folder: Path, lr: str, summary: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    """A finished point with the files of a run."""
    point = Point.of(1, [f"optimizer.lr={lr}"], frozenset())
    directory = folder / point.name
    directory.mkdir(parents=True)
    PointOutcome(point, PointStatus.DONE).save(directory)
    settings = compose(["model=mlp", "trainer.steps=2", f"optimizer.lr={lr}"])
    (directory / "config.yaml").write_text(dump(settings))
    chain = described(MLPConfig().build)
    make_plan(chain).save(directory / "plan.yaml")
    found = {
        "ended": "steps",
        "step_seconds_median": 1.0,
        "predicted_step_seconds": 1.0,
        "ranks": [],
    }
    (directory / "summary.json").write_text(json.dumps({**found, **summary}))
    lines = "".join(f"{json.dumps(step)}\n" for step in steps)
    (directory / "metrics.jsonl").write_text(f'{lines}{{"step": 3, "validation_accu')


def test_a_rate_has_the_unit_that_the_run_measured(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"overrides": []}')
    point_of(tmp_path, "0.1", {"rows_per_second": 2.0, "tokens_per_second": None}, [])
    point_of(tmp_path, "0.2", {"rows_per_second": 2.0, "tokens_per_second": 512.0}, [])
    points = sorted(read_results(tmp_path).points, key=lambda point: point.name)
    assert [(p.per_second, p.unit) for p in points] == [(2.0, "rows"), (512.0, "tokens")]


def test_metrics_come_from_summaries_and_steps(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"overrides": []}')
    for lr, value in (("0.1", 0.5), ("0.2", 0.75)):
        point_of(
            tmp_path,
            lr,
            {
                "validation_loss": 1 - value,
                "validation_accuracy": value,
                "goodput": {"share": value},
            },
            [{"step": 1, "gradient_norm": 9.0}, {"step": 2, "gradient_norm": value, "note": "x"}],
        )
    point_of(tmp_path, "0.3", {"validation_loss": None}, [])
    for metric, expected in (
        ("", [0.5, 0.25, None]),
        ("validation_accuracy", [0.5, 0.75, None]),
        ("goodput.share", [0.5, 0.75, None]),
        ("gradient_norm", [0.5, 0.75, None]),
    ):
        results = read_results(tmp_path, metric)
        assert results.metric == (metric or "validation_loss")
        assert sorted(map(str, map(results.value, results.points))) == sorted(map(str, expected))
    with pytest.raises(ConfigError) as refused:
        read_results(tmp_path, "validation_acuracy")
    assert str(refused.value) == (
        "--metric validation_acuracy: no finished point records it; accepted are validation_accuracy, "
        "validation_loss and 5 others (did you mean 'validation_accuracy'?)"
    )
    single = read_results(tmp_path / "lr-0.1", "gradient_norm")
    assert [single.value(point) for point in single.points] == [0.5]
