"""Files that are replaced whole, and where they may go."""

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
    """Where what can be made again is kept: ``$XDG_CACHE_HOME/parallax`` or ``~/.cache/parallax``; a folder of this
    user's in the temporary one where the home directory cannot be written. That is said once, and this process and
    those that it starts keep other libraries' caches there too."""
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
    except RuntimeError:  # no HOME, and no entry of this user
        reason = "HOME is not set"
    os.environ["XDG_CACHE_HOME"] = instead = str(_own_temporary())
    os.environ.setdefault("MPLCONFIGDIR", str(Path(instead) / "matplotlib"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(instead) / "triton"))
    logger.warning(
        "%s: caches are kept in %s; HOME or XDG_CACHE_HOME can name another folder", reason, instead
    )
    return Path(instead) / "parallax"


def _own_temporary() -> Path:
    """A folder that nobody else can write to, the same for all processes of this user."""
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
    """A file that takes the place of ``path`` when the block ends well: temporary file, fsync, rename. What a process
    that was killed has left of such a file goes with the next."""
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
    """Write ``text`` in place of ``path``, whole, with the rights of any new file, so that others may read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of an earlier process of the same number; or a link
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def making_folder(path: Path) -> Iterator[Path]:
    """A folder that becomes ``path``, where there is none or an empty one, when the block ends well: a folder in
    another one beside it, fsync of all that is in it, rename. What a process that was killed has left goes with the
    next."""
    alone = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.{_UNFINISHED}"
    _sweep(path.parent, prefix)
    handle, name = _own(lambda: _new_folder(path.parent, prefix))
    try:
        made = (
            Path(name) / path.name
        )  # with the rights of any new folder, which the one around it has not
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
            with contextlib.suppress(OSError):  # it holds something
                path.parent.rmdir()


def sync(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards. One that a killed process has left goes with the next."""
    base = Path(tempfile.gettempdir())
    _sweep(base, _FOLDER)
    handle, name = _own(lambda: _new_folder(base, _FOLDER))
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)
        os.close(handle)


def _new_folder(base: Path, prefix: str) -> tuple[int, str]:
    """One that is open, and its name."""
    while True:
        name = tempfile.mkdtemp(prefix=prefix, dir=base)
        with contextlib.suppress(FileNotFoundError):  # somebody took it for left over
            return os.open(name, os.O_RDONLY | os.O_DIRECTORY), name


def _own(make: Callable[[], tuple[int, str]]) -> tuple[int, str]:
    """What ``make`` makes, open and by name, locked as long as it stays open: others see that its maker lives."""
    while True:
        handle, name = make()
        # A file system without locks, where nothing is swept either.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if Path(name).exists():  # nobody took it for left over before it was locked
            return handle, name
        os.close(handle)


def _sweep(folder: Path, prefix: str) -> None:
    """Remove what begins with ``prefix`` in ``folder``, is this user's, and whose maker has gone."""
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
    """A file that grows by pieces, each of which is there whole or not at all: what a full disk took of one is given
    back, so that the next begins a line. OSError says so."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def append(self, data: bytes) -> None:
        """Write ``data``, past any buffer."""
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
    """``path`` or the nearest folder above it that exists: the file system that ``path`` will be on."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def disk_free_bytes(path: Path) -> int:
    """Bytes that this user can still write on the file system of ``path`` (which need not exist yet)."""
    return psutil.disk_usage(str(existing_parent(path))).free
