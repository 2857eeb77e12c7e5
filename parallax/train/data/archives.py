"""Find tar files by a path or a URL, and read pieces of them from local disks or through fsspec."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from parallax.errors import ConfigError, DataError, UserError, printable
from parallax.train.data.order import Numbers
from parallax.train.data.paths import data_path, inside

SUFFIX = ".tar"
_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4")
_RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
_MOST = 10**6  # archives that braces stand for
_OPEN = 64  # files that a process holds open
_SETS = ("train", "val", "valid", "validation", "test")


class Archives(Protocol):
    """Several tar files, which are identified by their index. ``sizes``: the bytes of each file. ``identity``: JSON
    data that identify the files."""

    sizes: list[int]
    identity: list[Any]

    def where(self, archive: int) -> str:
        """Return the name of an archive, for error messages."""

    def opened(self, archive: int) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a whole archive."""

    def read(self, archives: Numbers, offsets: Numbers, sizes: Numbers) -> list[bytes]:
        """Return ``sizes[i]`` bytes at ``offsets[i]`` of archive ``archives[i]``, for each i. Raises :class:`DataError`
        if a read fails."""


def find_archives(path: str, label: str) -> Archives:
    """Return the archives that ``path`` names: a folder, a glob, a name with ranges in braces, or a URL of one of
    these. ``label`` names the data in error messages."""
    if "://" in path:
        return RemoteArchives(path, label)
    return LocalArchives(_local(path, label))


def _local(path: str, label: str) -> list[Path]:
    whole = Path(path).expanduser().absolute()
    if not path or whole.exists() or not (glob.has_magic(path) or _RANGE.search(path)):
        root = data_path("data.path", path)
        if not root.is_dir():
            return [root]
        names = sorted(each.name for each in os.scandir(root) if not each.name.startswith("."))
        return [inside(root, name, label) for name in _tars(names, path, label)]
    if not glob.has_magic(path):
        return [data_path("data.path", each) for each in expanded(path)]
    fixed = Path(*takewhile(lambda part: not glob.has_magic(part), whole.parts[:-1]))
    found = [
        name
        for pattern in expanded(str(whole.relative_to(fixed)))
        for name in sorted(glob.glob(pattern, root_dir=fixed, recursive=True))
    ]
    if not found:
        raise DataError(f"{label}: no file matches")
    return [inside(fixed, name, label) for name in found]


def _tars(names: list[str], path: str, label: str) -> list[str]:
    """Return the tar files among ``names``, the files that ``path`` names. Raises :class:`DataError` if there are none,
    if a tar file is compressed, or if the files belong to different data sets, such as train and val, by their
    names."""
    if compressed := [each for each in names if re.search(r"\.tar\.\w+$|\.tgz$", each)]:
        raise _compressed(compressed[0], label)
    found = [each for each in names if each.endswith(SUFFIX)]
    if not found:
        raise DataError(
            f"{label}: it holds no {SUFFIX} file; name a folder of tar files, or a glob such as "
            f"{printable(path.rstrip('/'))}/**/*{SUFFIX}"
        )
    words = [set(re.split(r"[^a-z]+", os.path.basename(each).lower())) for each in found]
    sets = [each for each in _SETS if any(each in word for word in words)]
    if len(sets) > 1 and sets[0] == _SETS[0]:
        place = printable(path.rstrip("/"))
        others = " ".join(
            f"'data.validation.{each}.path={place}/*{each}*{SUFFIX}'" for each in sets[1:]
        )
        raise DataError(
            f"{label}: it holds shards of {' and '.join(sets)}, which are sets of their own: use "
            f"'data.path={place}/*{sets[0]}*{SUFFIX}' {others}"
        )
    return found


