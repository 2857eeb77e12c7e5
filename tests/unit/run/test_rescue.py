"""What a run that has failed for good has left in memory goes to the disk, or stays, and is told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallax.nodes.memory_folder import MemoryFolder, folder_of, has_copies, sweep_memory, token_of
from parallax.run.processes.rescue import rescue
from parallax.runtime.checkpoint import checkpoint_name, finish, list_checkpoints, read_metrics

STEP = 20


def save(directory: Path, started: float, loss: float) -> None:
    """A checkpoint of a start."""
    partial = directory / f".saving-{checkpoint_name(STEP)}"
    partial.mkdir(parents=True)
    finish(partial, {"step": STEP, "started": started, "metrics": {"loss": loss}})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[MemoryFolder]:
    """With a copy that its process has left."""
    token_of(tmp_path)
    found = folder_of(tmp_path)
    assert found is not None
    found.open()
    save(found.path, started=2.0, loss=0.5)
    found.close(remove=False)
    yield found
    found.open()
    found.close(remove=True)


def test_the_newest_goes_to_the_disk(tmp_path: Path, folder: MemoryFolder) -> None:
    """In place of one that an earlier start has left."""
    checkpoints = tmp_path / "checkpoints"
    save(checkpoints, started=1.0, loss=0.9)
    saved = checkpoints / checkpoint_name(STEP)
    assert (
        rescue(tmp_path, checkpoints) == f"step {STEP}: checkpoint {saved}, from its copy in memory"
    )
    assert read_metrics(saved) == {"loss": 0.5}
    assert [path.name for path in checkpoints.iterdir()] == [saved.name]
    assert not has_copies(tmp_path)
    assert not folder.path.exists()
    assert rescue(tmp_path, checkpoints) == ""


def test_a_later_one_on_the_disk_stays(tmp_path: Path, folder: MemoryFolder) -> None:
    checkpoints = tmp_path / "checkpoints"
    save(checkpoints, started=3.0, loss=0.9)
    assert rescue(tmp_path, checkpoints) == ""
    assert read_metrics(checkpoints / checkpoint_name(STEP)) == {"loss": 0.9}
    assert not folder.path.exists()


def test_what_cannot_be_written_stays_in_memory(tmp_path: Path, folder: MemoryFolder) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.touch()  # no folder
    said = rescue(tmp_path, checkpoints)
    assert said.startswith(f"the newest copy stays in memory ({folder.path}): ")
    assert has_copies(tmp_path)
    assert len(list_checkpoints(folder.path)) == 1


def test_a_start_long_after_finds_its_own(tmp_path: Path, folder: MemoryFolder) -> None:
    old = time.time() - 4000
    os.utime(folder.path, (old, old))
    sweep_memory(mine=folder.path)
    assert len(list_checkpoints(folder.path)) == 1
