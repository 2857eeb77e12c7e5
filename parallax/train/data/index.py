"""Indexes of data files (names, sizes, offsets), which are built once and cached.

An index is a few arrays in one file. All ranks and workers of a host map this file, so even 10⁷ rows use memory only
once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from parallax.common.documents import plain_json
from parallax.common.files import cache_directory, replacing
from parallax.errors import DataError, printable

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Index:
    """The content of an index: named ``arrays``, and ``notes``, which are JSON data. ``path``: the cache file; None if
    the index is not cached."""

    arrays: Arrays
    notes: dict[str, Any]
    path: Path | None = None

    def digest(self) -> str:
        """Return the SHA-256 of the content."""
        found = hashlib.sha256(json.dumps(self.notes, sort_keys=True).encode())
        for name in sorted(self.arrays):
            found.update(name.encode() + np.ascontiguousarray(self.arrays[name]).tobytes())
        return found.hexdigest()


class Names:
    """An array of names: the bytes of all names in one array, and the end of each name in another."""

    def __init__(self, letters: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self._letters, self._ends = letters, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> bytes:
        start = int(self._ends[number - 1]) if number else 0
        return self._letters[start : int(self._ends[number])].tobytes()


class NameList:
    """Collects names, for storage as :class:`Names`."""

    def __init__(self) -> None:
        self._letters, self._ends = bytearray(), array("q")

    def append(self, name: bytes) -> None:
        self._letters += name
        self._ends.append(len(self._letters))

    def arrays(self, key: str) -> Arrays:
        """Return the names as two arrays: their bytes under the name ``key``, and their ends under ``key`` with the
        suffix _ends."""
        return {key: np.frombuffer(self._letters, np.uint8), f"{key}_ends": integers(self._ends)}


def integers(values: Iterable[int]) -> NDArray[np.int64]:
    """Return ``values`` as an int64 array."""
    return np.array(values if isinstance(values, array) else list(values), dtype=np.int64)


def cached(
    kind: str,
    key: Any,
    make: Callable[[], Index],
    current: Callable[[Index], bool] = lambda index: True,
) -> Index:
    """Return the index of ``kind`` and ``key`` from the cache if ``current`` accepts it; otherwise the result of
    ``make``, which is then cached.

    One process builds the index, and other processes of the same user on this host wait. An index with the note
    ``transient`` is not cached.
    """
    name = hashlib.sha256(json.dumps([key]).encode()).hexdigest()[:32]
    path = cache_directory() / f"{kind}-{name}.safetensors"
    if (found := _load(path)) is not None and current(found):
        return found
    with _alone(path):
        if (found := _load(path)) is not None and current(found):
            return found  # another process has made it meanwhile
        made = make()
        if made.notes.get("transient"):
            return made
        try:
            with replacing(path) as file:
                file.write(save(made.arrays, {"notes": json.dumps(made.notes)}))
        except OSError as error:
            raise _unwritable(path, error) from error
    return _load(path) or made


def _load(path: Path) -> Index | None:
    """Return a cached index, mapped; None if there is none or if it is damaged."""
    try:
        with safe_open(str(path), "pt") as file:
            notes = plain_json((file.metadata() or {})["notes"])
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError):
        return None
    return Index(arrays, notes, path)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A context that holds the lock of ``path``, if the file system has locks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot keep the data's index in {printable(str(path.parent))} ({error.strerror}): make it writable, or point "
        "XDG_CACHE_HOME to a folder with space"
    )
