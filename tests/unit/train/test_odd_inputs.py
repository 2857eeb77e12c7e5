"""Files of every kind that are damaged, empty, forbidden or links: one line, or all rows, and never some of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallax.config import compose
from parallax.errors import ConfigError, DataError
from parallax.run.job import open_source
from tests.alone import alone
from tests.faults.kinds_of_rows import KINDS

MODULES = {"text": "tokenizers", "chat": "transformers", "parquet": "pyarrow", "audio": "soundfile"}
OF_FILES = [
    *("bytes of text", "text", "tokens", "chat", "images", "shards", "parquet", "arrays", "audio")
]
MODEL = ["model=custom", "model.target=tests.faults.kinds_of_rows:Digests"]
SIZES = ["+model.kwargs.sequence=40", "+model.kwargs.vocabulary=1000", "data.validation=0"]
NOBODY = 65534
EVERY_KIND = pytest.mark.parametrize("kind", OF_FILES)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file() and each.suffix != ".csv")


def written(kind: str, folder: Path) -> list[str]:
    pytest.importorskip(MODULES.get(kind, "numpy"))
    settings = KINDS[kind](folder)
    if kind == "tokens":  # the folder, not its files by name
        settings = [each for each in settings if "mixture" not in each]
    return settings


def rows_of(settings: list[str]) -> int:
    """Open the rows, and read all of them."""
    source: Any = open_source(compose([*MODEL, *SIZES, *settings]))
    batch = source.batch(len(source))
    batch.inputs(0, len(source)), batch.targets(0, len(source))
    return len(source)


def line(settings: list[str]) -> str:
    with pytest.raises((DataError, ConfigError)) as error:
        rows_of(settings)
    assert str(error.value).isprintable()
    return str(error.value)


@EVERY_KIND
@pytest.mark.parametrize("content", ["empty", "zeros"])
def test_a_damaged_file_is_one_line(here: Path, kind: str, content: str) -> None:
    settings = written(kind, here / "rows")
    whole = rows_of(settings)
    for place in files(here / "rows"):
        place.write_bytes(b"" if content == "empty" else b"\0" * 997)
    if kind == "tokens" and content == "zeros":
        assert "its 997 bytes are no whole number of uint16 tokens" in line(settings)
    else:
        assert whole
        assert line(settings)


@EVERY_KIND
@pytest.mark.parametrize("target", ["nowhere", "itself", "outside"])
def test_a_link_is_followed_if_no_file_names_it_and_named_if_it_leads_nowhere(
    here: Path, kind: str, target: str
) -> None:
    settings = written(kind, here / "rows")
    whole = rows_of(settings)
    place = files(here / "rows")[-1]
    outside = here / f"outside{place.suffix}"
    place.rename(outside)
    place.symlink_to({"nowhere": "/nowhere", "itself": place.name, "outside": outside}[target])
    if target == "outside" and kind not in (
        "shards",
        "arrays",
        "audio",
    ):  # as caches of models link
        assert rows_of(settings) == whole
        return
    found = line(settings)
    assert place.name in found
    if target == "outside":
        assert "outside of" in found


@EVERY_KIND
def test_a_folder_that_is_a_link_to_another_place_is_named(here: Path, kind: str) -> None:
    settings = written(kind, here / "rows")
    if kind in ("shards", "arrays", "audio"):  # whose files are in one folder, or in a table
        pytest.skip("no subfolders")
    folder = files(here / "rows")[-1].parent
    shutil.copytree(folder, here / "outside")
    (folder / "more").symlink_to(here / "outside")
    found = line(settings)
    assert "more leads to" in found
    assert "outside of the data's folder" in found


def test_a_folder_of_sounds_that_is_a_link_is_named(here: Path) -> None:
    pytest.importorskip("soundfile")
    KINDS["audio"](here / "rows")
    (here / "rows" / "class").mkdir()
    shutil.copy(here / "rows" / "0.wav", here / "rows" / "class")
    settings = ["data=audio", f"data.path={here / 'rows'}", "data.seconds=0.5"]
    assert rows_of(settings) == 1
    (here / "rows" / "class" / "more").symlink_to(here / "rows" / "class")
    assert "class/more leads to a folder, and links to folders are not followed" in line(settings)


def _check_refusal(settings: list[str], place: Path, cache: Path) -> None:
    """Read the rows, which imports all modules, and again as a user who may not read ``place``."""
    os.chdir(cache.parent)
    rows_of(settings)
    place.chmod(0)
    cache.mkdir()
    cache.chmod(0o777)
    os.environ["XDG_CACHE_HOME"] = str(cache)
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    assert place.name in line(settings)


@pytest.mark.sampled
@pytest.mark.skipif(os.getuid() != 0, reason="root alone becomes another user")
@EVERY_KIND
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_may_not_be_read_is_named(here: Path, kind: str, what: str) -> None:
    settings = written(kind, here / "rows")
    for each in (here, *here.parents):  # of pytest, which only its user may enter
        if each.is_relative_to("/tmp") and each != Path("/tmp"):
            each.chmod(0o755)
    place = files(here / "rows")[-1]
    if what == "folder":
        if kind in ("shards", "arrays", "audio"):
            pytest.skip("no subfolders")
        place = place.parent / "more"
        place.mkdir()
    alone(_check_refusal, settings, place, here / "cache-of-nobody")


@EVERY_KIND
def test_names_that_are_no_text(here: Path, kind: str) -> None:
    settings = written(kind, here / "rows")
    expected = rows_of(settings)
    if kind in ("parquet", "arrays", "audio"):
        pytest.skip("their names are in tables or settings, or go through libraries of text")
    for place in files(here / "rows"):
        place.rename(place.with_name(os.fsdecode(b"gr\xf6\xdfe \xff") + place.name))
    assert rows_of(settings) == expected


def test_a_sound_file_of_any_name(here: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    (here / "rows" / "class").mkdir(parents=True)
    soundfile.write(here / "x.wav", np.zeros(100), 100)
    (here / "x.wav").rename(here / "rows" / "class" / os.fsdecode(b"\xff\n.wav"))
    assert rows_of(["data=audio", f"data.path={here / 'rows'}"]) == 1


def test_rows_that_no_memory_holds(here: Path) -> None:
    settings = written("audio", here / "rows")
    assert "row(s) do not fit in memory" in line([*settings, "data.seconds=1e12"])


def test_labels_of_images_are_numbers_where_all_are(here: Path) -> None:
    written("images", here / "rows")
    names = [each.relative_to(here / "rows").as_posix() for each in files(here / "rows")[:3]]
    for labels, expected in (
        (["-1", "3", "+2"], torch.tensor([-1, 3, 2])),
        (["-1.5", "3", "1e-3"], torch.tensor([-1.5, 3, 1e-3])),
        (["-1", "b", "b"], torch.tensor([0, 1, 1])),
    ):
        rows = "".join(f"{name},{label}\n" for name, label in zip(names, labels))
        (here / "labels.csv").write_text(f"path,label\n{rows}")
        settings = ["data=images", f"data.path={here / 'rows'}", "data.shuffle=false"]
        chosen = [*settings, f"data.labels={here / 'labels.csv'}", "data.size=8"]
        source = open_source(compose([*MODEL, *SIZES, *chosen]))
        found = source.batch(3).targets(0, 3)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        (here / "labels.csv").unlink()


def test_a_mixture_whose_epoch_cannot_be_counted_is_refused(here: Path) -> None:
    settings = written("tokens", here / "rows")
    mixture = "data.mixture={rows/web.bin: 1e-300, rows/code.bin: 1}"
    assert "give the source with the smallest weight a larger one" in line([settings[0], mixture])


def test_empty_lists_and_the_index_of_pandas_in_parquet(here: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    empty = arrow.array([[]] * 6, arrow.list_(arrow.float32()))
    columns = {"x": np.arange(6.0), "empty": empty, "y": np.arange(6), "id": np.arange(6) * 10}
    index = {b"pandas": b'{"index_columns": ["id"], "columns": []}'}
    pq.write_table(arrow.table(columns).replace_schema_metadata(index), here / "rows.parquet")
    settings = ["data=parquet", f"data.path={here / 'rows.parquet'}"]
    source = open_source(compose([*MODEL, *SIZES, *settings]))
    inputs = source.batch(4).inputs(0, 4)
    assert list(inputs) == ["x", "empty"]
    assert inputs["empty"].shape == (4, 0)
    assert rows_of([*settings, "data.inputs=[x,id]"]) == 6


def test_tokens_of_another_width_are_refused(here: Path) -> None:
    draw = np.random.default_rng(0)
    settings = ["data=tokens", f"data.path={here / 'a.bin'}"]
    for dtype, given, message in (
        ("<u4", "auto", "as if its numbers had uint32: set data.dtype=uint32"),
        ("<i8", "auto", "as if its numbers had uint32: set data.dtype=uint32"),
        ("<i8", "uint32", "as if its numbers had 64 bits: write them as uint32"),
        ("<u2", "auto", ""),
        ("<u4", "uint32", ""),
        ("<u4", "uint16", ""),  # at one's own word
    ):
        draw.integers(0, 1000, 41 * 9).astype(dtype).tofile(here / "a.bin")
        chosen = [*settings, f"data.dtype={given}"]
        if message:
            assert message in line(chosen)
        else:
            assert rows_of(chosen)


SETS = {"tokens": "bin", "parquet": "parquet", "chat": "jsonl", "bytes of text": "txt"}


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("names", [("train", "val"), ("x_train/0", "x_test/0", "x_test/1")])
def test_files_of_training_and_held_out_rows_are_not_mixed(
    here: Path, kind: str, names: tuple[str, ...]
) -> None:
    """The settings of the refusal read the rows."""
    settings = written(kind, here / "rows")
    one, end = files(here / "rows")[0], SETS[kind]
    for name in names:
        place = here / "sets" / f"{name}.{end}"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(one, place)
    settings = [each.replace(f"{here}/rows", f"{here}/sets") for each in settings]
    found = line(settings)
    assert "which are sets of their own: use data.path=" in found
    used = found.partition(" use ")[2].split()
    assert [each.partition("=")[0] for each in used] == [
        "data.path",
        f"data.validation.{'val' if 'val' in names else 'test'}.path",
    ]
    if kind == "bytes of text":  # too few for held-out rows
        return
    kept = [each for each in settings if not each.startswith("data.path=")]
    sizes = [each for each in SIZES if each != "data.validation=0"]
    source: Any = open_source(compose([*MODEL, *sizes, *kept, *used]))
    assert len(source)
    assert len(source.validation_sets) == 1


def test_patterns_and_folders_of_their_own_read_sets_of_several_files(here: Path) -> None:
    for kind, expected in (
        ("parquet", f"use 'data.path={here}/a/**/*train*.parquet' 'data.validation.test.path="),
        (
            "tokens",
            "put the files of each set in a folder of its own, and name them as data.path and",
        ),
    ):
        settings = written(kind, here / "rows")
        one = files(here / "rows")[0]
        (here / "a").mkdir()
        for name in ("train-0", "train-1", "test-0", "test-1"):
            shutil.copy(one, here / "a" / f"{name}{one.suffix}")
        settings = [each.replace(f"{here}/rows", f"{here}/a") for each in settings]
        assert expected in line(settings)
        (here / "a" / f"more{one.suffix}").write_bytes(one.read_bytes())
        assert rows_of(settings)
        shutil.rmtree(here / "a")
        shutil.rmtree(here / "rows")


def test_sounds_of_training_and_held_out_rows_are_not_classes(here: Path) -> None:
    written("audio", here / "rows")
    for name in ("Train/a", "Test/a"):
        (here / "sets" / name).mkdir(parents=True)
        shutil.copy(here / "rows" / "0.wav", here / "sets" / name)
    settings = ["data=audio", f"data.path={here / 'sets'}", "data.seconds=0.5"]
    assert (
        "it holds Train/ and Test/, which are sets of rows and no classes: use "
        f"data.path={here}/sets/Train data.validation.test.path={here}/sets/Test"
    ) in line(settings)


@pytest.mark.parametrize("kind", ["images", "audio"])
def test_a_folder_above_the_classes_is_named(here: Path, kind: str) -> None:
    written(kind, here / "rows")
    one = files(here / "rows")[0]
    for name in ("a", "b"):
        (here / "above" / "data" / name).mkdir(parents=True)
        shutil.copy(one, here / "above" / "data" / name)
    settings = [f"data={kind}", f"data.path={here}/above"]
    found = line(settings)
    assert "its only class would be data, which holds the folders a, b" in found
    used = found.partition("use ")[2].partition(";")[0]
    assert rows_of([f"data={kind}", used]) == 2
    shutil.copy(one, here / "above" / "data")  # so that it is a class
    assert rows_of(settings) == 3


def test_files_of_formats_that_are_not_read_are_named(here: Path) -> None:
    """They would be rows that are missing."""
    settings = written("images", here / "rows")
    (here / "rows" / "__MACOSX" / "cat").mkdir(parents=True)
    (here / "rows" / "__MACOSX" / "cat" / "._000.jpg").write_bytes(b"\0\5\x16\7")
    whole = rows_of(settings)
    (here / "rows" / "cat" / "x.HEIC").write_bytes(b"x")
    assert "cat/x.HEIC is an image of a format that is not read; convert it" in line(settings)
    (here / "rows" / "cat" / "x.HEIC").unlink()
    assert rows_of(settings) == whole
    written("audio", here / "sounds")
    (here / "sounds" / "a").mkdir()
    shutil.copy(here / "sounds" / "0.wav", here / "sounds" / "a")
    (here / "sounds" / "a" / "x.m4a").write_bytes(b"x")
    assert "x.m4a has a format that is not read; convert it (ffmpeg" in line(
        ["data=audio", f"data.path={here / 'sounds'}"]
    )
    settings = written("bytes of text", here / "texts")
    (here / "texts" / "z.txt").write_bytes("größe\n".encode("utf-16") * 9)
    assert "z.txt is UTF-16; convert it (iconv -f UTF-16 -t UTF-8" in line(settings)


@pytest.mark.parametrize(
    "text",
    [
        "filename,target\n0,5\n1,7\n",
        "Image;Class\n0;5\n1;7\n",
        "client\tpath\tlabel\n9,9\t0\t5\n9,9\t1\t7\n",
        "fold,file_name,class,label\n1,0,a,5\n2,1,b,7\n",
        "path,label,split\n0,5,train\n1,7,train\n",
    ],
)
def test_columns_of_tables_have_the_usual_names(here: Path, text: str) -> None:
    written("images", here / "rows")
    for number, name in enumerate(files(here / "rows")[:2]):
        shutil.copy(name, here / "rows" / str(number))
    (here / "labels.csv").write_text(text)
    settings = ["data=images", f"data.path={here / 'rows'}", "data.shuffle=false", "data.size=8"]
    chosen = [*settings, f"data.labels={here / 'labels.csv'}"]
    source = open_source(compose([*MODEL, *SIZES, *chosen]))
    assert source.batch(2).targets(0, 2).tolist() == [5, 7]
