"""Check the paths in settings and data files: only files inside of the data's own folder may be opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from functools import partial
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


def files_below(
    root: Path, suffixes: Collection[str], label: str, hidden: tuple[str, ...] = ()
) -> list[str]:
    """Return the names of the files below the folder ``root`` that end in ``suffixes``, relative to ``root``. Folders
    that begin with ``hidden`` are left out. ``label``: the data's name, for error messages.

    Raises :class:`DataError` for a folder that cannot be listed and for links that :func:`found_file` or
    :func:`check_folder_link` refuses, because rows would be missing. A link to another folder of ``root`` is not
    followed: its files are read where they are.
    """
    found = list[str]()
    for folder, folders, names in os.walk(root, onerror=partial(_unlisted, label)):
        where = Path(folder).relative_to(root)
        folders[:] = [each for each in folders if not each.startswith(hidden)]
        for each in folders:
            check_folder_link(root, where / each, label)
        found += [
            (where / each).as_posix() for each in names if os.path.splitext(each)[1] in suffixes
        ]
    for name in found:
        found_file(root, name, label)
    return found


def _unlisted(label: str, error: OSError) -> None:
    raise DataError(
        f"{label}: cannot list {printable(str(error.filename))} ({error.strerror}); make it readable"
    ) from error


def check_folder_link(root: Path, name: Path | str, label: str) -> None:
    """Raise :class:`DataError` if the folder ``name`` in ``root`` is a link to a place outside of ``root``."""
    path = root / name
    if path.is_symlink() and not (real := path.resolve()).is_relative_to(root.resolve()):
        raise DataError(
            f"{label}: the link {printable(str(name))} leads to {printable(str(real))}, outside of the data's folder; "
            "copy the folder, or name its own place"
        )


def inside(root: Path, name: str, where: str) -> Path:
    """Return the path of the regular file ``name`` in the folder ``root``. ``where``: the file and line that contain
    the name, for error messages.

    Raises :class:`DataError` for an absolute path, a path outside of the folder (also through a symbolic link), and
    anything that is not a regular file.
    """
    path, real = _resolved(root, name, where)
    if os.path.isabs(name) or not real.is_relative_to(root.resolve()):
        raise DataError(
            f"{where}: {printable(name)} is outside of {printable(str(root))}, the data's folder"
        )
    _check_regular(name, real, where)
    return path


def found_file(root: Path, name: str, where: str) -> Path:
    """Return the path of the file ``name`` that was found in the folder ``root``. A link, which the folder's owner has
    made, may lead anywhere. Raises :class:`DataError` for a link to nothing, and anything but a regular file."""
    path, real = _resolved(root, name, where)
    _check_regular(name, real, where)
    return path


def _resolved(root: Path, name: str, where: str) -> tuple[Path, Path]:
    path = root / name
    try:
        return path, path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{where}: cannot open {printable(name)} ({reason})") from error


def _check_regular(name: str, real: Path, where: str) -> None:
    if not stat.S_ISREG(real.stat().st_mode):
        raise DataError(f"{where}: {printable(name)} is no regular file")
