"""Random rows and losses that several models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.zoo.entry import Batch

CLASSES, WIDTH, VOCABULARY, LENGTH, IMAGE = 5, 16, 32, 10, 16

MakeBatch = Callable[[int, torch.Generator], Batch]


def classes(rows: int, random: torch.Generator, count: int = CLASSES) -> Tensor:
    """A class for each row."""
    return torch.randint(0, count, (rows,), generator=random)


def vectors(width: int = WIDTH, count: int = CLASSES) -> MakeBatch:
    """Vectors and their classes."""
    return lambda rows, random: (
        torch.randn(rows, width, generator=random),
        classes(rows, random, count),
    )


def numbers(width: int = WIDTH, outputs: int = 1) -> MakeBatch:
    """Vectors and what is to be computed of them."""
    return lambda rows, random: (
        torch.randn(rows, width, generator=random),
        torch.randn(rows, outputs, generator=random),
    )


def images(channels: int = 3, size: int = IMAGE) -> MakeBatch:
    """Images and their classes."""
    return lambda rows, random: (
        torch.randn(rows, channels, size, size, generator=random),
        classes(rows, random),
    )


def tokens(length: int = LENGTH) -> MakeBatch:
    """Tokens and those that follow."""

    def make(rows: int, random: torch.Generator) -> Batch:
        drawn = torch.randint(0, VOCABULARY, (rows, length + 1), generator=random)
        return drawn[:, :-1], drawn[:, 1:]

    return make


def sequences(length: int = LENGTH, width: int = WIDTH) -> MakeBatch:
    """Sequences of vectors and their classes."""
    return lambda rows, random: (
        torch.randn(rows, length, width, generator=random),
        classes(rows, random),
    )


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over tokens."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over rows."""
    return F.cross_entropy(outputs, targets)


def square_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(outputs, targets)


def named(loss: Callable[[Any, Any], Tensor], name: str) -> Callable[[Any, Any], Tensor]:
    """``loss`` of one of several outputs."""
    return lambda outputs, targets: loss(outputs[name], targets)
