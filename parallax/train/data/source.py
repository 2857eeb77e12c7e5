"""The interface of data sources, from which a training loop reads rows, and of the options of ``data=``, which open a
data source."""

from __future__ import annotations

import abc
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from parallax.common.registered import Registered
from parallax.model.source import ModelConfig
from parallax.runtime.batch import Rows

Shapes = Callable[[int], tuple[tuple[Tensor, ...], Tensor]]
"""A function that returns inputs and targets of the given number of rows, on the meta device."""


class Source(Protocol):
    """A data source, from which a training loop reads batches."""

    def batch(self, rows: int) -> Rows:
        """Return the next global batch. Raise StopIteration after the last row; the run then saves a checkpoint and
        ends."""

    def validation(self, index: int, rows: int) -> Rows:
        """Return held-out batch ``index``: rows [index · rows, (index + 1) · rows), equal on each call. The last batch
        may be smaller. After the last batch, return no rows or raise StopIteration or IndexError.

        A source with a known number of held-out rows has that number as the attribute ``validation_rows``. A source
        with several held-out sets has a mapping ``validation_sets``: name → an object with this method and
        ``validation_rows``.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch for a checkpoint, as nested lists and dictionaries of numbers, text,
        tensors and arrays, at most 64 MiB as text."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position ``state``."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Registered):
    """The base class of the options of ``data=``: settings that open a data source.

    Each option is a dataclass in its own module of :mod:`parallax.train.data`, and overrides methods of this class.
    """

    package: ClassVar[str] = "parallax.train.data"
    reading: ClassVar[frozenset[str]] = frozenset()
    """The settings that affect only how rows are read, not which. A resumed run may change them."""

    @property
    def label(self) -> str:
        """The name of the data in error messages."""
        return f"data={self.name}"

    @property
    def identifies_rows(self) -> bool:
        """Whether the source has a ``fingerprint`` of its rows. If so, a run may resume with another path that has the
        same rows."""
        return False

    @property
    def pads_rows(self) -> bool:
        """Whether rows are token ids with padding at the end. Only models of transformers get a mask for the
        padding."""
        return False

    @abc.abstractmethod
    def open(self, model: ModelConfig, seed: int, *, quiet: bool = True) -> Source:
        """Return the source of rows for ``model``. ``quiet`` hides progress."""

    def shapes(self, model: ModelConfig) -> Shapes | None:  # noqa: ARG002
        """Return the shapes and dtypes of rows for ``model``; None if they are unknown before rows are read."""
        return None

    def tokens_per_row(self, model: ModelConfig) -> int:  # noqa: ARG002
        """Return the tokens in a row, for reports of tokens per second; 1 if rows are not tokens."""
        return 1

    def check_size(self, source: Source, model: ModelConfig, rows: int) -> None:
        """Raise :class:`~parallax.errors.DataError` if ``source`` has fewer than ``rows`` rows, those of a global
        batch."""


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch's CPU equally on all ranks, because a user's source may
    draw from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
