"""A wide, shallow network: many branches with few parameters, whose activations do not fit into the memory of a
device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Branch(nn.Module):
    """Two convolutions over the image, the first with a kernel of size ``kernel``. The output has 2 · ``channels``
    numbers for each image: the mean and the maximum of each channel."""

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
    """``branches`` parallel branches, and a linear layer over their concatenated outputs."""

    def __init__(self, branches: int = 16, channels: int = 32, classes: int = 2) -> None:
        super().__init__()
        kernels = [3 + 2 * (index % 3) for index in range(branches)]
        self.branches = nn.ModuleList(Branch(channels, kernel) for kernel in kernels)
        self.head = nn.Linear(2 * channels * branches, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.cat([branch(x) for branch in self.branches], 1))
        return scores
