"""What a run that has failed for good has left in this host's memory goes to its checkpoints.

Copies in memory outlive the ranks, for the next start. Where nobody starts them, they would stay in memory that others
need, and be lost with the host; on the disk they are checkpoints like all others, of a later step than these.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from parallax.common.files import sync
from parallax.errors import CheckpointError, ConfigError, printable
from parallax.nodes.memory_folder import MemoryFolder, folder_of, forget_copies
from parallax.runtime.checkpoint import (
    begin,
    give_name,
    lateness,
    list_checkpoints,
    partial_folder,
    remove_partial,
    step_of,
)


def rescue(directory: Path, checkpoints: Path) -> str:
    """Move the newest copy that the run in ``directory``, on this host alone, has in memory to ``checkpoints``, where
    that has none as late; what is to be said of it. What cannot be written stays in memory, for the next start."""
    found: MemoryFolder | None = None
    try:
        if (found := folder_of(directory)) is None:
            return ""
        found.open()
        newest = max(list_checkpoints(found.path), key=lateness, default=None)
        latest = max(map(lateness, list_checkpoints(checkpoints)), default=(0.0, ""))
        moved = newest is not None and lateness(newest) > latest
        if newest is not None and moved:
            if not directory.is_dir():
                raise CheckpointError(f"{directory} has been removed or moved")
            _move(newest, checkpoints)
    except (OSError, CheckpointError, ConfigError) as error:
        if found is not None:
            found.close(remove=False)
        place = "" if found is None else f" ({found.path})"
        return f"the newest copy stays in memory{place}: {printable(str(error))}"
    found.close(remove=True)
    forget_copies(directory)
    if newest is None or not moved:
        return ""
    return (
        f"step {step_of(newest)}: checkpoint {checkpoints / newest.name}, from its copy in memory"
    )


def _move(copy: Path, checkpoints: Path) -> None:
    partial = partial_folder(checkpoints, step_of(copy) or 0)
    begin(partial)
    try:
        shutil.copytree(copy, partial, dirs_exist_ok=True)
        for each in partial.iterdir():
            sync(each)
        give_name(partial)
    except OSError:
        remove_partial(checkpoints)
        raise
