"""Check the paths in settings and data files: only files inside of the data's own folder may be opened."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from parallax.errors import DataError, printable


def data_path(key: str, text: str) -> Path:
    """Return the file or folder ``text``, the value of the setting ``key``. Raises :class:`DataError` if it does not
    exist or cannot be read."""
    if not text:
        raise DataError(f"{key}=: it is empty; type {key}=FOLDER or {key}=FILE")
    path = Path(text).expanduser().absolute()
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(
            f"{key}={printable(text)}: {error.strerror}; name a file or folder that exists"
        ) from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise DataError(f"{key}={printable(text)}: it is neither a regular file nor a folder")
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise DataError(f"{key}={printable(text)}: it cannot be read; make it readable")
    return path


def inside(root: Path, name: str, where: str) -> Path:
    """Return the path of the regular file ``name`` in the folder ``root``. ``where``: the file and line that contain
    the name, for error messages.

    Raises :class:`DataError` for an absolute path, a path outside of the folder (also through a symbolic link), and
    anything that is not a regular file.
    """
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
