from __future__ import annotations

import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

from parallax.common.files import disk_free_bytes
from parallax.errors import ConfigError
from parallax.machine.host import available_memory
from parallax.nodes import memory_folder
from parallax.nodes.memory_folder import MemoryFolder, token_of


def test_it_is_found_again_by_who_knows_the_word(tmp_path: Path) -> None:
    folder = MemoryFolder("word", tmp_path)
    folder.open()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "kept").touch()
    folder.close(remove=False)
    again = MemoryFolder("word", tmp_path)
    again.open()
    assert (again.path / "kept").exists()
    assert MemoryFolder("another", tmp_path).path != folder.path
    again.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_one_process_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was refused takes nothing away."""
    monkeypatch.setattr(memory_folder, "_LEAVING_SECONDS", 0.2)
    folder, other = MemoryFolder("word", tmp_path), MemoryFolder("word", tmp_path)
    folder.open()
    with pytest.raises(ConfigError, match=r"cannot use .*checkpoint.memory=false"):
        other.open()
    other.close(remove=True)
    assert folder.path.exists()
    folder.close(remove=True)


def test_who_is_leaving_is_waited_for(tmp_path: Path) -> None:
    """A child of a rank that was killed holds it for a moment longer than the rank."""
    folder = MemoryFolder("word", tmp_path)
    folder.open()
    (folder.path / "kept").touch()
    begun = time.monotonic()
    with subprocess.Popen(["sleep", "0.5"], pass_fds=[folder._handle]):
        folder.close(remove=False)
        again = MemoryFolder("word", tmp_path)
        again.open()
        assert time.monotonic() - begun >= 0.5  # the child is gone, if not yet for its parent
    assert (again.path / "kept").exists()
    again.close(remove=True)


def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    folder = MemoryFolder("word", tmp_path)
    folder.open()
    with pytest.raises(
        ConfigError, match=r"2 copies of the state need 888\.2 PiB on .*, and .* has .* to spare"
    ):
        folder.check_room(10**18, "2 copies of the state")
    folder.close(remove=True)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = MemoryFolder("word", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    folder.path.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="cannot use"):
        folder.open()


def test_what_nobody_came_for_goes(tmp_path: Path) -> None:
    old, young = MemoryFolder("old", tmp_path), MemoryFolder("young", tmp_path)
    for each in (old, young):
        each.open()
        each.close(remove=False)
    os.utime(old.path, (0, 0))
    folder = MemoryFolder("word", tmp_path)
    folder.open()
    assert not old.path.exists()
    assert young.path.exists()
    folder.close(remove=True)


def test_what_others_need_is_not_taken(tmp_path: Path) -> None:
    """What is to stay free does on the file system and in memory; what is in the folder counts as free."""
    folder = MemoryFolder("word", tmp_path)
    folder.open()
    free, memory = disk_free_bytes(tmp_path), available_memory()
    folder.check_room(1000, "copies", spare_bytes=min(free, memory) // 2)
    for spare, coming, said in ((2 * free, 0, str(tmp_path)), (0, 2 * memory, "memory")):
        with pytest.raises(ConfigError, match=f"and {said} has"):
            folder.check_room(1000, "copies", spare_bytes=spare, coming_bytes=coming)
    folder.close(remove=True)


def test_a_token_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot use .*memory-token: .*checkpoint.memory=false"):
        token_of(tmp_path / "missing")
