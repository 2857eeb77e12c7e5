"""Rows of Parquet and Arrow files: the values in them, from any worker, and what is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from parallax.errors import ConfigError, DataError
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.factory.mlp import MLPConfig
from parallax.train.data.parquet import ParquetDataConfig
from parallax.train.data.table import BOTH
from tests.unit.train.reading import check_workers_and_splits, opened, refused, steps

ROWS = 50
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
Y = np.arange(ROWS, dtype=np.int32) % 7


def table(x: Any = None, y: Any = None) -> pa.Table:
    return pa.table({"x": pa.array(list(X)) if x is None else x, "y": Y if y is None else y})


def parquet(path: Path, rows: pa.Table | None = None, size: int = 9) -> Path:
    pq.write_table(table() if rows is None else rows, path / "rows.parquet", row_group_size=size)
    return path / "rows.parquet"


def compressed(path: Path, rows: pa.Table | None = None) -> Path:
    file = path / "rows.feather"
    feather.write_feather(table() if rows is None else rows, file, chunksize=9, compression="lz4")
    return file


def mapped(path: Path, rows: pa.Table | None = None) -> Path:
    file = path / "rows.arrow"
    plain = "uncompressed"
    feather.write_feather(table() if rows is None else rows, file, chunksize=9, compression=plain)
    return file


def stream(path: Path, rows: pa.Table | None = None) -> Path:
    """As Hugging Face's save_to_disk writes."""
    found = table() if rows is None else rows
    with pa.ipc.new_stream(path / "data.arrow", found.schema) as writer:
        writer.write_table(found, max_chunksize=9)
    return path / "data.arrow"


KINDS = pytest.mark.parametrize("write", [parquet, compressed, mapped, stream])


def config(path: Path | str, **settings: Any) -> ParquetDataConfig:
    return ParquetDataConfig(path=str(path), **settings)


def read(settings: ParquetDataConfig, rows: list[int], model: Any = None) -> Any:
    numbers = np.array(rows)
    found = settings.table(model or MLPConfig())
    return found.read(numbers, numbers.astype(np.uint64), BOTH)


@KINDS
@pytest.mark.sampled(2)
@pytest.mark.parametrize("cache", ["1GiB", 1])
def test_rows_are_those_of_the_file_for_any_workers_and_splits(
    tmp_path: Path, write: Any, cache: Any
) -> None:
    settings = config(write(tmp_path), cache=cache)
    found = read(settings, [49, 0, 0, 7, 8, 9])
    assert np.array_equal(found["inputs"], X[[49, 0, 0, 7, 8, 9]])
    assert np.array_equal(found["targets"], Y[[49, 0, 0, 7, 8, 9]])
    for step in check_workers_and_splits(settings):
        values, labels = step.values()
        places = [int(np.flatnonzero((value.numpy() == X).all(1))[0]) for value in values]
        assert labels.tolist() == Y[places].tolist()


@KINDS
def test_lists_of_lists_tensors_and_other_numbers(tmp_path: Path, write: Any) -> None:
    cube = np.arange(ROWS * 6, dtype=np.int64).reshape(ROWS, 2, 3)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 4)
    columns = {
        "nested": pa.array(cube.tolist()),
        "fixed": fixed,
        "large": pa.array(X.tolist(), pa.large_list(pa.float64())),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(cube.astype(np.float32)),
        "half": X[:, 0].astype(np.float16),
        "truth": Y > 3,
        "y": Y,
    }
    found = read(config(write(tmp_path, pa.table(columns))), [30, 2])
    expected = {
        "nested": cube,
        "fixed": X,
        "large": X,
        "tensor": cube,
        "half": X[:, 0].astype(np.float16),
        "truth": Y > 3,
    }
    assert set(found["inputs"]) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(found["inputs"][name], values[[30, 2]])


def test_files_of_a_folder_or_pattern_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    root = tmp_path / "größe"
    for place, (name, write) in enumerate((("b", parquet), ("a", stream), ("c/d", compressed))):
        (root / name).mkdir(parents=True)
        write(root / name, table().slice(place * 10, 10))
    (root / "_hidden").mkdir()
    (root / "b" / "README.md").touch()
    pq.write_table(table(Y), root / "_hidden" / "x.parquet")
    order = [*range(10, 20), *range(10), *range(20, 30)]
    assert np.array_equal(read(config(root), list(range(30)))["inputs"], X[order])
    assert len(config(f"{root}/*/*.arrow").table(MLPConfig())) == 10
    assert len(config(f"{root}/[abc]/**/*.[pf]*").table(MLPConfig())) == 20
    assert "there is no file" in refused(config(f"{root}/*.parquet"))
    (root / "b" / "link.parquet").symlink_to(parquet(tmp_path))
    assert len(config(root).table(MLPConfig())) == 30 + len(
        config(parquet(tmp_path)).table(MLPConfig())
    )


