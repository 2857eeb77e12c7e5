"""Paths that data names: only files below the data's own folder are opened."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from parallax.errors import DataError, printable


def data_path(key: str, text: str) -> Path:
    """Return the file or folder that the setting ``key`` names. Raises :class:`DataError` if there is none or if it
    cannot be read."""
    if not text:
        raise DataError(f"{key}=: it is empty; name a file or a folder")
    path = Path(text).expanduser().absolute()
    try:
        path.stat()
    except OSError as error:
        raise DataError(
            f"{key}={printable(text)}: {error.strerror}; name a file or folder that exists"
        ) from error
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise DataError(f"{key}={printable(text)}: it cannot be read; make it readable")
    return path


def inside(root: Path, name: str, where: str) -> Path:
    """Return the regular file ``name`` below the folder ``root``. ``where`` says which file and line name it.

    Raises :class:`DataError` for an absolute path, for one that leaves the folder, also by a symbolic link, and for
    what is not a regular file."""
    path = root / name
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{where}: cannot open {printable(name)} ({reason})") from error
    if os.path.isabs(name) or not real.is_relative_to(root.resolve()):
        raise DataError(
            f"{where}: {printable(name)} is outside of {printable(str(root))}, the data's folder"
        )
    if not stat.S_ISREG(mode):
        raise DataError(f"{where}: {printable(name)} is no regular file")
    return path
