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
