"""A save that is killed, or finds the disk full, keeps the previous checkpoint."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parallax.errors import CheckpointError
from parallax.runtime.checkpoint import (
    ALL_STAY,
    Retention,
    begin,
    checkpoint_name,
    list_checkpoints,
    partial_folder,
    remove_partial,
    writing,
)
from parallax.runtime.engine import Engine
from tests.alone import alone
from tests.distributed.pool import Pool
from tests.distributed.test_checkpoint import CASE, STATE, loading, saved
from tests.distributed.test_engine import (
    Case,
)

# ---- killed while saving

KILLS = [
    (base, call, at, when, behind)
    for base, renames in [("next", 1), ("again", 2)]  # a new step; the same step once more
    for call, count in [
        ("write_file", 1),
        ("_put", 3),
        ("write_text", 1),
        ("fsync", 4),
        ("rename", renames),
    ]
    for at in range(1, count + 1)
    for when in ("before", "after")
    for behind in (False, True)
    if not (behind and base == "again")
]
"""Of ``_put``, the header's, the first tensor's and one in the middle of the file, the third, is enough."""
REMOVALS = [
    ("next", "rename", 2, "before", True),
    ("next", "rename", 2, "after", False),
    ("next", "rmtree", 2, "before", True),
]
"""Of the checkpoint before, once the new one is there."""
ONE_STAYS = Retention(keep_last=1)


def folder_of(root: Path, kill: tuple[Any, ...], kind: str = "saving") -> Path:
    return root / "-".join(map(str, (kind, *kill)))


def killed_saves(root: Path) -> None:
    """Saves that are killed, each in a folder of its own; in a process that may fork."""
    engine = CASE.under((1,)).engine(root)
    for batch in CASE.batches()[:2]:
        engine.step(batch)
    engine.save(root / "next", STATE)
    engine.step(CASE.batches()[2])
    shutil.copytree(root / "next", root / "again")
    engine.save(root / "again", STATE)
    for kind, kills, retention in (
        ("saving", KILLS, ALL_STAY),
        ("removing", REMOVALS, ONE_STAYS),
    ):
        for base, call, at, when, behind in kills:
            folder = folder_of(root, (base, call, at, when, behind), kind)
            shutil.copytree(root / base, folder)
            child = os.fork()
            if child == 0:
                die_at(call, at, when)
                if behind:
                    write_behind(engine, folder, retention)
                else:
                    engine.save(folder, STATE, retention=retention)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), folder


def write_behind(engine: Engine, folder: Path, retention: Retention) -> None:
    """As a loop does whose next step takes for ever."""
    engine.saving.begin(folder, engine.completed_steps, {"state": STATE}, retention)
    pending = engine.saving.pending
    while pending.advance([pending.progress]) is None:
        time.sleep(0.001)
    pending.finish()


def die_at(call: str, at: int, when: str) -> None:
    """From now on the process dies before or after the call number ``at`` of the function ``call``."""
    owners: dict[str, Any] = {
        **{"write_file": writing, "_put": writing, "rmtree": shutil},
        **{"write_text": Path, "rename": Path},
    }
    owner, count = owners.get(call, os), itertools.count(1)
    plain = getattr(owner, call)

    def dying(*args: Any, **kwargs: Any) -> Any:
        due = next(count) == at
        if due and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = plain(*args, **kwargs)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, call, dying)


@pytest.mark.slow
def test_killed_while_saving(tmp_path: Path) -> None:
    """What was saved before is whole, and the next save or resume cleans up; also where it is written behind the
    steps."""
    alone(killed_saves, tmp_path)
    engine = CASE.under((1,)).engine(tmp_path)
    for kill in KILLS:
        base, call, at, when, _ = kill
        folder = folder_of(tmp_path, kill)
        remove_partial(folder)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        left = list_checkpoints(folder)
        renamed = (
            base == "again" or (call, when) == ("rename", "after") or (call, at) == ("fsync", 4)
        )
        assert [path.name for path in left] == [checkpoint_name(2), checkpoint_name(3)][
            : 1 + renamed
        ]
        for path in left:
            assert engine.load(path) == STATE
            assert engine.completed_steps == int(path.name[5:])
    for kill in REMOVALS:
        folder = folder_of(tmp_path, kill, "removing")
        whole = [checkpoint_name(3)] if kill[1:] != ("rename", 2, "before", True) else None
        assert [p.name for p in list_checkpoints(folder)] == (
            whole or [checkpoint_name(2), checkpoint_name(3)]
        )
        remove_partial(folder)
        assert {path.name for path in folder.glob("*step*")} == {
            path.name for path in list_checkpoints(folder)
        }
    engine.close()


def test_a_new_save_takes_nothing_from_an_interrupted_one(pool: Pool, tmp_path: Path) -> None:
    """A part that a plan of two stages had left over was read as if it belonged to the new checkpoint."""
    partial = partial_folder(tmp_path, 2)
    begin(partial)
    save_file(
        {"model/embedding.token.weight": torch.zeros(64, 32)}, partial / "stage-01.safetensors"
    )
    path = saved(pool, tmp_path)
    assert [p.name for p in path.glob("*.safetensors")] == ["stage-00.safetensors"]
    assert pool.run(loading, 1, CASE.under((1,)), path)[0][0] == ""


# ---- no space


def saved_without_room(folder: Path, limit: int) -> list[str]:
    """Return the errors of saves in which no file may exceed ``limit`` bytes, between two unlimited saves."""
    engine, reported = CASE.under((1,)).engine(folder), []
    engine.step(CASE.batches()[0])
    engine.save(folder, STATE)
    engine.step(CASE.batches()[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        engine.save(folder, STATE)
    except CheckpointError as error:
        reported.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    engine.save(folder, STATE)
    return reported


def test_disk_full(tmp_path: Path) -> None:
    (line,) = alone(saved_without_room, tmp_path, 100000)
    assert len(line.splitlines()) == 1
    assert str(tmp_path / ".saving-step-00000002" / "stage-00.safetensors") in line
    assert "KiB to" in line or "MiB to" in line
    assert "untouched" in line
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        checkpoint_name(1),
        checkpoint_name(2),
    ]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def unwritable(case: Case, folder: Path, part: str) -> str:
    """A save in which one stage cannot write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    engine = case.engine(folder / "elsewhere")
    engine.step(case.batches()[0])
    if f"{engine.mesh.pipeline_rank}" == part:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        engine.save(folder, STATE)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        engine.close()
    return ""


@pytest.mark.parametrize("stage", [0, 1])
def test_all_ranks_learn_that_one_cannot_write(pool: Pool, tmp_path: Path, stage: int) -> None:
    messages = pool.run(unwritable, 3, CASE.under((1, 2)), tmp_path, str(stage))
    assert len(set(messages)) == 1
    assert f"stage-0{stage}.safetensors" in messages[0]
    assert not list(tmp_path.glob("*step*"))


def test_folder_that_cannot_be_made(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    for message in pool.run(unwritable, 2, CASE.under((1, 1)), tmp_path / "checkpoints", ""):
        assert str(tmp_path / "checkpoints") in message
