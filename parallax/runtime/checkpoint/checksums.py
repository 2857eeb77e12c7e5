"""Checksums of tensors, by which damage and other values are known."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_PIECES, _PIECE_BYTES = 64, 1024  # of a tensor that is left out


def checksum(tensor: Tensor) -> int:
    """Of all bytes of a tensor in one run of host memory."""
    return zlib.crc32(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


def mark(tensor: Tensor) -> int:
    """A checksum of some of the bytes of a tensor that a checkpoint leaves out, to know it by: all of a small one,
    pieces from everywhere of a large one."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if len(flat) > _PIECES * _PIECE_BYTES:
        step = (len(flat) - _PIECE_BYTES) // (_PIECES - 1)
        flat = flat.as_strided((_PIECES, _PIECE_BYTES), (step, 1))
    return checksum(flat.contiguous().cpu())
