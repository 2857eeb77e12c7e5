"""One run to a directory: two that train into one would overwrite each other's checkpoints.

Whoever trains holds a lock of the operating system on a file in the directory, for as long as the process lives: it
cannot be left behind, whatever ends the process. The file says who holds it.
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
PRIVATE = 0o700  # of a run's folder: checkpoints and settings are its owner's
_NOBODYS = 0, 65534  # root's, and what servers of files make of root
_POLL_SECONDS = 0.1
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(directory: Path, patience_seconds: float = 0.0) -> Iterator[None]:
    """Hold the run directory, made where it is missing; what was made and stays empty is removed at the end.

    Raises :class:`ConfigError` where another process still holds it after ``patience_seconds``, naming that one, where
    it cannot be made, or where there are symbolic links in it.
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
    """Whether a process holds ``directory``; none where its file system knows no locks."""
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
    """Make ``directory`` and those above it; the new ones, innermost first."""
    try:
        missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
        directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        _check_own(directory)
    except OSError as error:
        raise _refusal(directory, error) from error
    return missing


def _check_own(directory: Path) -> None:
    """Refuse a directory in whose place another user can put other files: what a run reads there, it believes."""
    found = os.lstat(directory)
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError(
            f"{printable(str(directory))} is a symbolic link: give the folder that it leads to, or another name"
        )
    if found.st_uid not in (os.getuid(), *_NOBODYS):
        raise ConfigError(
            f"{printable(str(directory))} is another user's (uid {found.st_uid}): choose another name, or copy it"
        )


def _check_no_links(directory: Path) -> None:
    """Refuse a directory with symbolic links in it: what is written there would change, or what is removed there would
    take away, something elsewhere. Somebody may have made them for that, in a folder that was unpacked."""
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                raise ConfigError(
                    f"{printable(path)} is a symbolic link, through which nothing is written: put what it leads to in "
                    "its place, or remove it (checkpoint.directory=FOLDER keeps checkpoints elsewhere)"
                )


def _acquire(path: Path, until: float) -> int:
    """An open file that is locked, and still the one of that name."""
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
            pass  # the one before has just removed it: again, with a new one
        except OSError as error:
            os.close(handle)
            raise _refusal(path.parent, error) from error
        os.close(handle)


def _refusal(directory: Path, error: OSError) -> ConfigError:
    where = printable(str(error.filename or directory))
    return ConfigError(
        f"cannot write the run directory {printable(str(directory))}: {where}: {error.strerror}; make room or make it "
        "writable, choose another name, or start from another folder"
    )