def test_the_fingerprint_is_of_the_rows_not_of_the_place(tmp_path: Path) -> None:
    def fingerprint(path: Path, **settings: Any) -> str:
        return config(path, **settings).table(MLPConfig()).fingerprint

    one = fingerprint(parquet(tmp_path))
    (tmp_path / "b").mkdir()
    os.rename(tmp_path / "rows.parquet", tmp_path / "b" / "moved.pq")
    assert fingerprint(tmp_path / "b") == one
    assert fingerprint(tmp_path / "b", inputs="y", targets="x") != one
    assert fingerprint(parquet(tmp_path, table(y=Y[::-1]))) != one


def test_columns_are_stacked_or_taken_by_name(tmp_path: Path) -> None:
    columns = {"age": Y, "height": X[:, 0].astype(np.float64), "pair": list(X[:, :2]), "y": Y}
    file = parquet(tmp_path, pa.table(columns))
    found = read(config(file, stack=True), [4, 2])["inputs"]
    assert found.dtype == np.float32
    assert np.array_equal(found, np.column_stack([Y, X[:, 0], X[:, :2]])[[4, 2]].astype("f4"))
    found = read(config(file, inputs=["age", "pair"]), [4, 2])["inputs"]
    assert set(found) == {"age", "pair"}
    tokens = {"input_ids": list(X), "attention_mask": list(X), "labels": list(X)}
    found = read(config(parquet(tmp_path, pa.table(tokens))), [1], HuggingFaceConfig())
    assert set(found["inputs"]) == set(tokens)


def test_opening_reads_metadata_alone(tmp_path: Path) -> None:
    """The data is overwritten, and the metadata is not."""
    file = parquet(tmp_path, table(np.random.default_rng(0).normal(size=(ROWS))))
    found = config(file).table(MLPConfig())
    start = pq.ParquetFile(file).metadata.row_group(0).column(0).data_page_offset
    content = file.read_bytes()
    file.write_bytes(content[:start] + b"\xff" * 200 + content[start + 200 :])
    again = config(file).table(MLPConfig())
    assert len(again) == len(found) == ROWS
    assert "column x cannot be read" in refused(config(file))


def test_the_cache_holds_no_more_than_its_bytes_and_mapped_rows_none(tmp_path: Path) -> None:
    for write, limit in ((parquet, 400), (compressed, 400), (mapped, "1MiB"), (stream, "1MiB")):
        found: Any = config(write(tmp_path), cache=limit).table(MLPConfig())
        rows = np.random.default_rng(0).permutation(ROWS)
        found.read(rows, rows.astype(np.uint64), BOTH)
        held = [array.nbytes for array, _ in found._cache._held.values()]
        if limit == 400:
            assert 0 < sum(held) <= 400
        else:
            assert found._cache._bytes == 12 * 1024
            assert len(held) == 12


def test_no_thread_is_started_and_workers_open_their_own_files(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/task")), threading.active_count()
    found: Any = config(parquet(tmp_path)).table(MLPConfig())
    rows = np.arange(ROWS)
    found.read(rows, rows.astype(np.uint64), BOTH)
    own = found._files
    assert own._open
    if (child := os.fork()) == 0:
        own.get(0)
        os._exit(len(own._open) if own._process == os.getpid() else 9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert (len(os.listdir("/proc/self/task")), threading.active_count()) == before


@KINDS
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([1.0] * 20 + [None] + [1.0] * 29), "column x, row 20: it is null"),
        (pa.array([[1.0, 2.0]] * 30 + [[1.0, None]] + [[1.0, 2.0]] * 19), "column x, row 30"),
        (pa.array([[1.0, 2.0]] * 30 + [None] + [[1.0, 2.0]] * 19), "column x, row 30"),
        (pa.array([[1.0, 2.0]] * 30 + [[1.0]] + [[1.0, 2.0]] * 19), "row 30: its list has 1"),
        (pa.array([[1.0, 2.0]] * 9 + [[1.0]] * 41), "column x, row 9"),
        (pa.array([[[1.0], [2.0]]] * 30 + [[[1.0], []]] + [[[1.0], [2.0]]] * 19), "row 30"),
        (pa.array(["text"] * ROWS), "the column x has the type string"),
        (pa.array([["text"]] * ROWS), "the column x has the type list"),
        (pa.array([{"a": 1}] * ROWS), "the column x has the type struct"),
        (pa.array(["a", "b"] * 25).dictionary_encode(), "the column x has the type dictionary"),
        (pa.array([0] * ROWS, pa.timestamp("s")), "the column x has the type timestamp"),
        (pa.nulls(ROWS), "the column x has the type null"),
    ],
)
def test_values_that_make_no_array(
    tmp_path: Path, write: Any, values: pa.Array, expected: str
) -> None:
    file = write(tmp_path, table(values))
    text = refused(config(file))
    assert expected in text
    assert str(file) in text


