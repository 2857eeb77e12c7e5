"""Create swap files that no other user can read or replace, and that disappear even if the process is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from parallax.errors import SwapError, printable
from parallax.swap.stores.remedies import ENGINE, Remedies

_PREFIX = "parallax-swap-"
_LONGEST_NAME = 255  # bytes, on every file system in use


def private_file(directory: Path, remedies: Remedies = ENGINE) -> int:
    """Return the handle of a new file in ``directory`` that is already unlinked.

    The file is opened relative to a handle of the directory. So no other process can replace the directory between the
    check and the opening. ``remedies`` has the advice for error messages.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        if directory.is_symlink():
            raise SwapError(f"swap directory {directory} is a symbolic link: {remedies.directory}")
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _make_private(folder, directory, remedies)
            name = _PREFIX + secrets.token_hex(8)
            handle = os.open(
                name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder
            )
            _remove_files(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _unusable(directory, error, remedies) from error
    return handle


def check_directory(directory: Path, remedies: Remedies) -> None:
    """Raise the error that :func:`private_file` would raise in ``directory``, if any. No file is left behind."""
    try:
        if any(len(os.fsencode(name)) > _LONGEST_NAME for name in directory.parts):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        with contextlib.suppress(FileNotFoundError):
            os.lstat(
                directory / _PREFIX
            )  # raises for a path too long, and for a file in place of a folder
        nearest = next(
            folder
            for folder in (directory, *directory.absolute().parents)
            if os.path.lexists(folder)
        )
        if nearest != directory:
            probe = nearest / (_PREFIX + secrets.token_hex(8))
            probe.mkdir(mode=0o700)
            probe.rmdir()
    except OSError as error:
        raise _unusable(directory, error, remedies) from error
    if nearest == directory:
        os.close(private_file(directory, remedies))


def _unusable(directory: Path, error: OSError, remedies: Remedies) -> SwapError:
    name = str(directory)
    shown = name if len(name) <= _LONGEST_NAME else f"{name[:60]}... ({len(name)} characters)"
    return SwapError(
        f"cannot use swap directory {printable(shown)}: {error.strerror}; {remedies.directory}"
    )


def _make_private(folder: int, directory: Path, remedies: Remedies) -> None:
    """Restrict access to the folder with the handle ``folder`` to its owner. ``directory`` is its path, for errors.

    Raises :class:`SwapError` if another user owns the folder. It also raises this error if other users can access the
    folder and it already contains files that are not swap files.
    """
    found = os.fstat(folder)
    if found.st_uid != os.getuid():
        raise SwapError(f"swap directory {directory} is another user's: {remedies.directory}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        others = [name for name in os.listdir(folder) if not name.startswith(_PREFIX)]
        if others:
            raise SwapError(
                f"swap directory {directory} is open to other users and holds other files ({others[0]}): "
                f"{remedies.directory} to a folder of its own"
            )
        os.fchmod(folder, 0o700)


def _remove_files(folder: int) -> None:
    """Unlink this process's swap file, and those of processes that were killed before they could unlink theirs.

    ``folder`` is the handle of the folder.
    """
    for name in os.listdir(folder):
        if name.startswith(_PREFIX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
