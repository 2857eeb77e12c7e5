"""A file that no other user can read, replace or find left over."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from parallax.errors import SwapError

_PREFIX = "parallax-swap-"


def private_file(directory: Path) -> int:
    """An open, unlinked file in ``directory``, reached through the open directory and not by its name again,
    so that nobody can put another in its place meanwhile."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        if directory.is_symlink():
            raise SwapError(f"swap directory {directory} is a symbolic link: set swap.directory")
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _make_private(folder, directory)
            name = _PREFIX + secrets.token_hex(8)
            handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            _remove_files(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise SwapError(f"cannot use swap directory {directory}: {error.strerror}; set swap.directory") from error
    return handle


def _make_private(folder: int, directory: Path) -> None:
    """Refuse what others could tamper with, or what is not ours alone to close to others."""
    found = os.fstat(folder)
    if found.st_uid != os.getuid():
        raise SwapError(f"swap directory {directory} is another user's: set swap.directory")
    if stat.S_IMODE(found.st_mode) & 0o077:
        others = [name for name in os.listdir(folder) if not name.startswith(_PREFIX)]
        if others:
            raise SwapError(
                f"swap directory {directory} is open to other users and holds other files ({others[0]}): "
                "set swap.directory to a folder of its own"
            )
        os.fchmod(folder, 0o700)


def _remove_files(folder: int) -> None:
    """Unlink our file, and those of processes that were killed before they could."""
    for name in os.listdir(folder):
        if name.startswith(_PREFIX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
