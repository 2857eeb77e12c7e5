"""What processes that were killed leave behind, and that the next ones clean it up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from parallax.common.files import making_folder, replacing, temporary_folder
from parallax.runtime.checkpoint import checkpoint_name, list_checkpoints
from tests.faults.commands import (
    ON_ONE_RANK_AND_ON_TWO,
    TINY,
    prepared,
    ranks,
    running,
    temporary,
    wait_for,
)
from tests.faults.test_requests_to_end import ENDLESS, stepping

SWAPPING = ["swap.tier=disk", "swap.minimum_bytes=1"]


@pytest.mark.faults
@pytest.mark.parametrize("whom", ["launcher", pytest.param("all", marks=pytest.mark.thorough)])
@ON_ONE_RANK_AND_ON_TWO
def test_what_a_killed_launcher_leaves_goes_with_the_next(
    here: Path, monkeypatch: pytest.MonkeyPatch, whom: str, replicas: tuple[int, ...]
) -> None:
    run = prepared(*ENDLESS, *SWAPPING, replicas=replicas)
    process = stepping(run)
    for each in (*(ranks(process) if whom == "all" else []), process):
        os.kill(each.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not running(here), "the end of the ranks")
    assert len(temporary()) == 1
    assert not list(run.rglob("parallax-swap-*"))
    monkeypatch.setattr(tempfile, "tempdir", str(here.parent / "tmp"))
    with temporary_folder() as folder:
        assert temporary() == [folder]
    assert temporary() == []


@pytest.mark.faults
@ON_ONE_RANK_AND_ON_TWO
def test_an_old_checkpoint_that_a_kill_has_left_goes_at_the_end(
    here: Path, called: Callable[..., tuple[int, str, str]], replicas: tuple[int, ...]
) -> None:
    """Between the name of the last one and that: the next start has no step to take."""
    run = prepared(*TINY, "trainer.steps=6", "trainer.checkpoint_every=2", replicas=replicas)
    assert called("train", "--run-dir", str(run))[0] == 0
    kept = list_checkpoints(run / "checkpoints")
    assert len(kept) == 2
    shutil.copytree(kept[0], run / "checkpoints" / checkpoint_name(2))
    (run / "checkpoints" / checkpoint_name(9)).mkdir()  # is none
    code, _, err = called("train", "--run-dir", str(run))
    assert (code, err) == (0, "")
    assert list_checkpoints(run / "checkpoints") == kept


HOLDS = """
import pathlib, sys, time
from parallax.common.files import making_folder, replacing, temporary_folder
target = pathlib.Path(sys.argv[1])
with replacing(target) as file, temporary_folder(), making_folder(target.with_suffix(".d")) as made:
    (made / "half").touch()
    file.write(b"half")
    file.flush()
    print("held", flush=True)
    time.sleep(600)
"""


def test_what_is_in_use_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two at the same time one is killed: only what that one left is removed, and nothing that has another name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target, folder = tmp_path / "plan.yaml", tmp_path / "plan.d"
    for name in ("plan.yaml.original", ".plan.yaml.backup", "parallax-own"):
        (tmp_path / name).write_text("mine")
    others = {path.name for path in tmp_path.iterdir()}
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", HOLDS, str(target)]
    holders = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    try:
        for each in holders:
            assert each.stdout is not None
            assert each.stdout.readline() == "held\n"
        assert len({path.name for path in tmp_path.iterdir()} - others) == 6
        holders[0].kill()
        holders[0].wait()
        with replacing(target) as file, temporary_folder(), making_folder(folder):
            file.write(b"whole")
        assert len({path.name for path in tmp_path.iterdir()} - others) == 5
    finally:
        for each in holders:
            each.kill()
            each.communicate()
    with replacing(target) as file, temporary_folder(), making_folder(folder) as made:
        file.write(b"new")
        (made / "new").touch()
    assert {path.name for path in tmp_path.iterdir()} == others | {"plan.yaml", "plan.d"}
    assert target.read_bytes() == b"new"
    assert [path.name for path in folder.iterdir()] == ["new"]
