"""Reading images, from folders or tar files, as ranks read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from parallax.errors import ConfigError, DataError
from parallax.model.factory.mlp import MLPConfig
from parallax.train.data.indexed import IndexedDataConfig, IndexedSource

Step = tuple[Tensor, Tensor]
"""Inputs and targets of a batch."""


@contextmanager
def started(config: IndexedDataConfig, seed: int) -> Iterator[IndexedSource]:
    """The source of ``config``, with its workers."""
    source = config.indexed(MLPConfig(), seed)
    source.start()
    try:
        yield source
    finally:
        source.close()


def read(source: IndexedSource, rows: int, parts: int = 1) -> Step:
    """The next batch, read in ``parts`` micro-batches."""
    batch = source.batch(rows)
    spans = list(pairwise(rows * each // parts for each in range(parts + 1)))
    return (
        torch.cat([batch.inputs(*span) for span in spans]),
        torch.cat([batch.targets(*span) for span in spans]),
    )


def refusal(reading: Callable[[], object]) -> str:
    """The error that ``reading`` ends in, which is one line."""
    with pytest.raises((DataError, ConfigError)) as caught:
        reading()
    text = str(caught.value)
    assert "\n" not in text
    return text
