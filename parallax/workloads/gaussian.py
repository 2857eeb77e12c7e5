"""Points drawn from two Gaussians in three dimensions, and a small classifier for the points."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def points(rows: int = 200_000, seed: int = 0, distance: float = 9.0) -> TensorDataset:
    """Return ``rows`` points with three features, and their classes, which alternate. Points of class 1 are drawn from
    a Gaussian around (m, m, m), points of class 0 from a Gaussian around (−m, −m, −m). ``distance``: the distance of
    the two centres in standard deviations."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % 2
    centres = (2.0 * labels - 1) * distance / (2 * 3**0.5)
    return TensorDataset(torch.randn(rows, 3, generator=random) + centres[:, None], labels)


def classifier(width: int = 16) -> nn.Sequential:
    """Return a classifier for two classes, with two hidden layers of ``width`` units."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(3, width), nn.ReLU()),
        nn.Sequential(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, 2),
    )
