"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from parallax.common.files import making_folder, temporary_folder


def test_a_folder_is_there_at_the_end_with_the_usual_rights(tmp_path: Path) -> None:
    final, usual = tmp_path / "deep" / "final", tmp_path / "usual"
    usual.mkdir()
    with making_folder(final) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "file").write_text("x")
        assert not final.exists()
    assert (final / "part" / "file").read_text() == "x"
    assert final.stat().st_mode == usual.stat().st_mode
    assert [path.name for path in final.parent.iterdir()] == ["final"]


def _make(final: Path, error: BaseException | None) -> None:
    """A folder during whose making ``error`` is raised, or another is made in its place."""
    with making_folder(final) as folder:
        (folder / "mine").touch()
        if error is not None:
            raise error
        final.mkdir()
        (final / "theirs").touch()


@pytest.mark.parametrize("there", [False, True])
def test_an_error_leaves_what_was_there(there: bool, tmp_path: Path) -> None:
    final = tmp_path / "final"
    if there:
        final.mkdir()
    with pytest.raises(KeyboardInterrupt):
        _make(final, KeyboardInterrupt())
    assert [path.name for path in tmp_path.iterdir()] == (["final"] if there else [])


def test_what_came_meanwhile_is_kept(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with pytest.raises(OSError, match="not empty"):
        _make(final, None)
    assert [path.name for path in final.iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_folder_that_another_sweeps_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that begin together sweep what the others are just making."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make, made = tempfile.mkdtemp, list[str]()

    def swept(*args: Any, **options: Any) -> str:
        made.append(make(*args, **options))
        if len(made) < 3:
            os.rmdir(made[-1])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept)
    with temporary_folder() as folder:
        assert folder == Path(made[2])
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []
