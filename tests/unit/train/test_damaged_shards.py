"""Tar files, members and arrays that are damaged or not as expected: one line each, with the file and the offset."""

from __future__ import annotations

import gzip
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallax.errors import DataError
from parallax.train.data.archives import LocalArchives
from tests.unit.train.image_rows import read
from tests.unit.train.pictures import encoded, smooth
from tests.unit.train.tar_files import line, npy, opened, tar, three_shards, whole


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parallax"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return three_shards(tmp_path / "root")


def test_compressed_shards_are_refused(root: Path) -> None:
    content = (root / "s-01.tar").read_bytes()
    (root / "s-03.tar.gz").write_bytes(gzip.compress(content))
    assert "s-03.tar.gz is compressed, so its members cannot be read where they lie" in line(root)
    (root / "s-03.tar.gz").rename(root / "s-03.tar")
    assert re.search(r"s-03\.tar: it is compressed", line(root))


def test_damaged_shards_are_named_with_the_offset(root: Path) -> None:
    place = root / "s-02.tar"
    sound = place.read_bytes()
    with tarfile.open(place) as file:
        members = file.getmembers()
    place.write_bytes(b"")
    assert re.search(r"s-02\.tar: it is no tar file, or it is damaged at offset 0", line(root))
    place.write_bytes(b"no tar file" * 100)
    assert re.search(r"s-02\.tar: it is no tar file, or it is damaged at offset 0", line(root))
    member = members[8]
    place.write_bytes(sound[: member.offset + 100] + b"\xff" * 100 + sound[member.offset + 200 :])
    assert f"s-02.tar: it is no tar file, or it is damaged at offset {member.offset} " in line(root)
    place.write_bytes(sound[: member.offset_data + member.size // 2])
    assert (
        f"s-02.tar: the member {member.name} at offset {member.offset} has {member.size:,} bytes, more than follow"
        in line(root)
    )
    place.write_bytes(sound[: member.offset + 100])
    assert "it is no tar file, or it is damaged at offset" in line(root)


def test_sizes_that_are_negative_or_huge_are_refused(tmp_path: Path) -> None:
    for size in (-(2**40), 2**60):
        member = tarfile.TarInfo("0.cls")
        member.size = abs(size)
        header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
        if size < 0:
            header[124:136] = b"\xff" + (size & (2**88 - 1)).to_bytes(11, "big")
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
        place = tmp_path / "x.tar"
        place.write_bytes(bytes(header) + b"0" + b"\0" * 2000)
        assert re.search(
            r"x\.tar: the member 0\.cls at offset 0 has \S+ bytes, more than follow", line(place)
        )


def test_sparse_members_and_repeated_fields_are_refused(tmp_path: Path) -> None:
    member = tarfile.TarInfo("0.cls")
    member.type = tarfile.GNUTYPE_SPARSE
    (tmp_path / "x.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024)
    assert "the member 0.cls at offset 0 is stored sparse" in line(tmp_path / "x.tar")
    tar(tmp_path / "x.tar", [("0.cls", b"1"), ("0.CLS", b"2")])
    assert "the member 0.CLS at offset 1024 is there twice in its sample" in line(
        tmp_path / "x.tar"
    )


def test_samples_without_a_field_are_refused_or_left_out(root: Path) -> None:
    broken = [("1.png", b"no image"), ("1.cls", b"1"), ("2.png", b""), ("2.cls", b"2")]
    tar(root / "s-03.tar", [("x.txt", b"x"), ("0.png", encoded(smooth(8, 8))), *broken])
    text = line(root)
    assert re.search(
        r"s-03\.tar: the sample x has no field jpg or jpeg or png or webp but txt: set data.inputs",
        text,
    )
    assert whole(root, broken="skip")[1].tolist() == [number % 5 for number in range(24)]
    assert len(whole(root, inputs="npy", broken="skip")[1]) == 24


def test_a_member_that_breaks_in_decoding_is_named(root: Path) -> None:
    content = encoded(smooth(64, 64))
    tar(root / "s-03.tar", [("0.png", content[: len(content) // 2]), ("0.cls", b"1")])
    assert re.search(r"s-03\.tar: 0\.png at offset 512: \S+", line(root))
    assert re.search(r"s-03\.tar: 0\.png at offset 512: \S+", line(root, broken="skip"))
    tar(root / "s-03.tar", [("0.png", b"no image"), ("0.cls", b"1")])
    assert re.search(r"s-03\.tar: 0\.png at offset 512: it is no image of a known", line(root))


@pytest.mark.parametrize(
    ("settings", "content", "text"),
    [
        ({}, b"cat", r"0\.cls at offset \d+: b'cat' is no whole number"),
        ({}, b"9" * 400, r"0\.cls at offset \d+: b'9+' is no whole number"),
        ({"targets": "json:label"}, b"{", r"0\.json at offset \d+: "),
        ({"targets": "json:label"}, b'{"x": 1}', r"it is no JSON object with the key label"),
        ({"targets": "json:label"}, b'{"label": "cat"}', r"its label is no number or list of"),
        ({"targets": "json:label"}, b'{"label": [[1], [2, 3]]}', r"0\.json at offset \d+: "),
        ({"targets": "json:label"}, b'{"label": null}', r"its label is no number or list of"),
        ({"targets": "json:label"}, b"[" * 100000, r"0\.json at offset \d+: it is nested too deep"),
    ],
)  # fmt: skip
def test_mistakes_in_targets_are_named(
    tmp_path: Path, settings: dict[str, Any], content: bytes, text: str
) -> None:
    name = "json" if settings else "cls"
    place = tar(tmp_path / "x.tar", [("0.png", encoded(smooth(8, 8))), (f"0.{name}", content)])
    assert re.search(rf"x\.tar: .*{text}", line(place, **settings))


def test_arrays_of_any_layout(tmp_path: Path) -> None:
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    forms = [plain, np.asfortranarray(plain), plain.astype(">f4")]
    members = [
        member
        for number, form in enumerate(forms)
        for member in ((f"{number}.npy", npy(form)), (f"{number}.cls", b"0"))
    ]
    found = whole(tar(tmp_path / "x.tar", members), inputs="npy")[0]
    assert torch.equal(found, torch.from_numpy(plain).expand(3, 2, 3))
    scalars = [("0.npy", npy(np.int16(7))), ("0.cls", b"0")]
    assert whole(tar(tmp_path / "x.tar", scalars), inputs="npy")[0].tolist() == [7]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (npy(np.array([{"a": 1}], object), allow_pickle=True), "holds pickled objects"),
        (npy(np.array(["text"])), "can't convert|not supported|supported types"),
        (b"no array", "magic string is not correct"),
        (npy(np.zeros((4, 4)))[:-1], r"its header says \(4, 4\) of float64, and 127 bytes follow"),
        (npy(np.zeros(1)).replace(b"(1,)", b"(9,)"), r"its header says \(9,\) of float64"),
    ],
)
def test_arrays_that_are_none_are_refused(tmp_path: Path, content: bytes, text: str) -> None:
    place = tar(tmp_path / "x.tar", [("0.npy", content), ("0.cls", b"0")])
    found = line(place, inputs="npy")
    assert re.search(rf"x\.tar: 0\.npy at offset 512: .*({text})", found), found


def test_arrays_of_several_shapes_name_both(tmp_path: Path) -> None:
    members = [
        ("0.npy", npy(np.zeros(3))),
        ("0.cls", b"0"),
        ("1.npy", npy(np.zeros(4))),
        ("1.cls", b"0"),
    ]
    text = line(tar(tmp_path / "x.tar", members), inputs="npy")
    assert re.search(r"1\.npy at \S+ \d+ has shape \(4,\) .*0\.npy at \S+ \d+ has \(3,\)", text)


def test_a_shard_that_changes_while_it_is_read_is_refused(root: Path) -> None:
    with opened(root, validation=0, shuffle=False) as source:
        read(source, 9)
        with (root / "s-02.tar").open("ab") as file:
            file.write(b"\0" * 512)
        read(source, 1)
        with pytest.raises(DataError, match=r"s-02\.tar: it has changed since the run began"):
            read(source, 1)
        (root / "s-02.tar").unlink()
        with pytest.raises(DataError, match=r"s-02\.tar: it cannot be read \(No such file"):
            read(source, 1)


def test_pieces_are_read_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(200)))
    found = LocalArchives([tmp_path / "x"])
    numbers = np.zeros(3, np.int64)
    pieces = found.read(numbers, np.array([190, 0, 5]), np.array([10, 2, 0]))
    assert pieces == [bytes(range(190, 200)), b"\0\1", b""]
    with pytest.raises(DataError, match="it ends before offset 201"):
        found.read(numbers[:1], np.array([190]), np.array([11]))
