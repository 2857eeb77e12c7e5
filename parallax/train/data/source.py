"""The interfaces of data sources to the training loop, and of the ``data=`` options to a run."""

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
"""From a number of rows to inputs and targets of that many rows, on the meta device."""


class Source(Protocol):
    """The data source of a training loop."""

    def batch(self, rows: int) -> Rows:
        """Return the next global batch. A source without more rows raises StopIteration; the run then ends with a
        checkpoint."""

    def validation(self, index: int, rows: int) -> Rows:
        """Return held-out batch ``index``: rows [index · rows, (index + 1) · rows), equal on each call. The last batch
        may have fewer rows. After it, return no rows or raise StopIteration or IndexError. A source whose held-out rows
        repeat gives their number in ``validation_rows``. A source with several sets of held-out rows has a mapping
        ``validation_sets`` from the name of each to an object with both."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch as numbers, text, tensors and arrays in lists and dictionaries, at most
        64 MiB as text. Called for each checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position ``state``."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Registered):
    """Settings of a data source, from which it is opened: the base class of the dataclasses of ``data=``.

    Each dataclass is in its own module of :mod:`parallax.train.data` and overrides the methods that differ."""

    package: ClassVar[str] = "parallax.train.data"

    @property
    def label(self) -> str:
        """The name of the rows in errors."""
        return f"data={self.name}"

    @property
    def identifies_rows(self) -> bool:
        """Whether a source's ``fingerprint`` identifies its rows, so that a run may resume with the same rows at
        another location."""
        return False

    @abc.abstractmethod
    def open(self, model: ModelConfig, seed: int, *, quiet: bool = True) -> Source:
        """Return the source of rows for ``model``. ``quiet`` hides progress."""

    def shapes(self, model: ModelConfig) -> Shapes | None:  # noqa: ARG002
        """Return rows for ``model`` without values; None if their shapes are unknown before rows are read."""
        return None

    def tokens_per_row(self, model: ModelConfig) -> int:  # noqa: ARG002
        """Return the tokens in a row, to report tokens per second; 1 if rows are not tokens."""
        return 1

    def check_size(self, source: Source, model: ModelConfig, rows: int) -> None:
        """Raise :class:`~parallax.errors.DataError` if ``source`` has too few rows for a global batch of ``rows``
        rows."""


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch's CPU equally on all ranks; a user's source may draw from
    them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
