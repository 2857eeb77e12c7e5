"""Writes tensors into the files of a checkpoint: the main thread copies the tensors, and another thread writes the
copies.

The tensors of a file are collected in one buffer of :class:`~.snapshot.SnapshotMemory`. The thread reads the buffer
once to compute the tensors' checksums and the file's digest and to write the file.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from parallax.common.files import sync
from parallax.common.units import format_bytes
from parallax.errors import CheckpointError, printable
from parallax.machine.pinned import PlainArena
from parallax.model.files.tensors import FORMAT_NAMES, file_head
from parallax.runtime.checkpoint.checksums import bytes_of
from parallax.runtime.checkpoint.folder import UNTOUCHED, free_text
from parallax.runtime.checkpoint.snapshot import SnapshotMemory

PART_BYTES = 64 * 2**20  # of a file, which is copied before it is written
_CHUNK_BYTES = 2**20  # written and digested at one time
_ALIGNMENT = 64  # bytes at which a tensor begins in its buffer
WRITER = "parallax-checkpoint"  # prefix of the names of writing threads

Check = Callable[[str, Tensor], None]
"""Called with the name and the value of a tensor before it is written; raises if it must not be written."""


@dataclass(frozen=True, slots=True)
class WrittenParts:
    """The files that a rank has written. ``checksums`` maps the full name of each tensor to its CRC-32, and ``files``
    the name of each file to its size in bytes and its SHA-256."""

    checksums: dict[str, int] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


def contents_of(parts: Iterable[WrittenParts]) -> dict[str, Any]:
    """Return the entries of a checkpoint's index that describe the files in ``parts``: checksums, files, and the names
    of the optimizer states."""
    whole = WrittenParts()
    for part in parts:
        whole.checksums.update(part.checksums)
        whole.files.update(part.files)
    kinds = {name.split("/")[0] for name in whole.checksums}
    return {
        "checksums": whole.checksums,
        "files": whole.files,
        "optimizer": sorted(kinds - {"model"}),
    }


class PartWriter:
    """Writes one rank's tensors into files in ``folder``. The files' names begin with ``part``.

    ``part_bytes`` is the approximate size of a file. The tensors of a file are collected in a buffer of this size in
    ``memory``. ``thread`` is an executor with a single thread, which writes the files. Before it writes a tensor, it
    calls ``check`` with the tensor's name and value, which raises if the tensor must not be written.
    ``expected_bytes`` is the approximate size of all tensors of the rank.
    """

    def __init__(
        self,
        folder: Path,
        part: str,
        memory: SnapshotMemory,
        thread: ThreadPoolExecutor,
        *,
        check: Check = lambda name, value: None,
        part_bytes: int = PART_BYTES,
        expected_bytes: int = PART_BYTES,
    ) -> None:
        self._folder, self._part, self._check = folder, part, check
        self._memory, self._thread, self._part_bytes = memory, thread, part_bytes
        self._expected = expected_bytes
        self._count, self._cancelled = 0, threading.Event()
        self._written = WrittenParts()
        self._futures: list[Future[None]] = []
        self._batch: dict[str, Tensor] = {}
        self._buffer: Tensor | None = None
        self._at = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in FORMAT_NAMES:
            raise CheckpointError(
                f"{printable(name)} is of {tensor.dtype}, which safetensors does not have; {UNTOUCHED}"
            )
        start = -(-self._at // _ALIGNMENT) * _ALIGNMENT
        if self._buffer is not None and start + tensor.nbytes > len(self._buffer):
            self._submit()
        if self._buffer is None:
            start, size = 0, max(tensor.nbytes, min(self._part_bytes, self._expected), _ALIGNMENT)
            self._buffer = self._memory.acquire(size)
        place = self._buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor.detach())
        self._batch[name], self._at = place, start + tensor.nbytes

    def end(self) -> Future[WrittenParts]:
        """Close the last file. The returned future is complete when all files are written."""
        if self._batch or not self._count:
            self._submit()
        return self._thread.submit(self._collect)

    def cancel(self) -> None:
        """Skip the files that have not been written yet."""
        self._cancelled.set()
        if self._buffer is not None:
            self._memory.release(self._buffer)
            self._buffer = None

    def _submit(self) -> None:
        number = f"-{self._count:03d}" if self._count else ""
        path = self._folder / f"{self._part}{number}.safetensors"
        self._futures.append(self._thread.submit(self._write, path, self._batch, self._buffer))
        self._expected = max(0, self._expected - self._at)
        self._count, self._batch, self._buffer, self._at = self._count + 1, {}, None, 0

    def _write(self, path: Path, tensors: dict[str, Tensor], buffer: Tensor | None) -> None:
        try:
            if not self._cancelled.is_set():
                for name, value in tensors.items():
                    self._check(name, value)
                self._written.files[path.name] = write_file(path, tensors, self._written.checksums)
        except BaseException:
            self._cancelled.set()
            raise
        finally:
            if buffer is not None:
                self._memory.release(buffer)

    def _collect(self) -> WrittenParts:
        for future in self._futures:  # all are done: there is one thread
            future.result()
        return self._written


def write_file(path: Path, tensors: dict[str, Tensor], checksums: dict[str, int]) -> dict[str, Any]:
    """Write host tensors to the safetensors file ``path`` and sync it. Return the file's entry in the index: its size
    in bytes and its SHA-256. Also add the CRC-32 of each tensor to ``checksums``. Raises :class:`CheckpointError` if
    the file cannot be written."""
    # The widest types first, so that all tensors are aligned.
    ordered = sorted(tensors.items(), key=lambda entry: (-entry[1].element_size(), entry[0]))
    head, size = file_head(dict(ordered)), sum(tensor.nbytes for _, tensor in ordered)
    whole = hashlib.sha256()
    try:
        with path.open("wb", buffering=_CHUNK_BYTES) as file:
            _put(file, head, whole)
            for name, tensor in ordered:
                checksums[name] = _put(file, bytes_of(tensor), whole)
        sync(path)
    except OSError as error:
        reason = printable(error.strerror or str(error))
        raise CheckpointError(
            f"cannot write {format_bytes(size)} to {path}: {reason}{free_text(path)}; {UNTOUCHED}"
        ) from error
    return {"bytes": len(head) + size, "sha256": whole.hexdigest()}


def _put(file: BinaryIO, data: bytes | memoryview, whole: Any) -> int:
    """Write ``data`` to ``file``, update ``whole``, the hash of the file, with ``data``, and return the CRC-32 of
    ``data``. All this is done chunk by chunk, so that each chunk stays in the processor's caches."""
    found = 0
    for start in range(0, len(data), _CHUNK_BYTES):
        chunk = data[start : start + _CHUNK_BYTES]
        found = zlib.crc32(chunk, found)
        whole.update(chunk)
        file.write(chunk)
    return found


def write_parts(
    folder: Path, part: str, tensors: Iterable[tuple[str, Tensor]], part_bytes: int = PART_BYTES
) -> WrittenParts:
    """Write named tensors into files and wait for them; the arguments are those of :class:`PartWriter`."""
    memory = SnapshotMemory(PlainArena, 2 * part_bytes)
    with ThreadPoolExecutor(1, WRITER) as thread:
        writer = PartWriter(folder, part, memory, thread, part_bytes=part_bytes)
        for name, tensor in tensors:
            writer.add(name, tensor)
        return writer.end().result()
