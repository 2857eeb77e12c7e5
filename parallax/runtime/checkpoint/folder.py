"""The folders of checkpoints: their names, their atomic completion, and their identity."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from parallax.common.files import disk_free_bytes, sync
from parallax.common.units import format_bytes
from parallax.errors import CheckpointError
from parallax.runtime.checkpoint.checksums import SEAL, seal

VERSION = 1
INDEX = "checkpoint.json"
_PARTIAL = ".saving-"
_REPLACED = ".replaced-"
REMOVED = ".removed-"
UNTOUCHED = "the last checkpoint is untouched"


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step; names sort by step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step of a folder whose name :func:`checkpoint_name` made; None for any other name."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else None


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in ``directory``, oldest first."""
    return sorted(path for path in directory.glob("step-*") if (path / INDEX).is_file())


def remove_partial(directory: Path) -> None:
    """Delete the files of an interrupted save or removal. If the save was about to replace a checkpoint of the same
    step, that checkpoint gets its name back."""
    for path in directory.glob(f"{_REPLACED}*"):
        final = directory / path.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(final)
    for prefix in (_PARTIAL, REMOVED):
        for path in directory.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def digest(directory: Path) -> str:
    """Return the SHA-256 of the index file of the checkpoint in ``directory``. It distinguishes checkpoints of the same
    step."""
    return hashlib.sha256((directory / INDEX).read_bytes()).hexdigest()


def partial_folder(directory: Path, step: int) -> Path:
    """Return the temporary folder into which a save of ``step`` writes."""
    return directory / f"{_PARTIAL}{checkpoint_name(step)}"


def begin(partial: Path) -> None:
    """Create the folder ``partial``, empty."""
    try:
        remove_partial(partial.parent)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot make {partial}: {error.strerror}{free_text(partial)}; {UNTOUCHED}"
        ) from error


def finish(partial: Path, index: dict[str, Any]) -> None:
    """Write ``index`` as the index file of the temporary folder ``partial``, and rename the folder to its final name. A
    checkpoint of the same step is replaced. Raises :class:`CheckpointError` if the index cannot be written or the
    folder cannot be renamed."""
    path = partial / INDEX
    entries = {"version": VERSION, **index}
    text = json.dumps({SEAL: seal(entries), **entries}, indent=1)
    try:
        path.write_text(text, encoding="utf-8")
        sync(path)
        give_name(partial)
    except OSError as error:
        size = format_bytes(len(text))
        raise CheckpointError(
            f"cannot write {size} to {path}: {error.strerror}{free_text(path)}; {UNTOUCHED}"
        ) from error


def give_name(partial: Path) -> None:
    """Rename the temporary folder ``partial``, which is complete, to its final name. A checkpoint of the same step is
    replaced."""
    name = partial.name.removeprefix(_PARTIAL)
    final, replaced = partial.parent / name, partial.parent / f"{_REPLACED}{name}"
    sync(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def free_text(path: Path) -> str:
    """Return the free bytes of the disk of ``path`` as text to append to an error message, such as ", 3.1 GiB free"; ""
    if they cannot be read."""
    try:
        return f", {format_bytes(disk_free_bytes(path))} free"
    except OSError:
        return ""
