"""Files that are replaced whole, and where they may go."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import psutil


def cache_directory() -> Path:
    """Where what can be made again is kept: ``$XDG_CACHE_HOME/parallax`` or ``~/.cache/parallax``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parallax"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends well: temporary file, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def existing_parent(path: Path) -> Path:
    """``path`` or the nearest folder above it that exists: the file system that ``path`` will be on."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def disk_free_bytes(path: Path) -> int:
    """Bytes that this user can still write on the file system of ``path`` (which need not exist yet)."""
    return psutil.disk_usage(str(existing_parent(path))).free
