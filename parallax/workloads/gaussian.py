"""Points of two Gaussians in three dimensions, and a small classifier for them."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def points(rows: int = 200_000, seed: int = 0, distance: float = 9.0) -> TensorDataset:
    """Return ``rows`` points of three features with their classes: each second point is of the Gaussian around +m in
    all dimensions, the others of that around −m, so that the two centres are ``distance`` standard deviations apart."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % 2
    centres = (2.0 * labels - 1) * distance / (2 * 3**0.5)
    return TensorDataset(torch.randn(rows, 3, generator=random) + centres[:, None], labels)


def classifier(width: int = 16) -> nn.Sequential:
    """Return two hidden layers of ``width``."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(3, width), nn.ReLU()),
        nn.Sequential(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, 2),
    )
