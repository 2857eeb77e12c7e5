"""A network that is wide and shallow: many branches of few parameters, whose activations are larger than a device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Branch(nn.Module):
    """A kernel of its own size over the whole image, and the mean and the largest value of each channel."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(3, channels, kernel, padding=kernel // 2),
            nn.GELU(),
            nn.Conv2d(channels, channels, 1),
            nn.GELU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        found = self.look(x).flatten(2)
        return torch.cat([found.mean(2), found.amax(2)], 1)


class Wide(nn.Module):
    """``branches`` branches side by side, and one layer over all of their outputs."""

    def __init__(self, branches: int = 16, channels: int = 32, classes: int = 2) -> None:
        super().__init__()
        kernels = [3 + 2 * (index % 3) for index in range(branches)]
        self.branches = nn.ModuleList(Branch(channels, kernel) for kernel in kernels)
        self.head = nn.Linear(2 * channels * branches, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.cat([branch(x) for branch in self.branches], 1))
        return scores