def expanded(path: str) -> list[str]:
    """Return the names that ``path`` expands to, with ranges in braces as in a shell.

    >>> expanded("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    found = [path]
    while match := _RANGE.search(found[0]):
        first, last = match.groups()
        numbers = range(int(first), int(last) + 1)
        if not 0 < len(numbers) * len(found) <= _MOST:
            raise ConfigError(
                f"data.path={printable(path)}: {match[0]} stands for {len(numbers):,} names; accepted are 1 to "
                f"{_MOST:,}"
            )
        found = [
            _RANGE.sub(f"{number:0{len(first)}d}", each, count=1)
            for each in found
            for number in numbers
        ]
    return found


def _compressed(name: str, label: str) -> DataError:
    return DataError(
        f"{label}: {printable(name)} is compressed, so its members cannot be read where they lie; decompress it"
    )


def check_head(head: bytes, where: str) -> None:
    """Raise :class:`DataError` if ``head``, the first bytes of an archive, shows that the archive is compressed.
    ``where``: the archive, for error messages."""
    magic = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
    if head.startswith(magic):
        raise _compressed("it", where)


class LocalArchives:
    """Archives on a local disk. Archives are read with ``pread``, which does not use the file position, because
    processes that share a file descriptor also share the file position. A process opens a file at its first read, and
    keeps only a few files open."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        found = [each.stat() for each in paths]
        self.sizes = [each.st_size for each in found]
        self.identity = [
            [os.fsencode(path).hex(), each.st_size, each.st_mtime_ns]
            for path, each in zip(paths, found)
        ]
        self._handles: OrderedDict[int, int] = OrderedDict()

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", {}).values():
            os.close(handle)

    def where(self, archive: int) -> str:
        return printable(str(self._paths[archive]))

    @contextlib.contextmanager
    def opened(self, archive: int) -> Iterator[IO[bytes]]:
        with os.fdopen(self._open(archive), "rb") as file:
            yield file

    def read(self, archives: Numbers, offsets: Numbers, sizes: Numbers) -> list[bytes]:
        found = [b""] * len(archives)
        for place in np.lexsort((offsets, archives)).tolist():
            found[place] = self._read(int(archives[place]), int(offsets[place]), int(sizes[place]))
        return found

    def _read(self, archive: int, offset: int, size: int) -> bytes:
        try:
            found = os.pread(self._handle(archive), size, offset)
            while len(found) < size:
                more = os.pread(self._handle(archive), size - len(found), offset + len(found))
                if not more:
                    raise DataError(f"{self.where(archive)}: it ends before offset {offset + size}")
                found += more
        except OSError as error:
            raise DataError(
                f"{self.where(archive)}: cannot read at offset {offset} ({error.strerror})"
            ) from error
        return found

    def _handle(self, archive: int) -> int:
        if archive in self._handles:
            self._handles.move_to_end(archive)
            return self._handles[archive]
        handle = self._handles[archive] = self._open(archive)
        if len(self._handles) > _OPEN:
            os.close(self._handles.popitem(last=False)[1])
        return handle

    def _open(self, archive: int) -> int:
        try:
            handle = os.open(self._paths[archive], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise DataError(
                f"{self.where(archive)}: it cannot be read ({error.strerror}); make it readable or remove it"
            ) from error
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size != self.sizes[archive]:
            os.close(handle)
            raise DataError(
                f"{self.where(archive)}: it has changed since the run began; start again"
            )
        return handle


class RemoteArchives:
    """Archives read through fsspec. ``url``: a folder, a glob, a name with ranges in braces, or a file."""

    def __init__(self, url: str, label: str) -> None:
        self._url, self._label, self._process = url, label, 0
        self._filesystem: Any = None
        self._path = ""  # the URL's path within the file system
        with self._named(url):
            self._paths = self._found()
            details = [self._connected().info(each) for each in self._paths]
            self.sizes = [int(each.get("size") or 0) for each in details]
        stamps = ("ETag", "etag", "mtime", "LastModified", "last_modified", "created", "generation")
        self.identity = [
            [path, size, [str(each[key]) for key in stamps if key in each]]
            for path, size, each in zip(self._paths, self.sizes, details)
        ]
        for number, size in enumerate(self.sizes):
            if not size:
                raise DataError(
                    f"{self.where(number)}: its server does not tell its size, or it is empty"
                )

    def where(self, archive: int) -> str:
        return printable(str(self._connected().unstrip_protocol(self._paths[archive])))

    @contextlib.contextmanager
    def opened(self, archive: int) -> Iterator[IO[bytes]]:
        with self._named(self.where(archive)), self._connected().open(self._paths[archive]) as file:
            yield file

    def read(self, archives: Numbers, offsets: Numbers, sizes: Numbers) -> list[bytes]:
        paths = [self._paths[each] for each in archives.tolist()]
        with self._named(self._url):
            found = self._connected().cat_ranges(
                paths, offsets.tolist(), (offsets + sizes).tolist(), on_error="return"
            )
        for place, data in enumerate(found):
            size, where = int(sizes[place]), self.where(int(archives[place]))
            if isinstance(data, Exception):
                raise DataError(
                    f"{where}: cannot read at offset {offsets[place]} ({_error_text(data)})"
                ) from data
            if len(data) != size:
                raise DataError(
                    f"{where}: {len(data):,} bytes came of {size:,} at offset {offsets[place]}; its server must answer "
                    "requests for ranges"
                )
        return list(found)

    def _found(self) -> list[str]:
        filesystem, path = self._connected(), self._path
        if glob.has_magic(path):
            found = [each for name in expanded(path) for each in sorted(filesystem.glob(name))]
        elif len(names := expanded(path)) > 1 or path.endswith(SUFFIX):
            return names
        else:
            listed = sorted(str(each) for each in filesystem.ls(path, detail=False))
            return _tars(listed, self._url, self._label)
        if not found:
            raise DataError(f"{self._label}: no file matches")
        return [str(each) for each in found]

    def _connected(self) -> Any:
        """Return the file system. A forked process creates a file system of its own, because a file system may use a
        thread, and a fork does not copy threads."""
        if self._process != os.getpid():
            from fsspec.core import url_to_fs

            with self._named(self._url):
                self._filesystem, self._path = url_to_fs(self._url)
            self._process = os.getpid()
        return self._filesystem

    @contextlib.contextmanager
    def _named(self, place: str) -> Iterator[None]:
        """A context that converts any error of fsspec and its file systems to a :class:`DataError` that names
        ``place``. All exceptions are caught, because each file system raises its own exception classes."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise DataError(f"{printable(place)}: {_error_text(error)}") from error


def _error_text(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return printable(f"{type(error).__name__}: {text}")
