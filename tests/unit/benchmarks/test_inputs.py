"""The benchmark of inputs reads the same rows on both sides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from benchmarks.input_cases import KINDS, Sizes
from benchmarks.inputs import ours, theirs
from parallax.train.data.indexed import IndexedSource
from tests.unit.benchmarks.test_benchmarks import run

SMALL = Sizes(
    repetitions=1, seconds=0.01, warm=1, images=32, photos=8, sounds=32, chats=32, rows=64
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) if kind == "photos" else kind for kind in KINDS],
)
def test_both_sides_read_batches_of_one_size(kind: str, tmp_path: Path) -> None:
    case = KINDS[kind](tmp_path / "rows", SMALL)
    for side in (ours, theirs):
        batches = side(case, 0)
        assert [next(batches) for _ in range(3)] == [case.rows] * 3
        batches.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["text", "tokens", "chat", "arrays", "parquet"])
def test_rows_are_equal_on_both_sides(kind: str, tmp_path: Path) -> None:
    case = KINDS[kind](tmp_path / "rows", SMALL)
    source = replace(case.config, validation=0, shuffle=False).open(case.model, 0)
    assert isinstance(source, IndexedSource)
    assert len(source) == len(case.dataset)  # type: ignore[arg-type]
    batch = source.batch(8)
    rows = (case.collate or default_collate)([case.dataset[row] for row in range(8)])
    inputs, targets = rows.values() if isinstance(rows, dict) else rows
    torch.testing.assert_close(torch.as_tensor(batch.inputs(0, 8)), inputs, rtol=0, atol=0)
    torch.testing.assert_close(torch.as_tensor(batch.targets(0, 8)), targets, rtol=0, atol=0)


def test_photos_are_the_same_on_both_sides(tmp_path: Path) -> None:
    case = KINDS["photos"](tmp_path / "rows", SMALL)
    source = case.config.open(case.model, 0)
    batch = source.batch(8)
    found, labels = batch.inputs(0, 8), batch.targets(0, 8)
    rows = [case.dataset[row] for row in range(8)]
    for image, label in zip(found, labels.tolist()):
        distances = [float((image - other).abs().mean()) for other, _ in rows]
        nearest = min(range(8), key=distances.__getitem__)
        assert distances[nearest] < 0.1  # of lower resolution
        assert rows[nearest][1] == label


@pytest.mark.slow
def test_inputs_benchmark_prints_json_last() -> None:
    sizes = {"repetitions": 2, "seconds": 0.05, "warm": 1, "images": 32, "photos": 8}
    found = json.loads(
        run(
            "inputs",
            "--json",
            "--only=dataset",
            "--workers=1",
            *(f"--{key}={value}" for key, value in sizes.items()),
        ).splitlines()[-1]
    )
    (row,) = found["rows"]
    assert (row["kind"], row["workers"]) == ("dataset", 1)
    for name, taken in row["seconds_per_row"].items():
        assert len(taken) == 2
        assert row["rows_per_second"][name] == pytest.approx(1 / min(taken))
