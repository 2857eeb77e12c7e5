"""Rows without targets: the kind that files hold, their names and lengths, and bad rows in any process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from parallax.errors import ConfigError, DataError
from parallax.train.data.arrays import ArraysDataConfig
from parallax.train.data.chat import ChatDataConfig
from parallax.train.data.custom import CustomDataConfig
from parallax.train.data.images import ImagesDataConfig
from parallax.train.data.indexed import IndexedDataConfig, IndexedSource
from parallax.train.data.parquet import ParquetDataConfig
from parallax.train.data.source import DataConfig
from parallax.train.data.text import TextDataConfig
from parallax.train.data.tokens import TokensDataConfig
from parallax.train.unlabelled import SKIP, SKIPPED, STOP, UnlabelledDataConfig, settings_for

MODEL: Any = SimpleNamespace(name="custom", sequence=6, vocab_size=256, vocabulary=256)


def opened(kind: DataConfig, bad: str = STOP) -> IndexedSource:
    return UnlabelledDataConfig.of(kind, bad).indexed(MODEL, 0)


def inputs(kind: IndexedDataConfig) -> Any:
    """All inputs, in order."""
    source = opened(kind)
    return source.validation(0, len(source)).inputs(0, len(source))


@pytest.mark.parametrize(
    ("name", "stored", "found"),
    [
        ("x.npy", ArraysDataConfig(path="old", inputs="x"), "arrays"),
        ("x.npy", TokensDataConfig(path="old"), "tokens"),
        ("x.npy", CustomDataConfig(target="a:b"), "arrays"),
        ("x.parquet", ChatDataConfig(path="old"), "chat"),
        ("x.parquet", ArraysDataConfig(path="old"), "parquet"),
        ("a/b/x.PNG", ImagesDataConfig(path="old", size=32, labels="old.csv"), "images"),
        ("x.png", ImagesDataConfig(path="old", size=32), "images"),
        ("x.md", TextDataConfig(), "text"),
    ],
)
def test_the_kind_is_that_of_the_files(
    tmp_path: Path, name: str, stored: DataConfig, found: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"text")
    for path in (file, tmp_path):
        settings: Any = settings_for(str(path), stored)
        assert (settings.name, settings.path) == (found, str(path))
        assert getattr(settings, "size", 32) == 32
        assert not getattr(settings, "labels", "")


def test_a_file_of_no_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.dat").write_bytes(b"\0")
    with pytest.raises(ConfigError, match="no kind of data is known"):
        settings_for(str(tmp_path), TextDataConfig())
    with pytest.raises(ConfigError, match="data=custom: its rows have no numbers"):
        opened(CustomDataConfig(target="a:b"))


def test_arrays_and_columns_need_no_targets(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.save(tmp_path / "x.npy", values)
    np.savez(tmp_path / "both.npz", rows=values, label=np.zeros(4))
    np.testing.assert_array_equal(inputs(ArraysDataConfig(path=str(tmp_path / "x.npy"))), values)
    np.testing.assert_array_equal(inputs(ArraysDataConfig(path=str(tmp_path))), values)
    np.testing.assert_array_equal(inputs(ArraysDataConfig(path=str(tmp_path / "both.npz"))), values)
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"a": values[:, 0], "b": values[:, 1], "y": values[:, 2]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    kind = ParquetDataConfig(path=str(tmp_path / "rows.parquet"), stack=True)
    np.testing.assert_array_equal(inputs(kind), values[:, :2])
    with pytest.raises(DataError, match="there is no z"):
        opened(ParquetDataConfig(path=str(tmp_path / "rows.parquet"), inputs=["z"]))
    parquet.write_table(table.select(["y"]), tmp_path / "only.parquet")
    with pytest.raises(DataError, match=r"its names, y, are those of targets"):
        opened(ParquetDataConfig(path=str(tmp_path / "only.parquet")))


def test_lines_of_several_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"one\r\ntwo")
    (tmp_path / "a.txt").write_bytes(b"\nmuch too long\nsix by\n")
    source = opened(TextDataConfig(path=str(tmp_path)), SKIP)
    table: Any = source.table
    rows = np.arange(len(source))
    assert table.row_names(rows) == ["a.txt:1", "a.txt:2", "a.txt:3", "b.txt:1", "b.txt:2"]
    assert table.lengths(rows).tolist() == [0, 13, 6, 3, 3]
    batch: Any = source.validation(0, 5)
    found = [bytes(row.tolist()).rstrip(b"\0") for row in batch.inputs(0, 5)]
    assert found == [b"", b"", b"six by", b"one", b"two"]
    assert json.loads(batch.part(0, 5, SKIPPED)) == [
        [1, "a.txt:2: the line has 13 bytes, more than the model's 6; shorten it"]
    ]
    # With no other row in reach, any row that can be read takes the place.
    assert bytes(batch.inputs(1, 2)[0].tolist()) == bytes(6)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_rows_are_named_whichever_process_reads_them(tmp_path: Path, workers: int) -> None:
    for number in range(8):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / f"{number}.png")
    for number in (0, 5):
        (tmp_path / f"{number}.png").write_bytes(b"broken")
    kind = ImagesDataConfig(path=str(tmp_path), size=4, workers=workers)
    source = opened(kind, SKIP)
    source.start()
    try:
        bad, sound = list[int](), list[torch.Tensor]()
        for index in range(4):
            batch: Any = source.validation(index, 2)
            sound.append(batch.inputs(0, 2))
            bad += [row for row, _ in json.loads(batch.part(0, 2, SKIPPED))]
    finally:
        source.close()
    assert bad == [0, 5]
    values = torch.cat(sound)[:, 0, 0, 0]
    kept = [row for row in range(8) if row not in bad]
    assert values[kept].diff().gt(0).all()
    with pytest.raises(DataError, match=r"0.png.*\(--bad skip leaves such rows out\)"):
        opened(kind).validation(0, 2).inputs(0, 2)
