"""Files of images: broken ones, the index of a folder, tables, and what is refused in one line."""

from __future__ import annotations

import os
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from parallax.errors import CheckpointError, DataError
from parallax.model.factory.mlp import MLPConfig
from parallax.train.data.images import ImagesDataConfig
from parallax.train.data.index import Index, cached
from tests.unit.train.image_folders import line, one, opened, settled, whole
from tests.unit.train.image_rows import read
from tests.unit.train.pictures import encoded, folder, smooth

HERE = "tests.unit.train.pictures"
COUNTS = {"ants": 7, "bees": 9, "crows": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parallax"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return folder(tmp_path / "root", COUNTS)


# ----------------------------------------------------------------------------------------- broken files


BROKEN = {
    "empty": (b"", "it is empty"),
    "text": (b"no image at all", "no image of a known format"),
    "a PostScript program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "no image of"),
    "half a header": (encoded(smooth(64, 64))[:20], "Truncated File Read"),
    "a bomb": (encoded(Image.new("1", (3000, 3000))), "it has 3000 × 3000 pixels, more than"),
    "too many bytes": (encoded(smooth(8, 8)) + b"\0" * 300000, "more than data.max_file=200KiB"),
}


@pytest.mark.parametrize("kind", list(BROKEN))
def test_a_broken_file_is_refused_or_left_out(
    root: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"max_pixels": 10**6, "max_file": "200KiB"}
    expected = whole(root, **settings)
    content, reason = BROKEN[kind]
    (root / "bees" / "003x.png").write_bytes(content)
    text = line(root, **settings)
    assert f"{root}/bees/003x.png: " in text
    assert reason in text
    assert "broken=skip" in text
    found = whole(root, broken="skip", **settings)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    ImagesDataConfig(path=str(root), broken="skip", **settings).table(MLPConfig(), quiet=False)
    assert "1 of 25 images are broken" in caplog.text
    assert "003x.png" in caplog.text


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        *((kind, "refuse") for kind in ("jpeg", "png", "webp", "gif", "tiff")),
        *((kind, "skip") for kind in ("jpeg", "png", "gif", "tiff")),  # WebP's header has its size
    ],
)
def test_a_truncated_image_is_refused(root: Path, kind: str, broken: str) -> None:
    """Its header is sound, so it breaks in decoding, in the midst of an epoch."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = encoded(Image.fromarray(noise), kind)
    truncated = content[: len(content) * 2 // 3]
    if kind == "tiff":  # its header follows the pixels
        truncated = encoded(Image.fromarray(noise), kind, compression="tiff_lzw")
        truncated = truncated[:8] + b"\xff" * 200 + truncated[208:]
    (root / "bees" / f"truncated.{kind}").write_bytes(truncated)
    text = line(root, broken=broken)
    assert f"{root}/bees/truncated.{kind}: " in text
    assert "mend or remove it" in text


def test_a_bomb_is_refused_whatever_pillow_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(
        DataError, match=r"it has 3000 × 3000 pixels, more than data.max_pixels=10000"
    ):
        one(tmp_path, encoded(Image.new("1", (3000, 3000))), max_pixels=10000)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert one(tmp_path, encoded(smooth(30, 30))).shape == (3, 8, 8)
    assert Image.MAX_IMAGE_PIXELS == 100


def test_a_worker_refuses_in_the_same_line(root: Path) -> None:
    (root / "bees" / "008.png").write_bytes(b"no image")
    settings: dict[str, Any] = {"shuffle": False, "validation": 0}
    with opened(root, workers=1, **settings) as source:
        read(source, 10)
        read(source, 5)
        with pytest.raises(DataError, match=r"bees/008\.png: it is no image of a known format"):
            read(source, 5)


def test_headers_are_checked_once_and_a_mended_file_comes_back(root: Path) -> None:
    place = root / "bees" / "003.png"
    sound = place.read_bytes()
    place.write_bytes(b"no image")
    settled(root)
    assert len(whole(root, broken="skip")[1]) == 23
    stamps = {each.name: each.stat().st_mtime_ns for each in indexes(root)}
    assert len(whole(root, broken="skip")[1]) == 23
    assert stamps == {each.name: each.stat().st_mtime_ns for each in indexes(root)}
    place.write_bytes(sound)  # in place, which leaves the folder's time as it was
    settled(root)
    assert len(whole(root, broken="skip")[1]) == 24


# ------------------------------------------------------------------------------------- index and places


def indexes(root: Path) -> list[Path]:
    return sorted((root.parent / "cache" / "parallax").glob("*.safetensors"))


def test_the_index_is_made_once_and_again_when_a_file_comes_or_goes(root: Path) -> None:
    settled(root)
    first = whole(root)[1]
    (index,) = indexes(root)
    stamp = index.stat().st_mtime_ns
    assert torch.equal(whole(root)[1], first)
    assert index.stat().st_mtime_ns == stamp
    (root / "bees" / "zz.png").write_bytes(encoded(smooth(9, 9)))
    assert len(whole(root)[1]) == 25  # its folder changed just now, so this index is not kept
    settled(root)
    os.utime(root / "bees", (10**9 + 5, 10**9 + 5))
    assert len(whole(root)[1]) == 25
    (root / "bees" / "zz.png").unlink()
    assert len(whole(root)[1]) == 24


def test_one_process_makes_an_index_and_others_wait_for_it() -> None:
    made, begun, others = list[int](), threading.Event(), threading.Event()

    def make(number: int) -> Index:
        begun.set()
        others.wait()
        made.append(number)
        return Index({"numbers": np.arange(3)}, {})

    def get(number: int) -> None:
        found.append(cached("numbers", "key", partial(make, number)))

    found = list[Index]()
    threads = [threading.Thread(target=get, args=(number,)) for number in range(4)]
    threads[0].start()
    begun.wait()
    for thread in threads[1:]:
        thread.start()
    others.set()
    for thread in threads:
        thread.join()
    assert made == [0]
    assert [each.arrays["numbers"].tolist() for each in found] == [[0, 1, 2]] * 4


def test_a_damaged_index_is_made_again(root: Path) -> None:
    settled(root)
    first = whole(root)[0]
    (index,) = indexes(root)
    index.write_bytes(index.read_bytes()[:100])
    assert torch.equal(whole(root)[0], first)


def test_a_file_that_changes_in_place_ends_the_run_and_renews_the_index(root: Path) -> None:
    settled(root)
    whole(root)
    (root / "bees" / "003.png").write_bytes(encoded(smooth(50, 50)))
    assert "bees/003.png: it has changed since its size was read; start again" in line(root)
    assert len(whole(root)[1]) == 24


def test_the_fingerprint_is_of_the_rows_not_of_the_place(root: Path, tmp_path: Path) -> None:
    with opened(root) as source:
        first = source.fingerprint
        state = source.state_dict()
    root.rename(tmp_path / "moved")
    with opened(tmp_path / "moved") as source:
        assert source.fingerprint == first
    (tmp_path / "moved" / "bees" / "003.png").rename(tmp_path / "moved" / "ants" / "x.png")
    with opened(tmp_path / "moved") as source:
        assert source.fingerprint != first
        with pytest.raises(CheckpointError, match="trained on rows"):
            source.load_state_dict(state)


def test_a_cache_that_cannot_be_written_is_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root.parent / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(root.parent / "file"))
    assert "point XDG_CACHE_HOME to a folder with space" in line(root)


def test_names_need_not_be_text(tmp_path: Path) -> None:
    place = folder(tmp_path / "root", {"größe": 2, "日本": 2})
    os.rename(
        os.fsencode(place / "größe" / "001.png"), os.fsencode(place / "größe") + b"/\xff\xfe.png"
    )
    assert whole(place)[1].tolist() == [0, 0, 1, 1]
    with open(os.fsencode(place / "größe") + b"/\xff\xfe.png", "wb") as file:
        file.write(b"no image")
    assert r"\udcff\udcfe.png: it is no image" in line(place)


def test_links_to_folders_are_followed_only_below_the_folder(root: Path, tmp_path: Path) -> None:
    (root / "ants" / "link.png").symlink_to(root / "bees" / "001.png")
    (root / "again").symlink_to(root / "bees")
    assert whole(root)[1].tolist() == [0] * 9 + [1] * 8 + [2] * 9 + [3] * 8
    outside = folder(tmp_path / "outside", {"secret": 1})
    (root / "ants" / "out.png").symlink_to(outside / "secret" / "000.png")
    assert whole(root)[1].tolist() == [0] * 9 + [1] * 9 + [2] * 9 + [3] * 8
    (root / "ants" / "out.png").unlink()
    (root / "dusk").symlink_to(outside / "secret")
    assert re.search(r"the link dusk leads to \S+secret, outside of the data's folder", line(root))
    (root / "dusk").unlink()
    (root / "ants" / "gone.png").symlink_to(root / "nowhere.png")
    assert "cannot open ants/gone.png (No such file or directory)" in line(root)
    (root / "ants" / "gone.png").unlink()
    (root / "ants" / "circle").symlink_to(root / "ants")
    assert "the link ants/circle leads to a folder above it" in line(root)


def test_what_is_no_regular_file_is_refused(root: Path) -> None:
    os.mkfifo(root / "ants" / "pipe.png")
    assert "ants/pipe.png is no regular file" in line(root)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read anything")
def test_what_cannot_be_read_is_named(root: Path) -> None:
    (root / "ants" / "003.png").chmod(0)
    assert "ants/003.png: it cannot be read (Permission denied); make it readable" in line(root)
    (root / "ants" / "003.png").chmod(0o600)
    (root / "bees").chmod(0)
    try:
        assert "cannot list" in line(root)
    finally:
        (root / "bees").chmod(0o700)


def test_folders_without_classes_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "it has no folders: put the images of each class in a folder" in line(empty)
    (empty / "x.png").write_bytes(encoded(smooth(8, 8)))
    assert "it has 1 image(s), but no folders" in line(empty)
    assert "it is a file; name a folder" in line(empty / "x.png")
    assert "No such file or directory; name a file or folder that exists" in line(empty / "gone")
    (empty / "class").mkdir()
    assert "the folder class holds no images, so it is no class: remove it" in line(empty)


def test_training_and_held_out_folders_are_not_mixed(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        folder(tmp_path / "root" / name, {"ants": 2, "bees": 2})
    place = tmp_path / "root"
    assert line(place).endswith(
        f"it holds train/ and val/ and test/, which are sets of rows and no classes: use data.path={place}/train "
        f"data.validation.val.path={place}/val data.validation.test.path={place}/test"
    )
    (tmp_path / "root" / "val" / "ants" / "000.png").unlink()
    sets = {"val": {"path": f"{place}/val"}}
    with opened(place / "train", validation=sets, crop="random") as source:
        assert len(source) == 4
        held_out = source.validation_sets["val"].validation(0, 10)
        assert held_out.targets(0, 3).tolist() == [0, 1, 1]
        plain = whole(place / "val")[0]
        assert torch.equal(held_out.inputs(0, 3), plain)  # not augmented


def test_held_out_classes_have_the_numbers_of_training(tmp_path: Path) -> None:
    folder(tmp_path / "train", {"ants": 2, "bees": 2, "crows": 2})
    folder(tmp_path / "val", {"bees": 1, "crows": 1})
    sets = {"val": {"path": str(tmp_path / "val")}}
    with opened(tmp_path / "train", validation=sets) as source:
        assert source.validation_sets["val"].validation(0, 10).targets(0, 2).tolist() == [1, 2]
    folder(tmp_path / "val", {"dogs": 1})
    text = line_of_sets(tmp_path / "train", sets)
    assert "data.validation.val: the class dogs is not among the 3 of the training rows" in text


def line_of_sets(place: Path, sets: dict[str, Any]) -> str:
    with pytest.raises(DataError) as caught, opened(place, validation=sets):
        pass
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ table


def table(root: Path, content: str, encoding: str = "utf-8") -> Path:
    place = root.parent / "table.csv"
    place.write_bytes(content.encode(encoding))
    return place


def test_a_table_names_files_and_labels(root: Path) -> None:
    rows = "path,label,more\nbees/001.png,5,x\nants/000.png,12,y\nbees/001.png,0,z\n"
    inputs, targets = whole(root, labels=str(table(root, rows, "utf-8-sig")))
    assert targets.tolist() == [5, 12, 0]
    assert torch.equal(inputs[0], inputs[2])
    rows = 'label , path\n"flies, large",bees/001.png\nants,ants/000.png\n'
    inputs, targets = whole(root, labels=str(table(root, rows)))
    assert targets.tolist() == [1, 0]
    everything, _ = whole(root)
    assert torch.equal(inputs[1], everything[0])
    assert torch.equal(inputs[0], everything[8])


def test_a_table_that_changes_is_read_again(root: Path) -> None:
    place = str(table(root, "path,label\nbees/001.png,5\n"))
    assert whole(root, labels=place)[1].tolist() == [5]
    table(root, "path,label\nbees/001.png,5\nbees/002.png,6\n")
    assert whole(root, labels=place)[1].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", r"no column path, but nothing; the first line names the columns"),
        ("id,label\nx,1\n", r"no column path, but id, label; the first line names the columns"),
        ("path,kind\nx,1\n", r"no column label, but path, kind; the first line"),
        ("file,image,label\nx,y,1\n", r"may be the path \(file, image\); name one of them path"),
        (
            "path,label,split\nbees/001.png,1,train\nbees/002.png,1,val\n",
            r"its column split has rows of train, val, .*write a table for each",
        ),
        ("path,label\n", r"no rows below its header"),
        ("path,label\nbees/001.png,\n", r"line 2: a path and a label are needed"),
        ("path,label\nbees/001.png\n", r"line 2: a path and a label are needed"),
        ("path,label\nbees/001.png,1\n../secret.png,2\n", r"line 3: \.\./secret\.png is outside of"),
        ("path,label\n/etc/passwd,1\n", r"line 2: /etc/passwd is outside of"),
        ("path,label\nbees,1\n", r"line 2: bees is no regular file"),
        ("path,label\nbees/gone.png,1\n", r"line 2: cannot open bees/gone\.png \(No such file"),
        ('path,label\n"bees/001.png,1\n', r"no CSV file of UTF-8"),
        ("path,label\nbees/\0.png,1\n", r"line 2: cannot open bees/\\x00\.png|no CSV file"),
    ],
)  # fmt: skip
def test_mistakes_of_a_table_name_its_line(root: Path, content: str, text: str) -> None:
    (root.parent / "secret.png").write_bytes(encoded(smooth(8, 8)))
    place = table(root, content)
    found = line(root, labels=str(place))
    assert found.startswith(f"{place}: ")
    assert re.search(text, found)


def test_a_table_of_other_text_is_refused(root: Path) -> None:
    place = table(root, "path,label\nbees/001.png,größe\n", "latin-1")
    assert "it is no CSV file of UTF-8" in line(root, labels=str(place))
    assert "data.labels=/nowhere.csv: No such file" in line(root, labels="/nowhere.csv")
    assert "it is no regular file" in line(root, labels=str(root))


def test_held_out_tables_have_the_names_of_training(root: Path) -> None:
    names = table(root, "path,label\nbees/001.png,fly\nants/000.png,ant\n")
    other = root.parent / "val.csv"
    other.write_text("path,label\nbees/002.png,fly\n")
    sets = {"val": {"labels": str(other)}}
    with opened(root, labels=str(names), validation=sets) as source:
        assert source.validation_sets["val"].validation(0, 4).targets(0, 1).tolist() == [1]
    other.write_text("path,label\nbees/002.png,3\n")
    with (
        pytest.raises(DataError, match=r"data\.validation\.val: its labels are numbers, and those"),
        opened(root, labels=str(names), validation=sets),
    ):
        pass
