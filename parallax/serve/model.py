"""The interface between the server and a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallax.errors import printable

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


class BatchOutputs(NamedTuple):
    """The outputs of a batch, as tensors on the CPU, and the version of the weights that computed them. In the
    answer to a request, ``queue_seconds`` is its wait in the queue, and ``compute_seconds`` the time of its batch."""

    tensors: list[Tensor]
    version: str
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0


class ModelFailed(Exception):
    """The model raised an exception; the text names it."""

    @classmethod
    def of(cls, error: Exception) -> ModelFailed:
        """Return the failure for an exception of the model."""
        text = (str(error).splitlines() or [""])[0]
        return cls(printable(f"{type(error).__name__}: {text}")[:300])


class ServedModel(ABC):
    """A model that a server runs.

    ``name``, ``version``  parts of its address; the version is that of the newest weights
    ``capacity``           batches that :meth:`run` may compute at once; 0 while it cannot compute
    ``replicas``           copies of the model that are to run; ``ready``: that can compute; ``most``: that may run
    ``fetched_bytes``      bytes of offloaded parameters fetched so far
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    version = ""
    capacity = 1
    replicas, ready, most = 1, 1, 1
    fetched_bytes = 0

    @abstractmethod
    def run(self, tensors: Sequence[Tensor]) -> BatchOutputs:
        """Return the outputs for inputs on the CPU with equal numbers of rows. At most :attr:`capacity` threads call it
        at once."""

    def on_change(self, call: Callable[[], None]) -> None:  # noqa: B027
        """Have ``call`` called, by any thread, when :attr:`capacity` may have changed."""

    def scale(self, replicas: int) -> None:  # noqa: B027
        """Start or stop copies until ``replicas`` run, between 1 and :attr:`most`. Returns at once."""
