"""A home directory that cannot be written: caches go to a folder of this user's, which is reported once."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from parallax.common.files import cache_directory


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for key in ("XDG_CACHE_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(key, "restored afterwards")
        monkeypatch.delenv(key)
    return monkeypatch


def test_the_home_directory_is_used(home: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "parallax"
    assert "XDG_CACHE_HOME" not in os.environ


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/null"])
def test_a_home_directory_that_cannot_be_written_is_replaced(
    home: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    home.setenv("HOME", place)
    with caplog.at_level(logging.WARNING, "parallax"):
        found = cache_directory()
        assert cache_directory() == found
    found.mkdir(parents=True, exist_ok=True)
    (found / "a").touch()
    folder = Path(os.environ["XDG_CACHE_HOME"])
    assert found == folder / "parallax"
    assert folder.stat().st_mode & 0o777 == 0o700
    (output,) = caplog.messages
    assert str(folder) in output
    assert output.isprintable()
    assert os.environ["MPLCONFIGDIR"].startswith(str(folder))
    (found / "a").unlink()
    found.rmdir()
    folder.rmdir()


def test_a_folder_that_somebody_else_may_write_to_is_not_used(
    home: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home.setattr("tempfile.tempdir", str(tmp_path))
    home.setenv("HOME", "/proc/nowhere")
    (tmp_path / f"parallax-cache-{os.getuid()}").mkdir()
    (tmp_path / f"parallax-cache-{os.getuid()}").chmod(0o777)
    assert cache_directory().parent.name != f"parallax-cache-{os.getuid()}"
