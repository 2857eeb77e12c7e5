"""Samples in tar files: how members become rows, and from where they are read."""

from __future__ import annotations

import gc
import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallax.config import compose
from parallax.errors import CheckpointError, ConfigError
from parallax.model.factory.mlp import MLPConfig
from parallax.train.data import archives, stored
from parallax.train.data.archives import expanded
from parallax.train.data.indexed import IndexedSource
from parallax.train.data.order import Taken
from parallax.train.data.shards import ShardsDataConfig
from parallax.train.data.table import TARGETS
from tests.unit.train.image_rows import read
from tests.unit.train.pictures import encoded, smooth
from tests.unit.train.tar_files import line, opened, samples, tar, three_shards, whole


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parallax"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return three_shards(tmp_path / "root")


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
