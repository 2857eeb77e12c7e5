"""Lock run directories, because two runs in one directory would overwrite each other's checkpoints.

A training process holds an operating-system lock on a file in the directory. The system releases the lock when the
process ends, however it ends. The file contains the process and host that hold the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from parallax.errors import ConfigError, printable

LOCK = ".lock"
PRIVATE = 0o700  # mode of a run's folder: only its owner reads checkpoints and settings
_ROOT_USERS = 0, 65534  # root, and the user nobody, to which file servers map root
_POLL_SECONDS = 0.1
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(directory: Path, patience_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock of the run directory during the block.

    A missing directory is created; folders created here are removed at the end if they are still empty.

    Raises :class:`ConfigError` if another process still holds the lock after ``patience_seconds``, if the directory
    cannot be created, or if it contains symbolic links.
    """
    made = _make(directory)
    try:
        handle = _acquire(directory / LOCK, time.monotonic() + patience_seconds)
        try:
            _check_no_links(directory)
            yield
        finally:
            with contextlib.suppress(OSError):
                (directory / LOCK).unlink()
            os.close(handle)
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # no longer empty
                folder.rmdir()


def is_locked(directory: Path) -> bool:
    """Return whether a process holds the lock of ``directory``; False if the file system does not support locks."""
    try:
        handle = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _make(directory: Path) -> list[Path]:
    """Create ``directory`` and its missing parents; return the created folders, innermost first."""
    try:
        missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
        directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        _check_own(directory)
    except OSError as error:
        raise _refusal(directory, error) from error
    return missing


def _check_own(directory: Path) -> None:
    """Raise :class:`ConfigError` if ``directory`` is a symbolic link or belongs to another user.

    Another user could replace the files that the run reads.
    """
    found = os.lstat(directory)
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError(
            f"{printable(str(directory))} is a symbolic link: give the folder that it leads to, or another name"
        )
    if found.st_uid not in (os.getuid(), *_ROOT_USERS):
        raise ConfigError(
            f"{printable(str(directory))} is another user's (uid {found.st_uid}): choose another name, or copy it"
        )


def _check_no_links(directory: Path) -> None:
    """Raise :class:`ConfigError` if ``directory`` contains symbolic links.

    Writing or removing through a link would change files elsewhere, and an unpacked archive may contain malicious
    links.
    """
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                raise ConfigError(
                    f"{printable(path)} is a symbolic link, and Parallax writes through no link: put its target in "
                    "its place, or remove it (checkpoint.directory=FOLDER keeps checkpoints elsewhere)"
                )


def _acquire(path: Path, until: float) -> int:
    """Lock the file ``path`` and return its file descriptor. Wait for the lock until the monotonic time ``until``.

    The previous holder may have removed the file meanwhile. So the locked file is used only if it is still at ``path``.
    """
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _refusal(path.parent, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = printable(os.read(handle, 300).decode("utf-8", "replace").strip())
            os.close(handle)
            if time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
                continue
            raise ConfigError(
                f"{printable(str(path.parent))} is being trained by {holder or 'another process'}: wait for its end, "
                "stop it, or choose another name"
            ) from None
        except OSError as error:
            _log.info(
                "%s cannot be locked (%s): start no second run there", path.parent, error.strerror
            )
            return handle
        try:
            if os.fstat(handle).st_ino == path.stat().st_ino:
                os.truncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return handle
        except FileNotFoundError:
            pass  # the previous holder has just removed it: retry with a new file
        except OSError as error:
            os.close(handle)
            raise _refusal(path.parent, error) from error
        os.close(handle)


def _refusal(directory: Path, error: OSError) -> ConfigError:
    where = printable(str(error.filename or directory))
    return ConfigError(
        f"cannot write the run directory {printable(str(directory))}: {where}: {error.strerror}; free space or make it "
        "writable, choose another name, or start from another folder"
    )
