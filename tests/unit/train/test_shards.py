"""Samples in tar files: how members become rows, from where they are read, and what is refused in one line."""

from __future__ import annotations

import functools
import gc
import gzip
import http.server
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from parallax.config import compose
from parallax.errors import CheckpointError, ConfigError, DataError
from parallax.model.factory.mlp import MLPConfig
from parallax.train.data import archives, stored
from parallax.train.data.archives import LocalArchives, expanded
from parallax.train.data.indexed import IndexedSource
from parallax.train.data.order import Taken
from parallax.train.data.shards import ShardsDataConfig
from parallax.train.data.table import TARGETS
from tests.unit.train.image_rows import Step, read, refusal, started
from tests.unit.train.pictures import encoded, smooth

Members = Sequence[tuple[str, bytes]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parallax"


def tar(place: Path, members: Members, **options: Any) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(place, "w", **options) as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return place


def samples(first: int, count: int, kind: str = "png") -> list[tuple[str, bytes]]:
    """Samples of an image, its class as text, details as JSON, and an array."""
    found = []
    for number in range(first, first + count):
        array = io.BytesIO()
        np.save(array, np.full((2, 3), number, np.float32))
        details = {"label": number % 3, "box": [0.5, number], "name": "x"}
        image = encoded(smooth(14, 12, number), {"jpg": "jpeg"}.get(kind, kind))
        found += [
            (f"a/{number:04d}.{kind}", image),
            (f"a/{number:04d}.cls", str(number % 5).encode()),
            (f"a/{number:04d}.json", json.dumps(details).encode()),
            (f"a/{number:04d}.npy", array.getvalue()),
        ]
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three shards of 9, 1 and 14 samples."""
    for number, (first, count) in enumerate(((0, 9), (9, 1), (10, 14))):
        tar(tmp_path / "root" / f"s-{number:02d}.tar", samples(first, count))
    return tmp_path / "root"


def opened(place: object, seed: int = 3, **settings: Any) -> AbstractContextManager[IndexedSource]:
    return started(ShardsDataConfig(path=str(place), **{"size": 8, "workers": 0, **settings}), seed)


def whole(place: object, **settings: Any) -> Step:
    with opened(place, validation=0, shuffle=False, **settings) as source:
        return read(source, len(source))


def line(place: object, **settings: Any) -> str:
    return refusal(lambda: whole(place, **settings))


# ------------------------------------------------------------------------------------------------- rows


def test_members_of_one_name_are_a_row_in_the_order_of_the_shards(root: Path) -> None:
    inputs, targets = whole(root)
    assert inputs.shape == (24, 3, 8, 8)
    assert inputs.dtype == torch.float32
    assert inputs.is_contiguous()
    assert targets.dtype == torch.int64
    assert targets.tolist() == [number % 5 for number in range(24)]
    array, labels = whole(root, inputs="npy", targets="json:label")
    assert torch.equal(array, torch.arange(24.0).reshape(24, 1, 1).expand(24, 2, 3))
    assert labels.tolist() == [number % 3 for number in range(24)]
    boxes = whole(root, targets="json:box")[1]
    assert torch.equal(boxes, torch.stack([torch.full((24,), 0.5), torch.arange(24.0)], dim=1))


def test_images_are_those_of_files(root: Path, tmp_path: Path) -> None:
    from parallax.train.data.images import ImagesDataConfig

    for name, content in samples(0, 24):
        if name.endswith(".png"):
            place = tmp_path / "files" / "class" / Path(name).name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    source = ImagesDataConfig(
        path=str(tmp_path / "files"), size=8, validation=0, shuffle=False, workers=0
    ).open(MLPConfig(), 3)
    assert torch.equal(whole(root)[0], source.batch(24).inputs(0, 24))


def test_names_have_any_form_that_tar_knows(tmp_path: Path) -> None:
    image = encoded(smooth(8, 8))
    long = "x" * 150
    members = [
        ("./größe.PNG", image),  # the suffix in capitals
        ("./größe.cls", b" 1\n"),
        (f"{'folder/' * 30}{long}.png", image),
        (f"{'folder/' * 30}{long}.cls", b"2"),
        ("../../outside.png", image),  # a name alone, and no path
        ("../../outside.cls", b"3"),
        ("/etc/passwd.png", image),
        ("/etc/passwd.cls", b"4"),
        ("with.two.png", image),
        ("with.cls", b"5"),
        ("日本.png", image),
        ("日本.cls", b"6"),
        ("a.b/c.png", image),
        ("a.b/c.cls", b"7"),
        ("a.b/._c.png", b"no image"),
        ("README", b"no field"),
    ]
    for number, kind in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        place = tar(tmp_path / f"{number}.tar", members, format=kind)
        settings: dict[str, Any] = {"inputs": ["png", "two.png"]}
        assert whole(place, **settings)[1].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_what_is_no_regular_member_is_left_out(tmp_path: Path) -> None:
    place = tmp_path / "x.tar"
    with tarfile.open(place, "w") as file:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo("0.cls")
            member.type, member.linkname = kind, "/etc/passwd"
            file.addfile(member)
        for name, content in samples(0, 2):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    assert whole(place)[1].tolist() == [0, 1]


def test_the_first_of_the_fields_is_taken(tmp_path: Path) -> None:
    one, other = encoded(smooth(8, 8, 1)), encoded(smooth(8, 8, 2))
    members = [
        ("0.png", one),
        ("0.webp", other),
        ("0.cls", b"0"),
        ("1.webp", other),
        ("1.cls", b"1"),
    ]
    place = tar(tmp_path / "x.tar", members)
    webp, png = (whole(place, inputs=names)[0] for names in ("webp,png", "png,webp"))
    assert not torch.equal(png[0], png[1])
    assert torch.equal(webp[0], webp[1])
    assert torch.equal(webp[1], png[1])


def test_one_row_and_no_rows(tmp_path: Path) -> None:
    place = tar(tmp_path / "one" / "x.tar", samples(4, 1))
    with opened(place) as source:
        assert [len(source), source.validation_sets] == [1, {}]
        assert read(source, 3)[1].tolist() == [4] * 3
    tar(tmp_path / "one" / "empty.tar", [])
    assert whole(tmp_path / "one")[1].tolist() == [4]
    text = line(tmp_path / "one" / "empty.tar")
    assert "no member of its 1 tar file(s) has a name NAME.FIELD" in text


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("settings", [{}, {"in_memory": True}])
def test_augmented_rows_are_the_same_for_any_workers_and_micro_batches(
    root: Path, workers: int, settings: dict[str, Any]
) -> None:
    with opened(root, crop="random", flip=True) as source:
        expected = [read(source, 8) for _ in range(5)]
        fingerprint = source.fingerprint
    for parts in (1, 2, 4):
        with opened(root, crop="random", flip=True, workers=workers, **settings) as source:
            found = [read(source, 8, parts) for _ in range(5)]
            assert source.fingerprint == fingerprint
        for left, right in zip(expected, found):
            assert torch.equal(left[0], right[0])
            assert torch.equal(left[1], right[1])


def test_held_out_rows_are_not_augmented(root: Path) -> None:
    with (
        opened(root, validation=0.25, crop="random") as random,
        opened(root, validation=0.25) as plain,
    ):
        one, other = random.validation(0, 6), plain.validation(0, 6)
        assert torch.equal(one.inputs(0, 6), other.inputs(0, 6))


def test_the_option_is_composed_from_the_command_line(root: Path) -> None:
    config = compose(
        ["data=shards", f"data.path={root}", "data.inputs=[npy]", "data.targets=json:label"]
    )
    assert isinstance(config.data, ShardsDataConfig)
    source = config.data.open(MLPConfig(), 0)
    assert isinstance(source, IndexedSource)
    assert source.batch(2).inputs(0, 2).shape == (2, 2, 3)
    shapes = ShardsDataConfig(path="x", size=8).shapes(MLPConfig())
    assert shapes is not None
    assert shapes(2)[0][0].shape == (2, 3, 8, 8)
    assert config.data.shapes(MLPConfig()) is None


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"inputs": "mp4"}, r"data\.inputs=mp4: accepted are jpg, .*npy, cls, .*json:KEY"),
        ({"inputs": "jpg,npy"}, r"data\.inputs=jpg,npy: accepted are fields of one kind"),
        ({"inputs": []}, r"data\.inputs=: accepted are fields of one kind"),
        ({"targets": "json:"}, r"data\.targets=json:: accepted are"),
        ({"targets": "png"}, r"data\.targets=png: images are no targets"),
    ],
)
def test_wrong_fields_name_what_is_accepted(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ShardsDataConfig(path="x", **settings)


# ----------------------------------------------------------------------------------------------- places


def test_a_path_is_a_folder_a_file_a_glob_or_a_range(root: Path, tmp_path: Path) -> None:
    everything = whole(root)[1]
    assert torch.equal(whole(f"{root}/*.tar")[1], everything)
    assert torch.equal(whole(f"{root}/s-{{00..02}}.tar")[1], everything)
    assert torch.equal(whole(f"{tmp_path}/**/s-0[01].tar")[1], everything[:10])
    assert torch.equal(whole(f"{root}/s-{{02..02}}.ta[r]")[1], everything[10:])
    assert torch.equal(whole(root / "s-02.tar")[1], everything[10:])
    assert expanded("a{1..2}b{08..10}") == ["a1b08", "a1b09", "a1b10", "a2b08", "a2b09", "a2b10"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("", r"data\.path=: it is empty"),
        ("ROOT/gone", r"data\.path=\S+gone: No such file or directory"),
        ("ROOT/*.tgz", r"no file matches"),
        ("ROOT/s-{00..05}.tar", r"data\.path=\S+/s-03\.tar: No such file"),
        ("ROOT/s-{5..3}.tar", r"\{5\.\.3\} stands for 0 names"),
        ("ROOT/s-{0..99999999}.tar", r"stands for 100,000,000 names; accepted are 1 to 1,000,000"),
        ("ROOT/..", r"holds no \.tar file; name a folder of tar files, or a glob such as"),
    ],
)
def test_wrong_places_are_named(root: Path, path: str, text: str) -> None:
    assert re.search(text, line(path.replace("ROOT", str(root))))


def test_training_and_held_out_shards_are_not_mixed(tmp_path: Path) -> None:
    for number, name in enumerate(("set-train-0", "set-train-1", "set-val-0")):
        tar(tmp_path / "root" / f"{name}.tar", samples(4 * number, 4))
    place = tmp_path / "root"
    assert line(place).endswith(
        f"it holds shards of train and val, which are sets of their own: use 'data.path={place}/*train*.tar' "
        f"'data.validation.val.path={place}/*val*.tar'"
    )
    sets = {"val": {"path": f"{place}/*val*.tar"}}
    with opened(f"{place}/*train*.tar", validation=sets) as source:
        assert len(source) == 8
        assert len(source.validation_sets["val"].validation(0, 10)) == 4


def test_links_out_of_the_folder_are_refused(root: Path, tmp_path: Path) -> None:
    outside = tar(tmp_path / "outside" / "x.tar", samples(0, 1))
    (root / "z.tar").symlink_to(root / "s-01.tar")
    assert len(whole(root)[1]) == 25
    (root / "z.tar").unlink()
    (root / "z.tar").symlink_to(outside)
    assert re.search(r"z\.tar is outside of \S+root, the data's folder", line(root))
    assert re.search(r"z\.tar is outside of \S+root, the data's folder", line(f"{root}/*.tar"))
    (root / "z.tar").unlink()
    os.mkfifo(root / "z.tar")
    assert "z.tar is no regular file" in line(root)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read anything")
def test_a_shard_that_cannot_be_read_is_named(root: Path) -> None:
    (root / "s-01.tar").chmod(0)
    assert "s-01.tar: it cannot be read (Permission denied); make it readable" in line(root)


# ------------------------------------------------------------------------------------------------ index


def test_shards_are_indexed_once_and_again_when_one_changes(root: Path, cache: Path) -> None:
    first = whole(root)[1]
    (index,) = cache.glob("shards-*.safetensors")
    stamp = index.stat().st_mtime_ns
    assert torch.equal(whole(root)[1], first)
    assert index.stat().st_mtime_ns == stamp
    tar(root / "s-01.tar", samples(100, 3))
    assert whole(root)[1].tolist()[9:12] == [0, 1, 2]
    assert len(list(cache.glob("shards-*.safetensors"))) == 2


def test_the_fingerprint_is_of_the_samples_not_of_the_place(root: Path, tmp_path: Path) -> None:
    with opened(root) as source:
        first, state = source.fingerprint, source.state_dict()
    root.rename(tmp_path / "moved")
    with opened(tmp_path / "moved") as source:
        assert source.fingerprint == first
    tar(tmp_path / "moved" / "s-01.tar", samples(100, 1))
    with (
        opened(tmp_path / "moved") as source,
        pytest.raises(CheckpointError, match="trained on rows"),
    ):
        source.load_state_dict(state)


def test_a_rank_opens_only_the_shards_that_it_reads(root: Path) -> None:
    with opened(root, validation=0):
        pass  # the index is made
    table = ShardsDataConfig(path=str(root), size=8).table(MLPConfig())
    assert open_shards(root) == []
    taken = Taken(np.zeros(2, np.int64), np.array([12, 23]))
    table.read(taken.rows, taken.seeds(0), frozenset({TARGETS}))
    assert open_shards(root) == ["s-02.tar"]
    del table
    gc.collect()
    assert open_shards(root) == []


def open_shards(root: Path) -> list[str]:
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    found = [os.readlink(each) for each in links if os.path.lexists(each)]
    return sorted(os.path.basename(each) for each in found if each.startswith(str(root)))


def test_few_shards_are_held_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_OPEN", 3)
    for number in range(8):
        tar(tmp_path / "root" / f"{number}.tar", samples(number, 1))
    with opened(tmp_path / "root", validation=0, shuffle=False) as source:
        for _ in range(2):
            assert read(source, 8)[1].tolist() == [number % 5 for number in range(8)]
        assert len(open_shards(tmp_path / "root")) == 3


def test_local_shards_need_no_fsspec(root: Path) -> None:
    text = (
        "import sys\n"
        "sys.modules['fsspec'] = sys.modules['fsspec.core'] = None\n"
        "from parallax.train.data.shards import ShardsDataConfig\n"
        "from parallax.model.factory.mlp import MLPConfig\n"
        f"source = ShardsDataConfig(path={str(root)!r}, size=8).open(MLPConfig(), 0)\n"
        "print(source.batch(3).inputs(0, 3).shape)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120
    )
    assert found.stdout == "torch.Size([3, 3, 8, 8])\n", found.stderr


def test_rows_in_memory_are_those_of_the_shards(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(root)
    with opened(root, validation=0, shuffle=False, in_memory=True, workers=2) as source:
        for each in root.iterdir():
            each.unlink()
        found = [read(source, 8) for _ in range(3)]
    assert torch.equal(torch.cat([each[0] for each in found]), expected[0])
    assert torch.equal(torch.cat([each[1] for each in found]), expected[1])
    tar(root / "x.tar", samples(0, 3))
    monkeypatch.setattr(stored, "available_memory", lambda processes: 100 // processes)
    assert "data.in_memory=true needs" in line(root, in_memory=True)


# ----------------------------------------------------------------------------------------------- damage


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
        r"s-03\.tar: the sample x has no field jpg or jpeg or png or webp, as 0 more", text
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


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


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


# -------------------------------------------------------------------------------------------------- URLs


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Answers requests for ranges, as Python's own server does not."""

    ranges = True

    def do_GET(self) -> None:
        place = Path(self.translate_path(self.path))
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not place.is_file() or wanted is None or not self.ranges:
            super().do_GET()
            return
        content = place.read_bytes()
        first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(content[first : last + 1])

    def end_headers(self) -> None:
        if self.ranges:
            self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class NoRanges(Ranges):
    ranges = False


@contextmanager
def served(root: Path, handler: type[Ranges]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(root))
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", ["", "/*.tar", "/s-{00..02}.tar"])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_urls_give_the_rows_of_the_files(root: Path, kind: str, form: str, workers: int) -> None:
    expected = whole(root)
    place = f"file://{root}"
    if kind == "memory":
        memory = fsspec.filesystem("memory")
        for each in root.iterdir():
            memory.pipe_file(f"/shards{workers}/{each.name}", each.read_bytes())
        place = f"memory://shards{workers}"
    settings: dict[str, Any] = {"validation": 0, "shuffle": False}
    with opened(place + form, workers=workers, **settings) as source:
        found = [read(source, 8, 2) for _ in range(3)]
    assert torch.equal(torch.cat([each[0] for each in found]), expected[0])
    assert torch.equal(torch.cat([each[1] for each in found]), expected[1])


def test_errors_of_urls_are_one_line(root: Path) -> None:
    assert re.search(
        r"nowhere://x/y\.tar: ValueError: Protocol not known", line("nowhere://x/y.tar")
    )
    assert re.search(r"gone\.tar: FileNotFoundError", line(f"file://{root}/gone.tar"))
    assert "no file matches" in line(f"file://{root}/*.tgz")
    (root / "s-01.tar").write_bytes(b"no tar file" * 100)
    assert re.search(
        r"s-01\.tar: it is no tar file, or it is damaged at offset 0", line(f"file://{root}")
    )


def over_http(url: str, workers: int) -> subprocess.CompletedProcess[str]:
    """Read all rows in a process of its own: fsspec keeps a thread for its connections."""
    text = (
        "import sys, torch\n"
        "from parallax.train.data.shards import ShardsDataConfig\n"
        "from parallax.model.factory.mlp import MLPConfig\n"
        "try:\n"
        f"    config = ShardsDataConfig(path={url!r}, size=8, workers={workers}, validation=0, shuffle=False)\n"
        "    source = config.open(MLPConfig(), 0)\n"
        "    source.start()\n"
        "    found = [(b.inputs(0, 8), b.targets(0, 8)) for b in (source.batch(8) for _ in range(6))]\n"
        "    source.close()\n"
        "except Exception as error:\n"
        "    sys.exit(f'{type(error).__name__}: {error}')\n"
        "print([f'{x.double().sum():.4f} {y.tolist()}' for x, y in found])\n"
    )
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_read_over_http(root: Path, workers: int) -> None:
    pytest.importorskip("aiohttp")
    inputs, targets = whole(root)
    expected = [
        f"{inputs[first : first + 8].double().sum():.4f} {targets[first : first + 8].tolist()}"
        for first in (0, 8, 16, 0, 8, 16)
    ]
    with served(root, Ranges) as url:
        found = over_http(f"{url}/s-{{00..02}}.tar", workers)
    assert found.stdout == f"{expected}\n", found.stderr


@pytest.mark.slow
def test_a_server_without_ranges_or_files_is_named(root: Path) -> None:
    pytest.importorskip("aiohttp")
    with served(root, NoRanges) as url:
        found = over_http(f"{url}/s-00.tar", 0)
        assert re.match(
            rf"DataError: {url}/s-00\.tar: [^\n]+ must answer requests for ranges\n$", found.stderr
        )
        assert found.returncode == 1
        found = over_http(f"{url}/gone.tar", 0)
        assert re.match(rf"DataError: {url}/gone\.tar: FileNotFoundError: [^\n]+\n$", found.stderr)
