"""``parallax data``: what it shows of each kind of rows, and that wrong input ends in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from torch.utils.data import Dataset

from parallax import TensorRows, cli
from parallax.commands import data

HERE = "tests.unit.test_data_command"


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read for a moment instead of two seconds; keep the user's cache as it is."""
    monkeypatch.setattr(data, "_TIMED_SECONDS", 0.02)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Images(Dataset[Any]):
    """Image i is ``i`` everywhere but in its first pixel; one is NaN."""

    classes = ("a", "b\x1b[31m")

    def __len__(self) -> int:
        return 30

    def __getitem__(self, row: int) -> Any:
        image = torch.full((3, 5, 7), float(row))
        image[:, 0, 0] = -1
        return image, row % 2


class Padded(Dataset[Any]):
    """Tokens of which the first 2, 4 or 6 count."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, row: int) -> Any:
        tokens = torch.arange(8) + 97
        labels = tokens.clone()
        labels[2 + 2 * (row % 3) :] = -100
        return {"input_ids": tokens, "labels": labels}


class Alone:
    """A source of one's own, with rows for three batches."""

    left = 3

    def batch(self, rows: int) -> Any:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return TensorRows(torch.rand(rows, 4), torch.zeros(rows, dtype=torch.int64))

    def validation(self, index: int, rows: int) -> Any:
        raise IndexError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def shown(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["data", *arguments]) == 0
    return capfd.readouterr().out


def as_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(shown(capfd, "--json", *arguments))


def test_text_is_shown_as_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("überall " * 500)
    typed = [f"data.path={tmp_path}/a.txt", "data.shuffle=false", "model.sequence=17"]
    out = shown(capfd, *typed)
    assert "237 training rows, 12 held out (validation)" in out
    assert "row 1   inputs: 'überall überall'\n        targets: '\ufffdberall überall '" in out
    assert re.search(r"data\.workers=auto chooses [0-4]$", out, re.M)
    found = as_json(capfd, *typed, "trainer.global_batch=4")
    (inputs, targets) = found["columns"]
    assert (inputs["name"], inputs["dtype"], inputs["shape"]) == ("inputs", "int64", [17])
    assert inputs["step_bytes"] == targets["step_bytes"] == 4 * 17 * 8
    assert (inputs["low"], inputs["high"]) == (32, 0xC3)
    assert found["steps_per_epoch"] == 60
    assert found["reading"]["lengths"] is None
    assert len(found["fingerprint"]) == 12


def test_tokens_are_shown_as_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = {word: number for number, word in enumerate(["<|endoftext|>", "one", "two"])}
    file = tmp_path / "tokenizer.json"
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="two"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(file))
    (tmp_path / "a.txt").write_text("one two " * 200)
    typed = [f"data.path={tmp_path}/a.txt", f"data.tokenizer={file}", "data.shuffle=false"]
    out = shown(capfd, *typed, "model.sequence=3", "data.validation=0")
    assert "row 1   inputs: 'one two one'\n        targets: 'two one two'" in out
    out = shown(capfd, *typed, "model.sequence=500", "data.documents=lines", "data.validation=0")
    assert "targets: 400 of 500 count: 'two one two" in out


