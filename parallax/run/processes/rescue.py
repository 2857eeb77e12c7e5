"""What a run that has failed for good has left in this host's memory goes to its checkpoints.

Copies in memory outlive the ranks, for the next start. Where nobody starts them, they would stay in memory that others
need, and be lost with the host; on the disk they are checkpoints like all others, of a later step than these.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from parallax.common.files import making_folder
from parallax.errors import ConfigError
from parallax.machine.host import host_identity
from parallax.nodes.memory_folder import MemoryFolder, forget_copies, has_copies, token_of
from parallax.runtime.checkpoint import lateness, list_checkpoints


def rescue(directory: Path, checkpoints: Path) -> Path | None:
    """Move the newest copy that the run in ``directory``, on this host alone, has in memory to ``checkpoints``, where
    that has none as late; its place there. What cannot be written stays in memory."""
    if not has_copies(directory):
        return None
    moved = None
    try:
        folder = MemoryFolder.of_run(token_of(directory), host_identity())
        folder.open()
        try:
            found, known = list_checkpoints(folder.path), list_checkpoints(checkpoints)
            newest = max(found, key=lateness, default=None)
            if newest is not None and lateness(newest) > max(
                map(lateness, known), default=(0.0, "")
            ):
                moved = checkpoints / newest.name
                with making_folder(moved) as made:
                    shutil.copytree(newest, made, dirs_exist_ok=True)
        except BaseException:
            folder.close(remove=False)
            raise
        folder.close(remove=True)
    except (OSError, ConfigError):  # no room, or ranks that do not end: the next start looks there
        return None
    forget_copies(directory)
    return moved
