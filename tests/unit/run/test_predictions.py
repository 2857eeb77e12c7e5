"""The file of a prediction: parts that are joined, the same bytes however often it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch

from parallax.errors import ConfigError, DataError
from parallax.run.inference import ForwardJob, output_tensors
from parallax.run.predictions import Outputs, PredictedRows

ROWS, BATCH = 1000, 3


@pytest.fixture(autouse=True)
def _job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's own file is the matter of other tests."""
    monkeypatch.setattr(ForwardJob, "read", lambda path: Planned())


class Planned:
    rows = None

    def write(self, path: Path) -> None:
        path.write_text("{}")


def opened(path: Path, *, force: bool = False, top: int = 0) -> Outputs:
    outputs = Outputs(path, 0, "stop", force, {"--top": top})
    outputs.prepared(Planned)  # type: ignore[arg-type]
    return outputs


def batches(first: int, columns: int = 1) -> Iterator[PredictedRows]:
    """Rows of which every hundredth is bad; padded to 4, of lengths 0 to 4."""
    for start in range(first, ROWS, BATCH):
        rows = np.arange(start, min(ROWS, start + BATCH))
        bad = [(int(row), "broken") for row in rows if row % 100 == 7]
        kept = np.array([row for row in rows if row % 100 != 7], np.int64)
        values = np.sin(kept[:, None, None] + np.arange(8).reshape(4, 2)).astype(np.float32)
        values[kept % 50 == 0, 0, 0] = np.nan
        yield PredictedRows(
            end=int(rows[-1]) + 1,
            rows=kept,
            names=[f"{row}.png" for row in kept],
            lengths=kept % 5,
            padded=4,
            columns={f"output_{number}": values for number in range(columns)},
            bad=bad,
            bad_names=[f"{row}.png" for row, _ in bad],
        )


def write(path: Path, *stops: int, columns: int = 1) -> tuple[int, int]:
    """Write all rows, interrupted at ``stops``."""
    for stop in (*stops, ROWS):
        outputs = opened(path)
        for batch in batches(outputs.begin("rows"), columns):
            if batch.end > stop:
                break
            outputs.add(batch)
    return outputs.finish()


@pytest.mark.parametrize("suffix", [".npy", ".parquet", ".jsonl"])
def test_the_file_does_not_depend_on_interruptions(tmp_path: Path, suffix: str) -> None:
    whole, torn = tmp_path / f"whole{suffix}", tmp_path / f"torn{suffix}"
    assert write(whole) == write(torn, 1, 200, 501, 999) == (990, 10)
    assert whole.read_bytes() == torn.read_bytes()
    lists = [path.with_name(f"{path.name}.skipped.jsonl") for path in (whole, torn)]
    assert lists[0].read_bytes() == lists[1].read_bytes()
    skipped = [json.loads(line) for line in lists[0].read_text().splitlines()]
    assert skipped[1] == {"row": 107, "file": "107.png", "reason": "broken"}
    assert sorted(tmp_path.iterdir()) == sorted([whole, torn, *lists])


def test_formats_hold_the_rows(tmp_path: Path) -> None:
    paths = [tmp_path / f"out{suffix}" for suffix in (".npy", ".parquet", ".jsonl")]
    for path in paths:
        write(path)
    values = [rows.columns["output_0"] for rows in batches(0)]
    np.testing.assert_array_equal(np.load(paths[0], mmap_mode="r"), np.concatenate(values))
    table = pyarrow.parquet.read_table(paths[1]).to_pylist()
    lines = [json.loads(line) for line in paths[2].read_text().splitlines()]
    for stored in (table, lines):
        assert stored[13]["row"] == 14
        assert stored[13]["file"] == "14.png"
        assert [len(each["output_0"]) for each in stored[10:14]] == [1, 2, 3, 4]
    assert lines[100]["output_0"][0][0] == table[100]["output_0"][0][0]
    bare = next(each for each in lines if each["row"] == 150 + 1)
    assert bare["output_0"][0][0] == np.float32(np.sin(np.float64(151)))
    assert next(each for each in lines if each["row"] == 150)["output_0"] == []


def test_what_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    with pytest.raises(ConfigError, match=r"has 2 .output_0, output_1.; use .parquet"):
        write(out, columns=2)
    # Without finished rows, another request starts anew.
    outputs = opened(out, top=3)
    outputs.begin("rows")
    for rows in batches(0):
        outputs.add(rows)
    with pytest.raises(ConfigError, match="other --top"):
        opened(out)
    assert opened(out, top=3).begin("rows") > 0
    assert opened(out, force=True).begin("rows") == 0
    with pytest.raises(DataError, match="rows have changed"):
        opened(out).begin("others")
    write(tmp_path / "done.npy")
    with pytest.raises(ConfigError, match="it exists"):
        opened(tmp_path / "done.npy")
    outputs = opened(tmp_path / "shapes.npy")
    outputs.begin("rows")
    first, second, *_ = batches(0)
    outputs.add(first)
    second.columns["output_0"] = second.columns["output_0"][:, :2]
    with pytest.raises(DataError, match="outputs of one shape"):
        outputs.add(second)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("row", np.zeros(2), "the model's output row has the name of a column"),
        ("file", np.zeros(2), "the model's output file has the name of a column"),
        ("output", np.zeros(2, np.complex64), "use .npy, or return torch.view_as_real"),
    ],
)
def test_outputs_that_a_table_cannot_hold(
    tmp_path: Path, suffix: str, name: str, values: np.ndarray, reason: str
) -> None:
    rows = np.arange(2)
    part = PredictedRows(
        end=2,
        rows=rows,
        names=None,
        lengths=None,
        padded=0,
        columns={name: values},
        bad=[],
        bad_names=None,
    )
    outputs = opened(tmp_path / f"out{suffix}")
    outputs.begin("rows")
    outputs.add(part)
    with pytest.raises(ConfigError, match=reason):
        outputs.finish()


def test_names_of_outputs() -> None:
    one, loss = torch.zeros(2, 3), torch.zeros(())
    assert [name for name, _ in output_tensors(one)] == ["output"]
    nested = {"loss": loss, "a": one, "b": [one, {"c d": one}]}
    assert [name for name, _ in output_tensors(nested)] == ["a", "b_0", "b_1_c_d"]
    with pytest.raises(ConfigError, match="two tensors called a_0: rename"):
        output_tensors({"a_0": one, "a": [one]})