def test_arrays_are_shown_with_ranges(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    values = np.arange(80.0).reshape(20, 4)
    values[::2, 1] = np.nan
    np.savez(tmp_path / "rows.npz", x=values, y=np.arange(20, dtype=np.int8))
    typed = ["data=arrays", f"data.path={tmp_path}/rows.npz", "data.validation=0"]
    found = as_json(capfd, *typed, "data.shuffle=false", "model=mlp", "data.workers=2")
    inputs, targets = found["columns"]
    assert (inputs["dtype"], inputs["shape"], inputs["step_bytes"]) == ("float32", [4], 256)
    assert (inputs["low"], inputs["high"], inputs["non_finite"]) == (0, 31, 4)
    assert (targets["dtype"], targets["high"]) == ("int64", 7)
    assert found["first_rows"][1] == {"inputs": "4 5 6 7", "targets": "1"}
    assert (found["rows"], found["validation"]) == (20, {})
    assert found["workers"] == 2
    assert found["auto_workers"] in range(5)
    assert found["reading"]["rows"] >= 16
    assert set(found["reading"]["parts"]) == {"read"}


def test_arrays_of_another_byte_order_are_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = np.asfortranarray(np.arange(40.0).reshape(10, 4)).astype(">f4")
    np.savez(tmp_path / "rows.npz", x=rows, y=np.arange(10, dtype=">i2"))
    shown = [
        "data=arrays",
        f"data.path={tmp_path}/rows.npz",
        "data.validation=0",
        "data.shuffle=false",
    ]
    assert cli.main(["data", *shown]) == 0
    assert "row 2   inputs: 4 5 6 7" in capfd.readouterr().out


def test_ignored_targets_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    typed = ["data=dataset", f"data.target={HERE}:Padded", "data.validation=0"]
    found = as_json(capfd, *typed, "data.last_batch=drop", "trainer.global_batch=15")
    lengths = found["reading"]["lengths"]
    assert (lengths["low"], lengths["high"], lengths["mean"]) == (2, 6, 4)
    assert lengths["counts"] == [10, 0, 0, 0, 10, 0, 0, 10]
    out = shown(capfd, *typed)
    assert "targets that count in a row: 2 to 6, mean 4.0, in" in out
    assert "inputs.input_ids: 97 98 99 100 101 102 …" in out


def test_images_are_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sheet = tmp_path / "größe.png"
    typed = ["data=dataset", f"data.target={HERE}:Images", "data.validation=0", "model=mlp"]
    shown(capfd, *typed, "data.shuffle=false", "--sheet", str(sheet))
    with Image.open(sheet) as picture:
        assert picture.size == (8 * 130, 4 * 130)
        assert picture.getpixel((3, 3)) == (0, 0, 0)  # the first pixel of the first image
        assert picture.getpixel((100, 60)) == (255, 255, 255)
        assert picture.getpixel((100, 120)) == (0, 0, 0)  # below it: 5 by 7 pixels are 91 by 128


def test_a_source_of_ones_own_is_read_to_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    out = shown(capfd, "data=custom", f"data.target={HERE}:Alone", "model=mlp")
    assert "an unknown number of rows, none held out" in out
    found = as_json(capfd, "data=custom", f"data.target={HERE}:Alone", "model=mlp")
    assert found["reading"]["rows"] == 2 * 16
    assert (found["fingerprint"], found["steps_per_epoch"], found["auto_workers"]) == (None,) * 3


def test_an_iterable_dataset(capfd: pytest.CaptureFixture[str]) -> None:
    target = "data.target=tests.unit.train.datasets:Numbers"
    found = as_json(capfd, "data=dataset", target, "data.kwargs.rows=20", "model=mlp")
    assert found["rows"] is None
    assert found["first_rows"][2] == {"inputs": "2", "targets": "2"}


def test_too_few_rows_for_a_step_are_noted(capfd: pytest.CaptureFixture[str]) -> None:
    typed = ["data=dataset", f"data.target={HERE}:Images", "trainer.global_batch=64", "model=mlp"]
    assert "note: trainer.global_batch=64: data.target=" in shown(capfd, *typed)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["data.path=no/such/folder"], "there is no"),
        (["data=arrays", "data.path=no.npz"], "No such file"),
        (["data=arrays"], "data.path=: it is empty"),
        (["data.pth=x"], "did you mean 'path'"),
        (["data=dataset", f"data.target={HERE}:missing"], "missing"),
        (["--sheet", "no/folder/x.png"], "no/folder is no folder"),
        (["--sheet", "x.png", "data.max_bytes=64KiB"], "--sheet: the inputs are inputs (64, 256)"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", *arguments]) == 2
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("parallax: ")
    assert expected in line
    assert not out.strip()
    assert not (tmp_path / "x.png").exists()