def test_rows_that_the_metadata_betray_are_refused_before_training(tmp_path: Path) -> None:
    for values in ([1.0] * 45 + [None] * 5, [[1.0, 2.0]] * 45 + [[1.0]] * 5):
        file = parquet(tmp_path, table(pa.array(values)))
        with pytest.raises(DataError, match="row 45"):
            config(file).table(MLPConfig())


def test_files_that_are_damaged_empty_or_of_other_columns(tmp_path: Path) -> None:
    whole = {write: write(tmp_path).read_bytes() for write in (parquet, compressed, mapped)}
    for write, content in whole.items():
        file = write(tmp_path)
        for part in (b"", b"no table", content[: len(content) // 2], content[:-8]):
            file.write_bytes(part)
            assert str(file) in refused(config(file))
    stream(tmp_path).write_bytes(b"\xff\xff\xff\xff" + b"\0" * 4)
    assert "data.arrow" in refused(config(tmp_path / "data.arrow"))
    assert "the files have no rows" in refused(config(parquet(tmp_path, table().slice(0, 0))))
    assert "it is empty" in refused(ParquetDataConfig())
    assert "No such file" in refused(config(tmp_path / "none.parquet"))
    twice = pa.Table.from_arrays([pa.array(Y)] * 2, names=["y", "y"])
    assert "different names" in refused(config(parquet(tmp_path, twice)))
    (tmp_path / "several").mkdir()
    pq.write_table(table(), tmp_path / "several" / "a.parquet")
    pq.write_table(table(y=X[:, 0]), tmp_path / "several" / "b.parquet")
    text = refused(config(tmp_path / "several"))
    assert "b.parquet: the column y has the type float, and in" in text
    pq.write_table(pa.table({"x": Y}), tmp_path / "several" / "b.parquet")
    assert "b.parquet: it has no column y" in refused(config(tmp_path / "several"))
    assert "there is no z" in refused(config(tmp_path / "several" / "a.parquet", targets="z"))
    assert "no w" in refused(config(tmp_path / "several" / "a.parquet", inputs="w"))


def test_one_row(tmp_path: Path) -> None:
    with opened(config(parquet(tmp_path, table().slice(7, 1)))) as source:
        assert (len(source), source.validation_rows) == (1, 0)
        (step,) = steps(source, 1, rows=2, count=1)
    assert np.array_equal(next(iter(step.values())), X[[7, 7]])


@pytest.mark.slow
def test_cached_rows_do_not_count_as_memory_of_the_rank(tmp_path: Path) -> None:
    """Neither do modules: Arrow's own conversion to arrays would import pandas."""
    code = (
        "import sys; import numpy as np; from parallax.machine.host import data_bytes\n"
        "from parallax.train.data.parquet import ParquetDataConfig\n"
        "from parallax.model.factory.mlp import MLPConfig\n"
        "table = ParquetDataConfig(path=sys.argv[1]).table(MLPConfig())\n"
        "read = lambda rows: table.read(np.array(rows), np.array(rows, 'u8'), {'inputs', 'targets'})\n"
        "read([0]); before = data_bytes(); read(range(0, 40_000, 4_000))\n"
        "assert table._cache._bytes > 38 * 2**20\n"
        "assert data_bytes() - before < 12 * 2**20, data_bytes() - before\n"
        "assert 'pandas' not in sys.modules\n"
    )
    values = np.random.default_rng(0).normal(size=(40_000, 256)).astype(np.float32)
    wide = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 256)})
    file = parquet(tmp_path, wide.append_column("y", pa.array(np.arange(40_000))), size=4_000)
    command = [sys.executable, "-c", code, str(file)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert not found.returncode, found.stderr


def test_a_missing_pyarrow_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'parallax-train\[parquet\]'"):
        ParquetDataConfig(path=__file__).table(MLPConfig())
