"""What a run writes and believes is its user's alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallax.common import trust
from parallax.common.files import replace_text
from parallax.common.lock import LOCK, locked
from parallax.errors import ConfigError
from parallax.swap.stores.files import private_file


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Under which everybody may read and write what says nothing else."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_no_other_user_can_enter_the_folder_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "name"
    with locked(run):
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
        assert stat.S_IMODE((run / LOCK).stat().st_mode) == 0o600
        os.close(private_file(run / "swap"))
        assert stat.S_IMODE((run / "swap").stat().st_mode) == 0o700


def test_a_link_is_no_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to("elsewhere")
    with (
        pytest.raises(ConfigError, match="is a symbolic link: give the folder"),
        locked(tmp_path / "run"),
    ):
        pass
    (tmp_path / "elsewhere" / LOCK).symlink_to(tmp_path / "target")
    with (
        pytest.raises(ConfigError, match="cannot write the run directory"),
        locked(tmp_path / "elsewhere"),
    ):
        pass
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "checkpoints", "debug/steps.csv", "checkpoints/step-00000001", "gone"]
)
def test_links_inside_of_the_folder_of_a_run_are_refused(tmp_path: Path, name: str) -> None:
    """Writing through such a link would change other files of the user."""
    run, target = tmp_path / "run", tmp_path / "target"
    link = run / name
    link.parent.mkdir(parents=True)
    if name != "gone":
        target.mkdir()
    link.symlink_to(target)
    with (
        pytest.raises(ConfigError, match="is a symbolic link, and Parallax writes through no link"),
        locked(run),
    ):
        pass
    assert sorted(path.name for path in run.iterdir()) == [name.partition("/")[0]]
    link.unlink()
    with locked(run):
        pass


def test_what_is_replaced_is_not_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("theirs")
    for name in ("report.html", f".report.html.{os.getpid()}"):
        (tmp_path / name).symlink_to(target)
    replace_text(tmp_path / "report.html", "ours")
    assert target.read_text() == "theirs"
    assert (tmp_path / "report.html").read_text() == "ours"
    assert not (tmp_path / "report.html").is_symlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    os.chown(run, 1234, 1234)
    with pytest.raises(ConfigError, match=r"is another user's \(uid 1234\)"), locked(run):
        pass
    assert list(run.iterdir()) == []


def test_a_list_that_others_can_write_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    named = {"model.target": "theirs:build"}
    trust.remember(tmp_path, named)
    trust.check_named(tmp_path / "config.yaml", named)
    file = tmp_path / "parallax" / "named-class-paths.txt"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for mode in (0o620, 0o602):
        file.chmod(mode)
        with pytest.raises(ConfigError, match="not imported unless you type them"):
            trust.check_named(tmp_path / "config.yaml", named)
    trust.remember(tmp_path, named)
    trust.check_named(tmp_path / "config.yaml", named)
