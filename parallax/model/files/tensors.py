"""Read and write tensors in safetensors files one at a time, with conversions described by recipes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from parallax.errors import CheckpointError, printable

Read = Callable[[str], Tensor]
"""A function that returns the tensor with the given name."""


class TensorFiles(Protocol):
    """The interface to files that contain tensors. ``held``: {name: meta tensor}. ``read(name)`` returns the tensor."""

    held: Mapping[str, Tensor]

    def read(self, name: str) -> Tensor: ...


NUMBER_FORMATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""{name of a dtype in safetensors files: torch's dtype}."""

FORMAT_NAMES = {dtype: name for name, dtype in NUMBER_FORMATS.items()}


@dataclass(frozen=True)
class Recipe:
    """A computation of some tensors from others, between files and a model in either direction.

    ``sources``: the names of the tensors from which the others are computed. ``make(read)`` returns {name: tensor};
    ``read`` returns a source tensor by its name. If ``read`` returns meta tensors, so does ``make``, which shows names,
    shapes and dtypes.
    """

    sources: tuple[str, ...]
    make: Callable[[Read], dict[str, Tensor]]

    @classmethod
    def same(cls, source: str, name: str) -> Recipe:
        """Return a recipe that renames the tensor ``source`` to ``name``."""
        return cls((source,), lambda read: {name: read(source)})


def held_in(file: Any) -> dict[str, Tensor]:
    """Return {name: meta tensor} for the tensors in an open safetensors file."""
    return {name: _without_values(name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118


def _without_values(name: str, part: Any) -> Tensor:
    kind = part.get_dtype()
    if kind not in NUMBER_FORMATS:
        raise CheckpointError(
            f"{printable(name)} is in number format {kind}, which is not supported: accepted are "
            f"{', '.join(NUMBER_FORMATS)}"
        )
    return torch.empty(part.get_shape(), dtype=NUMBER_FORMATS[kind], device="meta")


def file_head(held: Mapping[str, Tensor]) -> bytes:
    """Return the header of a safetensors file that contains the tensors ``held``, in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in held.items():
        stop = start + tensor.nbytes
        kind, shape = FORMAT_NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data must start at a multiple of eight
    return struct.pack("<Q", len(text)) + text


def write_tensors(
    path: Path, held: Mapping[str, Tensor], recipes: Sequence[Recipe], read: Read
) -> None:
    """Write the tensors that ``recipes`` compute to a safetensors file, in this order.

    ``held``: {name: meta tensor} for all these tensors, in the same order. ``read`` returns a source tensor by its
    name.
    """
    with path.open("wb") as file:
        file.write(file_head(held))
        names = iter(held.items())
        for recipe in recipes:
            for name, tensor in recipe.make(read).items():
                _check_due(name, tensor, *next(names))
                file.write(memoryview(_plain_bytes(tensor)))


def _plain_bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _check_due(name: str, tensor: Tensor, due: str, wanted: Tensor) -> None:
    if (name, tensor.shape, tensor.dtype) != (due, wanted.shape, wanted.dtype):
        raise CheckpointError(
            f"{name} is now {list(tensor.shape)} of {tensor.dtype} instead of {due} of {list(wanted.shape)} and "
            f"{wanted.dtype}: the checkpoint has changed meanwhile; run it again"
        )
