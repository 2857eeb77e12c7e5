"""Rows of sound files: windows and labels, from any worker, and what is refused in one line."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from parallax.errors import ConfigError, DataError
from parallax.model.factory.mlp import MLPConfig
from parallax.train.data.audio import AudioDataConfig
from parallax.train.data.table import BOTH
from tests.unit.train.reading import check_workers_and_splits, opened, refused

RATE = 100
CLASSES = ("dog", "größe")


def sound(seed: int, samples: int, channels: int = 1) -> Any:
    return np.random.default_rng(seed).uniform(-1, 1, (samples, channels)).astype(np.float32)


def write(path: Path, samples: Any, rate: int = RATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    subtype = "FLOAT" if path.suffix == ".wav" else None
    soundfile.write(path, samples, rate, subtype=subtype)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """24 files of 30 to 120 samples, in two classes."""
    root = tmp_path / "sounds"
    for row in range(24):
        write(root / CLASSES[row % 2] / f"{row:02}.wav", sound(row, 30 + 4 * row))
    (root / "dog" / "notes.txt").write_text("no sound")
    (root / ".hidden").mkdir()
    (root / "README.md").touch()
    return root


def config(path: Path, **settings: Any) -> AudioDataConfig:
    return AudioDataConfig(path=str(path), **{"seconds": 0.5, **settings})


def read(settings: AudioDataConfig, rows: list[int], seed: int = 0) -> Any:
    numbers = np.array(rows)
    seeds = numbers.astype(np.uint64) + np.uint64(seed)
    return settings.table(MLPConfig()).read(numbers, seeds, BOTH)


def test_rows_are_windows_of_the_files_padded_with_zeros(folder: Path) -> None:
    found = read(config(folder, window="first"), [0, 11, 12])
    assert found["inputs"].shape == (3, 1, 50)
    assert found["inputs"].dtype == np.float32
    assert found["targets"].tolist() == [0, 0, 1]
    assert np.array_equal(found["inputs"][0, 0], np.append(sound(0, 30), np.zeros(20)).astype("f4"))
    assert np.array_equal(found["inputs"][1, 0], sound(22, 118)[:50, 0])
    assert np.array_equal(found["inputs"][2, 0], np.append(sound(1, 34), np.zeros(16)).astype("f4"))


def test_random_windows_come_from_the_seed_of_the_row(folder: Path) -> None:
    whole = sound(22, 118)[:, 0]
    starts = set()
    for seed in range(20):
        (window,) = read(config(folder), [11], seed)["inputs"][:, 0]
        again = read(config(folder), [11], seed)["inputs"][0, 0]
        assert np.array_equal(window, again)
        starts.add(int(np.flatnonzero(whole == window[0])[0]))
        assert np.array_equal(
            window, whole[max(starts, key=lambda s: whole[s] == window[0]) :][:50]
        )
    assert len(starts) > 5
    assert max(starts) <= 118 - 50


def test_rows_are_the_same_for_any_workers_and_splits(folder: Path) -> None:
    settings = config(folder)
    first = check_workers_and_splits(settings)
    with opened(settings) as source:
        assert source.classes == CLASSES
        assert (len(source), source.validation_rows) == (23, 1)
    assert {int(label) for step in first for label in list(step.values())[1]} == {0, 1}


def test_held_out_rows_begin_with_their_file(folder: Path) -> None:
    names = [name for label in CLASSES for name in sorted(folder.glob(f"{label}/*.wav"))]
    with opened(config(folder, validation=0.25)) as source:
        rows = source.validation(0, 6).inputs(0, 6)
    firsts = [soundfile.read(name, 30, dtype="float32")[0] for name in names]
    assert len(rows) == 6
    for row in rows[:, 0, :30]:
        assert any(np.array_equal(row, first) for first in firsts)


def test_targets_alone_read_no_file(folder: Path) -> None:
    table = config(folder).table(MLPConfig())
    for path in folder.glob("größe/*.wav"):
        path.unlink()
    rows = np.arange(24)
    found = table.read(rows, rows.astype(np.uint64), frozenset({"targets"}))
    assert found["targets"].tolist() == [0] * 12 + [1] * 12


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3", "aiff"])
def test_formats_that_soundfile_reads(tmp_path: Path, suffix: str) -> None:
    time = np.arange(16000) / 16000
    tone = 0.5 * np.sin(2 * np.pi * 440 * time)
    write(tmp_path / "a" / f"tone.{suffix}", tone, 16000)
    found = read(config(tmp_path, window="first", seconds=0.5), [0])["inputs"]
    assert found.shape == (1, 1, 8000)
    spectrum = np.abs(np.fft.rfft(found[0, 0]))
    assert int(spectrum.argmax()) * 2 == 440


def test_channels_are_averaged_or_kept(tmp_path: Path) -> None:
    stereo = sound(0, 60, 2)
    write(tmp_path / "a" / "s.wav", stereo)
    found = read(config(tmp_path, window="first"), [0])["inputs"]
    assert np.allclose(found[0, 0], stereo[:50].mean(1))
    found = read(config(tmp_path, window="first", channels=2), [0])["inputs"]
    assert np.array_equal(found[0], stereo[:50].T)
    write(tmp_path / "a" / "t.wav", sound(0, 60))
    assert "t.wav: it has 1 channel(s), not data.channels=2" in refused(
        config(tmp_path, channels=2)
    )


@pytest.mark.parametrize(
    ("labels", "numbers", "classes"),
    [
        (["3", "1"], [3, 1], None),
        (["0.5", "1"], [0.5, 1.0], None),
        (["x", "é"], [0, 1], ("x", "é")),
        (["1", "nan"], [0, 1], ("1", "nan")),
    ],
)
def test_a_table_names_files_and_labels(
    tmp_path: Path, labels: list[str], numbers: list[float], classes: Any
) -> None:
    for row in range(2):
        write(tmp_path / "in" / f"ü {row}.wav", sound(row, 60))
    lines = [f'extra,"in/ü {row}.wav",{label}' for row, label in enumerate(labels)]
    file = tmp_path / "labels.csv"
    file.write_text("\n".join(["split,path,label", *lines]), encoding="utf-8-sig")
    settings = config(file, window="first")
    found = read(settings, [0, 1])
    assert found["targets"].tolist() == numbers
    assert np.array_equal(found["inputs"][1, 0], sound(1, 60)[:50, 0])
    assert settings.table(MLPConfig()).classes == classes  # type: ignore[attr-defined]


def test_tables_that_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "rows" / "a.wav", sound(0, 60))
    write(tmp_path / "outside.wav", sound(0, 60))
    (tmp_path / "rows" / "link.wav").symlink_to(tmp_path / "outside.wav")
    file = tmp_path / "rows" / "t.csv"
    for text, expected in (
        ("", "its header has no column path, but nothing"),
        ("path,kind\na.wav,1\n", "its header has no column label"),
        ("path,label\n", "there is no sound file"),
        ("path,label\na.wav\n", "t.csv: line 2: a path and a label are needed"),
        ("path,label\na.wav,1\nb.wav,1\n", "t.csv: line 3: cannot open b.wav"),
        ("path,label\n../outside.wav,1\n", "outside of"),
        ("path,label\nlink.wav,1\n", "outside of"),
        (f"path,label\n{tmp_path}/rows/a.wav,1\n", "outside of"),
        ("path,label\n.,1\n", "is no regular file"),
    ):
        file.write_text(text)
        assert expected in refused(config(file))
    file.write_bytes(b"path,label\n\xff\xfe,1\n")
    assert "no CSV file of UTF-8" in refused(config(file))
    assert "no CSV file" in refused(config(tmp_path / "rows" / "a.wav"))
    file.write_bytes(b"path,label\n")
    os.truncate(file, 2**40)
    assert "line 2 has 131,072 characters or more" in refused(config(file))
    file.unlink()
    os.mkfifo(file)
    assert "it is neither a regular file nor a folder" in refused(config(file))


def test_folders_and_files_that_are_none_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "dog" / "99.wav").symlink_to("99.wav")
    assert "cannot open dog/99.wav" in refused(config(folder))
    (folder / "dog" / "99.wav").unlink()
    os.mkfifo(folder / "dog" / "99.wav")
    assert "dog/99.wav is no regular file" in refused(config(folder))
    (folder / "dog" / "99.wav").unlink()
    for target in (folder, tmp_path):
        (folder / "link").symlink_to(target)
        assert f"the link link leads to {target}, which is not below" in refused(config(folder))
        (folder / "link").unlink()


@pytest.mark.skipif(os.getuid() == 0, reason="root may read anything")
def test_a_folder_that_cannot_be_listed_is_named(folder: Path) -> None:
    (folder / "dog").chmod(0)
    assert "cannot list " in refused(config(folder))


def test_files_that_are_refused(folder: Path, tmp_path: Path) -> None:
    assert "there is no sound file" in refused(config(tmp_path / "sounds" / ".hidden"))
    assert "it is empty" in refused(AudioDataConfig())
    before = len(config(folder).table(MLPConfig()))
    assert "No such file" in refused(config(tmp_path / "none"))
    assert "not data.rate=200: convert it (ffmpeg" in refused(config(folder, rate=200))
    last = write(folder / "größe" / "zz.wav", sound(0, 60), 50)
    assert "zz.wav: it has 50 samples per second, not data.rate=100" in refused(config(folder))
    write(last, sound(0, 0))
    assert "zz.wav: it has no samples" in refused(config(folder))
    for content in (b"", b"RIFF", b"no sound at all" * 100):
        last.write_bytes(content)
        assert "zz.wav: it cannot be read as sound" in refused(config(folder))
    last.unlink()
    for name, shares in (("zz.wav", (0.3, 0.9)), ("zz.flac", (0.3, 0.9))):
        whole = write(last.with_name(name), sound(0, 60)).read_bytes()
        for share in shares:
            last.with_name(name).write_bytes(whole[: int(len(whole) * share)])
            assert re.search(
                rf"{name}: it (ends|cannot be (decoded|read as sound))", refused(config(folder))
            )
        last.with_name(name).unlink()
    write(tmp_path / "outside.wav", sound(0, 60))
    last.symlink_to(tmp_path / "outside.wav")
    assert len(config(folder).table(MLPConfig())) == before + 1


@pytest.mark.parametrize(
    "settings", [{"seconds": 0}, {"rate": 0}, {"rate": "fast"}, {"channels": 0}, {"window": "last"}]
)
def test_settings_that_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"data.{next(iter(settings))}="):
        AudioDataConfig(path="x", **settings)


def test_validation_sets_have_the_classes_of_the_training_rows(
    folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write(other / "dog" / "a.wav", sound(0, 60))
    settings = config(folder, validation={"test": {"path": str(other)}})
    with pytest.raises(DataError, match=r"data\.validation\.test: its classes are not"):
        settings.tables(MLPConfig())
    (other / "größe").mkdir()
    training, held_out = settings.tables(MLPConfig())
    assert (len(training), len(held_out["test"])) == (24, 1)


def test_the_fingerprint_is_of_the_rows_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    def fingerprint(path: Path, **settings: Any) -> str:
        return config(path, **settings).table(MLPConfig()).fingerprint

    one = fingerprint(folder)
    moved = folder.rename(tmp_path / "moved")
    assert fingerprint(moved) == one
    assert len({fingerprint(moved, seconds=0.2), fingerprint(moved, window="first"), one}) == 3
    (moved / "dog" / "00.wav").rename(moved / "größe" / "00.wav")
    assert fingerprint(moved) != one


def test_a_missing_soundfile_is_named_with_its_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ConfigError, match=r"pip install 'parallax-train\[audio\]'"):
        AudioDataConfig(path=str(folder)).table(MLPConfig())
