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
"""The datatypes of the Open Inference Protocol, and the corresponding torch dtypes."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """The description of one input or output tensor.

    ``shape``: the size of each dimension. The first dimension is the rows, and is -1. Any other size that may differ
    between requests is -1, too.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def datatype(self) -> str:
        return NAMES[self.dtype]

    def accepts(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of the given ``shape`` matches this description."""
        return len(shape) == len(self.shape) and all(
            size in (-1, have) for size, have in zip(self.shape, shape)
        )


class BatchOutputs(NamedTuple):
    """The outputs of a batch or of one request.

    ``tensors``          the output tensors, on the CPU
    ``version``          the version of the weights that computed them
    ``queue_seconds``    how long the request was queued
    ``compute_seconds``  how long its batch was computed

    Both times are 0 in the outputs of a batch.
    """

    tensors: list[Tensor]
    version: str
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0


class ModelFailed(Exception):
    """Raised if the model raises an exception. The message has that exception's type and the first line of its text."""

    @classmethod
    def of(cls, error: Exception) -> ModelFailed:
        """Return a :class:`ModelFailed` for ``error``, which the model raised."""
        text = (str(error).splitlines() or [""])[0]
        return cls(printable(f"{type(error).__name__}: {text}")[:300])


class ServedModel(ABC):
    """The interface to a model that a server runs.

    ``name``, ``version``  parts of the model's URL; the version is that of the newest weights
    ``inputs``             descriptions of the input tensors
    ``outputs``            descriptions of the output tensors
    ``capacity``           the number of batches that :meth:`run` may compute at the same time; 0: it cannot compute now
    ``replicas``           the requested number of copies of the model
    ``ready``              the number of copies that can compute now
    ``most``               the largest number of copies that may be requested
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
        """Return the outputs for ``tensors``, which are on the CPU and have equal numbers of rows.

        At most :attr:`capacity` threads call this at the same time.
        """

    def on_change(self, call: Callable[[], None]) -> None:  # noqa: B027
        """Register ``call``, which is called from any thread when :attr:`capacity` may have changed."""

    def scale(self, replicas: int) -> None:  # noqa: B027
        """Set the requested number of copies, between 1 and :attr:`most`, and return at once.

        Copies are started or stopped afterwards.
        """
