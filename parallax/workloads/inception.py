"""Inception v1 (Szegedy et al. 2014, table 1) without the auxiliary classifiers and the response normalizations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Channels of the branches: 1 × 1; 1 × 1 and 3 × 3; 1 × 1 and 5 × 5; 1 × 1 after pooling. "pool" halves the image.
MODULES: list[tuple[int, int, int, int, int, int] | str] = [
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    "pool",
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    "pool",
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
]


def _convolution(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, kernel, stride, kernel // 2), nn.ReLU())


class Inception(nn.Module):
    """The Inception module: four branches with the same input of ``channels`` channels, whose outputs are concatenated.

    The branches, with the output channels of their convolutions:

    * a 1×1 convolution (``one``)
    * a 1×1 (``r3``) and a 3×3 convolution (``three``)
    * a 1×1 (``r5``) and a 5×5 convolution (``five``)
    * max-pooling and a 1×1 convolution (``pool``)
    """

    def __init__(self, channels: int, one: int, r3: int, three: int, r5: int, five: int, pool: int):
        super().__init__()
        self.one = _convolution(channels, one, 1)
        self.three = nn.Sequential(_convolution(channels, r3, 1), _convolution(r3, three, 3))
        self.five = nn.Sequential(_convolution(channels, r5, 1), _convolution(r5, five, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), _convolution(channels, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class InceptionV1(nn.Module):
    """Inception v1 for images of any size of at least 32 pixels."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, 64, 7, 2),
            nn.MaxPool2d(3, 2, 1),
            _convolution(64, 64, 1),
            _convolution(64, 192, 3),
            nn.MaxPool2d(3, 2, 1),
        )
        channels, found = 192, list[nn.Module]()
        for each in MODULES:
            if isinstance(each, str):
                found.append(nn.MaxPool2d(3, 2, 1))
                continue
            found.append(Inception(channels, *each))
            channels = each[0] + each[2] + each[4] + each[5]
        self.modules_ = nn.ModuleList(found)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for module in self.modules_:
            x = module(x)
        scores: Tensor = self.head(x)
        return scores
