"""Rows of .npy, .npz and .safetensors files: the values in them, from any worker, and what is refused in one line."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.factory.mlp import MLPConfig
from parallax.train.data.arrays import ArraysDataConfig
from parallax.train.data.table import BOTH
from tests.unit.train.reading import check_workers_and_splits, opened, refused, steps

ROWS = 50
X = np.random.default_rng(0).normal(size=(ROWS, 3, 4)).astype(np.float32)
Y = np.arange(ROWS, dtype=np.int32) % 7


def folder(path: Path) -> Path:
    np.save(path / "x.npy", X)
    np.save(path / "y.npy", Y)
    return path


def stored(path: Path) -> Path:
    np.savez(path / "rows.npz", x=X, y=Y)
    return path / "rows.npz"


def compressed(path: Path) -> Path:
    np.savez_compressed(path / "rows.npz", x=X, y=Y)
    return path / "rows.npz"


def safetensors(path: Path) -> Path:
    file = path / "größe.safetensors"
    save_file({"x": torch.from_numpy(X), "y": torch.from_numpy(Y)}, file, {"made": "here"})
    return file


def config(path: Path, **settings: Any) -> ArraysDataConfig:
    return ArraysDataConfig(path=str(path), **settings)


def read(settings: ArraysDataConfig, rows: list[int], model: Any = None) -> Any:
    numbers = np.array(rows)
    table = settings.table(model or MLPConfig())
    return table.read(numbers, numbers.astype(np.uint64), BOTH)


@pytest.mark.parametrize("write", [folder, stored, compressed, safetensors])
def test_rows_are_those_of_the_file_for_any_workers_and_splits(tmp_path: Path, write: Any) -> None:
    settings = config(write(tmp_path))
    found = read(settings, [49, 0, 0, 7])
    assert np.array_equal(found["inputs"], X[[49, 0, 0, 7]])
    assert np.array_equal(found["targets"], Y[[49, 0, 0, 7]])
    for step in check_workers_and_splits(settings):
        values, labels = step.values()
        places = [int(np.flatnonzero((value.numpy() == X).all((1, 2)))[0]) for value in values]
        assert labels.tolist() == Y[places].tolist()


def test_stored_members_are_mapped_and_not_read(tmp_path: Path) -> None:
    for write, mapped in ((stored, True), (safetensors, True), (folder, True), (compressed, False)):
        table: Any = config(write(tmp_path)).table(MLPConfig())
        base = table._arrays["x"].values
        while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap) == mapped


def test_the_fingerprint_is_of_the_rows_not_of_the_place(tmp_path: Path) -> None:
    def fingerprint(path: Path, **settings: Any) -> str:
        return config(path, **settings).table(MLPConfig()).fingerprint

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b")
    assert fingerprint(a) == fingerprint(b)
    assert fingerprint(a) != fingerprint(b, inputs="y", targets="x")
    np.save(b / "y.npy", Y + 1)
    assert fingerprint(a) != fingerprint(b)


def test_names_are_files_below_the_folder_or_members(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "größen").mkdir()
    np.save(tmp_path / "größen" / "z.npy", X[:, 0])
    found = read(config(tmp_path, inputs=["x.npy", "größen/z"], targets="y"), [3])
    assert {name: value.shape for name, value in found["inputs"].items()} == {
        "x": (1, 3, 4),
        "z": (1, 4),
    }
    assert np.array_equal(found["inputs"]["z"], X[[3], 0])
    found = read(config(tmp_path, inputs="x", targets=["y", "x"]), [3])
    assert set(found["targets"]) == {"x", "y"}


def test_models_of_transformers_take_their_inputs_and_labels_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", input_ids=Y[:, None], labels=Y[:, None])
    found = read(config(tmp_path / "rows.npz"), [3], HuggingFaceConfig())
    assert set(found["inputs"]) == {"input_ids", "labels"}
    assert np.array_equal(found["targets"], [[3]])


def test_other_types_and_orders(tmp_path: Path) -> None:
    columns = np.asfortranarray(np.arange(12.0).reshape(6, 2))
    np.savez(tmp_path / "rows.npz", x=columns, y=np.arange(6, dtype=">i4"))
    found = read(config(tmp_path / "rows.npz"), [5, 1])
    assert np.array_equal(found["inputs"], columns[[5, 1]])
    assert found["targets"].tolist() == [5, 1]
    values = torch.randn(6, 2, dtype=torch.bfloat16)
    save_file({"x": values, "y": torch.arange(6)}, tmp_path / "rows.safetensors")
    found = read(config(tmp_path / "rows.safetensors"), [5, 1])
    assert torch.equal(found["inputs"], values[[5, 1]])


def test_one_row_trains_and_none_is_held_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=X[:1], y=Y[:1])
    with opened(config(tmp_path / "rows.npz")) as source:
        assert (len(source), source.validation_rows) == (1, 0)
        (step,) = steps(source, 1, rows=2, count=1)
    assert [len(value) for value in step.values()] == [2, 2]


def npz(path: Path, members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path / "rows.npz", "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path / "rows.npz"


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (npy(np.array([{}, {}], dtype=object)), "holds Python objects"),
        (npy(np.array(["a", "b"])), "has the type <U1"),
        (npy(np.zeros(2, dtype=[("a", "f4"), ("b", "f4")])), "has the type"),
        (npy(np.float32(1)), "is one number"),
        (npy(X)[:-1], "bytes of its array|its array needs"),
        (b"no array", "no .npy array"),
        (b"", "no .npy array"),
        (npy(X[:0]), "several numbers of rows"),
        (npy(X).replace(b"(50, 3, 4)", b"(-5,-3, 4)"), "has the type"),
        (npy(X).replace(b"(50, 3, 4), ", b"(99**9999), "), "no .npy array"),
    ],
)
def test_members_that_are_no_arrays_of_numbers(
    tmp_path: Path, kind: int, content: bytes, expected: str
) -> None:
    path = npz(tmp_path, {"x.npy": content, "y.npy": npy(Y)}, kind)
    text = refused(config(path))
    assert any(each in text for each in expected.split("|")), text
    assert "rows.npz" in text


def test_files_that_are_damaged_or_empty(tmp_path: Path) -> None:
    for name, expected in (("rows.npz", "no .npz file"), ("a.safetensors", "no .safetensors file")):
        for content in (b"", b"PK\3\4 nothing else", b"\xff" * 100):
            (tmp_path / name).write_bytes(content)
            assert expected in refused(config(tmp_path / name))
    whole = stored(tmp_path).read_bytes()
    (tmp_path / "rows.npz").write_bytes(whole[: len(whole) // 2])
    assert "no .npz file" in refused(config(tmp_path / "rows.npz"))
    # The directory names a place beyond the file's end.
    place = whole.rindex(b"PK\1\2") + 42
    (tmp_path / "rows.npz").write_bytes(whole[:place] + b"\xff\xff\xff\x00" + whole[place + 4 :])
    assert "has no member at" in refused(config(tmp_path / "rows.npz"))
    assert "has no .npy member" in refused(config(npz(tmp_path, {"a.txt": b"text"})))
    save_file({}, tmp_path / "none.safetensors")
    assert "has no tensors" in refused(config(tmp_path / "none.safetensors"))


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    class Mark:
        def __reduce__(self) -> Any:
            return (tmp_path / "ran").touch, ()

    np.save(tmp_path / "x.npy", np.array([Mark()], dtype=object), allow_pickle=True)
    np.save(tmp_path / "y.npy", Y[:1])
    assert "x.npy: it holds Python objects" in refused(config(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_names_outside_of_the_folder_and_wrong_names(tmp_path: Path) -> None:
    root = tmp_path / "rows"
    root.mkdir()
    folder(root)
    np.save(tmp_path / "other.npy", X)
    (root / "link.npy").symlink_to(tmp_path / "other.npy")
    for name in ("../other", "link", str(tmp_path / "other")):
        assert "outside of" in refused(config(root, inputs=name, targets="y"))
    assert "there is no z" in refused(config(root, inputs="x", targets="z"))
    assert "no w" in refused(config(root, inputs="w", targets="y"))
    assert "cannot open a/b.npy" in refused(config(root, inputs="x", targets="a/b"))
    member = npz(tmp_path, {"../x.npy": npy(X), "/y.npy": npy(Y)})
    found = read(config(member, inputs="../x", targets="/y"), [2])  # members are names alone
    assert np.array_equal(found["inputs"], X[[2]])
    assert not (tmp_path.parent / "x.npy").exists()


def test_paths_that_name_no_arrays(tmp_path: Path) -> None:
    assert "the folder has no .npy file" in refused(config(tmp_path))
    assert "it is empty" in refused(ArraysDataConfig())
    assert "No such file" in refused(config(tmp_path / "none.npz"))
    (tmp_path / "x.csv").write_text("1,2")
    assert "accepted are a folder" in refused(config(tmp_path / "x.csv"))
    np.save(tmp_path / "x.npy", X)
    assert "name its folder" in refused(config(tmp_path / "x.npy"))
    assert "no key is known as targets" in refused(config(tmp_path))
    np.savez(tmp_path / "y.npz", y=Y)
    assert "inputs need one too" in refused(config(tmp_path / "y.npz"))
    np.savez(tmp_path / "y.npz", y=Y, x=X[:-1])
    assert "x 49, y 50" in refused(config(tmp_path / "y.npz"))
    np.savez(tmp_path / "y.npz", y=Y[:0], x=X[:0])
    assert "have no rows" in refused(config(tmp_path / "y.npz"))
