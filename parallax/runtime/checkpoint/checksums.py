"""Checksums of tensors, to name the damaged ones, and of files and the index, to detect any damage."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.errors import CheckpointError, printable

_PIECES, _PIECE_BYTES = 64, 1024  # read for a mark
_CHUNK_BYTES = 2**20  # read and digested at one time
SEAL = "sha256"  # the index's own entry


def checksum(tensor: Tensor, before: int = 0) -> int:
    """Return the CRC-32 of all bytes of a contiguous host tensor; ``before`` is the CRC-32 of preceding bytes."""
    return zlib.crc32(bytes_of(tensor), before)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def mark(tensor: Tensor) -> int:
    """Return a checksum that identifies a tensor which a checkpoint leaves out. It covers all bytes of a small tensor,
    and evenly spaced pieces of a large one."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if len(flat) > _PIECES * _PIECE_BYTES:
        step = (len(flat) - _PIECE_BYTES) // (_PIECES - 1)
        flat = flat.as_strided((_PIECES, _PIECE_BYTES), (step, 1))
    return checksum(flat.contiguous().cpu())


def seal(index: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all entries of ``index``, the content of a ``checkpoint.json``, except the entry that holds
    this hash."""
    entries = {key: value for key, value in index.items() if key != SEAL}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def verify_file(path: Path, expected: str, checksums: Mapping[str, int]) -> None:
    """Read a safetensors file once, sequentially. Raises :class:`CheckpointError` if its SHA-256 is not ``expected``;
    the error names the tensors that differ from ``checksums``."""
    whole, damaged = hashlib.sha256(), list[str]()
    with path.open("rb") as file:
        head = file.read(8)
        text = file.read(int.from_bytes(head, "little"))
        whole.update(head + text)
        for name, (start, stop) in _spans(text):
            left, found = stop - start, 0
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                whole.update(chunk)
                found, left = zlib.crc32(chunk, found), left - len(chunk)
            if checksums.get(name) != found:
                damaged.append(name)
        whole.update(file.read())
    if whole.hexdigest() != expected:
        shown = ", ".join(printable(name) for name in damaged[:3])
        what = f"{shown} in it is damaged (checksum)" if damaged else "it is damaged (SHA-256)"
        raise CheckpointError(f"{path}: {what}; use an earlier checkpoint")


def _spans(text: bytes) -> list[tuple[str, tuple[int, int]]]:
    """Return the name and the byte range of each tensor in the header ``text``, ordered by range. Ranges start at the
    end of the header."""
    header = json.loads(text)
    found = [
        (name, tuple(each["data_offsets"]))
        for name, each in header.items()
        if name != "__metadata__"
    ]
    return sorted(found, key=lambda entry: entry[1])
