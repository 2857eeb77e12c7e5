"""The interface between the server and a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

DTYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
    "BF16": torch.bfloat16,
}
"""Datatypes of the protocol, and torch's."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """An input or an output: its name, its type, and the sizes of its dimensions; -1 for the rows, which come first,
    and for any other size that a request chooses."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def datatype(self) -> str:
        return NAMES[self.dtype]

    def accepts(self, shape: Sequence[int]) -> bool:
        """Whether a tensor may have ``shape``."""
        return len(shape) == len(self.shape) and all(
            size in (-1, have) for size, have in zip(self.shape, shape)
        )


class ServedModel(Protocol):
    """A model that a server runs. ``name`` and ``version`` are parts of its address."""

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs for inputs on the CPU with the same number of rows, as tensors on the CPU with as many
        rows. One thread at a time calls it."""
        ...
