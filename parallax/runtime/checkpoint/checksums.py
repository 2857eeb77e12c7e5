"""Checksums: of tensors, by which damage is named, and of files and of the index, by which none goes unseen."""

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

_PIECES, _PIECE_BYTES = 64, 1024  # of a tensor that is left out
_CHUNK_BYTES = 2**20  # read and digested at one time
SEAL = "sha256"  # the index's own entry


def checksum(tensor: Tensor, before: int = 0) -> int:
    """Of all bytes of a tensor in one run of host memory."""
    return zlib.crc32(bytes_of(tensor), before)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor in one run of host memory."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def mark(tensor: Tensor) -> int:
    """A checksum of some of the bytes of a tensor that a checkpoint leaves out, to know it by: all of a small one,
    pieces from everywhere of a large one."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if len(flat) > _PIECES * _PIECE_BYTES:
        step = (len(flat) - _PIECE_BYTES) // (_PIECES - 1)
        flat = flat.as_strided((_PIECES, _PIECE_BYTES), (step, 1))
    return checksum(flat.contiguous().cpu())


def seal(index: Mapping[str, Any]) -> str:
    """The SHA-256 of what an index says."""
    said = {key: value for key, value in index.items() if key != SEAL}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def verify_file(path: Path, expected: str, checksums: Mapping[str, int]) -> None:
    """Read a safetensors file once, from its beginning to its end, and raise :class:`CheckpointError` where its SHA-256
    is not ``expected``; the message names the tensors whose ``checksums`` are others."""
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
    """Where each tensor lies behind a file's header, in order."""
    header = json.loads(text)
    found = [
        (name, tuple(each["data_offsets"]))
        for name, each in header.items()
        if name != "__metadata__"
    ]
    return sorted(found, key=lambda entry: entry[1])
