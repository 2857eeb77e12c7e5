"""Names of points, and the files that say what became of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallax.config import is_name
from parallax.errors import ConfigError
from parallax.run.sweep.points import POINT, Point, PointOutcome, PointStatus, outcomes
from parallax.run.sweep.results import find_folder, read_results


def named(*words: str) -> str:
    return Point.of(1, words, frozenset({"fixed"})).name


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["model=gpt", "cluster.devices=2", "fixed=3"], "model-gpt_devices-2"),
        (["model.layers=1", "other.layers=2"], "model.layers-1_other.layers-2"),
        (["optimizer.lr=1e-3"], "lr-1e-3"),
        (["fixed=1"], "point"),
    ],
)
def test_names_say_what_differs(words: list[str], name: str) -> None:
    assert named(*words) == name


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
