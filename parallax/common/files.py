"""Replace files and folders atomically, and find the cache folder and temporary folders."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import psutil

logger = logging.getLogger("parallax")

_FOLDER = "parallax-run-"
_UNFINISHED = "unfinished-"


def cache_directory() -> Path:
    """Return the folder for cached data: ``$XDG_CACHE_HOME/parallax`` or ``~/.cache/parallax``.

    If the home directory is not writable, the folder is a private one in the temporary directory. Then a warning is
    logged once, and environment variables are set, so that other libraries in this process and its children use that
    folder, too.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "parallax"
    try:
        home = Path.home() / ".cache" / "parallax"
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK | os.X_OK):
            return home
        reason = f"{home} cannot be written"
    except OSError as error:
        reason = f"{error.filename or '~/.cache'}: {error.strerror}"
    except RuntimeError:  # no HOME, and no passwd entry for this user
        reason = "HOME is not set"
    os.environ["XDG_CACHE_HOME"] = instead = str(_own_temporary())
    os.environ.setdefault("MPLCONFIGDIR", str(Path(instead) / "matplotlib"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(instead) / "triton"))
    logger.warning(
        "%s: caches are kept in %s; HOME or XDG_CACHE_HOME can name another folder", reason, instead
    )
    return Path(instead) / "parallax"


def _own_temporary() -> Path:
    """Return a folder in the temporary directory that only this user can write.

    It is the same folder for all processes of the user, if possible.
    """
    folder = Path(tempfile.gettempdir()) / f"parallax-cache-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if (
            stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.getuid()
            and not found.st_mode & 0o022
        ):
            return folder
    return Path(tempfile.mkdtemp(prefix=f"parallax-cache-{os.getuid()}-"))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``path`` atomically at the end of the block (temporary file, fsync, rename).

    A process that is killed in the block leaves its temporary file. The next call for the same ``path`` removes it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.{_UNFINISHED}"
    _sweep(path.parent, prefix)
    handle, name = _own(lambda: tempfile.mkstemp(dir=path.parent, prefix=prefix))
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` with ``text`` atomically, with the default file mode."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # left by an earlier process with the same id, or a link
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def making_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``path`` atomically at the end of the block. ``path`` must be missing or empty.

    The folder is created beside ``path``, and its content is flushed with fsync before the rename. A process that is
    killed in the block leaves the folder. The next call for the same ``path`` removes it.
    """
    alone = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.{_UNFINISHED}"
    _sweep(path.parent, prefix)
    handle, name = _own(lambda: _new_folder(path.parent, prefix))
    try:
        made = Path(name) / path.name  # has the default mode, unlike the temporary folder around it
        made.mkdir()
        yield made
        for inside in (*made.rglob("*"), made):
            sync(inside)
        os.replace(made, path)
        sync(path.parent)
    finally:
        shutil.rmtree(name, ignore_errors=True)
        os.close(handle)
        if alone:
            with contextlib.suppress(OSError):  # not empty
                path.parent.rmdir()


def sync(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder that is removed at the end. Folders that killed processes have left are removed first."""
    base = Path(tempfile.gettempdir())
    _sweep(base, _FOLDER)
    handle, name = _own(lambda: _new_folder(base, _FOLDER))
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)
        os.close(handle)


def _new_folder(base: Path, prefix: str) -> tuple[int, str]:
    """Create a folder in ``base`` whose name begins with ``prefix``; return an open file descriptor of the folder and
    its path."""
    while True:
        name = tempfile.mkdtemp(prefix=prefix, dir=base)
        with contextlib.suppress(FileNotFoundError):  # another process removed it as left over
            return os.open(name, os.O_RDONLY | os.O_DIRECTORY), name


def _own(make: Callable[[], tuple[int, str]]) -> tuple[int, str]:
    """Call ``make`` to create a file or folder, lock it, and return what ``make`` returns: its file descriptor and its
    path.

    The lock is held until the descriptor is closed, so other processes can tell whether the owner still runs.
    """
    while True:
        handle, name = make()
        # on a file system without locks, nothing is removed either
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if Path(name).exists():  # no other process removed it as left over before it was locked
            return handle, name
        os.close(handle)


def _sweep(folder: Path, prefix: str) -> None:
    """Remove this user's entries of ``folder`` whose names begin with ``prefix`` and whose owner process has ended."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and not entry.is_symlink():
                with contextlib.suppress(OSError):
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    if entry.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    handle = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
    finally:
        os.close(handle)


class AppendedFile:
    """A file to which records are appended, each completely or not at all.

    If the disk is full, a partly written record is removed again, and OSError is raised.
    """

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def append(self, data: bytes) -> None:
        """Write ``data`` without buffering."""
        size, rest = os.fstat(self._handle).st_size, memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._handle, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, size)
            raise

    def close(self) -> None:
        os.close(self._handle)


def existing_parent(path: Path) -> Path:
    """Return ``path`` if it is a folder, otherwise its nearest existing parent folder.

    The result is on the file system on which ``path`` is or would be created.
    """
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def disk_free_bytes(path: Path) -> int:
    """Return the bytes that this user can still write on the file system of ``path``, which need not exist yet."""
    return psutil.disk_usage(str(existing_parent(path))).free
