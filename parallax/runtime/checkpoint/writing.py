"""Tensors into the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from parallax.common.files import sync
from parallax.common.units import format_bytes
from parallax.errors import CheckpointError, printable
from parallax.runtime.checkpoint.checksums import checksum
from parallax.runtime.checkpoint.folder import UNTOUCHED, free_words

PART_BYTES = 64 * 2**20  # of a file; they are copied before they are written


def write_parts(
    partial: Path, part: str, tensors: Iterable[tuple[str, Tensor]], part_bytes: int = PART_BYTES
) -> dict[str, int]:
    """Write named tensors, in files of about ``part_bytes``, so that never more of them need be in memory; the
    checksum of each."""
    checksums: dict[str, int] = {}
    batch: dict[str, Tensor] = {}
    count = 0

    def write() -> None:
        path = partial / (f"{part}-{count:03d}.safetensors" if count else f"{part}.safetensors")
        checksums.update(_write_part(path, batch))
        batch.clear()

    for name, tensor in tensors:
        batch[name] = tensor.detach().to("cpu").contiguous()
        if sum(value.nbytes for value in batch.values()) >= part_bytes:
            write()
            count += 1
    if batch or not count:
        write()
    return checksums


def _write_part(path: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    try:
        save_file(tensors, path)
        sync(path)
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise CheckpointError(
            f"cannot write {format_bytes(size)} to {path}: {printable(str(error))}{free_words(path)}; {UNTOUCHED}"
        ) from error
    return {name: checksum(tensor) for name, tensor in tensors.items()}
