"""Which checkpoints stay."""

from __future__ import annotations

import shutil
from pathlib import Path

from parallax.runtime.checkpoint.folder import checkpoint_name, list_checkpoints


def remove_old(directory: Path, keep: int, step: int) -> None:
    """Of the checkpoints up to that of ``step``, which was just saved, delete all but the last ``keep``; 0 keeps all.
    Later ones, which this training did not go on from, do not count: not every node may have them."""
    found = [path for path in list_checkpoints(directory) if path.name <= checkpoint_name(step)]
    for path in found[:-keep] if keep else []:
        shutil.rmtree(path, ignore_errors=True)
