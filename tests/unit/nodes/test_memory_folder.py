from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from parallax.errors import ConfigError
from parallax.nodes import memory_folder
from parallax.nodes.memory_folder import MemoryFolder


def test_it_is_found_again_by_who_knows_the_word(tmp_path: Path) -> None:
    folder = MemoryFolder("word", tmp_path)
    folder.open(0, "copies")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "kept").touch()
    folder.close(remove=False)
    again = MemoryFolder("word", tmp_path)
    again.open(0, "copies")
    assert (again.path / "kept").exists()
    assert MemoryFolder("another", tmp_path).path != folder.path
    again.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_one_process_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_folder, "_LEAVING_SECONDS", 0.2)
    folder, other = MemoryFolder("word", tmp_path), MemoryFolder("word", tmp_path)
    folder.open(0, "copies")
    with pytest.raises(ConfigError, match=r"cannot use .*checkpoint.memory=false"):
        other.open(0, "copies")
    other.close(remove=False)
    folder.close(remove=True)


def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    folder = MemoryFolder("word", tmp_path)
    with pytest.raises(
        ConfigError, match=r"2 copies of the state need 888\.2 PiB on .*, and .* has"
    ):
        folder.open(10**18, "2 copies of the state")
    folder.close(remove=True)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = MemoryFolder("word", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    folder.path.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="cannot use"):
        folder.open(0, "copies")


def test_what_nobody_came_for_goes(tmp_path: Path) -> None:
    old, young = MemoryFolder("old", tmp_path), MemoryFolder("young", tmp_path)
    for each in (old, young):
        each.open(0, "copies")
        each.close(remove=False)
    os.utime(old.path, (0, 0))
    folder = MemoryFolder("word", tmp_path)
    folder.open(0, "copies")
    assert not old.path.exists()
    assert young.path.exists()
    folder.close(remove=True)
