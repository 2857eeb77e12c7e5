"""Rows as a run reads them, for the tests of several kinds of data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from parallax.errors import UserError
from parallax.model.block import leaves
from parallax.model.factory.mlp import MLPConfig
from parallax.train.data.indexed import IndexedDataConfig, IndexedSource
from parallax.train.data.table import BOTH


@contextmanager
def opened(config: IndexedDataConfig, workers: int = 0) -> Iterator[IndexedSource]:
    """The source of ``config``, with ``workers`` that have started."""
    source = replace(config, workers=workers).open(MLPConfig(), 3)
    source.start()
    try:
        yield source
    finally:
        source.close()


def steps(source: IndexedSource, parts: int, rows: int = 8, count: int = 5) -> list[Any]:
    """The inputs and targets of ``count`` batches of ``rows`` rows, each read in ``parts`` micro-batches, by name."""
    found = []
    for _ in range(count):
        batch = source.batch(rows)
        bounds = [len(batch) * each // parts for each in range(parts + 1)]
        read: dict[Any, list[Any]] = {}
        for span in pairwise(bounds):
            for path, part in leaves((batch.inputs(*span), batch.targets(*span))):
                read.setdefault(path, []).append(torch.as_tensor(np.array(part)))
        found.append({path: torch.cat(several) for path, several in read.items()})
    return found


def check_workers_and_splits(config: IndexedDataConfig) -> list[Any]:
    """Check that rows are the same for any number of workers and micro-batches; return those of five batches of 8."""
    with opened(config) as source:
        expected = steps(source, 1)
    for workers, parts in ((0, 4), (1, 2), (3, 3)):
        with opened(config, workers) as source:
            found = steps(source, parts)
        for one, other in zip(expected, found, strict=True):
            assert one.keys() == other.keys()
            for path, value in one.items():
                assert torch.equal(value, other[path])
    return expected


def refused(config: IndexedDataConfig) -> str:
    """The one line with which opening or reading all rows in order ends."""

    def read() -> None:
        table = config.table(MLPConfig())
        rows = np.arange(len(table))
        table.read(rows, rows.astype(np.uint64), BOTH)

    with pytest.raises(UserError) as caught:
        read()
    text = str(caught.value)
    assert "\n" not in text
    return text
