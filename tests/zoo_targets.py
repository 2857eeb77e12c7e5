"""A model of the zoo and its loss, as settings name them: ``model.target``, ``loss.target``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.zoo.catalog import entries


def model(entry: str) -> nn.Module:
    return entries()[entry].build()


def loss(outputs: Any, targets: Any, entry: str) -> Tensor:
    return entries()[entry].loss(outputs, targets)
